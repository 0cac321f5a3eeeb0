"""A run on two nodes: it ends on both when one is lost, resumes, and equals a run on one node."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import yaml

from colocated_grpo.tracking import files
from tests.support.nodes import NodeLauncher, NodeRanks, Nodes, NoNamespaces, two_nodes
from tests.support.paths import ROOT
from tests.support.servers import free_port
from tests.support.training_runs import (
    Settings,
    TrainingRun,
    deterministic,
    settings,
    tiny_model,
    uninterrupted,
    weights_of,
    without_wall_clock,
)

SECONDS_TO_END = 120
HELD_STEP, HELD_LATER = 8, 14
"""Steps before which rank 1 waits, and rank 0 for it: in the first run, and in the one resumed from it."""
RESUME = "--resume auto continues from the last checkpoint"
KILLED = "killed, for example out of memory, or ended by user code"


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    try:
        with two_nodes() as nodes:
            yield nodes
    except NoNamespaces as reason:
        pytest.skip(f"network namespaces cannot be made here: {reason}")


def held_before(step: int) -> Settings:
    return deterministic({"hold_before": step, "held_rank": 1})


class Killed(NamedTuple):
    first: TrainingRun
    second: TrainingRun
    seconds: float
    """From the kill of node 1 to the end of node 0."""


@pytest.fixture(scope="module")
def killed(nodes: Nodes, tmp_path_factory: pytest.TempPathFactory) -> Killed:
    """The launchers of a run of which one node was killed."""
    folder = tmp_path_factory.mktemp("nodes")
    with (
        NodeLauncher(nodes, 0, folder, held_before(HELD_STEP)) as first,
        NodeLauncher(nodes, 1, folder, held_before(HELD_STEP)) as second,
    ):
        first.wait_for_step(HELD_STEP - 1)
        nodes.kill(1)
        since = time.monotonic()
        assert first.wait(SECONDS_TO_END) == 1, first.tail()
        seconds = time.monotonic() - since
        assert second.wait(SECONDS_TO_END) != 0
        assert first.processes() == second.processes() == []
        summary = files.read_summary(first.folder)
        assert summary["error"] in first.stderr
    return Killed(first, second, seconds)


@pytest.fixture(scope="module")
def cut_off(nodes: Nodes, killed: Killed) -> TrainingRun:
    """The run, resumed from there, whose nodes have lost each other."""
    folder = killed.first.folder.parent
    with NodeRanks(nodes, folder, held_before(HELD_LATER), "--resume", "auto") as run:
        run.wait_until(lambda: len(files.read_environment(run.folder)) == 2)
        run.wait_for_step(HELD_LATER - 1)
        nodes.cut()
        try:
            assert run.wait(SECONDS_TO_END) == 1
        finally:
            nodes.mend()
    return run


def first_step(run: TrainingRun) -> int:
    """Return the step at which the last start has begun."""
    return files.read_environment(run.folder)[-1]["first_step"]


def test_a_node_with_a_wrong_setting_ends_the_node_that_waits_for_it_with_one_line_that_names_both(tmp_path):
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump(settings(tiny_model(), output_dir=str(tmp_path))))
    command = [sys.executable, str(ROOT / "run_colocated_grpo.py"), "--config", str(config), "--gpus", "0"]
    command += ["--nodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(free_port()), "--join-timeout"]
    waiting = [*command, str(SECONDS_TO_END), "--node-rank", "0"]
    with subprocess.Popen(waiting, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as first:
        assert first.stdout.readline(), "its settings are right"
        second = subprocess.run(
            [*command, "1", "--node-rank", "1", "--policy.lrr", "1"], capture_output=True, text=True
        )
        wrong = "policy.lrr: unknown key; did you mean policy.lr? (command line)"
        assert second.stderr == f"error: {wrong}\n"
        assert first.communicate()[1] == f"error: rank 1 of another node failed first: node 1 did not start: {wrong}\n"
    assert (first.returncode, second.returncode) == (1, 2)


def test_a_killed_node_ends_the_other_with_one_line(nodes, killed):
    line = f"the process of rank 1 on {nodes.addresses[1]} ended without an error message: {KILLED}; {RESUME}"
    assert killed.first.stderr == f"error: {line}\n"
    assert killed.seconds < SECONDS_TO_END
    assert f"2, which joins node 0 at {nodes.addresses[0]}; " in killed.second.stdout


def test_nodes_that_lose_each_other_both_end_with_one_line(nodes, cut_off):
    assert first_step(cut_off) > 0, "resumed"
    assert sorted(cut_off.stderr.splitlines()) == [
        f"error: {address}, with rank {rank}, has not answered for 4 s: the machine or its network is lost; {RESUME}"
        for rank, address in enumerate(nodes.addresses)
    ]


def test_the_resumed_run_equals_an_uninterrupted_one_on_one_node_bit_for_bit(nodes, cut_off):
    with NodeRanks(nodes, cut_off.folder.parent, deterministic(), "--resume", "auto") as run:
        run.finish()
    whole = uninterrupted(2)
    assert weights_of(run) == weights_of(whole)
    assert without_wall_clock(run.rows(files.TRAIN)) == without_wall_clock(whole.rows(files.TRAIN))
