"""TRL as the peer: its arguments, the search for its fastest configuration, and one tiny run of both trainers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import AutoConfig, TrainerControl, TrainerState, TrainingArguments

from benchmarks import peer, peer_options, peer_tuning, step, train_trl
from benchmarks.adapters import peft_arguments
from benchmarks.harness import config_of
from benchmarks.peer import (
    OutOfMemoryPhase,
    PeerOutOfMemory,
    PeerRun,
    PeerSetup,
    PeerSpec,
    grpo_arguments,
    peer_command,
    peer_environment,
    run_peer,
)
from benchmarks.peer_trl import Recorder, chats, is_out_of_memory, merge, own_seconds, shortened
from benchmarks.peer_tuning import (
    Candidate,
    candidates,
    engine_fraction,
    least_training_bytes,
    run_tuned,
)
from benchmarks.throughput import ModelSize
from benchmarks.workload import LONGEST_PROMPT, MAX_PROMPT_TOKENS, RandomWork, add_stop_tokens
from colocated_grpo.environments.prompts import PromptEncoder
from colocated_grpo.errors import RunError
from colocated_grpo.settings.training import LoRAConfig
from colocated_grpo.tools.shapes import TINY
from colocated_grpo.types import JsonObject
from tests.support.paths import ROOT
from tests.support.random_models import make_model

SETUP = PeerSetup(micro_batch=4, checkpointing=False, liger=True, engine_fraction=0.5)
SPEC = PeerSpec(
    model="somewhere",
    prompts=4,
    group_size=4,
    max_completion=8,
    steps=2,
    until=None,
    seed=0,
    gpus=2,
    setup=SETUP,
    lora=None,
    extra_arguments={},
)
LORA = peft_arguments(LoRAConfig(rank=4, alpha=8))
RUN = PeerRun(steps=[], start_seconds=1.0, arguments={}, trained_parameters=0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_model(tmp_path_factory.mktemp("benchmark") / "tiny", shape=TINY)
    add_stop_tokens(folder)
    return folder


def test_trl_makes_one_optimizer_step_of_all_completions():
    arguments = grpo_arguments(SPEC)

    sequences = arguments["per_device_train_batch_size"] * arguments["gradient_accumulation_steps"] * SPEC.ranks
    assert sequences == SPEC.prompts * SPEC.group_size
    assert arguments["vllm_enable_sleep_mode"]
    assert grpo_arguments(replace(SPEC, extra_arguments={"bf16": False}))["bf16"] is False


def test_trl_gets_the_arguments_of_its_setup():
    assert (
        grpo_arguments(SPEC).items()
        >= {
            "gradient_checkpointing": False,
            "use_liger_kernel": True,
            "vllm_gpu_memory_utilization": 0.5,
        }.items()
    )


def test_trl_loads_the_frozen_weights_beside_adapters_on_gpus_in_bf16():
    init = {
        (gpus, lora is not None): grpo_arguments(replace(SPEC, gpus=gpus, lora=lora)).get("model_init_kwargs")
        for gpus in (0, 2)
        for lora in (None, LORA)
    }

    assert init.pop((2, True)) == {"dtype": "bfloat16"}
    assert set(init.values()) == {None}
    assert step.notes(replace(SPEC, lora=LORA)) == [
        "frozen weights are loaded in bfloat16, where TRL's default is float32"
    ]


def test_trl_gets_the_adapter_of_our_settings():
    lora = LoRAConfig(rank=4, alpha=8, rslora=True, target_modules=["q_proj"], exclude_modules=".*7.*")
    ours = LoraConfig(**peft_arguments(lora))

    assert (ours.r, ours.lora_alpha, ours.use_rslora, ours.lora_dropout, ours.bias) == (4, 8, True, 0, "none")
    assert (ours.target_modules, ours.exclude_modules) == ({"q_proj"}, ".*7.*")
    assert LORA["target_modules"] == "all-linear"


def test_micro_batches_are_tried_from_the_whole_batch_down_and_checkpointing_last():
    assert peer_tuning.micro_batch_sizes(512) == [512, 256, 128, 64, 32, 16, 8, 4, 2, 1]
    assert peer_tuning.micro_batch_sizes(60) == [60, 30, 15, 6, 3, 1]
    assert candidates(4, None, None) == [(4, False), (2, False), (1, False), (4, True), (2, True), (1, True)]
    assert candidates(4, 2, None) == [(2, False), (2, True)]
    assert candidates(4, None, True) == [(4, True), (2, True), (1, True)]
    assert candidates(4, 2, False) == [(2, False)]


def test_the_search_ends_with_the_first_configuration_that_fits(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    ran = outcomes(monkeypatch, ["training", None])
    tried = [Candidate(8, False), Candidate(4, False), Candidate(2, False), Candidate(8, True)]
    needed = dict.fromkeys(tried, 1.0) | {tried[0]: 3.0 * 2**30}

    run, tries = run_tuned(SPEC, tried, needed.__getitem__, 2 * 2**30, tmp_path)

    assert run == RUN
    assert [(setup.micro_batch, setup.checkpointing, setup.probe) for setup in ran] == [
        (4, False, True),
        (2, False, True),
    ]
    assert [one.outcome for one in tries] == [
        "skipped, needs at least 3 of 2 GiB",
        "out of memory during training",
        "fits",
    ]
    assert capsys.readouterr().out.splitlines() == [
        "TRL: micro-batch 8, checkpointing off: skipped, needs at least 3 of 2 GiB",
        "TRL: micro-batch 4, checkpointing off: trying",
        "TRL: micro-batch 4, checkpointing off: out of memory during training",
        "TRL: micro-batch 2, checkpointing off: trying",
        "TRL: micro-batch 2, checkpointing off: fits",
    ]


def test_a_fully_named_configuration_runs_without_a_probe(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    ran = outcomes(monkeypatch, [None])

    run_tuned(SPEC, [Candidate(8, True)], lambda _candidate: 2.0, 1, tmp_path)

    assert ran == [replace(SETUP, micro_batch=8, checkpointing=True, probe=False)]


@pytest.mark.parametrize("phase", ["start", "first generation"])
def test_an_engine_that_does_not_fit_ends_the_search(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, phase: OutOfMemoryPhase
):
    ran = outcomes(monkeypatch, [phase])

    with pytest.raises(RunError, match=f"--peer-gpu-memory=0.5: TRL ran out of memory during {phase}"):
        run_tuned(SPEC, candidates(8, None, None), lambda _candidate: 0.0, 1, tmp_path)
    assert len(ran) == 1


def test_a_search_without_a_fit_ends_with_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    outcomes(monkeypatch, ["training", "training"])

    with pytest.raises(RunError, match="no configuration of TRL fits"):
        run_tuned(SPEC, candidates(1, None, None), lambda _candidate: 0.0, 1, tmp_path)


def test_a_search_ends_after_its_first_try_when_the_time_is_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    ran = outcomes(monkeypatch, ["training"])

    with pytest.raises(RunError, match="--peer-until"):
        run_tuned(replace(SPEC, until=time.time() - 1), candidates(2, None, None), lambda _candidate: 0.0, 1, tmp_path)
    assert len(ran) == 1


def outcomes(monkeypatch: pytest.MonkeyPatch, phases: list[OutOfMemoryPhase | None]) -> list[PeerSetup]:
    """Let runs of TRL end in these phases, or complete for None. Returns the list of setups that ran."""
    remaining: Iterator[OutOfMemoryPhase | None] = iter(phases)
    ran: list[PeerSetup] = []

    def fake_run(spec: PeerSpec, _scratch: Path) -> PeerRun:
        ran.append(spec.setup)
        if (phase := next(remaining)) is not None:
            raise PeerOutOfMemory(phase)
        return RUN

    monkeypatch.setattr(peer_tuning, "run_peer", fake_run)
    return ran


def test_the_engine_gets_the_cache_of_all_sequences_beside_the_trainer():
    size = size_of(trained=10**9)
    working = peer_tuning.ENGINE_WORKING_BYTES["cuda"]
    needed = 2e9 + 100 * (MAX_PROMPT_TOKENS + 840) * 1e5 + working
    fraction = partial(engine_fraction, max_completion=840, device_bytes=100 * 10**9)

    assert fraction(size, 100, gpus=1, adapters=False) == pytest.approx(needed / 100e9, abs=0.006)
    # 12 bytes a parameter stay with the trainer, and a twentieth with neither.
    assert fraction(size, 10_000, gpus=1, adapters=False) == pytest.approx(0.95 - 0.12)
    assert fraction(size, 10_000, gpus=2, adapters=False) == pytest.approx(0.95 - 0.06)
    # While the engine starts, the weights are not sharded yet.
    assert fraction(size, 10_000, gpus=8, adapters=False) == pytest.approx(0.95 - 0.04)


def test_beside_frozen_weights_the_engine_gets_most_of_the_memory():
    fraction = partial(engine_fraction, size_of(trained=10**8), 10_000, 840, device_bytes=100 * 10**9, adapters=True)

    # 2 bytes a frozen parameter and 12 a trained one
    assert fraction(gpus=1) == pytest.approx(0.95 - 0.02 - 0.012, abs=0.006)
    # 2 and 4 before they are sharded
    assert fraction(gpus=8) == pytest.approx(0.95 - 0.02 - 0.004, abs=0.006)


def size_of(trained: int) -> ModelSize:
    return ModelSize(
        parameters=10**9,
        weight_bytes=2 * 10**9,
        kv_bytes_per_token=10**5,
        trained_parameters=trained,
        training_flops_per_token=6 * 10**9,
    )


def test_the_least_memory_of_a_step_counts_what_backward_keeps(model: Path):
    hf_config = AutoConfig.from_pretrained(model)
    spec = replace(SPEC, gpus=1)
    tokens = 4 * (LONGEST_PROMPT + 8)
    # 2 layers; hidden 64, 4 query heads and 2 key-value heads of 32, intermediate 128
    layer = 4 * 64 + 2 * (4 + 2) * 32 + 3 * 128

    least = partial(least_training_bytes, hf_config, size_of(trained=10))
    assert least(spec, Candidate(4, False)) == 2 * tokens * 2 * layer + 120
    assert least(spec, Candidate(4, True)) == 2 * tokens * 2 * 64 + 120

    state = 2 * 10**9 + 120
    assert least(replace(spec, lora=LORA), Candidate(4, False)) == 2 * tokens * 2 * layer + state
    assert least(replace(spec, lora=LORA, gpus=2), Candidate(4, True)) == 2 * tokens * 2 * 64 + state / 2
    some = replace(spec, lora={**LORA, "target_modules": ["q_proj"]})
    assert least(some, Candidate(4, False)) == state


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), True),
        (RuntimeError("CUDA Error: out of memory at cumem_allocator.cpp:62"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("shape mismatch"), False),
    ],
)
def test_errors_of_all_allocators_count_as_out_of_memory(error: Exception, expected: bool):
    assert is_out_of_memory(error) is expected


def test_a_process_without_memory_says_in_which_phase_it_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    write = "import pathlib; pathlib.Path('peer.failed.json').write_text('{\"out_of_memory\": \"training\"}'); exit(1)"
    monkeypatch.setattr(peer, "peer_command", lambda *_arguments: [sys.executable, "-c", write])

    with pytest.raises(PeerOutOfMemory) as raised:
        run_peer(SPEC, tmp_path)
    assert raised.value.phase == "training"


def test_a_process_that_fails_ends_with_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(peer, "peer_command", lambda *_arguments: ["false"])

    with pytest.raises(RunError, match="--peer=trl: TRL exited with code 1"):
        run_peer(SPEC, tmp_path)


def test_phases_of_trl_leave_out_the_phases_nested_in_them():
    nested = {"collect": 10.0, "sync": 2.0, "generate": 6.0, "wake_weights": 0.5, "wake_kv_cache": 0.25, "sleep": 1.0}

    own = own_seconds(nested, step=25.0)

    assert own.pop("seconds/step") == sum(own.values()) == 25.0
    assert own["seconds/generate"] == 4.75
    assert own["seconds/sync"] == 1.5
    assert own["seconds/score"] == 2.0


def test_tokens_of_trl_are_summed_over_ranks_and_padding_is_what_it_computed_beyond_them():
    counts = {"sequences": 2.0, "prompt_tokens": 10.0, "completion_tokens": 20.0, "computed_tokens": 60.0}
    busier = {**counts, "completion_tokens": 50.0}

    row = merge([{**counts, "seconds/step": 1.0}, {**busier, "seconds/step": 9.0}])

    assert row["tokens"] == row["trained_tokens"] == 90
    assert row["padding"] == pytest.approx(1 - 90 / 120)
    assert row["imbalance"] == pytest.approx(60 / 45 - 1)
    assert (row["prompt_tokens"], row["completion_tokens"]) == (5, 17.5)
    assert row["seconds/step"] == 1.0


def test_long_lists_among_recorded_arguments_are_replaced_by_their_length():
    assert shortened({"a": {"ids": [7] * 300, "few": [1, 2]}, "b": 0.5}) == {
        "a": {"ids": "300 values", "few": [1, 2]},
        "b": 0.5,
    }


def error_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The line printed for flags of a peer run that is rejected."""
    assert step.main(["--gpus", "2", "--prompts", "4", "--group-size", "4", "--peer", "trl", *arguments]) == 2
    return capsys.readouterr().err


