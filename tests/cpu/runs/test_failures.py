"""Failures end a run within seconds on every rank, with an error that names the cause and no process left over."""

from __future__ import annotations

import signal
from contextlib import ExitStack

import pytest

from colocated_grpo.tracking import files
from tests.support.faulty_runs import failed, faulty
from tests.support.servers import free_port
from tests.support.training_runs import (
    ForkedRun,
    LaunchedRun,
    deterministic,
    settings,
    tiny_model,
    train,
    uninterrupted,
)

SECONDS_TO_END = 120
"""On an idle machine it takes a few. A collective would wait for its lost rank for half an hour."""

BREAKS_ON_RANK_1 = """
import colocated_grpo.trainer as trainer
update = trainer.update
def broken(run, batch, staleness):
    if run.policy.version == 2 and run.world.rank == 1:
        raise ZeroDivisionError("the defect of rank 1")
    return update(run, batch, staleness)
trainer.update = broken
"""


def test_a_rank_that_raises_ends_all_ranks_and_its_traceback_is_shown_last(tmp_path):
    with LaunchedRun(tmp_path, faulty(tmp_path, BREAKS_ON_RANK_1), ranks=2) as run:
        run.wait_until(lambda: "the defect of rank 1" in run.stderr)
        assert run.wait(SECONDS_TO_END) != 0
        assert run.processes() == []
    assert len(run.rows("train")) == 2
    assert run.stderr.count("Traceback") == 1
    assert run.stderr.endswith("ZeroDivisionError: the defect of rank 1\n")
    summary = files.read_summary(run.folder)
    place = summary.pop("where")
    assert summary == {
        "state": "failed",
        "steps": 2,
        "error": "ZeroDivisionError: the defect of rank 1",
        "exit_code": 1,
        "rank": 1,
        "step": 2,
    }
    assert place.startswith("broken (faulty.py, line ")
    assert "the defect of rank 1" in (run.folder / "report.html").read_text()
    log = (run.folder / "run.log").read_text()
    assert "step  1/10" in log and "Traceback" in log and "ZeroDivisionError: the defect of rank 1" in log


def test_a_rank_that_fails_to_build_ends_the_other_ranks(tmp_path):
    config = faulty(tmp_path, "if RANK == '1':\n    raise ImportError('not on this rank')")
    run = failed(ForkedRun(tmp_path, config, ranks=2))
    [line] = run.stderr.splitlines()
    assert "ImportError: not on this rank" in line


STOPS_IN_ITS_CONSTRUCTOR = """
class Faulty(Faulty):
    def __init__(self):
        print("constructing", flush=True)
        threading.Event().wait()
"""


@pytest.mark.parametrize("begun", ["Co-located GRPO", "constructing"], ids=["before a rank runs", "while it is built"])
def test_an_interrupt_during_the_start_is_one_line_and_leaves_no_run_folder(tmp_path, begun):
    with LaunchedRun(tmp_path, faulty(tmp_path, STOPS_IN_ITS_CONSTRUCTOR)) as run:
        run.wait_until(lambda: begun in run.stdout)
        run.launcher.send_signal(signal.SIGINT)
        assert run.wait(SECONDS_TO_END) == 130, run.tail()
        assert run.processes() == []
    assert run.stderr == "\nstopping during start-up, before the first step\n"
    assert "Traceback" not in run.stdout
    assert not run.folder.exists()


STOPPED_BY_ITSELF = """
import signal
from colocated_grpo.launch import rank
from colocated_grpo.tracking.tracker import Tracker
def stops_after(target, name):
    original = getattr(target, name)
    def stopped(*arguments):
        original(*arguments)
        os.kill(os.getpid(), signal.SIGTERM)
    setattr(target, name, stopped)
"""


@pytest.mark.parametrize(
    ("last_call", "outcome"),
    [("Tracker, 'start'", "stopped"), ("rank.dist, 'destroy_process_group'", "finished")],
)
def test_a_signal_between_start_and_training_or_after_the_last_step_leaves_a_complete_run(tmp_path, last_call, outcome):
    fault = f"{STOPPED_BY_ITSELF}stops_after({last_call})"
    run = train(tmp_path, faulty(tmp_path, fault, training_steps=1, checkpoint={"every": 0}))
    assert files.read_summary(run.folder)["state"] == outcome
    assert [path.name for path in run.folder.glob("checkpoints/step_*")] == [f"step_00000{int(outcome == 'finished')}"]


