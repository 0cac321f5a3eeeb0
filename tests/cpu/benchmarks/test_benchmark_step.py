"""Whole-step benchmarks: their arithmetic by hand, and tiny runs of each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from colocated_grpo.benchmarks import growth, step
from colocated_grpo.benchmarks.comparison import comparison
from colocated_grpo.benchmarks.figures import (
    ModelSize,
    generation_bound,
    medians,
    model_size,
    sync_bound,
    training_bound,
    with_rates,
)
from colocated_grpo.benchmarks.peer import PeerSpec, peer_command, peer_environment
from colocated_grpo.benchmarks.peer_trl import chats, merge, own_seconds, trainer_arguments
from colocated_grpo.benchmarks.roofline import Roofline
from colocated_grpo.benchmarks.workload import RandomWork, add_stop_tokens
from colocated_grpo.environments.prompts import PromptEncoder
from colocated_grpo.tools.make_model import make_model
from colocated_grpo.tools.shapes import TINY
from tests.support.paths import ROOT
from tests.support.ranks import TIMEOUT, start_module

RATES = Roofline(
    copy_bytes_per_second=100.0,
    matmul_flops_per_second=1000.0,
    gather_bytes_per_second=10.0,
    datasheet_flops_per_second=2000.0,
)
SIZE = ModelSize(parameters=50, weight_bytes=100, kv_bytes_per_token=4)
SPEC = PeerSpec(
    model="somewhere",
    prompts=4,
    group_size=4,
    max_completion=8,
    steps=2,
    until=None,
    seed=0,
    gpus=2,
    batch=4,
    gpu_memory=0.4,
    changes={},
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


def test_mfu_without_a_data_sheet_is_a_share_of_the_measured_rate():
    row = {"tokens": 1.0, "trained_tokens": 20.0, "seconds/step": 1.0, "seconds/train": 2.0}

    assert with_rates(row, SIZE, replace(RATES, datasheet_flops_per_second=None), ranks=3)["mfu"] == pytest.approx(1.0)


def test_medians_keep_only_what_every_step_has():
    assert medians([{"a": 1.0, "b": 5.0}, {"a": 9.0}, {"a": 2.0}]) == {"a": 2.0}


def test_decoding_reads_the_weights_each_step_and_the_cache_of_every_running_sequence():
    # Two completions of 3 and 1 tokens after prompts of 10: 3 steps; caches of 11 + 12 + 13 and 11 tokens.
    read = 3 * 100 + (11 + 12 + 13 + 11) * 4 / 2

    assert generation_bound(SIZE, RATES, 2, 10.0, [3, 1]) == pytest.approx(read / 100)


def test_the_bounds_of_sync_and_training_shrink_as_the_work_is_shared():
    assert sync_bound(SIZE, replace(RATES, gather_bytes_per_second=None), 1) == pytest.approx(200 / 100)
    assert sync_bound(SIZE, RATES, 4) == pytest.approx(75 / 10 + 200 / 100)
    assert training_bound(SIZE, RATES, 4, tokens=40.0) == pytest.approx(6 * 50 * 40 / 4 / 1000)


def test_sizes_are_those_of_the_model_files(model: Path):
    size = model_size(model, itemsize=2)

    # 2 layers, keys and values, 2 heads of 32 numbers
    assert size.kv_bytes_per_token == 2 * 2 * 2 * 32 * 2
    assert size.weight_bytes == 2 * size.parameters == 2 * sum_of_numbers(model)


def sum_of_numbers(model: Path) -> int:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model).num_parameters()


def test_peer_phases_leave_out_what_runs_inside_them():
    nested = {"collect": 10.0, "sync": 2.0, "generate": 6.0, "wake_weights": 0.5, "wake_kv_cache": 0.25, "sleep": 1.0}

    own = own_seconds(nested, step=25.0)

    assert own.pop("seconds/step") == sum(own.values()) == 25.0
    assert own["seconds/generate"] == 4.75
    assert own["seconds/sync"] == 1.5
    assert own["seconds/score"] == 2.0


def test_peer_tokens_are_those_of_all_ranks_and_padding_is_what_they_computed_beside_them():
    counts = {"sequences": 2.0, "prompt_tokens": 10.0, "completion_tokens": 20.0, "computed_tokens": 60.0}
    busier = {**counts, "completion_tokens": 50.0}

    row = merge([{**counts, "seconds/step": 1.0}, {**busier, "seconds/step": 9.0}])

    assert row["tokens"] == row["trained_tokens"] == 90
    assert row["padding"] == pytest.approx(1 - 90 / 120)
    assert row["imbalance"] == pytest.approx(60 / 45 - 1)
    assert (row["prompt_tokens"], row["completion_tokens"]) == (5, 17.5)
    assert row["seconds/step"] == 1.0


def test_the_peer_makes_one_optimizer_step_of_all_completions():
    arguments = trainer_arguments(SPEC)

    sequences = arguments["per_device_train_batch_size"] * arguments["gradient_accumulation_steps"] * SPEC.ranks
    assert sequences == SPEC.completions
    assert arguments["vllm_enable_sleep_mode"]
    assert trainer_arguments(replace(SPEC, changes={"bf16": False}))["bf16"] is False


def test_a_peer_batch_that_does_not_divide_the_work_is_refused_in_one_line(capsys: pytest.CaptureFixture[str]):
    code = step.main(["--gpus", "2", "--prompts", "4", "--group-size", "4", "--peer", "trl", "--peer-batch", "3"])

    assert code == 2
    assert capsys.readouterr().err == "error: --peer-batch=3: 16 completions on 2 ranks are not a multiple of it\n"


def test_several_peer_ranks_start_with_fsdp2(tmp_path: Path):
    from accelerate.commands.config import load_config_from_file
    from accelerate.commands.launch import launch_command_parser

    python, _, launcher, *arguments = peer_command(SPEC, tmp_path / "spec.json", tmp_path / "result.json")

    assert (python, launcher) == (sys.executable, "accelerate.commands.launch")
    launch = launch_command_parser().parse_args(arguments)
    assert launch.num_processes == 2
    assert (launch.module, launch.training_script) == (True, "colocated_grpo.benchmarks.peer_trl")
    assert load_config_from_file(launch.config_file).fsdp_config["fsdp_version"] == 2
    assert PeerSpec(**json.loads(Path(launch.training_script_args[0]).read_text())) == SPEC


def test_the_peer_sees_no_more_gpus_than_it_has_ranks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5,7")
    assert peer_environment(SPEC)["CUDA_VISIBLE_DEVICES"] == "3,5"

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert peer_environment(SPEC)["CUDA_VISIBLE_DEVICES"] == "0,1"


def test_a_peer_that_fails_gives_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(step, "peer_command", lambda *_arguments: ["false"])

    assert step.run_peer(SPEC, tmp_path) is None


def test_the_peer_reads_the_same_prompt_tokens_as_our_trainer(model: Path):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    encoder = PromptEncoder(tokenizer, max_prompt_tokens=200)
    ours = RandomWork().prompts(SPEC.seed, "train")

    for theirs in chats(SPEC):
        token_ids = tokenizer.apply_chat_template(theirs["prompt"], add_generation_prompt=True, return_dict=False)
        assert encoder.encode(next(ours), index=0, source="work").token_ids == token_ids


def test_less_time_and_more_throughput_both_count_as_faster():
    ours = {"median": {"seconds/step": 2.0, "tokens_per_second_per_gpu": 90.0, "tokens": 7.0}}
    peer = {"median": {"seconds/step": 8.0, "tokens_per_second_per_gpu": 30.0, "tokens": 7.0}}

    assert comparison(ours, peer, {})["speedup"] == {"seconds/step": 4.0, "tokens_per_second_per_gpu": 3.0}
    assert comparison(ours, None, {})["speedup"] == {}


def test_stops_get_rarer_as_the_longest_completion_grows():
    options = growth.growth_parser().parse_args(["--axis", "length", "--sizes", "4096", "1024"])
    short, long = growth.sizes_of(options, ranks=1)

    assert (short.length, long.length) == (1024, 4096)
    assert short.stop_share == 4 * long.stop_share


def test_on_the_gpu_axis_each_rank_keeps_its_work():
    options = growth.growth_parser().parse_args(["--axis", "gpus", "--sizes", "32"])

    assert [growth.sizes_of(options, ranks)[0].completions for ranks in (1, 2)] == [32, 64]


def test_a_size_that_whole_groups_cannot_make_up_is_refused(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        growth.main(["--sizes", "64", "100"])

    assert "--axis=completions: 100 completions are not a multiple of --group-size=16" in capsys.readouterr().err


def test_growth_is_told_from_the_smallest_size():
    rows = growth.with_growth([{"tokens": 10.0, "step us/token": 4.0}, {"tokens": 40.0, "step us/token": 2.0}])

    assert rows[1]["tokens x"] == 4
    assert rows[1]["time per token x"] == 0.5
    assert rows[1]["tokens/s x"] == 2


def test_our_steps_and_the_peers_stand_side_by_side(model: Path, tmp_path: Path):
    file = tmp_path / "step.json"

    command = [
        sys.executable, "-m", "colocated_grpo.benchmarks.step", "--model", str(model), "--gpus", "0",
        "--prompts", "2", "--group-size", "4", "--max-completion", "8",
        "--steps", "2", "--warmup", "0", "--json", str(file), "--peer", "trl", "--peer-batch", "4",
        "--peer-gpu-memory", "0.05", "--peer-until", "0", "--policy.compile", "off",
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]

    result = json.loads(file.read_text())
    ours, peer = result["ours"]["median"], result["peer"]["median"]
    assert [len(result[side]["steps"]) for side in ("ours", "peer")] == [2, 1], "the peer's time was up after a step"
    assert result["ours"]["steps"][0]["prompt_tokens"] == pytest.approx(peer["prompt_tokens"])
    assert 0 < peer["padding"] < 1
    for side in (ours, peer):
        assert side["seconds/step"] > side["seconds/generate"] > result["roofline"]["seconds/generate"] > 0
        assert side["mfu"] > 0
    assert result["speedup"]["seconds/step"] == pytest.approx(peer["seconds/step"] / ours["seconds/step"])
    assert result["commit"]
    assert "tokens_per_second_per_gpu" in done.stdout


def test_one_run_is_trained_at_every_size(model: Path, tmp_path: Path):
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


def test_more_warmup_than_steps_is_refused(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        step.parse(["--steps", "2", "--warmup", "2"])

    assert "--warmup=2: must be less than --steps=2" in capsys.readouterr().err
