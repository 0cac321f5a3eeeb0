"""Rewards that never return and hold the interpreter lock: in processes they cost their completions, in threads the run
ends at the limit.

The four runs train at the same time, because most of their time is start-up and waiting.
"""

from __future__ import annotations

import json
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import psutil
import pytest

from colocated_grpo.runtime.processes import DUPLICATE_SECONDS
from colocated_grpo.runtime.user_code import MIN_SECONDS
from colocated_grpo.tracking import files
from tests.support.serve_process import START_SECONDS
from tests.support.servers import until
from tests.support.training_runs import ForkedRun, LaunchedRun, Settings, settings, tiny_model

SECONDS_TO_END = 120.0
"""Without other load on two cores it takes 6."""
REWARD = """\
import ctypes

def hang(completions, number, **columns):
    if number[0] != 7:
        return [float(len(text)) for text in completions]
    print("hanging", flush=True)
    return [float(ctypes.PyDLL(None).sleep(3600)) for text in completions]
"""
"""PyDLL holds the interpreter lock during the call, as a regular expression does, but takes no core."""
PLACE = "hang (my_rewards.py, line 7)"


def config(folder: Path, run_in: str, engine: Settings, **rollout: object) -> Settings:
    """Three steps of four prompts; the reward of one prompt in step 1 hangs."""
    folder.mkdir()
    (folder / "my_rewards.py").write_text(REWARD)
    (folder / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"{i}", "number": i}) + "\n" for i in range(40)))
    entry = {"type": "dataset", "name": str(folder / "rows.jsonl"), "shuffle": False}
    reward = {"name": f"{folder / 'my_rewards.py'}:hang", "run_in": run_in}
    return settings(
        tiny_model(),
        environments=[{**entry, "rewards": [reward]}],
        training_steps=3,
        engine=engine,
        rollout={**rollout, "max_reward_errors": 0.5, "reward_workers": 2},
        evaluation={"every": 0},
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("blocking")
    short = {"reward_timeout": MIN_SECONDS}  # a busy machine keeps it for the other prompts
    none = {"reward_timeout": 3600.0}  # the second signal alone ends this run
    served: Settings = {"placement": "server", "server_timeout": START_SECONDS}
    with ExitStack() as stack:
        yield {
            name: stack.enter_context(kind(folder / name / "out", config(folder / name, run_in, engine, **limit)))
            for name, kind, run_in, engine, limit in [
                ("process", ForkedRun, "auto", {}, short),  # first: the others would wait for the fork server
                ("stopped", LaunchedRun, "thread", {}, none),
                ("killed", LaunchedRun, "thread", {}, short),
                ("served", partial(LaunchedRun, ranks=2), "thread", served, short),
            ]
        }


def test_when_the_launcher_is_killed_the_limit_ends_all_processes(runs):
    run = runs["killed"]
    run.wait_until(lambda: "hanging" in run.stdout)
    run.launcher.kill()
    run.launcher.wait(SECONDS_TO_END)
    psutil.wait_procs(run.processes(), MIN_SECONDS)  # cheaper than looking through all processes again and again
    until(lambda: not run.processes(), SECONDS_TO_END)
    assert files.read_summary(run.folder) == {}, "its launcher died too: nothing is left to record the end"


def test_a_second_signal_ends_all_processes_within_seconds(runs):
    run = runs["stopped"]
    run.wait_until(lambda: "hanging" in run.stdout)
    run.launcher.terminate()
    run.wait_until(lambda: "stopping: " in run.stderr)  # two pending signals would be one
    time.sleep(2 * DUPLICATE_SECONDS)
    run.launcher.terminate()
    run.launcher.wait(SECONDS_TO_END)
    assert run.processes() == []
    assert files.read_summary(run.folder)["state"] == "killed"


def test_in_a_process_it_costs_its_completions_and_the_run_goes_on(runs):
    run = runs["process"].finish()
    assert [row["reward_errors"] for row in run.rows("train")] == [0, 4, 0]
    errors = {row["error"] for row in files.read_rollouts(run.folder)}
    assert errors == {None, f"no reward within rollout.reward_timeout=10 s, in {PLACE}"}


def test_in_a_thread_it_ends_all_ranks_and_the_engine_server_with_one_line(runs):
    run = runs["served"]
    assert run.wait() == 1
    [line] = run.stderr.splitlines()
    assert line.replace("rank 1 could", "rank 0 could") == (
        f"error: rollout.reward_timeout=10: no thread of rank 0 could run, because {PLACE} holds Python's interpreter "
        "lock; the rank was ended; --resume auto continues from the last checkpoint"
    )
    assert len(run.rows("train")) == 1
    assert run.processes() == []