def test_a_micro_batch_that_does_not_divide_the_work_is_rejected_in_one_line(capsys: pytest.CaptureFixture[str]):
    line = "error: --peer-micro-batch=3: 16 completions on 2 ranks are not a multiple of it\n"

    assert error_of(capsys, "--peer-micro-batch", "3") == error_of(capsys, "--peer-batch", "3") == line


def test_trl_without_liger_kernel_is_rejected_in_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(peer_options, "find_spec", lambda name: None if name == "liger_kernel" else name)

    assert error_of(capsys) == (
        "error: --peer=trl: TRL is fastest with liger-kernel, which is not installed; pip install liger-kernel\n"
    )


def test_settings_that_trl_cannot_follow_are_rejected_in_one_line(capsys: pytest.CaptureFixture[str]):
    assert error_of(capsys, "--policy.train_layers", "0") == (
        "error: policy.train_layers: TRL trains all weights or an adapter; leave it out with --peer trl\n"
    )
    assert error_of(capsys, "--policy.lora.layers", "0") == (
        "error: policy.lora.layers: adapters of TRL are in all blocks; leave it out with --peer trl\n"
    )
    assert "policy.lora.init='somewhere': benchmarks start from a new" in error_of(
        capsys, "--policy.lora.init", "somewhere"
    )
    assert "policy.learning_speed" in error_of(capsys, "--policy.learning_speed", "1")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--peer-checkpointing", "on"], "--peer: missing"),
        (["--peer", "trl", "--peer-args", "[1]"], "--peer-args=[1]: must be a YAML mapping"),
        (["--peer", "trl", "--peer-args", "[1"], "--peer-args: invalid"),
        (["--peer", "trl", "--peer-micro-batch", "0"], "--peer-micro-batch=0: must be at least 1"),
        (["--peer", "trl", "--peer-steps", "0"], "--peer-steps=0: must be at least 1"),
    ],
)
def test_contradicting_flags_are_rejected(arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        step.parse(arguments)

    assert line in capsys.readouterr().err


def test_the_training_phase_of_trl_reads_settings_in_every_form_that_runs_read():
    forms = [
        ["--policy.lora.rank", "4", "--policy.lora.alpha", "8"],
        ["--policy.lora.rank=4", "--policy.lora.alpha=8"],
        ["--policy.lora.rank=4", "--policy.lora.target_modules", "[q_proj, v_proj]", "--policy.lora.alpha", "8"],
    ]

    adapters = [config_of(Path("model"), train_trl.parse(form)).policy.lora for form in forms]

    assert [adapter and (adapter.rank, adapter.alpha) for adapter in adapters] == [(4, 8)] * 3


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (["--policy.lora.rank=4", "--policy.lr", "1e-5"], "error: --policy.lr: TRL has no such setting; only"),
        (["--policy.lora.rank", "4", "--policy.lr=1e-5"], "error: --policy.lr: TRL has no such setting; only"),
        (["--policy.lora.rank"], "error: --policy.lora.rank: needs a value"),
    ],
)
def test_the_training_phase_of_trl_takes_settings_of_the_adapter_alone(
    settings: list[str], line: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit):
        train_trl.parse(settings)

    assert line in capsys.readouterr().err


