"""A run on two nodes: it equals a run on one, ends on both nodes when one is lost, and resumes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from colocated_grpo.tracking import files
from tests.support.nodes import NodeLauncher, NodeRanks, Nodes, NoNamespaces, two_nodes
from tests.support.training_runs import deterministic, uninterrupted, weights_of, without_wall_clock

SECONDS_TO_END = 15
RESUME = "--resume auto continues from the last checkpoint"
KILLED = "killed, for example out of memory, or ended by user code"


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    try:
        with two_nodes() as nodes:
            yield nodes
    except NoNamespaces as reason:
        pytest.skip(f"network namespaces cannot be made here: {reason}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of one run, which the tests continue one after the other."""
    return tmp_path_factory.mktemp("nodes")


def test_a_killed_node_ends_the_other_with_one_line(nodes, folder):
    with (
        NodeLauncher(nodes, 0, folder, deterministic()) as first,
        NodeLauncher(nodes, 1, folder, deterministic()) as second,
    ):
        first.wait_for_step(5)
        nodes.kill(1)
        since = time.monotonic()
        assert first.wait(SECONDS_TO_END) == 1
        assert time.monotonic() - since < SECONDS_TO_END
        assert second.wait() != 0
        assert first.processes() == second.processes() == []
    line = f"the process of rank 1 on {nodes.addresses[1]} ended without an error message: {KILLED}; {RESUME}"
    assert first.stderr == f"error: {line}\n"
    assert "waiting for node 1 of 2\n" in first.stdout
    assert f"waiting for node 0 of 2 at {nodes.addresses[0]}\n" in second.stdout
    assert files.read_summary(first.folder)["error"] == line


def test_a_node_without_network_ends_both(nodes, folder):
    before = len(files.read_environment(folder / "run"))
    with NodeRanks(nodes, folder, deterministic(), "--resume", "auto") as run:
        run.wait_until(lambda: len(files.read_environment(run.folder)) > before)
        resumed_at = files.read_environment(run.folder)[-1]["first_step"]
        run.wait_for_step(resumed_at + 4)
        nodes.cut()
        try:
            assert run.wait(SECONDS_TO_END) == 1
        finally:
            nodes.mend()
    assert resumed_at > 0
    assert sorted(run.stderr.splitlines()) == [
        f"error: {address}, with rank {rank}, has not answered for 4 s: the machine or its network is lost; {RESUME}"
        for rank, address in enumerate(nodes.addresses)
    ]


def test_the_resumed_run_equals_an_uninterrupted_one_on_one_node_bit_for_bit(nodes, folder):
    with NodeRanks(nodes, folder, deterministic(), "--resume", "auto") as run:
        run.finish()
    whole = uninterrupted(2)
    assert weights_of(run) == weights_of(whole)
    assert without_wall_clock(run.rows(files.TRAIN)) == without_wall_clock(whole.rows(files.TRAIN))
