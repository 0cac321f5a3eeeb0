"""The packed forward of every model family equals transformers' own forward, one sequence at a time."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from shutil import copytree

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from colocated_grpo.batching.micro_batch import MicroBatch
from colocated_grpo.policy import model_loader
from colocated_grpo.policy.checkpoint_files import CheckpointReader
from colocated_grpo.policy.model import PackedLM, build_empty, read_model_config, reshard
from colocated_grpo.policy.model_loader import ModelLoader
from colocated_grpo.runtime.distributed import World
from colocated_grpo.settings import model_support
from colocated_grpo.settings.errors import ConfigError
from tests.support.families import GEMMA4_LARGE, SETTINGS, WHOLE_QUERIES, WINDOW
from tests.support.ranks import run_on_ranks
from tests.support.small_policy import (
    assert_same,
    config_of,
    logprobs_one_by_one,
    pack_for,
    policy_of,
    random_groups,
    rounding,
    weights_of,
    whole,
)

FAMILIES = SETTINGS | {
    "gemma3 with soft-capped logits": WINDOW | {"final_logit_softcapping": 2.0},
    "gemma4 with keys as values": GEMMA4_LARGE,
    "deepseek_v3 with whole queries": SETTINGS["deepseek_v3"] | WHOLE_QUERIES,
}
TYING = {"tied": True, "untied": False}


def micro_batch_of(world: World, folder: Path) -> MicroBatch:
    (micro_batch,) = pack_for(world, random_groups(3, 3), config_of(folder)).minibatches[0].micro_batches
    return micro_batch


def upstream_of(micro_batch: MicroBatch) -> torch.Tensor:
    return torch.randn(len(micro_batch.tokens.targets_N), generator=torch.Generator().manual_seed(3))


def packed_forward(world: World, folder: Path, micro_batch: MicroBatch, **policy) -> tuple[torch.Tensor, dict]:
    """Return log-probabilities of the scored tokens, and the gradient of their sum weighted by `upstream_of`."""
    config = config_of(folder, policy={"cpu_offload": True, **policy})  # one rank uses FSDP2 only with cpu_offload
    model = ModelLoader(config, read_model_config(config.model, folder), folder, world).weights().model
    logprobs, _ = model(micro_batch.tokens)
    (logprobs * upstream_of(micro_batch)).sum().backward()
    reshard(model)  # gradients are on the sharded parameters
    return logprobs.detach(), {name: whole(p.grad) for name, p in model.hf_parameters().items()}


def one_by_one_forward(folder: Path, micro_batch: MicroBatch) -> tuple[torch.Tensor, dict]:
    """Compute the same with transformers' eager model, without packing."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    logprobs = logprobs_one_by_one(model, micro_batch)
    (logprobs * upstream_of(micro_batch)).sum().backward()
    return logprobs.detach(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("tied", TYING.values(), ids=TYING)
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_log_probabilities_and_gradients_equal_those_of_one_sequence_at_a_time(
    world, model_folder, family, tied
):
    folder = model_folder(family.split()[0], tied=tied, edits=FAMILIES[family])
    micro_batch = micro_batch_of(world, folder)
    expected, expected_gradients = one_by_one_forward(folder, micro_batch)
    assert expected.std() > 0.1, "tokens must differ in probability"
    for checkpointing in (False, True):
        actual, gradients = packed_forward(world, folder, micro_batch, gradient_checkpointing=checkpointing)
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
        assert sorted(gradients) == sorted(expected_gradients)
        atol = max(2e-5, rounding(expected_gradients))
        assert_same(dict(sorted(gradients.items())), dict(sorted(expected_gradients.items())), rtol=1e-3, atol=atol)


WITHOUT_WINDOW, WITHOUT_CAP = {"sliding_window": 64}, {"attn_logit_softcapping": 1e3}


@pytest.mark.parametrize(
    ("family", "without"),
    [
        *((family, WITHOUT_WINDOW) for family in ("mistral", "gemma2", "gemma3", "gemma4", "gpt_oss", "olmo3")),
        ("gemma2", WITHOUT_CAP),
    ],
)
def test_sliding_window_and_cap_change_the_log_probabilities(world, model_folder, family, without):
    """Otherwise the test above would pass with them ignored on both sides."""
    folder = model_folder(family, tied=True, edits=FAMILIES[family])
    other = model_folder(family, tied=True, edits=FAMILIES[family] | without)
    micro_batch = micro_batch_of(world, folder)
    (logprobs, _), (other_logprobs, _) = (packed_forward(world, f, micro_batch) for f in (folder, other))
    assert (logprobs - other_logprobs).abs().max() > 1e-3


@torch.no_grad()
def test_the_temperature_is_not_rounded_to_the_compute_type(world, model_folder):
    folder = model_folder()
    config = config_of(folder, policy={"compute_dtype": "bfloat16"})
    model = ModelLoader(config, read_model_config(config.model, folder), folder, world).model(offloaded=False)
    micro_batch = micro_batch_of(world, folder)
    hidden_NH, temperature_N = model(
        micro_batch.tokens, lambda hidden_NH, *_, temperature_N, **__: (hidden_NH, temperature_N)
    )
    assert hidden_NH.dtype == torch.bfloat16
    assert torch.equal(temperature_N, micro_batch.tokens.temperature_N)
    assert not torch.equal(temperature_N, temperature_N.bfloat16().float())


def test_gradient_checkpointing_keeps_fewer_activations(world, model_folder):
    folder = model_folder()
    micro_batch = micro_batch_of(world, folder)
    sizes = {}
    for checkpointing in (False, True):
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, saved=saved: saved.append(t.numel()) or t, lambda t: t):
            config = config_of(folder, policy={"gradient_checkpointing": checkpointing})
            policy_of(config, world).model(micro_batch.tokens)
        sizes[checkpointing] = sum(saved)
    assert sizes[True] < 0.6 * sizes[False]