CORRUPTS_RANK_1 = """
from colocated_grpo.weights import colocated
write = colocated.buckets.write_planned
def corrupted(gathered, plan, device):
    write(gathered, plan, device)
    if RANK == "1":
        plan.targets["model.layers.0.mlp.down_proj.weight"].view[3, 4] += 0.001
colocated.buckets.write_planned = corrupted
"""


def test_one_wrong_weight_in_the_engine_of_one_rank_ends_the_run_in_that_step(tmp_path):
    run = failed(ForkedRun(tmp_path, faulty(tmp_path, CORRUPTS_RANK_1), ranks=2))
    [line] = run.stderr.splitlines()
    assert line.startswith("error: weight sync: the engine does not hold the policy's bytes in 1 of ")
    assert " tensors (model.layers.0.mlp.down_proj.weight); nothing was sampled with them." in line
    assert [row["step"] for row in run.rows("train")] == [0], "the second sync is the first one that was planned"


NO_MEMORY_ON_RANK_1 = """
import torch
from colocated_grpo.policy.policy import Policy
forward_backward = Policy.forward_backward
def without_memory(self, *arguments):
    if RANK == "1" and self.version == 1:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    forward_backward(self, *arguments)
Policy.forward_backward = without_memory
"""


def test_memory_that_runs_out_in_a_training_step_ends_the_run_with_one_line(tmp_path):
    run = failed(ForkedRun(tmp_path, faulty(tmp_path, NO_MEMORY_ON_RANK_1), ranks=2))
    [line] = run.stderr.splitlines()
    assert line.startswith(
        "error: batch.max_tokens_per_micro_batch=512: a training step does not fit into device memory "
        "(OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.); lower it, "
    )
    assert [row["step"] for row in run.rows("train")] == [0]


def test_more_reward_errors_than_allowed_end_the_run_with_one_line(tmp_path):
    run = failed(ForkedRun(tmp_path, faulty(tmp_path, "judge = lambda: 1 / 0"), ranks=2))
    [line] = run.stderr.splitlines()
    assert line.startswith(
        "error: rewards: 16 of 16 failed, above rollout.max_reward_errors=0.2; the first: "
        "ZeroDivisionError: division by zero ("
    )
    assert list(run.folder.glob("checkpoints/*")) == [], "no step was trained"


FAILS_AFTER_TWO_STEPS = """
calls = []
def judge():
    calls.append(None)
    if len(calls) > 32:
        raise OSError("the judge is down")
    return float(len(calls) % 2)
"""


def test_rewards_that_fail_later_end_the_run_after_a_checkpoint_of_the_steps_before(tmp_path):
    config = faulty(tmp_path, FAILS_AFTER_TWO_STEPS, training_steps=4, checkpoint={"every": 3})
    run = failed(ForkedRun(tmp_path, config))
    assert "16 of 16 failed, above rollout.max_reward_errors=0.2; the first: OSError: the judge is down" in run.stderr
    assert [folder.name for folder in (run.folder / "checkpoints").iterdir()] == ["step_000002"]
    with ForkedRun(tmp_path, config, "--resume", "auto") as resumed:
        resumed.finish()
    assert [row["step"] for row in resumed.rows(files.TRAIN)] == [0, 1, 2, 3]


