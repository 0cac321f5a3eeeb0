"""The processes of a tensor-parallel engine: rank 0 starts the others and ends with them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import torch.distributed as dist

from colocated_grpo.runtime.parents_death import signal_at_parents_death
from colocated_grpo.runtime.stores import connect_store, serve_store
from colocated_grpo.runtime.verdict import RUN_ERROR

LOOPBACK = "127.0.0.1"
START_SECONDS = 600.0
POLL_SECONDS = 1.0


def join_ranks(size: int) -> dist.Store:
    """Return the store of all ranks, after rank 0 has started the others. Sets their environment variables."""
    if "RANK" in os.environ:  # started by rank 0
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # rank 0 decides when to end
        return connect_store(LOOPBACK, int(os.environ["MASTER_PORT"]), START_SECONDS)
    store, port = serve_store(LOOPBACK, 0, START_SECONDS)
    shared = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(port)}
    os.environ.update(shared)
    peers = [_start(rank) for rank in range(1, size)]
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0"}
    if peers:
        threading.Thread(target=_watch, args=(peers,), name="ranks", daemon=True).start()
    return store


def _start(rank: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "colocated_grpo.servers.rank", *sys.argv[1:]],
        env={**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        preexec_fn=signal_at_parents_death(signal.SIGKILL),
    )


def _watch(peers: list[subprocess.Popen[bytes]]) -> None:
    """End this process if a peer has died: its collectives would wait for the peer."""
    while True:
        time.sleep(POLL_SECONDS)
        for rank, peer in enumerate(peers, start=1):
            if code := peer.poll():  # 0 after rank 0 has ended them
                print(f"error: rank {rank} of the engine ended with exit code {code}", file=sys.stderr, flush=True)
                os._exit(RUN_ERROR)
