"""Benchmarks of single parts: each runs and reports its figures, and the ratios that make the trainer fast hold."""

from __future__ import annotations

import json
import statistics
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors import safe_open
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM

from benchmarks import (
    attention,
    decode,
    exactness,
    logprob,
    patches,
    sleep,
    sync,
    train,
)
from benchmarks.adapters import arguments_for, write_random_adapter
from benchmarks.harness import config_of as config_of_benchmark
from benchmarks.results import number, since_kept, table
from benchmarks.roofline import Roofline, measure_roofline, seconds_of
from benchmarks.throughput import model_size
from benchmarks.workload import STOP_PROBABILITY
from colocated_grpo.batching import plan
from colocated_grpo.batching.micro_batch import build_micro_batch
from colocated_grpo.batching.pack import Batch, Minibatch
from colocated_grpo.losses.inputs import Counts
from colocated_grpo.runtime.distributed import World
from colocated_grpo.settings.errors import ConfigError
from colocated_grpo.settings.training import LoRAConfig
from colocated_grpo.types import Group, JsonObject, Rollout
from tests.support.families import SETTINGS
from tests.support.ranks import TIMEOUT, start_module
from tests.support.small_policy import config_of, group_of, policy_of, rollout_of, sequence_of
from tests.support.training_runs import tiny_model

CPU = torch.device("cpu")
ORIGIN = {"benchmark", "command", "commit", "time", "python", "packages", "machine", "gpu", "ranks", "rows"}
RATES = Roofline(
    copy_bytes_per_second=100.0,
    matmul_flops_per_second=1000.0,
    gather_bytes_per_second=None,
    datasheet_flops_per_second=2000.0,
)


@pytest.fixture
def measured(tmp_path) -> Callable[..., JsonObject]:
    """A function that runs a benchmark and returns the JSON it wrote."""

    def run(benchmark: ModuleType, *arguments: str, forked: bool = False) -> JsonObject:
        """Run the command's main function, or the module in a forked rank, which saves the imports."""
        file = tmp_path / "results" / "result.json"
        arguments += ("--json", str(file))
        if forked:
            stderr = tmp_path / "stderr"
            with start_module(benchmark.__name__, arguments, 1, tmp_path / "stdout", stderr) as rank:
                assert rank.exit_codes(TIMEOUT) == [0], stderr.read_text()
        else:
            assert benchmark.main(arguments) == 0
        result = json.loads(file.read_text())
        assert set(result) >= ORIGIN | ({"roofline"} if benchmark not in (patches, exactness) else set())
        assert result["packages"]["torch"] == torch.__version__
        assert result["command"].startswith("python -m benchmarks.")
        return result

    return run


def test_attention_measures_each_kernel_at_each_length(measured):
    sizes = ["--tokens", "64", "--heads", "4", "--kv-heads", "2", "--head-size", "8", "--repeats", "2"]
    result = measured(attention, *sizes, "--lengths", "8", "64")

    assert [(row["length"], row["kernel"]) for row in result["rows"]] == [(8, "padded"), (64, "padded")]
    short, long = result["rows"]
    assert long["forward_floor_seconds"] == pytest.approx(short["forward_floor_seconds"] * 65 / 9)
    for row in result["rows"]:
        assert row["backward_floor_seconds"] == pytest.approx(2.5 * row["forward_floor_seconds"])
        assert row["forward_seconds"] > 0 < row["backward_seconds"]


def test_logprob_measures_each_operator_at_each_size(measured):
    result = measured(logprob, "--tokens", "64", "--vocab", "256", "--hidden", "16", "32", "--chunk", "16")

    assert [(row["hidden"], row["operator"]) for row in result["rows"]] == [
        (hidden, name) for hidden in (16, 32) for name in ("linear_loss", "linear_logprobs", "full_logits")
    ]
    for row in result["rows"]:
        assert row["ratio"] == pytest.approx(row["seconds"] / row["matmul_seconds"])


