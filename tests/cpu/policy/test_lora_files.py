"""Adapters as files: PEFT loads what a run exports, and a run continues from what PEFT saves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from colocated_grpo.batching.micro_batch import TrainSequence, build_micro_batch
from colocated_grpo.policy.export import AdapterExport
from colocated_grpo.policy.policy import Policy
from colocated_grpo.runtime.distributed import World
from colocated_grpo.settings.errors import ConfigError
from colocated_grpo.settings.inputs import with_adapter_settings
from colocated_grpo.settings.schema import Config
from tests.support.ranks import run_on_ranks
from tests.support.saved_runs import invert
from tests.support.small_policy import config_of, pack_for, policy_of, random_groups, train

TOKENS = torch.tensor([[5, 40, 17, 62, 8, 33, 21, 54, 12, 70, 3, 29]])


def config_with(folder: Path, **lora: Any) -> Config:
    return config_of(folder, policy={"lr": 1e-2, "lora": lora})


def export(world: World, config: Config, policy: Policy, target: Path) -> None:
    assert config.policy.lora is not None
    AdapterExport(
        policy=policy,
        lora=config.policy.lora,
        base=config.model.name,
        tokenizer=AutoTokenizer.from_pretrained(config.model.name),
        world=world,
    ).write(target)


def trained_adapter(world: World, folder: Path, target: Path, lora: dict[str, Any]) -> None:
    config = config_with(folder, **lora)
    policy = policy_of(config, world)
    train(policy, pack_for(world, random_groups(6, 4), config), steps=3)
    export(world, config, policy, target)


def of_tokens(logits: Tensor) -> Tensor:
    """Return the log-probabilities of TOKENS after the first."""
    return torch.log_softmax(logits[0, :-1], dim=-1).gather(1, TOKENS[0, 1:, None])[:, 0]


@torch.no_grad()
def base_logprobs(folder: Path) -> Tensor:
    return of_tokens(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(TOKENS).logits)


@torch.no_grad()
def peft_logprobs(folder: Path, adapter: Path) -> Tensor:
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return of_tokens(PeftModel.from_pretrained(base, adapter).eval()(TOKENS).logits)


def our_logprobs(world: World, folder: Path, adapter: Path) -> Tensor:
    """Return the same of a run's policy that starts from the adapter."""
    policy = policy_of(with_adapter_settings(config_with(folder, init=str(adapter))), world)
    unused = np.zeros(TOKENS.shape[1] - 1, np.float32)
    sequence = TrainSequence(
        token_ids=TOKENS[0].numpy(),
        scored=np.arange(1, TOKENS.shape[1]),
        sampling_logprobs=unused,
        advantages=unused,
        temperature=1.0,
        trained=False,
    )
    return policy.score(build_micro_batch([sequence]))


@pytest.mark.parametrize(
    "lora",
    [
        {"rank": 4, "alpha": 8},
        {"rank": 2, "rslora": True, "target_modules": ["q_proj", "up_proj"], "layers": "1"},
        {"rank": 3, "target_modules": r".*0.*(q|down)_proj"},
    ],
)
def test_peft_loads_an_exported_adapter_with_equal_log_probabilities(world, model_folder, tmp_path, lora):
    trained_adapter(world, model_folder(), tmp_path / "adapter", lora)
    theirs = peft_logprobs(model_folder(), tmp_path / "adapter")
    assert (theirs - base_logprobs(model_folder())).abs().max() > 1e-2
    torch.testing.assert_close(our_logprobs(world, model_folder(), tmp_path / "adapter"), theirs, rtol=1e-5, atol=1e-5)


def test_settings_name_layers_as_briefly_as_they_can(world, model_folder, tmp_path):
    wanted = {"some": {"layers": "1"}, "odd": {"target_modules": r".*0.*(q|down)_proj"}}
    for name, lora in wanted.items():
        trained_adapter(world, model_folder(), tmp_path / name, lora)
    brief, exact = (json.loads((tmp_path / name / "adapter_config.json").read_text()) for name in wanted)
    assert brief["layers_to_transform"] == [1]
    assert "q_proj" in brief["target_modules"]
    assert exact["layers_to_transform"] is None
    assert sorted(exact["target_modules"]) == ["model.layers.0.mlp.down_proj", "model.layers.0.self_attn.q_proj"]


