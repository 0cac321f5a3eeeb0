"""Two nodes on this machine: network namespaces with one cable between them. Needs root and Linux' `ip`."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from colocated_grpo.runtime import rendezvous, supervision
from tests.support.paths import ROOT
from tests.support.ranks import Ranks, run_module
from tests.support.training_runs import TAG, ForkedRun, LaunchedRun, Settings, TrainingRun

NODES = 2
PORT = 29500
"""Free: every namespace has its own ports."""
CLONE_NEWNET = 0x40000000  # Linux <sched.h>


class NoNamespaces(Exception):
    """This machine does not allow network namespaces. The message says why."""


class Nodes:
    """The namespaces, by node rank."""

    def __init__(self) -> None:
        self.names = [f"grpo-{os.getpid()}-{node}" for node in range(NODES)]
        self.addresses = [f"10.77.0.{node + 1}" for node in range(NODES)]

    def cut(self) -> None:
        """Unplug node 1: its packets are lost, and no connection is closed."""
        _ip("-n", self.names[1], "link", "set", "cable1", "down")

    def mend(self) -> None:
        _ip("-n", self.names[1], "link", "set", "cable1", "up")

    def kill(self, node: int) -> None:
        """Send SIGKILL to every process of a node."""
        while pids := _ip("netns", "pids", self.names[node]).split():
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)


@contextmanager
def two_nodes() -> Generator[Nodes]:
    """Yield two connected nodes. Raises NoNamespaces."""
    nodes = Nodes()
    try:
        for name in nodes.names:
            _ip("netns", "add", name)
        first, second = nodes.names
        _ip("link", "add", "cable0", "netns", first, "type", "veth", "peer", "name", "cable1", "netns", second)
        for node, name in enumerate(nodes.names):
            _ip("-n", name, "addr", "add", f"{nodes.addresses[node]}/24", "dev", f"cable{node}")
            for link in ("lo", f"cable{node}"):
                _ip("-n", name, "link", "set", link, "up")
        yield nodes
    finally:
        for name in nodes.names:
            with suppress(NoNamespaces):
                _ip("netns", "del", name)


def _ip(*arguments: str) -> str:
    try:
        result = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=True)
    except FileNotFoundError:
        raise NoNamespaces("no program 'ip' (iproute2)") from None
    except subprocess.CalledProcessError as error:
        raise NoNamespaces(f"ip {' '.join(arguments)}: {error.stderr.strip()}") from None
    return result.stdout


class NodeLauncher(LaunchedRun):
    """The launcher of one node, started as the guide to clusters says."""

    def __init__(self, nodes: Nodes, node: int, output_dir: Path, config: Settings, *flags: str) -> None:
        TrainingRun.__init__(self, output_dir, config, f"node{node}")
        command = ["ip", "netns", "exec", nodes.names[node], sys.executable, str(ROOT / "run_colocated_grpo.py")]
        command += ["--nodes", str(NODES), "--node-rank", str(node), "--master-addr", nodes.addresses[0]]
        with self._stdout.open("w") as out, self._stderr.open("w") as err:
            self.launcher = subprocess.Popen(
                [*command, "--gpus", "0", "--config", str(self.config_file), *flags],
                stdout=out,
                stderr=err,
                env={**os.environ, TAG: self._tag, "OMP_NUM_THREADS": "1"},  # as many as the ranks of one node have
                start_new_session=True,
            )


class NodeRanks(ForkedRun):
    """One forked rank on each node, without a launcher, as under srun. Losing a node takes 4 seconds instead of 20."""

    def __init__(self, nodes: Nodes, output_dir: Path, config: Settings, *flags: str) -> None:
        TrainingRun.__init__(self, output_dir, config, "ranks")
        for file in (self._stdout, self._stderr):
            file.write_text("")
        variables = {
            TAG: self._tag,
            "MASTER_ADDR": nodes.addresses[0],
            "MASTER_PORT": str(PORT),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "TORCHELASTIC_USE_AGENT_STORE": "False",
        }
        arguments = ["--config", str(self.config_file), *flags]
        self._ranks = Ranks(_run_on_node, NODES, nodes.names, arguments, self._stdout, self._stderr, variables)


def _run_on_node(names: list[str], arguments: list[str], stdout: Path, stderr: Path, variables: dict[str, str]) -> None:
    with open(f"/run/netns/{names[int(os.environ['RANK'])]}") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
    rendezvous.PROBE_SECONDS = supervision.PROBE_SECONDS = 1
    run_module("colocated_grpo", arguments, NODES, stdout, stderr, variables)