def test_both_ranks_of_train_share_the_work_of_one_batch(measured):
    work = ["--prompts", "8", "--group-size", "4", "--max-completion", "64", "--mean-completion", "16"]
    few = ["--shape", "tiny", "--steps", "2", "--warmup", "1"]
    result = measured(train, "--gpus", "0", "--nproc", "2", *few, *work, "--batch.max_tokens_per_micro_batch", "512")

    [row] = result["rows"]
    assert result["ranks"] == 2
    assert result["roofline"]["gather_bytes_per_second"] > 0
    assert len(result["seconds"]) == 2
    assert row["tokens_per_second_per_gpu"] == pytest.approx(row["tokens"] / row["seconds"] / 2)
    assert row["micro_batches"] > 1  # the setting at the end of the command reached the ranks
    assert row["padding"] == 0
    assert 0 < row["padding_saved"] < 1
    assert 0 <= row["imbalance"] < 0.1
    assert sum(kernel["share"] for kernel in result["kernels"]) == pytest.approx(1)


def test_train_refuses_context_parallel_groups_that_do_not_divide_the_ranks(tmp_path):
    arguments, stderr = ["--gpus", "0", "--shape", "tiny", "--policy.context_parallel", "2"], tmp_path / "stderr"
    with start_module(train.__name__, arguments, 1, tmp_path / "stdout", stderr) as rank:
        assert rank.exit_codes(TIMEOUT) == [2]
    assert stderr.read_text().splitlines()[-1] == "error: policy.context_parallel=2: must divide the number of ranks, 1"


def test_the_sync_benchmark_times_the_merge_of_an_adapter(measured):
    [row] = measured(sync, "--gpus", "0", "--shape", "tiny", "--policy.lora.rank", "8", forked=True)["rows"]
    assert row["publish_seconds"] > 0
    assert row["path"] == "views"


def test_the_planned_sync_is_no_slower_than_the_loader_of_the_engine(measured):
    [row] = measured(sync, "--gpus", "0", "--shape", "tiny", forked=True)["rows"]

    assert row["path"] == "views"
    assert row["seconds"] <= row["load_weights_seconds"]  # a seventh of it on an idle machine
    assert row["ratio"] == pytest.approx(row["seconds"] / (row["gather_seconds"] + row["copy_seconds"]))
    assert row["bytes"] == 4 * 105_408


def test_sleep_times_the_start_sleep_and_wake_of_an_engine(measured):
    small = ["--shape", "tiny", "--max-num-seqs", "4", "--max-completion", "16", "--repeats", "2"]
    [row] = measured(sleep, "--gpus", "0", *small, forked=True)["rows"]

    assert 0 < row["engine_start_seconds"] < row["first_token_seconds"]
    assert row["import_seconds"] > 0
    parts = [row[f"{part}_seconds"] for part in ("sleep", "wake_weights", "wake_kv_cache")]
    assert row["sleep_and_wake_seconds"] == pytest.approx(sum(parts))
    assert "asleep_gib" not in row  # host memory is not measured by engine


def test_decode_divides_the_time_of_a_step_among_kernels(measured):
    work = ["--sequences", "4", "2", "--group-size", "2", "--prompt", "20", "--sampled", "8", "--steps", "4"]
    result = measured(decode, "--gpus", "0", "--shape", "tiny", *work, forked=True)

    assert [(row["sequences"], row["cached_tokens_each"]) for row in result["rows"]] == [(4, 30), (2, 30)]
    for row in result["rows"]:
        kernels = [kernel for kernel in result["kernels"] if kernel["sequences"] == row["sequences"]]
        assert sum(kernel["share"] for kernel in kernels) == pytest.approx(1)
        assert sum(kernel["ms"] for kernel in kernels) == pytest.approx(4 * row["device_ms"])
        assert {kernel["kernel"]: kernel["calls"] for kernel in kernels}["aten::mm"] == 4 * 9  # two layers and the head
        assert row["idle_share"] == pytest.approx(1 - row["device_ms"] / row["step_ms"])


def test_exactness_compares_every_operator_of_the_engine_with_the_policys(measured):
    work = ["--prompt", "20", "--sampled", "8", "--skip-graphs"]
    result = measured(exactness, "--gpus", "0", "--model", str(tiny_model(head_dim=64)), *work, forked=True)

    assert [row["equal_layers"] for row in result["rows"]] == ["2 of 2"] * 10
    assert result["first difference"] == "none"


