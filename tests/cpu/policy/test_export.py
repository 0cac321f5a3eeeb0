"""An exported model loads in transformers and computes the same log-probabilities as the policy."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from colocated_grpo.errors import RunError
from colocated_grpo.policy import export as export_module
from colocated_grpo.policy.checkpoint_files import fetch_model, fetch_tokenizer
from colocated_grpo.policy.export import ModelExport
from colocated_grpo.policy.model_files import read_model_files
from colocated_grpo.runtime.checksums import CHECKSUMS_FILE
from colocated_grpo.runtime.distributed import World
from colocated_grpo.settings.errors import ConfigError
from colocated_grpo.settings.generation import ModelConfig
from tests.support.families import SETTINGS
from tests.support.ranks import run_on_ranks
from tests.support.saved_runs import halve, invert
from tests.support.small_policy import (
    assert_same,
    config_of,
    pack_for,
    policy_of,
    positions_of,
    random_groups,
    rows_of,
    train,
    weights_of,
)


def train_and_export(
    world: World, folder: Path, target: Path, dtype: torch.dtype = torch.float32, file_bytes: int = 4 << 30
) -> tuple:
    """Train two steps and export; return (weights, micro-batch, its log-probabilities)."""
    config = config_of(folder, policy={"lr": 1e-2})
    policy = policy_of(config, world)
    batch = pack_for(world, random_groups(2, 3), config)
    train(policy, batch, steps=2)
    default, export_module.FILE_BYTES = export_module.FILE_BYTES, file_bytes
    try:
        ModelExport(policy=policy, files=read_model_files(config.model, world), dtype=dtype, world=world).write(target)
    finally:
        export_module.FILE_BYTES = default
    micro_batch = batch.minibatches[0].micro_batches[0]
    return weights_of(policy), micro_batch, policy.score(micro_batch)


def logprobs_from(folder: Path, micro_batch) -> torch.Tensor:
    # By default, transformers computes Gemma 2 without the cap of its attention scores.
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    tokens = micro_batch.tokens
    logits = []
    for index, rows in enumerate(rows_of(micro_batch)):
        sources = positions_of(rows, tokens.source_N[micro_batch.loss_inputs.sequence_N == index])
        with torch.no_grad():
            logits.append(model(tokens.input_ids_T[None, rows]).logits[0, sources])
    log_probs = torch.log_softmax(torch.cat(logits).float() / tokens.temperature_N[:, None], -1)
    return log_probs.gather(1, tokens.targets_N[:, None])[:, 0]


@pytest.mark.parametrize(
    ("family", "tied"), [*((family, True) for family in SETTINGS), ("qwen3", False), ("gpt2", False)]
)
def test_the_exported_model_computes_what_the_policy_computes(world, model_folder, tmp_path, family, tied):
    folder, target = model_folder(family, tied=tied, edits=SETTINGS[family]), tmp_path / "final_model"
    weights, micro_batch, expected = train_and_export(world, folder, target)
    torch.testing.assert_close(logprobs_from(target, micro_batch), expected, rtol=1e-5, atol=1e-5)
    assert (logprobs_from(folder, micro_batch) - expected).abs().max() > 1e-2
    model = AutoModelForCausalLM.from_pretrained(target)
    assert model.dtype == torch.float32
    assert_same({name: p.detach() for name, p in model.named_parameters()}, weights, rtol=0, atol=0)
    assert AutoTokenizer.from_pretrained(target).encode("12") == AutoTokenizer.from_pretrained(folder).encode("12")
    assert [path.name for path in tmp_path.iterdir()] == ["final_model"]


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_two_ranks_write_several_files_and_an_index_with_every_tensor_once(model_folder, tmp_path, tied):
    target = tmp_path / "final_model"
    file_bytes = 30_000
    results = run_on_ranks(train_and_export, 2, model_folder(tied=tied), target, torch.float32, file_bytes)
    weights, micro_batch, expected = results[0]
    files = sorted(target.glob("*.safetensors"))
    assert len(files) > 2
    assert [file.name for file in files] == [
        f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)
    ]
    index = json.loads((target / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(weights)
    assert set(index["weight_map"].values()) == {file.name for file in files}
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in weights.values())
    assert all(file.stat().st_size < file_bytes + 5_000 for file in files)
    torch.testing.assert_close(logprobs_from(target, micro_batch), expected, rtol=1e-5, atol=1e-5)


def test_weights_are_written_in_the_given_dtype(world, model_folder, tmp_path):
    weights, *_ = train_and_export(world, model_folder(), tmp_path / "half", torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "half", dtype="auto")
    assert model.dtype == torch.bfloat16
    exported = load_file(tmp_path / "half" / "model.safetensors")
    expected = {name: tensor.bfloat16() for name, tensor in sorted(weights.items())}
    assert_same(dict(sorted(exported.items())), expected, rtol=0, atol=0)


def test_an_export_replaces_an_older_one_and_copies_the_generation_settings(world, model_folder, tmp_path):
    target = tmp_path / "final_model"
    target.mkdir()
    (target / "stale.safetensors").write_bytes(b"")
    train_and_export(world, model_folder(), target)
    assert not (target / "stale.safetensors").exists()
    settings = "generation_config.json"
    assert (target / settings).read_bytes() == (model_folder() / settings).read_bytes()


def test_whoever_can_read_the_settings_of_an_export_can_read_its_weights(world, model_folder, tmp_path):
    train_and_export(world, model_folder(), tmp_path / "final_model")
    assert len({file.stat().st_mode for file in (tmp_path / "final_model").iterdir()}) == 1


def test_a_failed_write_ends_the_export_with_one_line_and_no_partial_model(world, model_folder, tmp_path):
    """A limit on file sizes stands for a full disk; safetensors raises an error type of its own for both."""
    folder, target = model_folder(), tmp_path / "final_model"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(RunError, match=rf"^export: writing to {tmp_path} failed \(.* GiB free there\): ") as caught:
            train_and_export(world, folder, target)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "\n" not in str(caught.value)
    assert not target.exists()


@pytest.mark.parametrize(
    ("name", "damage", "problem"),
    [
        ("model.safetensors", invert, "differs from its checksum"),
        ("model.safetensors", halve, "differs from its checksum"),
        ("tokenizer.json", Path.unlink, "is missing"),
        ("config.json", invert, "differs from its checksum"),
        (CHECKSUMS_FILE, halve, "cannot be read"),
    ],
)
def test_a_damaged_export_is_refused_where_a_run_or_a_server_would_load_it(
    world, model_folder, tmp_path, name, damage, problem
):
    target = tmp_path / "final_model"
    train_and_export(world, model_folder(), target)
    others = {path.name for path in target.iterdir()} - {CHECKSUMS_FILE}
    assert set(json.loads((target / CHECKSUMS_FILE).read_text())["xxh3_128"]) == others
    settings = ModelConfig(name=str(target))
    assert fetch_model(settings, world) == target
    damage(target / name)
    with pytest.raises(ConfigError, match=rf"^model.name='{target}': {name} {problem}; export it again, or delete"):
        fetch_model(settings, world)
    (target / CHECKSUMS_FILE).unlink()
    assert fetch_model(settings, world) == target


def test_a_folder_of_the_working_directory_is_still_found_after_user_code_has_changed_it(
    world, model_folder, monkeypatch
):
    folder = model_folder()
    monkeypatch.chdir(folder.parent)
    settings = ModelConfig(name=folder.name)
    assert fetch_model(settings, world) == fetch_tokenizer(settings) == folder
