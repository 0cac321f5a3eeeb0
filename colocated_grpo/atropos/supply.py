"""A Supply of groups that Atropos environments sample from this run's engines, score, and post to an API server.

Phases of a step:
SERVE  engines awake: requests are answered, rank 0 polls the API server for a batch
DRAIN  a batch has arrived: running requests finish, new ones wait in the inbox with their connections open
TRAIN  engines asleep: /health still returns 200, so environments wait instead of giving up
SYNC   the engines get the new weights, and SERVE begins again
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Protocol

from colocated_grpo.atropos.source import AtroposSource
from colocated_grpo.environments.base import BatchResult
from colocated_grpo.rollout.collect import Stopped
from colocated_grpo.rollout.inbox import Driver, Inbox
from colocated_grpo.rollout.supply import Order
from colocated_grpo.runtime.distributed import World
from colocated_grpo.servers.rank_links import LoadBalancer, RankLink, RemoteInbox
from colocated_grpo.types import Group, JsonObject
from colocated_grpo.web.server import ServerThread

LONG_SLEEP_SECONDS = 480.0
"""Longer sleeps are logged. Environments abandon a rollout after 600 s by default, pending requests included."""
LAST_BATCH_SECONDS = 10.0
"""Longest wait, after a stop request, for a batch already requested: the server sends each batch only once. Short,
because schedulers soon kill a stopping process."""

Note = Callable[[str], None]


class ServingRank(Protocol):
    """One rank's part of serving."""

    def before_wake(self) -> None:
        """Run just before the engine wakes."""
        ...

    def collect(self, step: int, world: World) -> list[Group] | None:
        """Serve until a batch has arrived and return its groups; None on a stop request. Collective, engine awake."""
        ...

    def settle(self) -> dict[str, float]:
        """Mark the batch as trained and return its metrics."""
        ...

    def state_dict(self) -> JsonObject | None: ...

    def load_state_dict(self, state: JsonObject) -> None: ...

    def close(self) -> None: ...


class MainRank:
    """Rank 0: HTTP, its own engine, and the API server's batches."""

    def __init__(
        self,
        source: AtroposSource,
        driver: Driver,
        inbox: Inbox,
        rank_links: list[RankLink],
        engines: LoadBalancer,
        servers: list[ServerThread],
        stop_requested: Callable[[], bool],
        policy_version: Callable[[], int],
        note: Note,
    ) -> None:
        self._source = source
        self._driver = driver
        self._inbox = inbox
        self._rank_links = rank_links
        self._engines = engines
        self._servers = servers
        self._stop_requested = stop_requested
        self._policy_version = policy_version
        self._note = note
        self._asleep_since: float | None = None
        self._batch_thread = ThreadPoolExecutor(1, thread_name_prefix="atropos")

    def collect(self, step: int, world: World) -> list[Group] | None:
        # Served inside from_main: an error of the source then ends all ranks with the same message.
        return world.from_main(lambda: self._serve(step))

    def _serve(self, step: int) -> list[Group] | None:
        end = threading.Event()
        batch = self._batch_thread.submit(self._source.wait_for_groups, step, self._policy_version(), end)
        batch.add_done_callback(lambda _: self._inbox.wake())
        try:
            while not batch.done() and not self._stop_requested():
                self._driver.step()
        finally:
            end.set()
            stopped = self._stop_requested()
            for link in self._rank_links:
                link.end_phase(step + 1, abort=stopped)
        if stopped:
            self._driver.abort()
            self._wait_for_last(batch)
            return None
        self._driver.drain()
        self._asleep_since = time.monotonic()
        return batch.result()

    def _wait_for_last(self, batch: Future[list[Group] | None]) -> None:
        """Wait for a batch that is being received. The source keeps it for the resumed run."""
        if wait([batch], LAST_BATCH_SECONDS).not_done:
            self._note(
                f"atropos: the API server did not answer within {LAST_BATCH_SECONDS:g} s; if it still sends a batch, "
                "that batch is lost"
            )

    def before_wake(self) -> None:
        if self._asleep_since is None:
            return
        asleep = time.monotonic() - self._asleep_since
        if asleep > LONG_SLEEP_SECONDS:
            self._note(
                f"atropos: requests were pending for {asleep:.0f} s while the policy trained; environments give up "
                "after --env.worker_timeout, 600 s by default"
            )

    def settle(self) -> dict[str, float]:
        self._source.settle()
        return self._source.metrics()

    def state_dict(self) -> JsonObject:
        return self._source.state_dict()

    def load_state_dict(self, state: JsonObject) -> None:
        self._source.load_state_dict(state)

    def close(self) -> None:
        # In this order: reject new requests, respond to pending ones, close the connections.
        self._engines.closed = True
        self._driver.abort()
        for server in self._servers:
            server.close()
        for link in self._rank_links:
            link.close()
        self._batch_thread.shutdown(wait=False, cancel_futures=True)


class WorkerRank:
    """Every other rank: its engine, for the requests that rank 0 sends over the rank link."""

    def __init__(self, driver: Driver, inbox: RemoteInbox) -> None:
        self._driver = driver
        self._inbox = inbox

    def before_wake(self) -> None:
        pass

    def collect(self, step: int, world: World) -> list[Group] | None:
        self._inbox.serve(self._driver, step + 1)
        return world.from_main(lambda: None)  # receives rank 0's groups; the argument is not called on this rank

    def settle(self) -> dict[str, float]:
        return {}

    def state_dict(self) -> None:
        return None

    def load_state_dict(self, state: JsonObject) -> None:
        pass

    def close(self) -> None:
        self._driver.abort()
        self._inbox.close()


class AtroposSupply:
    """A `Supply` whose groups come from Atropos environments."""

    def __init__(self, rank: ServingRank, world: World, stop_requested: Callable[[], bool]) -> None:
        self._rank = rank
        self._world = world
        self._stop_requested = stop_requested

    def order(self, step: int) -> Order:
        if self._world.from_main(self._stop_requested):
            raise Stopped
        self._rank.before_wake()
        return lambda: self._collect(step)

    def _collect(self, step: int) -> list[Group]:
        groups = self._rank.collect(step, self._world)
        if groups is None:
            raise Stopped
        return groups

    def settle(self, groups: list[Group]) -> BatchResult:
        return BatchResult(trained_now=list(range(len(groups))), metrics=self._rank.settle())

    def release_engine(self) -> None:
        """Do nothing: requests of environments stay queued while no batch is collected."""

    def state_dict(self) -> JsonObject | None:
        return self._rank.state_dict()

    def load_state_dict(self, state: JsonObject) -> None:
        self._rank.load_state_dict(state)

    def close(self) -> None:
        self._rank.close()