def test_a_random_adapter_has_the_format_of_peft(tmp_path):
    from peft import PeftModel

    model = tiny_model()
    write_random_adapter(tmp_path, model, LoRAConfig(rank=8, alpha=16), torch.float32)
    base = AutoModelForCausalLM.from_pretrained(model)
    token_ids = torch.tensor([[1, 2, 3]])
    expected = base(token_ids).logits

    adapted = PeftModel.from_pretrained(base, str(tmp_path))
    with safe_open(tmp_path / "adapter_model.safetensors", framework="pt") as file:
        names = set(file.keys())
    assert len(names) == 2 * 7 * 2  # two factors for each of seven linear layers in two blocks
    loaded = {name: weight for name, weight in adapted.named_parameters() if "lora_B" in name and weight.any()}
    assert {name.replace(".default", "") for name in loaded} == {name for name in names if "lora_B" in name}
    assert adapted.peft_config["default"].r == 8
    assert not torch.allclose(adapted(token_ids).logits, expected)


@pytest.mark.parametrize(
    "architecture", ["qwen3", "gpt2", "qwen3_moe", "olmoe", "qwen2_moe", "glm4_moe", "deepseek_v3"]
)
def test_benchmarks_count_the_parameters_of_the_trainers_adapter(world, architecture):
    folder = tiny_model(architecture, edits=SETTINGS[architecture])
    config = config_of(folder, policy={"lora": {"rank": 8}})
    trained = policy_of(config, world).num_trained()
    assert model_size(folder, 2, config.policy).trained_parameters == trained > 0


@pytest.mark.parametrize("architecture", ["qwen3_moe", "olmoe", "qwen2_moe"])
def test_trl_gets_an_adapter_without_experts(architecture):
    folder = tiny_model(architecture, edits=SETTINGS[architecture])
    assert "all-linear" not in arguments_for(folder, LoRAConfig(rank=8))["target_modules"]


@pytest.mark.parametrize("architecture", ["glm4_moe", "deepseek_v3"])
def test_families_of_which_peft_adapts_other_layers_are_not_measured_beside_trl(architecture):
    folder = tiny_model(architecture, edits=SETTINGS[architecture])
    with pytest.raises(ConfigError, match=r"policy\.lora: PEFT, which TRL uses, adapts other layers"):
        arguments_for(folder, LoRAConfig(rank=8))


def test_patches_lists_every_replacement_inside_vllm_with_its_hits(measured):
    work = ["--sequences", "4", "--group-size", "2", "--prompt", "20", "--completion", "8"]
    result = measured(patches, "--gpus", "0", "--shape", "tiny", *work, forked=True)

    rows = {row["target"]: (row["status"], row["hits"]) for row in result["rows"]}
    assert [row["target"] for row in result["rows"]] == [row["target"] for row in result["patches"]]
    assert rows["vllm.v1.sample.sampler:batched_count_greater_than"][0] == "applied"
    status, linear_layers = rows["vllm.model_executor.layers.utils:dispatch_cpu_unquantized_gemm"]
    assert status == "applied"
    assert linear_layers >= 2 * 4  # qkv, o, gate_up and down of two layers
    assert rows["vllm.v1.core.sched.scheduler:Scheduler.schedule"][1] > 0
    assert rows["vllm.model_executor.models.qwen3:Qwen3Attention.forward"] == ("skipped: only on cuda", 0)
    assert result["sampled_tokens"] == 4 * 8


def test_settings_of_the_command_line_override_those_of_the_benchmark():
    settings = ["--rollout.group_size", "4", "--policy.lr=1e-3"]
    config = config_of_benchmark(Path("model"), Namespace(settings=settings), rollout={"group_size": 2})

    assert (config.rollout.group_size, config.policy.lr, config.model.name) == (4, 1e-3, "model")
    with pytest.raises(ConfigError, match="learning_speed"):
        config_of_benchmark(Path("model"), Namespace(settings=["--policy.learning_speed", "1"]))


def work_of(flags: str) -> Namespace:
    return train.add_work(ArgumentParser()).parse_args(flags.split())


def test_an_agents_history_its_prompt_or_nothing_is_computed_once(world):
    """Two episodes of three turns: prompts of 10, 15 and 20 tokens, of which siblings and turns share more or less."""
    flags = "--prompts 1 --group-size 2 --turns 3 --prompt-tokens 10 10 --message-tokens 5 5 --max-completion 1"
    config = config_of("model", rollout={"max_completion_tokens": 8, "max_prompt_tokens": 64})

    def computed(reuse: str) -> tuple[int, int]:
        groups = train.make_groups(work_of(f"{flags} --reuse {reuse}"), vocabulary=100_000)
        batch = train.pack_all(groups, config, world)
        return batch.num_tokens, batch.computed_tokens

    assert computed("nothing") == (2 * (11 + 16 + 21), 96)
    assert computed("prompt") == (96, 96 - 5 * 10)
    assert computed("turns") == (96, 96 - 5 * 10 - 2 * 5)