def test_several_ranks_of_trl_start_with_fsdp2(tmp_path: Path):
    from accelerate.commands.config import load_config_from_file
    from accelerate.commands.launch import launch_command_parser

    python, _, launcher, *arguments = peer_command(SPEC, tmp_path / "spec.json", tmp_path / "result.json")

    assert (python, launcher) == (sys.executable, "accelerate.commands.launch")
    launch = launch_command_parser().parse_args(arguments)
    assert launch.num_processes == 2
    assert (launch.module, launch.training_script) == (True, "benchmarks.peer_trl")
    assert load_config_from_file(launch.config_file).fsdp_config["fsdp_version"] == 2
    assert PeerSpec.read(Path(launch.training_script_args[0])) == SPEC


def test_trl_sees_no_more_gpus_than_it_has_ranks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5,7")
    assert peer_environment(SPEC)["CUDA_VISIBLE_DEVICES"] == "3,5"

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert peer_environment(SPEC)["CUDA_VISIBLE_DEVICES"] == "0,1"


def test_trl_reads_the_same_prompt_tokens_as_our_trainer(model: Path):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    encoder = PromptEncoder(tokenizer, max_prompt_tokens=200)
    ours = RandomWork().prompts(SPEC.seed, "train")

    for theirs in chats(SPEC):
        token_ids = tokenizer.apply_chat_template(theirs["prompt"], add_generation_prompt=True, return_dict=False)
        assert encoder.encode(next(ours), index=0, source="work").token_ids == token_ids


