"""Supplies groups from Atropos environments, which sample from this run's engines and post to an API server.

Phases of a step:
SERVE  engines awake: requests are answered, rank 0 polls the API server for a batch
DRAIN  a batch has arrived: running requests finish, new requests wait in the inbox with their connections open
TRAIN  engines asleep: /health still returns 200, so environments wait instead of giving up
SYNC   the engines get the new weights, and SERVE begins again
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass

from colocated_grpo.atropos.source import AtroposSource
from colocated_grpo.environments.base import BatchResult
from colocated_grpo.rollout.collect import Stopped
from colocated_grpo.rollout.inbox import Driver, Inbox
from colocated_grpo.rollout.supply import Order, Supply
from colocated_grpo.runtime.distributed import World
from colocated_grpo.servers.rank_links import LoadBalancer, RankLink, RemoteInbox
from colocated_grpo.types import Group, JsonObject

LONG_SLEEP_SECONDS = 480.0
"""Longer sleeps are logged. By default environments abandon a rollout after 600 s, including its pending requests."""
LAST_BATCH_SECONDS = 10.0
"""Maximum wait, after a stop request, for a batch that was already requested. The server sends each batch only once, so
an abandoned batch would be lost. The wait is short, because schedulers soon kill a stopping process."""


@dataclass(eq=False)
class AtroposSupply(Supply):
    """A rank's `Supply` of groups from Atropos environments."""

    world: World
    driver: Driver
    stop_requested: Callable[[], bool]
    disconnect: Callable[[], None]
    """Closes ports and rank links."""

    def order(self, step: int) -> Order:
        if self.world.from_main(self.stop_requested):
            raise Stopped
        return lambda: self._serve(step)

    def _serve(self, step: int) -> list[Group]:
        """Serve until a batch has arrived and return its groups. Collective, engine awake. Raises Stopped."""
        raise NotImplementedError

    def settle(self, groups: list[Group]) -> BatchResult:
        return BatchResult(trained_now=list(range(len(groups))))

    def close(self) -> None:
        self.driver.abort()
        self.disconnect()


@dataclass(eq=False, kw_only=True)
class MainSupply(AtroposSupply):
    """Supply of rank 0: serves HTTP, drives its own engine, and gets batches from the API server."""

    source: AtroposSource
    inbox: Inbox
    rank_links: list[RankLink]
    engines: LoadBalancer
    policy_version: Callable[[], int]
    note: Callable[[str], None]

    def __post_init__(self) -> None:
        self._asleep_since = time.monotonic()
        self._batch_thread = ThreadPoolExecutor(1, thread_name_prefix="atropos")

    def _serve(self, step: int) -> list[Group]:
        # An error of the source is raised on all ranks with the same message.
        return self.world.from_main(lambda: self._serve_clients(step))

    def _serve_clients(self, step: int) -> list[Group]:
        if (asleep := time.monotonic() - self._asleep_since) > LONG_SLEEP_SECONDS:
            rule = "environments give up after --env.worker_timeout, 600 s by default"
            self.note(f"atropos: requests were pending for {asleep:.0f} s while the policy trained; {rule}")
        end = threading.Event()
        batch = self._batch_thread.submit(self.source.wait_for_groups, step, self.policy_version(), end)
        batch.add_done_callback(lambda _: self.inbox.wake())
        try:
            while not batch.done() and not self.stop_requested():
                self.driver.step()
        finally:
            end.set()
            stopped = self.stop_requested()
            for link in self.rank_links:
                link.end_phase(step + 1, abort=stopped)
        if stopped:
            self.driver.abort()
            if wait([batch], LAST_BATCH_SECONDS).not_done:  # a batch that is being received is saved by the source
                problem = f"the API server did not answer within {LAST_BATCH_SECONDS:g} s"
                self.note(f"atropos: {problem}; if it still sends a batch, that batch is lost")
            raise Stopped
        self.driver.drain()
        self._asleep_since = time.monotonic()
        groups = batch.result()
        assert groups is not None, "`end` was set after the batch had arrived"
        return groups

    def settle(self, groups: list[Group]) -> BatchResult:
        self.source.settle()
        return BatchResult(trained_now=list(range(len(groups))), metrics=self.source.metrics())

    def state_dict(self) -> JsonObject:
        return self.source.state_dict()

    def load_state_dict(self, state: JsonObject) -> None:
        self.source.load_state_dict(state)

    def close(self) -> None:
        # Order matters: reject new requests, respond to pending ones, then close the connections.
        self.engines.closed = True
        super().close()
        self._batch_thread.shutdown(wait=False, cancel_futures=True)


@dataclass(eq=False, kw_only=True)
class WorkerSupply(AtroposSupply):
    """Supply of other ranks: the engine serves requests sent by rank 0 over the rank link."""

    inbox: RemoteInbox

    def _serve(self, step: int) -> list[Group]:
        self.inbox.serve(self.driver, step + 1)
        return self.world.from_main(list)  # receives rank 0's groups; the argument is not called on this rank
