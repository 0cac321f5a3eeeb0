"""Batches from an Atropos API server that may be late, restarted, reset, or full of nonsense."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from colocated_grpo.atropos.client import AtroposClient, NotRegistered
from colocated_grpo.atropos.rows import Reader, Reading
from colocated_grpo.environments.base import EnvironmentSetupError
from colocated_grpo.errors import RunError
from colocated_grpo.types import Group
from colocated_grpo.web.client import Refused, Unavailable

POLL_SECONDS = 0.5
LONGEST_PAUSE = 30.0
PATIENCE = 60.0
"""Seconds without a batch after which a person is told what the server holds."""
UNUSABLE_BATCHES = 8
"""In a row, after which the run ends: an environment that only sends what cannot be trained is set up wrongly."""


class AtroposSource:
    """Lives on rank 0. `wait_for_groups` may run in a thread; nothing else is called meanwhile."""

    def __init__(
        self,
        client: AtroposClient,
        reader: Reader,
        *,
        connect_timeout: float,
        note: Callable[[str], None],
        keep: Callable[[list[Any]], None],
    ) -> None:
        """keep: is given each batch as it came."""
        self._client = client
        self._reader = reader
        self._connect_timeout = connect_timeout
        self._note = note
        self._keep = keep
        self._registered = False
        self._failures = 0
        self._reconnects = 0
        self._unusable = 0
        self._taken: deque[list[Any]] = deque()
        """Batches that the server no longer has and that are not trained yet. The first is the next one to read."""
        self._groups_read = 0
        """Of the batches before those."""
        self._groups = 0
        self._sequences = 0
        self._last = Reading()
        self._status: dict[str, float] = {}
        """Of the server when the last batch came."""

    def connect(self) -> None:
        """See that the server is there and fits, before anything expensive is built.

        Raises EnvironmentSetupError with one line.
        """
        deadline = time.monotonic() + self._connect_timeout
        while True:
            try:
                self._client.check()
                return
            except Unavailable as error:
                reason = str(error)
            except Refused as error:
                raise self._no_api(str(error)) from None
            if time.monotonic() >= deadline:
                raise self._no_api(f"within {self._connect_timeout:g} s ({reason})")
            time.sleep(POLL_SECONDS)

    def _no_api(self, reason: str) -> EnvironmentSetupError:
        return EnvironmentSetupError(
            f"environments: atropos: url={self._client.url!r}: no Atropos API there, {reason}; start run-api, or "
            "python -m colocated_grpo.atropos.api"
        )

    def begin(self, step: int) -> None:
        """Register if the server is there, else leave it to `wait_for_groups`: the engines took minutes to build, in
        which a server may be restarted as at any other time."""
        try:
            self.register(step)
        except (Unavailable, Refused, NotRegistered) as error:
            reason = str(error) or "it forgot this trainer"
            self._note(
                f"atropos: could not register at {self._client.url} ({reason}); trying again with the next batch"
            )

    def register(self, step: int) -> None:
        """Become the server's trainer, as of `step`, and let environments in."""
        if items := self._client.register(step, self._note):
            self._taken.append(items)
        self._registered = True

    def wait_for_groups(self, step: int, policy_version: int, stop: threading.Event) -> list[Group] | None:
        """The groups of the next batch; None once `stop` is set. Raises RunError where no batch can be trained.

        They come again, also in a resumed run, until `settle` is called.
        """
        told = time.monotonic()
        self._last = Reading()
        while not stop.is_set():
            if self._taken:
                if groups := self._read(self._taken[0], policy_version):
                    return groups
                self._taken.popleft()
            elif not self._take(step, stop):
                if time.monotonic() - told > PATIENCE:
                    told = time.monotonic()
                    self._say_what_is_missing()
                stop.wait(POLL_SECONDS * random.uniform(0.5, 1.5))
        return None

    def _read(self, items: list[Any], policy_version: int) -> list[Group]:
        self._keep(items)
        reading = self._reader.read(items, self._groups_read, policy_version)
        self._count(reading)
        if reading.groups:
            with suppress(Unavailable, Refused):
                self._status = self._client.status()
        return reading.groups

    def _take(self, step: int, stop: threading.Event) -> bool:
        """One attempt to get a batch, followed by a pause when it failed."""
        try:
            if not self._registered:
                self.register(step)
                self._reconnects += 1
                self._note(f"atropos: registered again at {self._client.url}")
            if not self._taken and (items := self._client.batch()):
                self._taken.append(items)
            self._failures = 0
        except NotRegistered:
            self._registered = False
            self._note(f"atropos: {self._client.url} no longer knows this trainer; registering again")
        except (Unavailable, Refused) as error:
            # Also after a reset, where /batch is a server error until somebody registers.
            self._registered = False
            self._failures += 1
            pause = min(LONGEST_PAUSE, 2.0 ** (self._failures - 1) * POLL_SECONDS)
            if self._failures == 1 or pause == LONGEST_PAUSE:
                self._note(f"atropos: no batch from {self._client.url} ({error}); trying again, at most every 30 s")
            stop.wait(pause * random.uniform(0.5, 1.0))
        return bool(self._taken)

    def _count(self, reading: Reading) -> None:
        self._last.dropped.update(reading.dropped)
        self._last.unknown += reading.unknown
        self._groups = len(reading.groups)
        self._sequences = sum(len(group.rollouts) for group in reading.groups)
        if reading.dropped:
            self._note(f"atropos: left out {reading.dropped.total()} sequences: {_listed(reading.dropped)}")
        self._unusable = 0 if reading.groups else self._unusable + 1
        if self._unusable == UNUSABLE_BATCHES:
            raise RunError(
                f"environments: the last {UNUSABLE_BATCHES} batches of {self._client.url} held nothing that can be "
                f"trained; reasons in this step: {_listed(self._last.dropped)}"
            )

    def _say_what_is_missing(self) -> None:
        try:
            status = self._client.status()
        except (Unavailable, Refused):
            return
        waiting = int(status.get("queue_size", 0))
        advice = (
            "batches are made of whole groups whose sizes are powers of two that divide the batch of "
            f"{self._client.batch_size} sequences"
            if waiting
            else "is an environment running, with this --env.rollout_server_url, with --env.wandb_name and with this "
            "trainer's server as --openai.base_url?"
        )
        self._note(f"atropos: no batch for {PATIENCE:g} s; {self._client.url} holds {waiting} groups; {advice}")

    def settle(self) -> None:
        """The groups of the last batch are trained now."""
        self._taken.popleft()
        self._groups_read += self._groups

    def metrics(self) -> dict[str, float]:
        """Of the last batch."""
        row = {
            "atropos/dropped": float(self._last.dropped.total()),
            "atropos/unknown_origin": self._last.unknown / self._sequences if self._sequences else 0.0,
            "atropos/reconnects": float(self._reconnects),
        }
        row |= {f"atropos/dropped/{reason}": float(count) for reason, count in self._last.dropped.items()}
        return row | {f"atropos/{name}": value for name, value in self._status.items()}

    def state_dict(self) -> dict[str, Any]:
        """What is queued lives in the API server and outlasts this process; what was taken from there is kept here.

        So is how the queued groups were sampled: a few MB at most.
        """
        origins = self._reader.origins.state_dict()
        return {"groups_read": self._groups_read, "taken": list(self._taken), "origins": origins}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "groups_read" not in state:
            raise EnvironmentSetupError(
                "environments: the checkpoint is of a run with other environments than this atropos entry; an exact "
                "resume needs the same ones"
            )
        self._groups_read = state["groups_read"]
        # Before what came with this process's own registration.
        self._taken.extendleft(reversed(state.get("taken", [])))
        self._reader.origins.load_state_dict(state.get("origins", []))


def _listed(reasons: Counter[str]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
