"""Memory and disk space of a run by arithmetic, and settings with which it would fit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from colocated_grpo.settings.model_sizes import ENGINE_RESERVE, sizes_of
from colocated_grpo.settings.run_sizes import FULL, GIB, Placement, RunSizes, fits, memory_fix
from tests.support.config_text import load
from tests.support.real_sizes import config_json

H100 = Placement(ranks=1, on_gpu=True, device_bytes=80 * GIB)
SHORT = "rollout: {max_prompt_tokens: 512, max_completion_tokens: 512}\n"


@pytest.mark.parametrize(
    ("text", "bytes_per_parameter"),
    [
        ("", 16),
        ("policy: {optimizer: {type: adamw_8bit}}", 10),
        ("policy: {optimizer: {type: adafactor}}", 8),
        ("policy: {lora: {}}", 4),
        ("policy: {lora: {base_on_host: true}}", 2),
        ("policy: {lora: {base_dtype: nf4}}", 0.85 * 9 / 16 + 0.15 * 2),
        ("policy: {cpu_offload: true}", 0),
        ("loss: {type: grpo, kl: {coef: 0.1}}", 18),
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


def test_a_model_that_is_too_large_fits_with_the_settings_named():
    sizes = sizes_of(config_json())
    run = RunSizes(load(SHORT), sizes, H100)
    assert not fits(run, 1024 * GIB, FULL)
    fix = memory_fix(run, 1024 * GIB)
    assert "--policy.lora {} (" in fix and "--policy.cpu_offload true (" in fix
    assert " 2 such GPUs" in fix and "offload_optimizer" not in fix
    assert fits(RunSizes(load(SHORT, "--policy.lora", "{}"), sizes, H100), 64 * GIB, FULL)
    assert fits(RunSizes(load(SHORT), sizes, replace(H100, ranks=4)), 16 * GIB, FULL)


def test_a_base_in_4_bits_is_named_where_training_does_not_fit_and_left_out_where_it_is_rejected():
    sizes, long = sizes_of(config_json()), "rollout: {max_prompt_tokens: 4096, max_completion_tokens: 90000}\n"
    adapter = RunSizes(load(long, "--policy.lora", "{}"), sizes, H100)
    smaller = adapter.smaller()["--policy.lora.base_dtype nf4"].footprint()
    assert adapter.footprint().training - smaller.training == pytest.approx(
        sizes.total * (2 * 0.85 + (2 - 9 / 16) * 0.85), rel=0.01
    )
    for flags in (["--weights", "shared"], ["--policy.lora.base_on_host", "true"]):
        run = RunSizes(load(long, "--policy.lora", "{}", *flags), sizes, H100)
        assert "--policy.lora.base_dtype nf4" not in run.smaller()


def test_host_memory_must_hold_what_is_offloaded():
    run = RunSizes(load(SHORT, "--policy.cpu_offload", "true"), sizes_of(config_json()), H100)
    assert fits(run, 1024 * GIB, FULL) and not fits(run, 64 * GIB, FULL)
    assert run.footprint().host == pytest.approx(122 * GIB, rel=0.01)


def test_a_fixed_share_for_the_engine_must_leave_room_for_the_trainer():
    sizes = sizes_of(config_json("qwen3-1.7b"))
    large, small = (RunSizes(load(SHORT, "--engine.gpu_memory_utilization", s), sizes, H100) for s in ("0.9", "0.4"))
    assert not fits(large, 64 * GIB, FULL) and fits(small, 64 * GIB, FULL)
    assert "--engine.gpu_memory_utilization null (" in memory_fix(large, 64 * GIB)


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