def test_a_reward_that_never_returns_fails_alone_and_does_not_keep_the_process_alive(tmp_path):
    fault = "judge = threading.Event().wait"
    rollout = {"reward_timeout": 0.2, "reward_workers": 2, "max_reward_errors": 1.0}
    config = faulty(tmp_path, fault, training_steps=2, rollout=rollout)
    run = train(tmp_path, config)
    assert [row["reward_errors"] for row in run.rows("train")] == [16.0, 16.0]
    assert (run.folder / "final_model/model.safetensors").exists()


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"policy": {"lr": -1}}, "policy.lr=-1: must be greater than 0"),
        ({"model": {"name": "./no-such-model"}}, "model.name='./no-such-model': no such folder"),
        (
            {"batch": {"max_tokens_per_micro_batch": 8}},
            "batch.max_tokens_per_micro_batch=8: must be at least rollout.max_prompt_tokens",
        ),
    ],
)
def test_an_invalid_config_is_one_line_and_exit_code_2_before_anything_starts(tmp_path, changes, line):
    with LaunchedRun(tmp_path, settings(tiny_model()) | changes) as run:
        assert run.wait() == 2
    [shown] = run.stderr.splitlines()
    assert shown.startswith("error: ")
    assert line in shown
    assert run.stdout == ""
    assert not run.folder.exists()


def test_nodes_that_do_not_find_each_other_end_with_one_line_each(tmp_path):
    ports = [free_port(), free_port()]
    flags = ["--nodes", "2", "--master-addr", "127.0.0.1", "--join-timeout", "1"]
    with ExitStack() as stack:
        nodes = [
            stack.enter_context(
                LaunchedRun(
                    tmp_path / str(node), deterministic(), *flags, f"--node-rank={node}", f"--master-port={port}"
                )
            )
            for node, port in enumerate(ports)
        ]
        assert [node.wait(SECONDS_TO_END) for node in nodes] == [1, 1]
    place = f"MASTER_ADDR=127.0.0.1 MASTER_PORT={ports[1]}"
    assert [node.stderr for node in nodes] == [
        "error: rank 1 of 2 did not start within 1 s: see the output of the node, or start all nodes\n",
        f"error: {place}: rank 1 has not reached rank 0 there for 1 s (Connection refused)\n",
    ]


def test_an_unknown_argument_of_the_engine_is_one_line(tmp_path):
    with ForkedRun(tmp_path, deterministic(engine={"args": {"max_num_batched_token": 64}})) as run:
        assert run.wait() == 2
    line = run.stderr.splitlines()[-1]
    assert line.startswith("error: engine.args.max_num_batched_token: not an engine argument of vLLM ")
    assert line.endswith("; did you mean max_num_batched_tokens?")


def test_a_rejected_start_leaves_no_run_folder(tmp_path):
    with LaunchedRun(tmp_path, faulty(tmp_path, "raise ImportError('not here')")) as run:
        assert run.wait() == 2
    [line] = run.stderr.splitlines()
    assert line.startswith("error: environments ")
    assert not run.folder.exists()


def test_a_new_run_does_not_write_into_a_finished_run_of_the_same_name():
    finished = uninterrupted(1)
    before = finished.rows("train")
    run = failed(ForkedRun(finished.folder.parent, deterministic(), name="again"))
    [line] = run.stderr.splitlines()
    assert "already contains a run; add --resume, or choose another name" in line
    assert finished.rows("train") == before


FAILS_WHILE_A_CHECKPOINT_IS_WRITTEN = """
import threading
from colocated_grpo.checkpoint import storage
from colocated_grpo.checkpoint.checkpoints import Checkpoints
from colocated_grpo.errors import RunError
from colocated_grpo.policy.policy import Policy

write, step, wait, waits = storage.write_durably, Policy.optimizer_step, Checkpoints.wait, threading.Event()

def slow(*arguments):
    waits.wait()
    write(*arguments)

def waiting(checkpoints):
    waits.set()
    wait(checkpoints)

def failing(policy, *arguments):
    if policy.version == 2:
        Checkpoints.wait = waiting
        raise RunError("no memory")
    return step(policy, *arguments)

storage.write_durably, Policy.optimizer_step = slow, failing
"""


def test_a_run_that_fails_while_a_checkpoint_is_written_keeps_this_checkpoint(tmp_path):
    config = faulty(tmp_path, FAILS_WHILE_A_CHECKPOINT_IS_WRITTEN, checkpoint={"every": 2})
    run = failed(ForkedRun(tmp_path, config))
    assert "error: no memory\n" in run.stderr
    assert [path.name for path in (run.folder / "checkpoints").iterdir()] == ["step_000002"]
