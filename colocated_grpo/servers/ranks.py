"""A tensor-parallel engine: rank 0 starts the other ranks' processes and repeats each engine call on them."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from colocated_grpo.rollout.engine import Finished, Part, Request, RolloutEngine, TokenDelta
from colocated_grpo.runtime.parents_death import signal_at_parents_death
from colocated_grpo.runtime.stores import connect_store, serve_store
from colocated_grpo.runtime.verdict import RUN_ERROR

LOOPBACK = "127.0.0.1"
START_SECONDS = 600.0
POLL_SECONDS = 1.0


def join_ranks(size: int) -> dist.Store:
    """Return the store of all ranks, after rank 0 has started the other ranks. Sets RANK and related environment
    variables."""
    if "RANK" in os.environ:  # started by rank 0
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # rank 0 decides when to end
        return connect_store(LOOPBACK, int(os.environ["MASTER_PORT"]), START_SECONDS)
    store, port = serve_store(LOOPBACK, 0, START_SECONDS)
    shared = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(port)}
    os.environ.update(shared)
    peers = [
        subprocess.Popen(
            [sys.executable, "-m", "colocated_grpo.servers", *sys.argv[1:]],
            env={**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            preexec_fn=signal_at_parents_death(signal.SIGKILL),
        )
        for rank in range(1, size)
    ]
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0"}
    if peers:
        threading.Thread(target=_watch, args=(peers,), name="ranks", daemon=True).start()
    return store


def _watch(peers: list[subprocess.Popen[bytes]]) -> None:
    """End this process if a peer has died, because collectives would wait for the dead peer."""
    while True:
        time.sleep(POLL_SECONDS)
        for rank, peer in enumerate(peers, start=1):
            if code := peer.poll():  # 0 after rank 0 has ended the peer
                print(f"error: rank {rank} of the engine ended with exit code {code}", file=sys.stderr, flush=True)
                os._exit(RUN_ERROR)


END = "end"


@dataclass(eq=False)
class MirroredEngine:
    """An engine whose calls run on all of its ranks. Rank 0 uses it, every other rank only `follow`."""

    engine: RolloutEngine
    """This rank's engine, whose methods are commands."""
    group: dist.ProcessGroup | None
    """None for a single rank."""
    commands: Mapping[str, Callable[..., object]] = field(default_factory=dict)
    """Further commands by name. If such a command raises ValueError on any rank, rank 0 raises it too."""

    def __post_init__(self) -> None:
        self.max_num_seqs = self.engine.max_num_seqs
        self.admission_cost = self.engine.admission_cost

    def call(self, name: str, *arguments: object) -> Any:
        """Broadcast the call, then return this rank's result. Arguments must be picklable. Rank 0 only."""
        self._send(name, arguments)
        return self._run(name, arguments)

    def _run(self, name: str, arguments: tuple[object, ...]) -> object:
        if name not in self.commands:
            return getattr(self.engine, name)(*arguments)
        if self.group is None:
            return self.commands[name](*arguments)
        result, problem = None, None
        try:
            result = self.commands[name](*arguments)
        except ValueError as error:
            problem = str(error)
        problems: list[str | None] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(problems, problem, group=self.group)
        for rank, text in enumerate(problems):
            if text is not None:
                raise ValueError(f"rank {rank} of the engine: {text}")
        return result

    def follow(self) -> None:
        """Run rank 0's calls until it closes the engine. Rank 0 reports a ValueError of this rank. Other ranks only."""
        while True:
            box: list[Any] = [None]
            dist.broadcast_object_list(box, src=0, group=self.group)
            name, arguments = box[0]
            if name == END:
                return
            with suppress(ValueError):
                self._run(name, arguments)

    def _send(self, name: str, arguments: tuple[object, ...]) -> None:
        if self.group is not None:
            dist.broadcast_object_list([(name, arguments)], src=0, group=self.group)

    def submit(self, requests: Iterable[Request]) -> None:
        self.call("submit", list(requests))

    def step(self) -> Finished:
        return self.call("step")

    def deltas(self) -> list[tuple[Hashable, TokenDelta]]:
        return self.engine.deltas()

    def abort(self, keys: Collection[Hashable] | None = None) -> None:
        self.call("abort", None if keys is None else list(keys))

    def top_logprobs(self, token_ids: Sequence[int], k: int) -> list[dict[int, float]]:
        return self.call("top_logprobs", list(token_ids), k)

    def weights_changed(self, policy_version: int) -> None:
        self.call("weights_changed", policy_version)

    def wake(self, part: Part) -> None:
        self.call("wake", part)

    def sleep(self) -> None:
        self.call("sleep")

    def close(self) -> None:
        """End the other ranks, then this rank's engine."""
        self._send(END, ())
        self.engine.close()
