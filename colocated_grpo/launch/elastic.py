"""torchrun with a loopback-only rendezvous for --standalone and one-line errors for ranks without a traceback.

Flags and agent are torchrun's. Plain torchrun prints forty lines about a failed process, even below its error line.
"""

import argparse
import logging
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress

import psutil
from torch.distributed import DistNetworkError, DistStoreError
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure, record
from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.run import parse_args, run

from colocated_grpo.runtime import program, rendezvous
from colocated_grpo.runtime.verdict import RUN_ERROR, USAGE_ERROR, ended_from_outside, first_report, report

AGENT_LOGGER = "torch.distributed.elastic.multiprocessing.api"
"""Logger that reports how each process ended."""
REPEATED = ("Sending process", "failed (exitcode")
"""Starts of log messages that only repeat the failure report."""
JOINED = re.compile(r"waiting for clients\. (\d+)/(\d+) clients joined")
"""Text of torch's error for missing nodes."""
BACKEND = "loopback"
HOST = "127.0.0.1"
TIMEOUT_SECONDS = 600
POLL_SECONDS = 1.0
NO_FILE = "<N/A>"
"""torch's placeholder for the error file of a process without a traceback."""


@record
def main() -> None:
    logging.getLogger(AGENT_LOGGER).addFilter(lambda log: first_report() is None and not log.msg.startswith(REPEATED))
    threading.Thread(target=_continue_orphans, args=[os.getppid()], name="launcher", daemon=True).start()
    arguments = parse_args(sys.argv[1:])
    use_loopback(arguments)
    if arguments.nnodes.isdecimal() and int(arguments.nnodes) > 1:
        print(waiting_line(int(arguments.nnodes), arguments.node_rank, arguments.master_addr), flush=True)
    _wait_for_node_0(arguments)
    try:
        run(arguments)
    except ChildFailedError as error:
        if first_report() is not None:
            sys.exit(RUN_ERROR)
        if (line := explain_killed_ranks(error.failures)) is None:
            raise
        report(RUN_ERROR, [line])
        sys.exit(RUN_ERROR)
    except SignalException as stopped:  # raised once the agent has forwarded the signal and the ranks have exited
        sys.exit(128 + stopped.sigval)
    except (DistNetworkError, DistStoreError) as error:
        code, line = explain_meeting(error, arguments)
        report(code, [line])
        sys.exit(code)
    finally:
        # The ranks have exited. torch's handlers would raise SignalException during interpreter shutdown.
        for number in program.stop_signals():
            signal.signal(number, signal.SIG_IGN)


def _wait_for_node_0(arguments: argparse.Namespace) -> None:
    """Wait for node 0's store; exit with one line if it does not start."""
    if arguments.node_rank == 0 or not arguments.rdzv_conf:
        return
    seconds = _join_timeout(arguments)
    try:
        rendezvous.wait_for_listener(arguments.master_addr, arguments.master_port, seconds)
    except OSError as error:
        why = f"node 0 does not answer there after {seconds:g} s (--join-timeout): {error.strerror or error}"
        report(RUN_ERROR, [f"error: {_address(arguments)}: {why}"])
        sys.exit(RUN_ERROR)


def explain_meeting(error: Exception, arguments: argparse.Namespace) -> tuple[int, str]:
    """Return exit code and line for an error of the nodes' store, which is opened before any rank starts."""
    if "EADDRINUSE" in str(error):
        return USAGE_ERROR, f"error: {_address(arguments)}: already in use; choose another port"
    text = str(error).partition("\n")[0]
    if (nodes := JOINED.search(text)) is None:
        return RUN_ERROR, f"error: {_address(arguments)}: {text}"
    seconds = _join_timeout(arguments)
    return RUN_ERROR, f"error: only {nodes[1]} of {nodes[2]} nodes have started after {seconds:g} s (--join-timeout)"


def _address(arguments: argparse.Namespace) -> str:
    return f"--master-port={arguments.master_port} on --master-addr={arguments.master_addr}"


def _continue_orphans(launcher: int) -> None:
    """Continue stopped ranks (SIGSTOP) after the launcher's death: they must receive the SIGTERM that follows it."""
    while os.getppid() == launcher:
        time.sleep(POLL_SECONDS)
    for rank in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            rank.send_signal(signal.SIGCONT)


def _join_timeout(arguments: argparse.Namespace) -> float:
    """Return the seconds that the launcher passes as `--rdzv-conf timeout=SECONDS`."""
    return float(arguments.rdzv_conf.removeprefix("timeout="))


def waiting_line(nodes: int, node_rank: int, master_addr: str) -> str:
    """Return the line that names the nodes being waited for."""
    if node_rank > 0:
        return f"waiting for node 0 of {nodes} at {master_addr}"
    others = "node 1" if nodes == 2 else f"nodes 1 to {nodes - 1}"
    return f"waiting for {others} of {nodes}"


def explain_killed_ranks(failures: Mapping[int, ProcessFailure]) -> str | None:
    """Return one line for ranks killed by signals before they could report; None if any rank has a traceback.

    failures: failures by rank. The agent ends the remaining ranks by SIGTERM. A rank that another signal ended
    therefore failed first.
    """
    killed = {rank: failure.signal_name() for rank, failure in failures.items() if failure.exitcode < 0}
    if not killed or any(failure.error_file != NO_FILE for failure in failures.values()):
        return None
    first = {rank: name for rank, name in killed.items() if name != signal.SIGTERM.name} or killed
    return ended_from_outside(", ".join(f"rank {rank} by {name}" for rank, name in sorted(first.items())))


class LoopbackRendezvous(StaticTCPRendezvous):
    """Rendezvous for the ranks of one node, through a store that is reachable only from this machine.

    torch's stores listen on every interface, and with `--standalone` torchrun stores its state as a pickle. Any host
    that reaches the port could run code.
    """

    def __init__(self, run_id: str) -> None:
        store = rendezvous.serve_store(HOST, TIMEOUT_SECONDS)
        super().__init__(HOST, store.port, rank=0, world_size=1, run_id=run_id, timeout=TIMEOUT_SECONDS)
        self._store = store  # torch's class would create a store that listens on every interface

    def get_backend(self) -> str:
        return BACKEND


def use_loopback(arguments: argparse.Namespace) -> None:
    """Replace torchrun's rendezvous for `--standalone` by a rendezvous on the loopback address, on any free port."""
    if arguments.standalone:
        rendezvous_handler_registry.register(BACKEND, lambda parameters: LoopbackRendezvous(parameters.run_id))
        arguments.standalone = False
        arguments.rdzv_backend, arguments.rdzv_endpoint = BACKEND, f"{HOST}:0"


if __name__ == "__main__":
    main()