def test_two_ranks_export_what_one_rank_exports(world, model_folder, tmp_path):
    trained_adapter(world, model_folder(), tmp_path / "one", {"rank": 4})
    run_on_ranks(trained_adapter, 2, model_folder(), tmp_path / "two", {"rank": 4})
    one, two = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("one", "two"))
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=1e-3, atol=1e-4)


@pytest.fixture
def elsewhere(model_folder, tmp_path):
    """Save an adapter with PEFT itself; arguments are those of its LoraConfig."""

    def saved(**settings: Any) -> Path:
        torch.manual_seed(1)
        base = AutoModelForCausalLM.from_pretrained(model_folder())
        model = get_peft_model(
            base, LoraConfig(**{"r": 4, "lora_alpha": 12, "target_modules": "all-linear", **settings})
        )
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
        model.save_pretrained(str(tmp_path / "elsewhere"))
        return tmp_path / "elsewhere"

    return saved


@pytest.mark.parametrize(
    "settings", [{}, {"target_modules": ["v_proj", "nowhere"], "layers_to_transform": [0], "use_rslora": True}]
)
def test_a_run_continues_from_an_adapter_that_peft_saved(world, model_folder, elsewhere, settings):
    adapter = elsewhere(**settings)
    config = with_adapter_settings(config_with(model_folder(), init=str(adapter)))
    assert config.policy.lora.rank == 4
    assert config.policy.lora.alpha == 12
    theirs = peft_logprobs(model_folder(), adapter)
    torch.testing.assert_close(our_logprobs(world, model_folder(), adapter), theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "given", "line"),
    [
        ({}, {"rank": 8}, "policy.lora.rank=8: the adapter policy.lora.init="),
        ({"use_dora": True}, {}, "policy.lora.init=.*: use_dora=True in adapter_config.json is not supported"),
        ({"modules_to_save": ["lm_head"]}, {}, "modules_to_save=.* is not supported"),
        ({"rank_pattern": {"q_proj": 2}}, {}, "rank_pattern=.* is not supported"),
        ({"bias": "all"}, {}, "bias='all' in adapter_config.json is not supported"),
        ({"init_lora_weights": "pissa"}, {}, "init_lora_weights='pissa' in adapter_config.json is not supported"),
        ({}, {"layers": "0"}, r"policy.lora.layers=\[0\]: the adapter policy.lora.init=.* has None; leave the setting"),
    ],
)
def test_adapters_of_other_kinds_are_refused_in_one_line(model_folder, elsewhere, settings, given, line):
    adapter = elsewhere(**settings)
    with pytest.raises(ConfigError, match=line) as caught:
        with_adapter_settings(config_with(model_folder(), init=str(adapter), **given))
    assert "\n" not in str(caught.value)


def test_an_adapter_of_a_base_with_another_name_is_refused(model_folder, elsewhere):
    adapter = elsewhere()
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": "Qwen/Qwen3-8B"}))
    with pytest.raises(ConfigError, match=r"the adapter was trained on Qwen/Qwen3-8B, not on model\.name="):
        with_adapter_settings(config_with(model_folder(), init=str(adapter)))


def edited(adapter: Path, edit: Any) -> None:
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file)


FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("edit", "line"),
    [
        (lambda tensors: tensors.pop(FIRST), f"the adapter lacks {FIRST}; it was trained on another base model"),
        (lambda tensors: tensors.update(more=torch.ones(1)), "the adapter has more, which the model does not"),
        (
            lambda tensors: tensors.update({FIRST: torch.ones(4, 99)}),
            r"is \(4, 99\) in the adapter, but must be \(4, 36\)",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(world, model_folder, elsewhere, edit, line):
    adapter = elsewhere()
    edited(adapter, edit)
    with pytest.raises(ConfigError, match=line):
        policy_of(with_adapter_settings(config_with(model_folder(), init=str(adapter))), world)


def test_a_damaged_adapter_of_a_run_is_refused_by_the_run_that_would_continue_it(world, model_folder, tmp_path):
    adapter = tmp_path / "final_adapter"
    trained_adapter(world, model_folder(), adapter, {})
    config = with_adapter_settings(config_with(model_folder(), init=str(adapter)))
    policy_of(config, world)
    invert(adapter / "adapter_model.safetensors")
    with pytest.raises(
        ConfigError, match=r"^policy.lora.init=.*: adapter_model.safetensors differs from its checksum;"
    ):
        policy_of(config, world)
