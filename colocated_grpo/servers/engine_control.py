"""The engine of a server process without a trainer: its ranks, and commands between two decode steps.

Rank 0 of a tensor-parallel engine starts the other ranks' processes and repeats each engine call on them.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch.distributed as dist

from colocated_grpo.rollout.engine import Finished, Request, RolloutEngine, TokenDelta
from colocated_grpo.rollout.inbox import IDLE_SECONDS, Calls, Driver, Inbox
from colocated_grpo.runtime import parents_death, rendezvous, verdict
from colocated_grpo.runtime.distributed import World
from colocated_grpo.runtime.processes import bind_store
from colocated_grpo.runtime.program import LOOPBACK, rank_variables

START_SECONDS = 600.0
POLL_SECONDS = 1.0


def join_ranks(size: int) -> dist.Store:
    """Return the store of all ranks, after rank 0 has started the other ranks. Sets RANK and related variables."""
    if "RANK" in os.environ:  # started by rank 0
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # rank 0 decides when to end
        return rendezvous.connect_store(LOOPBACK, int(os.environ["MASTER_PORT"]), START_SECONDS)
    store = rendezvous.serve_store(bind_store(LOOPBACK, 0), START_SECONDS)
    peers = [
        subprocess.Popen(
            [sys.executable, "-m", "colocated_grpo.servers", *sys.argv[1:]],
            env={**os.environ, **rank_variables(rank, size, port=store.port)},
            preexec_fn=parents_death.signal_at_parents_death(signal.SIGKILL),
        )
        for rank in range(1, size)
    ]
    os.environ |= rank_variables(0, size, port=store.port)
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
                os._exit(verdict.RUN_ERROR)


END = "end"


@dataclass(eq=False)
class MirroredEngine(RolloutEngine):
    """An engine whose calls run on all of its ranks. Rank 0 uses it, every other rank only `follow`."""

    engine: RolloutEngine
    """This rank's engine, whose methods are commands."""
    world: World
    """The engine's ranks. Its `control` group must wait without limit for the next call."""
    commands: Mapping[str, Callable[..., object]] = field(default_factory=dict)
    """Further commands by name. If such a command raises ValueError on any rank, rank 0 raises it too."""

    def __post_init__(self) -> None:
        self.max_num_seqs = self.engine.max_num_seqs
        self.admission_cost = self.engine.admission_cost

    def call(self, name: str, *arguments: object) -> Any:
        """Broadcast the call, then return this rank's result. Arguments must be picklable. Rank 0 only."""
        self.world.broadcast_object((name, arguments))
        return self._run(name, arguments)

    def _run(self, name: str, arguments: tuple[object, ...]) -> object:
        if name not in self.commands:
            return getattr(self.engine, name)(*arguments)
        if self.world.size == 1:
            return self.commands[name](*arguments)
        result, problem = None, None
        try:
            result = self.commands[name](*arguments)
        except ValueError as error:
            problem = str(error)
        for rank, text in enumerate(self.world.gather_objects(problem)):
            if text is not None:
                raise ValueError(f"rank {rank} of the engine: {text}")
        return result

    def follow(self) -> None:
        """Run rank 0's calls until it closes the engine. Rank 0 reports a ValueError of this rank. Other ranks only."""
        while True:
            call: Any = self.world.broadcast_object(None)
            name, arguments = call
            if name == END:
                return
            with suppress(ValueError):
                self._run(name, arguments)

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

    def close(self) -> None:
        """End the other ranks, then this rank's engine."""
        self.world.broadcast_object((END, ()))
        self.engine.close()


P = ParamSpec("P")
T = TypeVar("T")
SERVING, NO_WEIGHTS = "serving", "waiting for weights"


def between_steps(
    command: Callable[Concatenate["EngineControl", P], T],
) -> Callable[Concatenate["EngineControl", P], Future[T]]:
    """Make a command of `EngineControl` run on the driving thread. A call returns the future of its result."""

    def submit(control: "EngineControl", *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        return control.commands.submit(lambda: command(control, *args, **kwargs))

    return submit


class EngineControl:
    """Commands between two decode steps, from any thread. Each returns a future; of an invalid one, of a ValueError."""

    def __init__(self, engine: RolloutEngine, inbox: Inbox, driver: Driver) -> None:
        self._engine = engine
        self._inbox = inbox
        self._driver = driver
        self.commands = Calls(inbox.wake)
        self.is_paused = False
        self._has_trainer = False
        """True while a trainer has joined to send weights. False after it is lost."""
        self.has_whole_weights = True
        """False after a failed change of the weights."""
        self.has_received_weights = False
        """True once a trainer has written into the model's own weights."""
        self.policy_version: int | None = None
        """Version of the weights; None until a trainer has set a version."""

    @property
    def state(self) -> str:
        """State of the engine for clients: whether requests are answered, or what they wait for."""
        if not self.has_whole_weights:
            return NO_WEIGHTS
        return "paused" if self.is_paused else SERVING

    def run(self, stop_requested: Callable[[], bool]) -> None:
        """Serve requests and commands on this thread until a stop is requested."""
        try:
            while not stop_requested():
                self.commands.run()
                if self.state != SERVING:
                    self._inbox.wait(IDLE_SECONDS)
                else:
                    self._driver.step()
        finally:
            self._driver.abort()
            self.commands.cancel()

    @between_steps
    def pause(self) -> None:
        """Stop after the current decode step. Running requests keep their tokens and KV cache."""
        self.is_paused = True

    @between_steps
    def resume(self) -> None:
        self.is_paused = False

    @between_steps
    def set_version(self, policy_version: int) -> None:
        """Finish requests, drop cached prefixes, stamp later completions. Each rank of a trainer repeats this call."""
        if policy_version != self.policy_version:
            self._finish_requests()
            self._engine.weights_changed(policy_version)
            self.policy_version = policy_version

    @between_steps
    def change_weights(self, change: Callable[[], object]) -> object:
        """Finish running requests, then run `change`. After it, trainers' requests are rejected until `set_version`."""
        self._finish_requests()
        result = change()
        self.policy_version = None
        return result

    @between_steps
    def join_trainer(self, join: Callable[[], object]) -> None:
        """Finish running requests, then run `join`. Weights can be received once it has succeeded."""
        self._finish_requests()
        self._has_trainer = False
        join()
        self._has_trainer = True

    @between_steps
    def receive_weights(self, receive: Callable[[], object]) -> object:
        """Run `receive` like `change_weights`. Raises ValueError if no trainer has joined.

        After a failure, some weights may be new and others old, so all requests wait until a later call succeeds.
        """
        self._finish_requests()
        if not self._has_trainer:  # a stranger's request must not mark the weights as damaged
            raise ValueError("no trainer has joined since this server started; POST /bridge/init first")
        self.policy_version, self.has_received_weights = None, True
        self._has_trainer = False
        try:
            result = receive()
        except BaseException:
            self.has_whole_weights = False
            raise
        self.has_whole_weights = self._has_trainer = True
        return result

    def _finish_requests(self) -> None:
        if self.is_paused and self._driver.running:
            raise ValueError("the engine is paused with running requests; POST /bridge/resume first")
        self._driver.drain()