def test_a_probe_step_has_the_longest_prompts_and_precedes_the_same_work():
    probing = chats(replace(SPEC, setup=replace(SETUP, probe=True)))

    assert probing[SPEC.prompts :] == chats(SPEC)
    assert {len(row["prompt"][0]["content"]) for row in probing[: SPEC.prompts]} == {LONGEST_PROMPT}
    assert grpo_arguments(replace(SPEC, setup=replace(SETUP, probe=True)))["max_steps"] == SPEC.steps + 1


def fake_trainer() -> Any:
    """A trainer whose engine samples three tokens for each prompt, at most `max_completion_length`."""
    engine = SimpleNamespace(max_completion_length=8, llm=SimpleNamespace(sleep=None, wake_up=None, generate=None))

    def generate(prompts: list[list[int]]) -> tuple[list[list[int]], ...]:
        completions = [[5, 6, 7][: engine.max_completion_length] for _ in prompts]
        return (
            prompts,
            completions,
            [[[0.5]] * len(row) for row in completions],
            [[[0]] * len(row) for row in completions],
        )

    def fail() -> None:
        raise RuntimeError("out of memory")

    engine.generate, engine.sync_weights = generate, fail
    engine.llm = SimpleNamespace(sleep=fail, wake_up=fail, generate=fail)
    accelerator = SimpleNamespace(device=torch.device("cpu"))
    return SimpleNamespace(accelerator=accelerator, vllm_generation=engine, _generate_and_score_completions=fail)


