"""Training with an engine server: the result of a co-located run, also when the trainer or the engine is killed.

The tests use one server one after another, in this order; another test a server of two ranks.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from colocated_grpo.runtime.user_code import MIN_SECONDS
from colocated_grpo.tracking import files
from tests.support.atropos_environment import GROUP, environment
from tests.support.programs import ended_by_a_callback
from tests.support.ranks import Ranks
from tests.support.serve_process import START_SECONDS, ServeProcess
from tests.support.served_runs import (
    BLOCKING_LINE,
    SERVER_FLAGS,
    STEPS,
    block_rank,
    kill_engine,
    trained,
    work,
    write_task,
)
from tests.support.servers import EMBEDDED, ApiProcess, free_port, needs_atropos, until
from tests.support.training_runs import (
    ForkedRun,
    LaunchedRun,
    TrainingRun,
    settings,
    tiny_model,
    train,
    weights_of,
)

FRESH = 1e-5
"""Float32 on both sides, with kernels that add up in different orders."""
CLOSE = 2e-4
"""Weights of runs that sampled the same tokens in other batches: a fifth of an update."""
RANK = 4
SECONDS_TO_END = 300.0


@pytest.fixture(scope="module")
def server() -> Iterator[ServeProcess]:
    with ServeProcess(tiny_model(), "--enable-lora", *SERVER_FLAGS) as server:
        server.wait_until_ready()
        yield server


@pytest.fixture(scope="module")
def wide_server() -> Iterator[ServeProcess]:
    """A server of two ranks that has begun to start."""
    with ServeProcess(tiny_model(), "--tensor-parallel-size", "2", *SERVER_FLAGS) as server:
        yield server


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Path:
    return write_task(tmp_path_factory.mktemp("task"))


@pytest.fixture(scope="module")
def uninterrupted(server, task, tmp_path_factory) -> TrainingRun:
    return train(tmp_path_factory.mktemp("uninterrupted"), work(task, server))


def adapted(task: Path, server: ServeProcess, **changes: Any) -> dict[str, Any]:
    policy = {"lr": 0.02, "lora": {"rank": RANK}}
    return work(task, server, engine={"bridge": "adapter"}, policy=policy, **changes)


def assert_equal(run: TrainingRun, other: TrainingRun) -> None:
    """Assert the same weights, metrics and rollouts, bit for bit."""
    assert weights_of(run) == weights_of(other)
    assert trained(run) == trained(other)
    assert files.read_rollouts(run.folder) == files.read_rollouts(other.folder)


def assert_trained_on_the_same(run: TrainingRun, other: TrainingRun, steps: int = STEPS) -> None:
    """Assert the same steps, once each, on the same rollouts with fresh weights."""
    rows = run.rows(files.TRAIN)
    assert [row["step"] for row in rows] == list(range(steps))
    assert max(row["mismatch/plain"] for row in rows) < FRESH
    assert {row["staleness"] for row in rows} == {0.0}
    for name in ("reward", "completion_tokens", "policy_version"):
        assert [row.get(name) for row in rows] == [row.get(name) for row in other.rows(files.TRAIN)][:steps], name
    expected = [row for row in files.read_rollouts(other.folder) if row["step"] < steps]
    assert files.read_rollouts(run.folder) == expected


def weights_differ_by(run: TrainingRun, other: TrainingRun) -> float:
    [ours, theirs] = [load_file(next((r.folder).glob("final_*/*.safetensors"))) for r in (run, other)]
    return max((ours[name] - theirs[name]).abs().max().item() for name in ours)


SENDS_THE_FIRST_WEIGHTS_AGAIN = """
from colocated_grpo.servers import broadcast
gather, first = broadcast.gather, {}
def stale(bucket, *rest):
    gathered = gather(bucket, *rest)
    return first.setdefault(tuple(bucket.shapes), gathered.clone())
