"""The page of models: its tables are those of the code, and its recipe gives a model that trains."""

from __future__ import annotations

import json
import re

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma3Config, Gemma3ForConditionalGeneration
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as MODULES

from colocated_grpo.config.families import FAMILIES
from colocated_grpo.config.model_support import refusals
from colocated_grpo.tools.char_tokenizer import build_char_tokenizer
from colocated_grpo.tools.make_model import ARCHITECTURES
from colocated_grpo.tools.models_page import OLDEST_VLLM, PAGE, with_tables
from tests.cpu.rollout.vllm.test_patches import OLDEST, SOURCES
from tests.support.families import SETTINGS
from tests.support.paths import ROOT

TEXT = PAGE.read_text()
SMALL = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}
VOCAB = 300
SPECIAL_TOKENS = {"boi_token_index": 297, "eoi_token_index": 298, "image_token_index": 299}


def test_the_tables_are_those_of_the_code():
    assert with_tables(TEXT) == TEXT, "run python -m colocated_grpo.tools.models_page"


def test_every_family_of_the_table_is_tested_and_every_tested_family_is_in_the_table():
    assert [family.architecture for family in FAMILIES if family.architecture not in SETTINGS] == []
    assert set(SETTINGS) == {family.architecture for family in FAMILIES}
    assert all(ARCHITECTURES[family.architecture] == family.model_type for family in FAMILIES)


def test_the_test_files_of_the_page_exist():
    named = re.findall(r"`(tests/\S+\.py)`", TEXT)
    assert len(named) == 7
    assert [name for name in named if not (ROOT / name).is_file()] == []


def test_the_oldest_vllm_has_every_family():
    assert f"{OLDEST_VLLM}.0" == OLDEST
    if not (SOURCES[OLDEST] / "vllm").is_dir():
        pytest.skip(f"no sources of vLLM {OLDEST}; `make test` unpacks them")
    registry = (SOURCES[OLDEST] / "vllm/model_executor/models/registry.py").read_text()
    assert [family.name for family in FAMILIES if f'"{MODULES[family.model_type]}"' not in registry] == []


def test_the_recipe_of_the_page_saves_a_text_model_that_trains(tmp_path):
    [code] = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    name, folder = tmp_path / "whole", tmp_path / "text"
    whole = Gemma3ForConditionalGeneration(
        Gemma3Config(
            text_config={**SMALL, "head_dim": 16, "num_key_value_heads": 1, "vocab_size": VOCAB},
            vision_config={**SMALL, "image_size": 28, "patch_size": 14},
            mm_tokens_per_image=4,
            **SPECIAL_TOKENS,
        )
    ).eval()
    whole.save_pretrained(name)
    build_char_tokenizer().save_pretrained(name)
    assert refusals(json.loads((name / "config.json").read_text()))
    code = code.replace('"google/gemma-3-4b-it"', repr(str(name))).replace('"gemma-3-4b-text"', repr(str(folder)))
    exec(code, {})
    assert refusals(json.loads((folder / "config.json").read_text())) == []
    tokens = torch.tensor([AutoTokenizer.from_pretrained(folder).encode("sort 31")])
    text = AutoModelForCausalLM.from_pretrained(folder).eval()
    torch.testing.assert_close(text(tokens).logits, whole(tokens).logits)