def test_completions_of_the_probe_step_have_the_greatest_length_and_it_is_not_recorded():
    trainer = fake_trainer()
    recorder = Recorder(trainer, replace(SPEC, setup=replace(SETUP, probe=True), until=0.0))
    control = TrainerControl()
    recorder.on_train_begin()

    for recorded, completion in [(0, [5] * 8), (1, [5, 6, 7]), (2, [5, 6, 7])]:
        assert not control.should_training_stop
        prompts, completions, logprobs, token_ids = trainer.vllm_generation.generate([[1, 2]])
        recorder.on_step_end(TrainingArguments(), TrainerState(), control)
        assert (prompts, completions) == ([[1, 2]], [completion])
        assert len(logprobs[0]) == len(token_ids[0]) == len(completion)
        assert len(recorder.rows) == recorded
    assert control.should_training_stop, "the time was up, and one step after the warm-up is recorded"


def test_lengthened_completions_have_the_greatest_length_in_every_recorded_step():
    trainer = fake_trainer()
    recorder = Recorder(trainer, replace(SPEC, lengthened=True))
    recorder.on_train_begin()

    for recorded in (1, 2):
        _prompts, completions, logprobs, token_ids = trainer.vllm_generation.generate([[1, 2]])
        recorder.on_step_end(TrainingArguments(), TrainerState(), TrainerControl())
        assert completions == [[5] * 8]
        assert len(logprobs[0]) == len(token_ids[0]) == 8
        assert len(recorder.rows) == recorded


def test_an_error_in_the_first_weight_sync_belongs_to_the_first_generation_and_later_ones_to_training():
    trainer = fake_trainer()
    recorder = Recorder(trainer, SPEC)
    assert not recorder.in_first_generation
    with pytest.raises(RuntimeError):
        trainer.vllm_generation.sync_weights()
    assert recorder.in_first_generation

    trainer.vllm_generation.generate([[1, 2]])
    recorder.on_step_end(TrainingArguments(), TrainerState(), TrainerControl())
    with pytest.raises(RuntimeError):
        trainer.vllm_generation.sync_weights()
    assert not recorder.in_first_generation