def test_a_packed_long_tail_trains_faster_than_one_padded_to_its_longest(world):
    work = work_of("--prompts 4 --group-size 8 --max-completion 384 --mean-completion 64")
    config = config_of(
        tiny_model(),
        rollout={"max_completion_tokens": 384, "max_prompt_tokens": 128},
        batch={"max_tokens_per_micro_batch": 512},
    )
    policy = policy_of(config, world)
    groups = train.make_groups(work, vocabulary=96)
    packed, padded = (train.pack_all(each, config, world) for each in (groups, padded_to_longest(groups)))

    assert padded.num_tokens >= 2 * packed.num_tokens
    ratios = [once(partial(train.train, policy, padded)) / once(partial(train.train, policy, packed)) for _ in range(3)]
    assert statistics.median(ratios) >= 1.5


def test_completions_of_a_long_prompt_train_faster_when_its_forward_pass_is_reused(world, monkeypatch):
    limits = {"max_completion_tokens": 32, "max_prompt_tokens": 256}
    config = config_of(tiny_model(), rollout=limits, batch={"max_tokens_per_micro_batch": 2048})
    policy = policy_of(config, world)
    siblings = [rollout_of([8] * 256, [9] * (16 + sibling), reward=float(sibling % 2)) for sibling in range(8)]
    groups = [group_of(index, siblings) for index in range(2)]
    together = train.pack_all(groups, config, world)
    monkeypatch.setattr(plan, "GROUPING_THRESHOLD", 0.0)
    apart = train.pack_all(groups, config, world)

    assert apart.computed_tokens == apart.num_tokens == together.num_tokens > 4 * together.computed_tokens
    slow, fast = (partial(train.train, policy, batch) for batch in (apart, together))
    ratios = [once(slow) / once(fast) for _ in range(3)]
    assert statistics.median(ratios) >= 1.15


def once(work: Callable[[], object]) -> float:
    return seconds_of(work, CPU, repeats=1, warmup=0)[0]


def padded_to_longest(groups: list[Group]) -> list[Group]:
    longest = max(len(rollout.token_ids) for group in groups for rollout in group.rollouts)
    return [replace(group, rollouts=[padded(rollout, longest) for rollout in group.rollouts]) for group in groups]


def padded(rollout: Rollout, length: int) -> Rollout:
    missing = length - len(rollout.token_ids)
    return replace(
        rollout,
        token_ids=rollout.token_ids + [0] * missing,
        loss_mask=rollout.loss_mask + [False] * missing,
        sampling_logprobs=rollout.sampling_logprobs + [0.0] * missing,
    )


@pytest.mark.parametrize("operator", [logprob.fused_loss, logprob.recomputed])
def test_the_logprob_operator_needs_a_fraction_of_the_memory_of_full_logits(operator):
    problem = logprob.make_problem(tokens=1024, vocab=2048, hidden=16, device=CPU)
    full = peak_bytes(lambda: logprob.forward_backward(problem, logprob.full_logits))
    chunked = peak_bytes(lambda: logprob.forward_backward(problem, partial(operator, chunk_tokens=64)))

    assert full >= 2 * 1024 * 2048 * 4
    assert chunked <= full / 8