def loaded_weights(world: World, folder: Path) -> tuple[dict, dict]:
    """Return the weights that the ranks loaded, and the number of rows of each tensor that this rank read."""
    rows = defaultdict(int)
    read_into = CheckpointReader.read_into

    def counting(self: CheckpointReader, target: torch.Tensor, name: str, first: int) -> None:
        read_into(self, target, name, first)
        rows[name] += len(target)

    CheckpointReader.read_into = counting
    policy = policy_of(config_of(folder), world)
    CheckpointReader.read_into = read_into
    return weights_of(policy), dict(rows)


@pytest.mark.parametrize("tied", TYING.values(), ids=TYING)
def test_each_rank_reads_only_its_own_rows_of_the_checkpoint(model_folder, tied):
    folder = model_folder(tied=tied)
    file = load_file(folder / "model.safetensors")
    (first, first_rows), (second, second_rows) = run_on_ranks(loaded_weights, 2, folder)
    assert set(first) == set(file)
    for name, tensor in file.items():
        assert torch.equal(first[name], tensor)
        assert torch.equal(second[name], tensor)
        assert first_rows.get(name, 0) + second_rows.get(name, 0) == len(tensor)
        assert first_rows[name] <= (len(tensor) + 1) // 2


def test_a_checkpoint_in_torch_format_loads_the_same_weights(world, model_folder, tmp_path):
    tensors = load_file(model_folder() / "model.safetensors")
    (tmp_path / "config.json").write_bytes((model_folder() / "config.json").read_bytes())
    names = list(tensors)
    for part, chosen in enumerate((names[:5], names[5:])):
        file = tmp_path / f"pytorch_model-{part + 1:05d}-of-00002.bin"
        torch.save({name: tensors[name] for name in chosen}, file)
    weights = weights_of(policy_of(config_of(tmp_path), world))
    assert_same(dict(sorted(weights.items())), dict(sorted(tensors.items())), rtol=0, atol=0)


def test_weights_in_half_precision_become_float32_masters(world, model_folder, tmp_path):
    AutoModelForCausalLM.from_pretrained(model_folder(), dtype=torch.bfloat16).save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    weights = weights_of(policy_of(config_of(tmp_path), world))
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    assert all(torch.equal(weights[name], stored[name].float()) for name in stored)


def test_a_checkpoint_of_the_base_model_alone_loads(world, model_folder, tmp_path):
    """Its tensors are named 'h.0...' instead of 'transformer.h.0...'."""
    AutoModelForCausalLM.from_pretrained(model_folder("gpt2")).transformer.save_pretrained(tmp_path)
    weights = weights_of(policy_of(config_of(tmp_path), world))
    assert_same(weights, weights_of(policy_of(config_of(model_folder("gpt2")), world)), rtol=0, atol=0)


MATRIX = "model.layers.0.mlp.experts.1.{}_proj.weight"


