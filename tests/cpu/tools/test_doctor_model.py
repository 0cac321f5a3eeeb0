"""The doctor's checks of memory and disk, by arithmetic."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from colocated_grpo.settings.model_sizes import ENGINE_RESERVE, sizes_of
from colocated_grpo.settings.run_sizes import GIB, Placement, RunSizes
from colocated_grpo.tools.doctor.machine import check_disk, check_memory, judge_memory
from tests.support.config_text import load
from tests.support.doctor import TWO_H200, fake_nvidia_smi, python_on_small_disk, subject_of
from tests.support.real_sizes import config_json
from tests.support.small_policy import config_of

H100 = Placement(ranks=1, on_gpu=True, device_bytes=80 * GIB)
ON_CPU = Placement(ranks=1, on_gpu=False, device_bytes=0)
SHORT = "rollout: {max_prompt_tokens: 512, max_completion_tokens: 512}\n"


@pytest.mark.parametrize(
    ("text", "bytes_per_parameter"),
    [
        ("", 16),
        ("policy: {optimizer: {type: adamw_8bit}}", 10),
        ("policy: {optimizer: {type: adafactor}}", 8),
        ("policy: {lora: {}}", 4),
        ("policy: {lora: {base_on_host: true}}", 2),
        ("policy: {cpu_offload: true}", 0),
        ("loss: {type: grpo, kl: {coef: 0.1}}", 20),
        ("policy: {train_layers: 0-8}", 2 + 14 / 4 * 0.85),
    ],
)
def test_training_takes_the_documented_bytes_per_parameter_over_all_ranks(text, bytes_per_parameter):
    """The difference between 2 and 4 ranks is a quarter of what is sharded."""
    sizes = sizes_of(config_json())
    two, four = (RunSizes(load(text), sizes, replace(H100, ranks=ranks)).footprint().training for ranks in (2, 4))
    # An adapter leaves the embeddings and the output layer out, which are 15 % of this model.
    assert (two - four) * 4 / sizes.total == pytest.approx(bytes_per_parameter, rel=0.16, abs=1e-6)


def test_replicas_on_nodes_take_the_memory_of_a_run_on_one_node():
    sizes = sizes_of(config_json())
    two_nodes = replace(H100, ranks=8, nodes=2)
    replicated = RunSizes(load("policy: {replicate: nodes}"), sizes, two_nodes).footprint()
    assert replicated == RunSizes(load(""), sizes, replace(H100, ranks=4)).footprint()
    assert replicated.training > RunSizes(load(""), sizes, two_nodes).footprint().training


@pytest.mark.parametrize(("text", "expected"), [("", 18), ("policy: {lora: {}}", 4)])
def test_shared_weights_take_the_documented_bytes_per_parameter(text, expected):
    sizes = sizes_of(config_json())
    config = load(f"weights: shared\nbatch: {{max_tokens_per_micro_batch: 64}}\n{text}\n", *TINY_SEQUENCES)
    assert RunSizes(config, sizes, H100).footprint().training / sizes.total == pytest.approx(expected, rel=0.16)


TINY_SEQUENCES = ("--rollout.max_prompt_tokens", "32", "--rollout.max_completion_tokens", "32")


@pytest.mark.parametrize(
    ("text", "more"),
    [("", 2), ("engine: {tensor_parallel_size: 2}", 1), ("engine: {dtype: float32}", 4), ("engine: {sleep: false}", 2)],
)
def test_the_engine_adds_its_weights_while_it_generates(text, more):
    sizes = sizes_of(config_json())
    alone = RunSizes(load(f"engine: {{placement: server}}\n{SHORT}"), sizes, replace(H100, ranks=4)).footprint()
    beside = RunSizes(load(text + "\n" + SHORT), sizes, replace(H100, ranks=4)).footprint()
    added = beside.generating - alone.generating - ENGINE_RESERVE
    assert added / sizes.total == pytest.approx(more, rel=0.03)
    assert beside.training - alone.training == (2 * sizes.total if "sleep" in text else 0)


def test_offloading_the_optimizer_frees_its_state_while_the_engine_generates():
    sizes, place = sizes_of(config_json()), replace(H100, ranks=4)
    plain, offloaded = (
        RunSizes(load(text), sizes, place).footprint() for text in ("", "policy: {offload_optimizer: true}")
    )
    assert plain.generating - offloaded.generating == offloaded.host == 8 * (sizes.total // 4)
    assert plain.training == offloaded.training


def test_a_model_that_is_too_large_fails_with_settings_that_fit():
    sizes = sizes_of(config_json())
    found = judge_memory(RunSizes(load(SHORT), sizes, H100), 1024 * GIB, 1)
    assert found.status == "failed"
    assert found.detail.startswith("8.19 B parameters on 1 GPUs: 139 GiB while training, ")
    assert "--policy.lora {} (" in found.fix and "--policy.cpu_offload true (" in found.fix
    assert " 2 such GPUs" in found.fix and "offload_optimizer" not in found.fix
    assert judge_memory(RunSizes(load(SHORT, "--policy.lora", "{}"), sizes, H100), 64 * GIB, 1).status == "ok"
    assert judge_memory(RunSizes(load(SHORT), sizes, replace(H100, ranks=4)), 64 * GIB, 4).status == "ok"


def test_host_memory_must_hold_what_is_offloaded():
    sizes, config = sizes_of(config_json()), load(SHORT, "--policy.cpu_offload", "true")
    assert judge_memory(RunSizes(config, sizes, H100), 1024 * GIB, 1).status == "ok"
    found = judge_memory(RunSizes(config, sizes, H100), 64 * GIB, 1)
    assert found.status == "failed"
    assert "122 GiB of 64 GiB host memory" in found.detail


def test_a_fixed_share_for_the_engine_must_leave_room_for_the_trainer():
    sizes = sizes_of(config_json("qwen3-1.7b"))
    found = judge_memory(RunSizes(load(SHORT, "--engine.gpu_memory_utilization", "0.9"), sizes, H100), 64 * GIB, 1)
    assert found.status == "failed"
    assert "--engine.gpu_memory_utilization null (" in found.fix
    assert (
        judge_memory(RunSizes(load(SHORT, "--engine.gpu_memory_utilization", "0.4"), sizes, H100), 64 * GIB, 1).status
        == "ok"
    )


def test_checkpoints_and_exports_are_counted():
    sizes = sizes_of(config_json())

    def size(*overrides: str) -> float:
        return RunSizes(load("", "--training_steps", "100", *overrides), sizes, H100).run_folder_bytes() / sizes.total

    assert size() == pytest.approx(3 * 12 + 2), "three checkpoints of 12 bytes a parameter, one export of 2"
    assert size("--checkpoint.every", "0") == pytest.approx(12 + 2)
    assert size("--checkpoint.export_every", "50") == pytest.approx(3 * 12 + 3 * 2)
    assert size("--checkpoint.final", "false", "--checkpoint.keep_last", "1") == pytest.approx(2 * 12)
    assert size("--policy.lora", "{}") < 0.5
    assert size("--evaluation.keep_best", "held_out/reward") == pytest.approx(4 * 12 + 2 * 2)


@pytest.fixture
def huge(tmp_path) -> Path:
    """A folder with the config.json of a model that no machine holds, and a weight file of no tensors."""
    folder = tmp_path / "huge"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config_json() | {"num_hidden_layers": 100_000}))
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    return folder


def test_a_model_larger_than_memory_and_disk_fails(huge, tmp_path, monkeypatch):
    config = config_of(huge, output_dir=str(tmp_path / "not" / "there"))
    subject = subject_of(config)
    assert check_memory(subject).status == "failed"
    found = check_disk(subject)
    assert found.status == "failed"
    assert found.detail.endswith(f"are free in {tmp_path}")
    fake_nvidia_smi(tmp_path, monkeypatch, TWO_H200)
    assert "of 140 GiB each" in check_memory(subject_of(config, gpus=2)).detail


def test_a_disk_that_is_too_small_fails(model_folder, tmp_path):
    code = (
        "from colocated_grpo.tools.doctor.machine import check_disk\n"
        "from colocated_grpo.settings.config_file import load_config\nfrom tests.support.doctor import subject_of\n"
        "config = load_config({path!r})\nprint(check_disk(subject_of(config)).status)"
    )
    file, output = tmp_path / "x.yaml", tmp_path / "runs"
    output.mkdir()
    file.write_text(f"model: {model_folder()}\noutput_dir: {output}\n")
    code = code.format(path=str(file))
    assert python_on_small_disk(code, output, "128k").strip() == "failed"
    assert python_on_small_disk(code, output, "64m").strip() == "ok"


def test_a_small_model_passes(model_folder):
    subject = subject_of(config_of(model_folder()))
    assert [check(subject).status for check in (check_memory, check_disk)] == ["ok", "ok"]


def test_an_unknown_model_has_no_sizes(tmp_path):
    subject = subject_of(config_of(tmp_path / "none"))
    assert [check(subject).status for check in (check_memory, check_disk)] == ["skipped", "skipped"]
    assert check_memory(subject).detail == f"model.name='{tmp_path}/none': no such folder"
