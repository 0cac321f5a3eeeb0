"""Groups that environments in other processes sample from these engines, score, and post to an Atropos API server.

SERVE  engines awake: requests are answered, rank 0 asks the API for a batch
DRAIN  a batch is there: what is under way is finished, new requests wait in the inbox with their connections open
TRAIN  engines asleep; /health answers 200, so environments wait instead of giving up
SYNC   new weights into the engines, and SERVE again
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Protocol

from colocated_grpo.atropos.source import AtroposSource
from colocated_grpo.environments.base import BatchResult
from colocated_grpo.rollout.collect import Stopped
from colocated_grpo.rollout.inbox import Driver, Inbox
from colocated_grpo.rollout.supply import Order
from colocated_grpo.runtime.distributed import World
from colocated_grpo.serving.load_balancer import LeastBusy
from colocated_grpo.serving.rank_links import Link, LinkedInbox
from colocated_grpo.types import Group
from colocated_grpo.web.serving import ServerThread

LONGEST_HOLD = 480.0
"""Seconds. Atropos' environments give a rollout up after 600 by default, waiting for a held request included."""
LAST_ANSWER_SECONDS = 10.0
"""For a batch that was asked for before a stop: the server gives each batch once, and schedulers kill soon."""

Note = Callable[[str], None]


class Role(Protocol):
    """A rank's part in serving."""

    def before_wake(self) -> None:
        """Just before the engine wakes."""
        ...

    def collect(self, step: int, world: World) -> list[Group] | None:
        """Collective, with the engine awake. The batch, once it has come; None if the run is asked to stop before."""
        ...

    def settle(self) -> dict[str, float]:
        """The batch is trained now; metrics of it."""
        ...

    def state_dict(self) -> dict[str, Any] | None: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


class MainServing:
    """Rank 0: answers HTTP, drives its engine, asks for batches."""

    def __init__(
        self,
        source: AtroposSource,
        driver: Driver,
        inbox: Inbox,
        links: list[Link],
        engines: LeastBusy,
        servers: list[ServerThread],
        stop_asked: Callable[[], bool],
        policy_version: Callable[[], int],
        note: Note,
    ) -> None:
        self._source = source
        self._driver = driver
        self._inbox = inbox
        self._links = links
        self._engines = engines
        self._servers = servers
        self._stop_asked = stop_asked
        self._policy_version = policy_version
        self._note = note
        self._asleep_since: float | None = None
        self._waiting = ThreadPoolExecutor(1, thread_name_prefix="atropos")

    def collect(self, step: int, world: World) -> list[Group] | None:
        # Served inside: an error of the environments then ends all ranks with the same line.
        return world.from_main(lambda: self._serve(step))

    def _serve(self, step: int) -> list[Group] | None:
        enough = threading.Event()
        batch = self._waiting.submit(self._source.wait_for_groups, step, self._policy_version(), enough)
        batch.add_done_callback(lambda _: self._inbox.wake())
        try:
            while not batch.done() and not self._stop_asked():
                self._driver.step()
        finally:
            enough.set()
            stopped = self._stop_asked()
            for link in self._links:
                link.end_phase(step + 1, abort=stopped)
        if stopped:
            self._driver.abort()
            self._wait_for_last(batch)
            return None
        self._driver.drain()
        self._asleep_since = time.monotonic()
        return batch.result()

    def _wait_for_last(self, batch: Future[list[Group] | None]) -> None:
        """What it brings is kept by the source, for the resumed run."""
        if wait([batch], LAST_ANSWER_SECONDS).not_done:
            self._note(
                f"atropos: the API server did not answer within {LAST_ANSWER_SECONDS:g} s; a batch that it still sends "
                "is lost"
            )

    def before_wake(self) -> None:
        if self._asleep_since is None:
            return
        held = time.monotonic() - self._asleep_since
        if held > LONGEST_HOLD:
            self._note(
                f"atropos: requests were held for {held:.0f} s while the policy trained; environments give up after "
                "--env.worker_timeout, 600 s by default"
            )

    def settle(self) -> dict[str, float]:
        self._source.settle()
        return self._source.metrics()

    def state_dict(self) -> dict[str, Any]:
        return self._source.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._source.load_state_dict(state)

    def close(self) -> None:
        # First no new requests, then an answer to those that wait, then the connections.
        self._engines.closed = True
        self._driver.abort()
        for server in self._servers:
            server.close()
        for link in self._links:
            link.close()
        self._waiting.shutdown(wait=False, cancel_futures=True)


class RankServing:
    """Every other rank: drives its engine for the requests that rank 0 sends on."""

    def __init__(self, driver: Driver, end: LinkedInbox) -> None:
        self._driver = driver
        self._end = end

    def before_wake(self) -> None:
        pass

    def collect(self, step: int, world: World) -> list[Group] | None:
        self.serve(step)
        return world.from_main(lambda: None)  # rank 0's batch: what it makes is made there alone

    def serve(self, step: int) -> None:
        """Until rank 0 ends the phase."""
        while not self._end.ended(step + 1):
            self._driver.step()
        if self._end.aborted:
            self._driver.abort()
        else:
            self._driver.drain()

    def settle(self) -> dict[str, float]:
        return {}

    def state_dict(self) -> None:
        return None

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass

    def close(self) -> None:
        self._driver.abort()
        self._end.close()


class ServedSupply:
    """A Supply of what environments in other processes have sampled here."""

    def __init__(self, role: Role, world: World, stop_asked: Callable[[], bool], probe: list[int]) -> None:
        """probe: for the first freshness check, before anything was sampled."""
        self._role = role
        self._world = world
        self._stop_asked = stop_asked
        self._probe = probe

    def order(self, step: int) -> Order:
        if self._world.from_main(self._stop_asked):
            raise Stopped
        self._role.before_wake()
        return Order(probe=self._probe, collect=lambda: self._collect(step))

    def _collect(self, step: int) -> list[Group]:
        groups = self._role.collect(step, self._world)
        if groups is None:
            raise Stopped
        self._probe = groups[0].rollouts[0].token_ids
        return groups

    def settle(self, groups: list[Group]) -> BatchResult:
        return BatchResult(trained_now=list(range(len(groups))), metrics=self._role.settle())

    def state_dict(self) -> dict[str, Any] | None:
        return self._role.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._role.load_state_dict(state)

    def close(self) -> None:
        self._role.close()