def peak_bytes(work: Callable[[], object]) -> int:
    """Return the peak of allocated bytes beyond those before `work`, from the allocator's events."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        work()
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    allocated = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        allocated += event.nbytes()
        peak = max(peak, allocated)
    return peak


def test_all_three_operators_compute_the_same_gradients():
    problem = logprob.make_problem(tokens=40, vocab=64, hidden=16, device=CPU)
    gradients = []
    for operator in (
        logprob.full_logits,
        *(partial(f, chunk_tokens=16) for f in (logprob.fused_loss, logprob.recomputed)),
    ):
        logprob.forward_backward(problem, operator)
        gradients.append((problem.hidden_NH.grad, problem.weight_VH.grad))

    for others in gradients[1:]:
        torch.testing.assert_close(others, gradients[0])


def test_completions_have_the_long_tail_of_random_stops():
    groups = train.make_groups(work_of("--prompts 200"), vocabulary=100)
    lengths = [sum(rollout.loss_mask) for group in groups for rollout in group.rollouts]

    survives = (1 - STOP_PROBABILITY) ** 1024
    assert statistics.mean(lengths) == pytest.approx((1 - survives) / STOP_PROBABILITY, rel=0.05)
    assert lengths.count(1024) / len(lengths) == pytest.approx(survives / (1 - STOP_PROBABILITY), rel=0.15)
    assert min(lengths) >= 1


def test_mfu_counts_the_flop_of_computed_tokens():
    batch = Batch(minibatches=[], num_tokens=60, computed_tokens=40, imbalance=0.0, padding=0.0)
    row = train.speed(batch, flops_per_token=60, seconds=2.0, roofline=RATES, ranks=2)

    assert row["mfu"] == pytest.approx(6 * 10 * 20 / 2.0 / 2000)
    assert row["mfu_of_measured_matmul"] == pytest.approx(6 * 10 * 20 / 2.0 / 1000)
    assert row["floor_seconds"] == pytest.approx(6 * 10 * 20 / 1000)
    assert row["tokens_per_second_per_gpu"] == 15, "tokens of the rollouts, however often their prompts were computed"


def test_saved_padding_is_counted_per_micro_batch(world):
    micro_batches = [build_micro_batch([sequence_of(5), sequence_of(3)]), build_micro_batch([sequence_of(4)] * 2)]
    counts = Counts(tokens=16, sequences=4, batch_tokens=16, minibatches=1)
    minibatches = [Minibatch(micro_batches=micro_batches, counts=counts)]
    batch = Batch(minibatches=minibatches, num_tokens=16, computed_tokens=16, imbalance=0.0, padding=0.0)

    row = train.packing(batch, world)

    assert row["padded_tokens"] == 2 * 5 + 2 * 4
    assert row["padding_saved"] == pytest.approx(2 / 18)
    assert row["padding"] == 0


def test_the_lower_bound_of_a_sync_is_its_bytes_over_the_measured_rates():
    rates = replace(RATES, gather_bytes_per_second=50.0)
    # two ranks, ten parameters of two bytes: half of them cast from four bytes, half received, all copied
    assert sync.floor_seconds(20, 10, rates, ranks=2) == pytest.approx((20 + 10) / 100 + 10 / 50 + 40 / 100)
    assert sync.floor_seconds(20, 10, RATES, ranks=1) == pytest.approx((40 + 20) / 100 + 40 / 100)


def test_the_roofline_of_a_cpu_has_no_all_gather_and_no_data_sheet(world: World):
    roofline = measure_roofline(CPU)

    assert roofline.copy_bytes_per_second > 1e8
    assert roofline.matmul_flops_per_second > 1e8
    assert roofline.gather_bytes_per_second is None  # one rank
    assert roofline.peak_flops_per_second == roofline.matmul_flops_per_second  # a CPU has no data sheet here


def test_a_table_is_aligned_and_leaves_missing_cells_empty():
    text = table([{"name": "a", "seconds": 0.00123456}, {"name": "bcd", "bytes": 1234567}])
    assert text.splitlines() == [
        "name   seconds      bytes",
        "   a  0.001235",
        " bcd            1,234,567",
    ]


def test_a_single_row_is_transposed():
    assert table([{"shape": "tiny", "seconds": 2.5}]).splitlines() == ["  shape  tiny", "seconds   2.5"]


@pytest.mark.parametrize(
    ("value", "text"), [(None, ""), (123456.7, "123,457"), (0.25, "0.25"), (12345, "12,345"), ("a", "a")]
)
def test_numbers_have_four_significant_digits(value, text):
    assert number(value) == text


def test_a_result_is_compared_with_the_kept_one_of_the_same_devices(tmp_path):
    kept = tmp_path / "train.json"
    rows = [{"shape": "tiny", "hidden": 64, "seconds": 2.0}, {"shape": "tiny", "hidden": 128, "seconds": 4.0}]
    former = {"gpu": "H100", "ranks": 1, "commit": "0123456789", "rows": rows}
    assert since_kept(former, kept) == []
    kept.write_text(json.dumps(former))
    now = former | {"rows": [rows[0] | {"seconds": 2.5}, rows[1] | {"shape": "small"}]}
    assert since_kept(now, kept) == ["tiny: 2.5 s, +25.0% since commit 01234567"]
    assert since_kept(now | {"gpu": "H200"}, kept) == []
