"""The adapter guide: its YAML loads, its tables are complete and right, and its commands are possible."""

from __future__ import annotations

import re

import pytest
import yaml

from colocated_grpo.policy.export import AdapterExport, ModelExport
from colocated_grpo.settings.config_file import load_config
from colocated_grpo.settings.errors import parse_path, setting_names
from colocated_grpo.settings.model_sizes import sizes_of
from colocated_grpo.settings.run_sizes import adapter_parameters
from colocated_grpo.settings.schema import Config
from colocated_grpo.settings.training import LoRAConfig
from tests.support.config_text import load
from tests.support.paths import ROOT
from tests.support.real_sizes import config_json

GUIDE = (ROOT / "docs/guides/lora.md").read_text()
SHIPPED = load_config(ROOT / "training_configs/gsm8k_qwen3_8b_lora_1gpu.yaml")
BLOCKS_OF_QWEN3_8B = 36


def section(heading: str) -> str:
    return GUIDE.split(f"## {heading}\n")[1].split("\n## ")[0]


def test_every_yaml_of_the_guide_loads():
    texts = re.findall(r"```yaml\n(.*?)```", GUIDE, re.DOTALL)
    configs = [load(text) for text in texts]
    assert [config.policy.lora is not None for config in configs] == [True, True, True, True, False]
    assert configs[0].policy.lora == LoRAConfig()
    assert configs[1].policy == configs[0].policy, "the settings shown are the defaults"
    assert configs[4].policy.train_layers == list(range(27, BLOCKS_OF_QWEN3_8B))


def test_the_table_of_settings_is_complete_and_its_defaults_are_right():
    rows = dict(re.findall(r"^\| `(\w+)` \| (.+?) \|", section("Settings"), re.MULTILINE))
    assert set(rows) == set(LoRAConfig.model_fields) - {"dropout"}
    for name, text in rows.items():
        shown = yaml.safe_load(text.replace("`", "").partition(":")[0])
        assert shown == LoRAConfig.model_fields[name].default, name


def test_the_memory_of_a_base_in_4_bits_is_right_by_the_same_arithmetic():
    sizes = sizes_of(config_json())
    linear = sum(inputs * outputs for block in sizes.blocks for inputs, outputs in block.linear.values())
    stored, others, whole = (size / 1e9 for size in (linear * 9 / 16, 2 * (sizes.total - linear), 2 * sizes.total))
    rows = (
        f"| adapter | {whole + 2 * linear / 1e9:.0f} GB | {2 * whole + 2 * linear / 1e9:.0f} GB |",
        f"`weights: shared` | {whole:.0f} GB, with the engine | {whole:.0f} GB |",
        f"| {stored + others:.1f} GB: {stored:.1f} of linear layers, {others:.1f} of embeddings and output layer |",
        f" output layer | {stored + others + whole:.0f} GB |",
        f"without the adapter's own {16e-9 * adapter_parameters(LoRAConfig(), sizes):.1f} GB",
    )
    assert [row for row in rows if row not in GUIDE] == []


def test_settings_named_in_the_guide_exist():
    settings = {path for path, _ in setting_names(Config)}
    named = re.findall(r"`((?:policy|checkpoint|loss|engine)\.\w[\w.]*)`", GUIDE)
    assert len(named) > 5
    assert [name for name in named if parse_path(name) not in settings] == []


def test_the_folders_named_in_the_guide_are_those_of_the_exports():
    left = section("What a run leaves")
    for export in (AdapterExport, ModelExport):
        assert f"`{export.final_name}/`" in left
        assert f"`{export.step_prefix}N/`" in left


def test_the_rank_served_in_the_guide_is_that_of_the_shipped_file():
    [rank] = re.findall(r"--max-lora-rank (\d+)", GUIDE)
    assert int(rank) == SHIPPED.policy.lora.rank == LoRAConfig().rank
    assert SHIPPED.weights == "shared"
    assert f"vllm serve {SHIPPED.model.name} " in GUIDE


def test_vllm_would_reject_that_rank_without_the_flag():
    lora = pytest.importorskip("vllm.config.lora")
    [default] = re.findall(r"default is (\d+)\.", section("Serving the result"))
    assert lora.LoRAConfig().max_lora_rank == int(default) < SHIPPED.policy.lora.rank


def test_the_names_imported_in_the_guide_exist():
    code = "".join(re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL))
    imports = "\n".join(line for line in code.splitlines() if line.startswith("from "))
    namespace: dict[str, object] = {}
    exec(imports, namespace)
    assert hasattr(namespace["PeftModel"], "from_pretrained")
    assert hasattr(namespace["BitsAndBytesConfig"], "from_dict")
