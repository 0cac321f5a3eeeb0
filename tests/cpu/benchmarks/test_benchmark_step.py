"""Benchmarks of whole steps: their arithmetic by hand, and tiny runs of ours."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import growth, step
from benchmarks.comparison import PeerSummary, Summary, comparison
from benchmarks.roofline import Roofline
from benchmarks.throughput import (
    ModelSize,
    generation_bound,
    medians,
    model_size,
    sync_bound,
    training_bound,
    with_rates,
)
from benchmarks.workload import add_stop_tokens
from colocated_grpo.settings.training import LoRAConfig, PolicyConfig
from colocated_grpo.tools.shapes import TINY
from tests.support.families import SETTINGS as FAMILIES
from tests.support.random_models import make_model
from tests.support.ranks import TIMEOUT, start_module

RATES = Roofline(
    copy_bytes_per_second=100.0,
    matmul_flops_per_second=1000.0,
    gather_bytes_per_second=10.0,
    datasheet_flops_per_second=2000.0,
)
SIZE = ModelSize(
    parameters=50, weight_bytes=100, kv_bytes_per_token=4, trained_parameters=50, training_flops_per_token=300
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_model(tmp_path_factory.mktemp("benchmark") / "tiny", shape=TINY)
    add_stop_tokens(folder)
    return folder


def test_mfu_and_throughput_follow_their_definitions():
    row = {"tokens": 300.0, "trained_tokens": 20.0, "seconds/step": 5.0, "seconds/train": 2.0}

    derived = with_rates(row, SIZE, RATES, ranks=3)

    assert derived["tokens_per_second_per_gpu"] == 300 / (5 * 3)
    assert derived["mfu"] == pytest.approx(6 * 50 * 20 / (2 * 3) / 2000)


def test_mfu_without_a_data_sheet_is_relative_to_the_measured_rate():
    row = {"tokens": 1.0, "trained_tokens": 20.0, "seconds/step": 1.0, "seconds/train": 2.0}

    assert with_rates(row, SIZE, replace(RATES, datasheet_flops_per_second=None), ranks=3)["mfu"] == pytest.approx(1.0)


def test_medians_are_taken_of_numbers_that_every_step_has():
    assert medians([{"a": 1.0, "b": 5.0}, {"a": 9.0}, {"a": 2.0}]) == {"a": 2.0}


def test_decoding_reads_the_weights_each_step_and_the_cache_of_every_running_sequence():
    # Two completions of 3 and 1 tokens after prompts of 10: 3 steps; caches of 11 + 12 + 13 and 11 tokens.
    read = 3 * 100 + (11 + 12 + 13 + 11) * 4 / 2

    assert generation_bound(SIZE, RATES, 2, 10.0, [3, 1]) == pytest.approx(read / 100)


def test_decoding_reads_only_the_experts_that_running_sequences_choose():
    mixture = replace(SIZE, expert_bytes=80, expert_share=0.25, kv_bytes_per_token=0)
    # One step of two sequences and two of one; 0.75 of the experts are not chosen by one token, 0.75^2 by two.
    read = 3 * 20 + 80 * (1 - 0.75**2) + 2 * 80 * 0.25

    assert generation_bound(mixture, RATES, 1, 10.0, [3, 1]) == pytest.approx(read / 100)


def test_the_bounds_of_sync_and_training_shrink_with_the_number_of_ranks():
    assert sync_bound(SIZE, replace(RATES, gather_bytes_per_second=None), 1) == pytest.approx(200 / 100)
    assert sync_bound(SIZE, RATES, 4) == pytest.approx(75 / 10 + 200 / 100)
    assert training_bound(SIZE, RATES, 4, tokens=40.0) == pytest.approx(6 * 50 * 40 / 4 / 1000)


def test_model_sizes_are_read_from_the_checkpoint(model: Path):
    size = model_size(model, itemsize=2)

    # 2 layers, keys and values, 2 heads of 32 numbers
    assert size.kv_bytes_per_token == 2 * 2 * 2 * 32 * 2
    assert size.weight_bytes == 2 * size.parameters == 2 * num_parameters(model)
    assert size.trained_parameters == size.parameters
    assert size.training_flops_per_token == 6 * size.parameters


def test_experts_count_by_the_share_that_a_token_chooses(tmp_path: Path):
    folder = make_model(tmp_path / "mixture", architecture="qwen3_moe", settings=FAMILIES["qwen3_moe"])
    size = model_size(folder, itemsize=2)

    # 2 of 4 experts in each of 2 layers, with 3 matrices of 64 x 32
    experts = 2 * 4 * 3 * 64 * 32
    assert size.parameters == num_parameters(folder)
    assert (size.expert_bytes, size.expert_share) == (2 * experts, 0.5)
    assert size.training_flops_per_token == 6 * (size.parameters - experts // 2)


def test_frozen_weights_have_no_gradient_and_adapters_no_forward_pass(model: Path):
    size = model_size(model, itemsize=2, policy=PolicyConfig(lora=LoRAConfig(rank=8)))

    # hidden 64, 4 query heads and 2 key-value heads of 32, intermediate 128; inputs plus outputs of the linear layers
    adapter = 2 * 8 * ((64 + 128) + 2 * (64 + 64) + (128 + 64) + 2 * (64 + 128) + (128 + 64))
    assert size.trained_parameters == adapter
    assert size.training_flops_per_token == 4 * (size.parameters + adapter)
    assert (size.parameters, size.weight_bytes) == (num_parameters(model), 2 * num_parameters(model))


def test_the_backward_pass_ends_at_the_first_block_with_trained_weights(model: Path):
    full = model_size(model, itemsize=2)
    block = 64 * (128 + 64 + 64) + 128 * 64 + 3 * 64 * 128 + 2 * 64 + 2 * 32  # linear layers and norms
    upper, lower, adapted, everywhere = (
        model_size(model, itemsize=2, policy=policy)
        for policy in (
            PolicyConfig(train_layers=[1]),
            PolicyConfig(train_layers=[0]),
            PolicyConfig(lora=LoRAConfig(rank=8, layers=[1])),
            PolicyConfig(lora=LoRAConfig(rank=8)),
        )
    )

    assert upper.trained_parameters == lower.trained_parameters == block
    assert upper.training_flops_per_token == 4 * full.parameters - 2 * block + 2 * block
    assert lower.training_flops_per_token == 4 * full.parameters + 2 * block
    assert 2 * adapted.trained_parameters == everywhere.trained_parameters
    assert adapted.training_flops_per_token == 4 * full.parameters - 2 * block + 4 * adapted.trained_parameters


def num_parameters(model: Path) -> int:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model).num_parameters()


def peer_summary(medians: dict[str, float]) -> PeerSummary:
    return {
        "median": medians,
        "steps": [],
        "arguments": {},
        "trained_parameters": 50,
        "tries": [],
        "notes": [],
    }


def test_less_time_and_more_throughput_both_count_as_faster():
    ours: Summary = {"median": {"seconds/step": 2.0, "tokens_per_second_per_gpu": 90.0, "tokens": 7.0}, "steps": []}
    peer = peer_summary({"seconds/step": 8.0, "tokens_per_second_per_gpu": 30.0, "tokens": 7.0})

    result = comparison(ours, peer, {"seconds/step": 1.0})

    assert result["speedup"] == {"seconds/step": 4.0, "tokens_per_second_per_gpu": 3.0}
    assert result["peer"] == peer
    assert result["rows"][0] == {
        "figure": "seconds/step",
        "ours": 2.0,
        "TRL": 8.0,
        "TRL/ours": 4.0,
        "at least": 1.0,
    }
    assert comparison(ours, None, {})["speedup"] == {}


def test_stop_tokens_become_rarer_as_the_longest_completion_grows():
    options = growth.growth_parser().parse_args(["--axis", "length", "--sizes", "4096", "1024"])
    short, long = growth.sizes_of(options, ranks=1)

    assert (short.length, long.length) == (1024, 4096)
    assert short.stop_probability == 4 * long.stop_probability


def test_on_the_gpu_axis_the_work_per_rank_is_constant():
    options = growth.growth_parser().parse_args(["--axis", "gpus", "--sizes", "32"])

    assert [growth.sizes_of(options, ranks)[0].completions for ranks in (1, 2)] == [32, 64]


def test_a_number_of_completions_that_is_no_multiple_of_the_group_size_is_rejected(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        growth.main(["--sizes", "64", "100"])

    assert "--axis=completions: 100 completions are not a multiple of --group-size=16" in capsys.readouterr().err


def test_growth_is_relative_to_the_smallest_size():
    rows = growth.with_growth([{"tokens": 10.0, "step us/token": 4.0}, {"tokens": 40.0, "step us/token": 2.0}])

    assert rows[1]["tokens x"] == 4
    assert rows[1]["time per token x"] == 0.5
    assert rows[1]["tokens/s x"] == 2


def test_one_run_trains_at_every_size_of_an_axis(model: Path, tmp_path: Path):
    file, stderr = tmp_path / "growth.json", tmp_path / "stderr"
    arguments = [
        "--model", str(model), "--gpus", "0", "--axis", "length", "--sizes", "8", "64",
        "--completions", "8", "--group-size", "4",
        "--steps", "1", "--warmup", "0", "--json", str(file), "--policy.compile", "off",
    ]  # fmt: skip
    with start_module(growth.__name__, arguments, 1, tmp_path / "stdout", stderr) as rank:
        assert rank.exit_codes(TIMEOUT) == [0], stderr.read_text()

    short, long = json.loads(file.read_text())["rows"]
    assert (short["longest"], long["longest"]) == (8, 64)
    assert long["tokens"] > short["tokens"]


def test_a_warmup_that_leaves_no_measured_step_is_rejected(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        step.parse(["--steps", "2", "--warmup", "2"])

    assert "--warmup=2: must be less than --steps=2" in capsys.readouterr().err