def run_benchmark(name: str, model: Path, file: Path, *arguments: str) -> tuple[str, JsonObject]:
    """Run a benchmark in which TRL makes one measured step of 2 x 4 completions."""
    command = [
        sys.executable, "-m", f"benchmarks.{name}", "--model", str(model), "--gpus", "0",
        "--prompts", "2", "--group-size", "4", "--peer-until", "0", "--json", str(file), *arguments,
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout, json.loads(file.read_text())


@pytest.fixture(scope="module")
def beside_trl(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future]]:
    """Both programs, at the same time: most of each is start-up on one core."""
    folder = tmp_path_factory.mktemp("beside_trl")
    ours = ["--max-completion", "8", "--steps", "2", "--warmup", "0", "--policy.compile", "off", "--weights", "shared"]
    adapter = ["--policy.lora.rank", "4", "--policy.lora.alpha", "8"]
    theirs = ["--peer", "trl", "--peer-steps", "3"]
    with ThreadPoolExecutor() as pool:
        yield {
            "an adapter": pool.submit(run_benchmark, "step", model, folder / "step.json", *ours, *adapter, *theirs),
            "all weights": pool.submit(
                run_benchmark, "train_trl", model, folder / "train.json", "--max-completion", "64"
            ),
        }


def test_our_steps_and_those_of_trl_stand_side_by_side(beside_trl: dict[str, Future]):
    printed, result = beside_trl["an adapter"].result()

    ours, theirs = result["ours"]["median"], result["peer"]["median"]
    steps = [len(result[side]["steps"]) for side in ("ours", "peer")]
    assert steps == [2, 2], "TRL's time was up after its warm-up and one measured step"
    assert result["ours"]["steps"][0]["prompt_tokens"] == pytest.approx(result["peer"]["steps"][0]["prompt_tokens"])
    assert 0 < theirs["padding"] < 1
    for side in (ours, theirs):
        assert side["seconds/step"] > side["seconds/generate"] > result["roofline"]["seconds/generate"] > 0
        assert side["mfu"] > 0
    assert result["speedup"]["seconds/step"] == pytest.approx(theirs["seconds/step"] / ours["seconds/step"])
    assert result["commit"]
    assert "tokens_per_second_per_gpu" in printed

    assert result["peer"]["tries"] == [{"micro_batch": 8, "checkpointing": False, "outcome": "fits"}]
    assert "use_liger_kernel is left out" in result["peer"]["notes"][0]
    arguments = result["peer"]["arguments"]["GRPOConfig"]
    assert arguments["per_device_train_batch_size"] == 8
    assert arguments["gradient_checkpointing"] is False
    for name, value in arguments.items():
        assert f"{name}={value!r}" in printed


def test_both_trainers_train_the_adapter_of_our_settings(beside_trl: dict[str, Future]):
    _, result = beside_trl["an adapter"].result()

    assert result["peer"]["trained_parameters"] == result["trained_parameters"] < result["parameters"] / 8
    assert (
        result["peer"]["arguments"]["GRPOTrainer"]["peft_config"]
        == {"LoraConfig": result["lora"]}
        == {"LoraConfig": LORA}
    )


def test_the_training_phase_of_trl_is_measured_with_completions_of_the_greatest_length(beside_trl: dict[str, Future]):
    printed, result = beside_trl["all weights"].result()

    [row] = result["rows"]
    median = result["peer"]["median"]
    assert median["completion_tokens"] == 64
    assert row["seconds"] == pytest.approx(median["seconds/score"] + median["seconds/train"])
    assert row["tokens_per_second_per_gpu"] == pytest.approx(row["tokens"] / row["seconds"])
    assert (row["micro_batch"], row["gradient_checkpointing"]) == (8, False)
    assert f"max_completion_length={64!r}" in printed


def test_without_an_adapter_trl_trains_all_weights(beside_trl: dict[str, Future]):
    _, result = beside_trl["all weights"].result()

    assert result["peer"]["trained_parameters"] == result["trained_parameters"] == result["parameters"]
    assert result["lora"] is None
    assert result["peer"]["arguments"]["GRPOTrainer"]["peft_config"] is None
    assert result["peer"]["median"]["mfu"] > 0