@pytest.mark.parametrize("edit", ["gate", "up", "down", "rows", "experts"])
def test_experts_that_do_not_fill_their_parameter_are_rejected_in_one_line(world, model_folder, tmp_path, edit):
    folder = tmp_path / "model"
    copytree(model_folder("qwen3_moe", edits=SETTINGS["qwen3_moe"]), folder)
    tensors = load_file(folder / "model.safetensors")
    if edit in ("gate", "up", "down"):
        del tensors[MATRIX.format(edit)]
    else:
        stored = {name: tensor for name, tensor in tensors.items() if ".experts." in name}
        for name, tensor in stored.items():
            if edit == "rows":
                tensors[name] = tensor[:-2].clone()
            elif ".experts.3." in name:
                del tensors[name]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(
        ConfigError, match=r"^model\.name=.*(experts.* has shape|lacks matrices of .*experts)"
    ) as caught:
        policy_of(config_of(folder), world)
    assert len(str(caught.value).splitlines()) == 1


def test_a_checkpoint_that_lacks_tensors_is_rejected_in_one_line(world, model_folder, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(model_folder())
    state = {name: tensor for name, tensor in model.state_dict().items() if ".1.mlp." not in name}
    model.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(ConfigError, match=r"model.name=.*lacks 3 tensors, first 'model.layers.1.mlp") as caught:
        policy_of(config_of(tmp_path), world)
    assert "\n" not in str(caught.value)


def test_a_damaged_weight_file_is_rejected_in_one_line(world, model_folder, tmp_path):
    copytree(model_folder(), tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(
        ConfigError, match=r"^model\.name=.*: cannot read model\.safetensors \([^\n]*; download it again$"
    ):
        policy_of(config_of(tmp_path / "model"), world)


@pytest.mark.parametrize("policy", [{}, {"lora": {"rank": 2}}], ids=["all weights", "an adapter"])
def test_shapes_are_compared_before_parameters_are_allocated(policy, world, model_folder, tmp_path, monkeypatch):
    folder = copytree(model_folder(), tmp_path / "model")
    entries = json.loads((folder / "config.json").read_text())
    rows, columns = entries["vocab_size"], entries["hidden_size"]
    (folder / "config.json").write_text(json.dumps(entries | {"vocab_size": rows + 1}))
    built = []

    def build_and_keep(*args, **kwargs) -> PackedLM:
        built.append(build_empty(*args, **kwargs))
        return built[0]

    monkeypatch.setattr(model_loader.models, "build_empty", build_and_keep)

    with pytest.raises(ConfigError) as caught:
        policy_of(config_of(folder, policy=policy), world)

    assert str(caught.value) == (
        f"model.name={str(folder)!r}: 'model.embed_tokens.weight' has shape [{rows}, {columns}] in the checkpoint, "
        f"and [{rows + 1}, {columns}] by config.json"
    )
    assert all(p.is_meta for p in built[0].hf_parameters().values())


def test_a_folder_without_weights_is_rejected_in_one_line(world, model_folder, tmp_path):
    (tmp_path / "config.json").write_bytes((model_folder() / "config.json").read_bytes())
    with pytest.raises(ConfigError, match=r"has no .*safetensors"):
        policy_of(config_of(tmp_path), world)


def test_a_policy_is_not_built_for_a_model_that_does_not_train(world, model_folder):
    folder = model_folder("gemma3", edits={"use_bidirectional_attention": True})
    with pytest.raises(ConfigError, match=r"^model.name='.*': model type 'gemma3_text' does not train .* later tokens"):
        policy_of(config_of(folder), world)


@pytest.mark.parametrize(
    ("family", "reason"), [("mamba", "layers that carry a state"), ("bloom", "attention outside transformers'")]
)
def test_a_model_that_no_rule_names_is_rejected_by_its_modules(family, reason, monkeypatch):
    """Models with code of their own have types that no rule knows."""
    monkeypatch.setattr(model_support, "RULES", ())
    with pytest.raises(ConfigError, match=f"model type '{family}': {reason}"):
        build_empty(AutoConfig.for_model(family, num_hidden_layers=2), 64, trust_remote_code=False)


def test_a_model_before_loading_has_rotary_frequencies_but_no_parameter_storage(model_folder):
    folder = model_folder()
    model = build_empty(read_model_config(config_of(folder).model, folder), 64, trust_remote_code=False)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model.lm.model.rotary_emb.inv_freq[0] == 1.0