broadcast.gather = stale
"""

READS_ANOTHER_FOLDER = """
from colocated_grpo.servers import broadcast
broadcast.checksums.exported_digest = lambda folder: "another"
"""


def faulty_task(task: Path, folder: Path, fault: str) -> Path:
    path = folder / "faulty.py"
    path.write_text(task.read_text() + fault)
    return path


def test_a_server_that_loads_another_adapter_ends_the_run(server, task, tmp_path):
    with ForkedRun(tmp_path, adapted(faulty_task(task, tmp_path, READS_ANOTHER_FOLDER), server)) as run:
        assert run.wait() != 0
    [line] = run.stderr.splitlines()
    assert line.startswith(f"error: weight sync: the engine at {server.url} has loaded other files than ")
    assert run.rows(files.TRAIN) == []


def test_an_adapter_is_exchanged_in_the_running_server_and_after_a_crash(server, task, tmp_path):
    process = server.engine()
    whole = train(tmp_path / "whole", adapted(task, server, training_steps=4))
    assert server.engine() == process
    assert_trained_on_the_same(whole, whole, steps=4)
    killed = kill_engine(task, server, step=2)
    run = train(tmp_path / "killed", adapted(task, server, training_steps=4))
    assert killed.exists()
    assert not process.is_running()
    assert_trained_on_the_same(run, whole, steps=4)
    assert weights_differ_by(run, whole) < CLOSE
    rank = torch.linalg.matrix_rank(load_file(next(run.folder.glob("final_adapter/*.safetensors"))).popitem()[1])
    assert 0 < rank <= RANK


def test_a_server_gives_the_result_of_a_colocated_run_bit_for_bit(server, task, tmp_path):
    """With prompts that decode together: the engines of both runs admit them in one step."""
    changes = {"rollout": {"prompts_per_step": 2}}
    alone = train(tmp_path / "colocated", work(task, **changes))
    served = train(tmp_path / "served", work(task, server, **changes))
    assert_equal(served, alone)
    assert len({row["grad_norm"] for row in served.rows(files.TRAIN)}) == STEPS  # every step moves the weights


def test_a_trainer_that_a_reward_blocks_continues_with_the_same_server(server, task, uninterrupted, tmp_path):
    """A reward holds the interpreter lock while the server decodes for step 3."""
    blocked = block_rank(task, step=3)
    with ForkedRun(tmp_path, work(task, server, rollout={"reward_timeout": MIN_SECONDS})) as run:
        assert run.wait() == 1
        assert "Timeout (" in run.stderr  # stacks of all threads: there is no launcher to make a line of them
        assert f'work.py", line {BLOCKING_LINE} in score' in run.stderr
    assert blocked.exists()
    until(lambda: server.printed[-1].endswith("has disconnected; another may connect"))
    resumed = train(tmp_path, work(task, server), "--resume", "auto")
    assert [start["first_step"] for start in files.read_environment(resumed.folder)] == [0, 2]
    assert_equal(resumed, uninterrupted)


def test_the_next_batch_is_sampled_while_the_current_one_trains(server, task, tmp_path):
    changes = {"deterministic": False, "rollout": {"max_staleness": 1}}
    run = train(tmp_path, work(task, server, **changes))
    rows = run.rows(files.TRAIN)
    assert [row["staleness"] for row in rows] == [0.0] + [1.0] * (STEPS - 1)
    assert rows[0]["mismatch/plain"] < FRESH
    rollouts = files.read_rollouts(run.folder)
    assert {row["policy_version"] for row in rollouts if row["step"] == 3} == {2}


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_callback_that_ends_the_run_waits_for_the_batch_sampled_ahead_before_the_last_evaluation(
    server, task, tmp_path, ranks
):
    rollout = {"max_staleness": 1, "prompts_per_step": 32}
    changes = {"deterministic": False, "rollout": rollout, "evaluation": {"every": 5, "prompts": 8}}
    given = work(task, server, output_dir=str(tmp_path), **changes)
    with Ranks(ended_by_a_callback, ranks, given) as processes:
        results = processes.results(SECONDS_TO_END)
    assert {(result.outcome, result.steps, result.model) for result in results} == {
        ("finished", 2, tmp_path / "run/final_model")
    }
    evaluated = [row["step"] for row in files.read_metrics(tmp_path / "run") if row["kind"] == files.EVALUATION]
    assert evaluated == [0, 2]


def test_merged_weights_of_a_base_in_4_bits_are_broadcast(server, task, tmp_path):
    policy = {"lr": 0.02, "lora": {"rank": RANK, "base_dtype": "nf4"}}
    rows = train(tmp_path, work(task, server, policy=policy)).rows(files.TRAIN)
    assert len(rows) == STEPS
    assert max(row["mismatch/plain"] for row in rows) < FRESH


def test_a_broadcast_run_whose_engine_is_killed_saves_ends_and_continues(server, task, uninterrupted, tmp_path):
    killed = kill_engine(task, server, step=3)
    config = work(task, server, checkpoint={"every": 0})
    with ForkedRun(tmp_path, config) as run:
        assert run.wait() == 1
        assert run.stderr.splitlines()[-1] == (
            f"error: engine.urls={server.url}: it was restarted and has lost the policy's weights; the run has saved a "
            "checkpoint, from which --resume auto continues"
        )
        assert "Traceback" not in run.stderr
    assert killed.exists()
    resumed = train(tmp_path, config, "--resume", "auto")
    assert [start["first_step"] for start in files.read_environment(resumed.folder)] == [0, 3]
    assert_equal(resumed, uninterrupted)


@pytest.mark.usefixtures("wide_server")  # starts meanwhile, on the core that these restarts leave idle
def test_a_server_restarts_with_each_step_s_weights_and_after_a_crash(server, task, uninterrupted, tmp_path):
    def lines() -> list[str]:
        return [line for line in server.printed if line.startswith("serving ")]

    before, earlier = {server.engine()}, len(lines())
    killed = kill_engine(task, server, step=1)
    run = train(tmp_path, work(task, server, engine={"bridge": "restart"}, training_steps=2))
    assert killed.exists()
    assert_trained_on_the_same(run, uninterrupted, steps=2)
    until(lambda: len(lines()) >= earlier + 3)  # the last line may arrive after the end of the run
    served = lines()
    models = [Path(line.split()[1]).name for line in served]
    assert models[-3:] == ["model_b", "model_a", "model_a"]  # two steps, and the second again after the crash
    assert not any(process.is_running() for process in before)
    assert len(psutil.Process(server.process.pid).children()) == 1
    assert f"at {server.url}" in served[-1]


def test_two_training_ranks_write_into_the_two_ranks_of_a_server(wide_server, task, tmp_path):
    wide_server.wait_until_ready()
    run = train(tmp_path, work(task, wide_server, deterministic=False, training_steps=3), ranks=2)
    assert max(row["mismatch/plain"] for row in run.rows(files.TRAIN)) < FRESH
    assert len({row["grad_norm"] for row in run.rows(files.TRAIN)}) == 3  # every step moves the weights
    family = psutil.Process(wide_server.process.pid).children(recursive=True)
    wide_server.process.send_signal(signal.SIGTERM)
    assert wide_server.process.wait(timeout=SECONDS_TO_END) == 0
    assert len(family) >= 2
    assert not any(process.is_running() for process in family)


@needs_atropos
def test_an_atropos_environment_samples_from_the_server_while_the_run_trains(server, task, tmp_path):
    entry = {"type": "atropos", "connect_timeout": START_SECONDS, "server": {"port": free_port()}}
    with ApiProcess(EMBEDDED) as api, environment(tmp_path, api.url, server.port):
        rollout = {"prompts_per_step": 4, "group_size": GROUP}
        changes = {"environments": [{**entry, "url": api.url}], "training_steps": 4, "rollout": rollout}
        run = train(tmp_path, work(task, server, deterministic=False, **changes))
    rows = run.rows(files.TRAIN)
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert {row["atropos/unknown_origin"] for row in rows} == {1.0}
    assert {row["atropos/dropped"] for row in rows} == {0.0}


def test_a_launcher_leaves_no_server_behind(tmp_path):
    """Killed while it trains, and then, resumed, interrupted by Ctrl-C as soon as the server is ready."""
    scratch, log = tmp_path / "tmp", tmp_path / "out/server.log"
    scratch.mkdir()
    engine = {"placement": "server", "server_timeout": START_SECONDS}
    config = settings(tiny_model(), training_steps=10_000, engine=engine)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(scratch))
        with LaunchedRun(tmp_path / "out", config) as run:
            run.wait_for_step(3)
            family = [process.cmdline() for process in run.processes()]
            assert sum("colocated_grpo.servers" in line for line in family) == 2  # a server and its engine process
            run.launcher.kill()
            until(lambda: not run.processes(), SECONDS_TO_END)
        assert "serving " in log.read_text()
        with LaunchedRun(tmp_path / "out", config, "--resume", "auto") as run:
            run.wait_until(lambda: log.read_text().count("serving ") == 2)
            run.launcher.send_signal(signal.SIGINT)
            assert run.wait(SECONDS_TO_END) == 130, run.tail()
            assert run.processes() == []
    assert list(scratch.iterdir()) == []  # the second start has removed the folders that the first one left


def test_a_server_that_has_missed_a_broadcast_ends_the_run_in_that_step(server, task, tmp_path):
    with ForkedRun(tmp_path, work(faulty_task(task, tmp_path, SENDS_THE_FIRST_WEIGHTS_AGAIN), server)) as run:
        assert run.wait() != 0
    [line] = run.stderr.splitlines()
    assert line.startswith(f"error: weight sync: the engine at {server.url} does not hold the policy's bytes in ")
    assert [row["step"] for row in run.rows(files.TRAIN)] == [0], "before the second step nothing had changed"
