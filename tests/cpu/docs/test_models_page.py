"""The page of models: its tables are those of the code, and its tests exist."""

from __future__ import annotations

import re

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as MODULES

from colocated_grpo.settings.families import FAMILIES, OLDEST_VLLM
from colocated_grpo.tools.shapes import ARCHITECTURES
from docs.models_page import PAGE, with_tables
from tests.cpu.rollout.vllm.test_patches import OLDEST, SOURCES
from tests.support.families import SETTINGS
from tests.support.paths import ROOT

TEXT = PAGE.read_text()


def test_the_tables_are_those_of_the_code():
    assert with_tables(TEXT) == TEXT, "run python -m docs.models_page"


def test_every_family_of_the_table_is_tested_and_every_tested_family_is_in_the_table():
    assert [family.architecture for family in FAMILIES if family.architecture not in SETTINGS] == []
    assert set(SETTINGS) == {family.architecture for family in FAMILIES}
    assert all(ARCHITECTURES[family.architecture] == family.model_type for family in FAMILIES)


def test_the_test_files_of_the_page_exist():
    named = re.findall(r"`(tests/\S+\.py)`", TEXT)
    assert len(named) > 10
    assert [name for name in named if not (ROOT / name).is_file()] == []


def test_the_oldest_vllm_has_the_families_that_the_table_names_with_it():
    assert f"{OLDEST_VLLM}.0" == OLDEST
    if not (SOURCES[OLDEST] / "vllm").is_dir():
        pytest.skip(f"no sources of vLLM {OLDEST}; `make test` unpacks them")
    registry = (SOURCES[OLDEST] / "vllm/model_executor/models/registry.py").read_text()
    missing = [family.name for family in FAMILIES if f'"{MODULES[family.model_type]}"' not in registry]
    assert missing == [family.name for family in FAMILIES if family.vllm != OLDEST_VLLM]
