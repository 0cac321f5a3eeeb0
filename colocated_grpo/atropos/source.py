"""Batches from an Atropos API server that may start late, restart, be reset, or send malformed groups."""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from colocated_grpo.atropos.client import AtroposClient, NotRegistered
from colocated_grpo.atropos.rows import MISSING_LOGPROBS, GroupReader, ReadBatch
from colocated_grpo.environments.base import EnvironmentSetupError
from colocated_grpo.errors import NothingUsable
from colocated_grpo.types import Group, JsonObject
from colocated_grpo.web.client import RequestRejected, Unavailable

POLL_SECONDS = 0.5
MAX_RETRY_SECONDS = 30.0
EXPLAIN_SECONDS = 60.0
"""While no batch arrives, the log says at this interval how many groups wait in the server's queue."""
REPORT_SECONDS = 10.0
"""Shortest time between two lines about dropped sequences: a client can post thousands of groups a second."""
MAX_NAMED = 5
"""Environments that such a line names."""
NEEDS_LOGPROBS = "GRPO requires inference_logprobs for importance sampling!"
"""As in Atropos' own trainer."""


class AtroposSource:
    """Batches for rank 0. `wait_for_groups` may run on another thread while no other method is called."""

    def __init__(
        self,
        client: AtroposClient,
        reader: GroupReader,
        *,
        connect_timeout: float,
        unusable_timeout: float | None,
        note: Callable[[str], None],
        keep: Callable[[list[object]], None],
    ) -> None:
        """connect_timeout, unusable_timeout: in seconds. note: logs one line. keep: called with each batch as
        received."""
        self._client = client
        self._reader = reader
        self._connect_timeout = connect_timeout
        self._unusable_timeout = unusable_timeout
        self._note = note
        self._keep = keep
        self._registered = False
        self._num_failures = 0
        """Consecutive failed requests for a batch."""
        self._num_reconnects = 0
        self._unusable_since: float | None = None
        """Arrival of the first batch without a valid sequence since the last one with some."""
        self._unreported = ReadBatch()
        """Counts of dropped sequences that the log does not name yet."""
        self._reported = -REPORT_SECONDS
        self._untrained: deque[list[object]] = deque()
        """Batches received and not yet trained, the next one first. The server no longer has them."""
        self._groups_read = 0
        """Groups of all batches trained so far; the prompt index of the next batch's first group."""
        self._num_groups = 0
        self._num_sequences = 0
        """Counts of the batch last read."""
        self._last = ReadBatch()
        """Counts of the last `wait_for_groups`, over all batches that it read."""
        self._status: dict[str, float] = {}
        """The server's status after the last usable batch, for the metrics."""

    def connect(self) -> None:
        """Check, before the engines are built, that the server is reachable and has no conflicting registration.

        Raises EnvironmentSetupError after `connect_timeout`.
        """
        deadline = time.monotonic() + self._connect_timeout
        while True:
            try:
                self._client.check()
                return
            except Unavailable as error:
                reason = str(error)
            except RequestRejected as error:
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
        """Register. A failure is logged, and `wait_for_groups` tries again.

        Building the engines takes minutes, so the server may have stopped or restarted since `connect`.
        """
        try:
            self._register(step)
        except (Unavailable, RequestRejected, NotRegistered) as error:
            reason = str(error) or "the registration was lost"
            self._note(
                f"atropos: could not register at {self._client.url} ({reason}); trying again with the next batch"
            )

    def _register(self, step: int) -> None:
        if items := self._client.register(step, self._note):
            self._untrained.append(items)
        self._registered = True

    def wait_for_groups(self, step: int, policy_version: int, stop: threading.Event) -> list[Group] | None:
        """Return the groups of the next batch; None once `stop` is set.

        Raises NothingUsable where no batch has had a valid sequence for too long. The same batch is returned again,
        also by a resumed run, until `settle` is called.
        """
        explained = time.monotonic()
        self._last = ReadBatch()
        while not stop.is_set():
            if self._untrained:
                if groups := self._read(self._untrained[0], policy_version):
                    self._unusable_since = None
                    return groups
                self._untrained.popleft()
                self._check_patience()
            elif not self._fetch(step, stop):
                if time.monotonic() - explained > EXPLAIN_SECONDS:
                    explained = time.monotonic()
                    self._explain_missing_batch()
                stop.wait(POLL_SECONDS * random.uniform(0.5, 1.5))
        return None

    def _read(self, items: list[object], policy_version: int) -> list[Group]:
        self._keep(items)
        batch = self._reader.read(items, self._groups_read, policy_version)
        self._count(batch)
        if batch.groups:
            with suppress(Unavailable, RequestRejected):
                self._status = self._client.status()
        return batch.groups

    def _fetch(self, step: int, stop: threading.Event) -> bool:
        """Request a batch once and return True if one is available. Pauses after a failure."""
        try:
            if not self._registered:
                self._register(step)
                self._num_reconnects += 1
                self._note(f"atropos: registered again at {self._client.url}")
            if not self._untrained and (items := self._client.batch()):
                self._untrained.append(items)
            self._num_failures = 0
        except NotRegistered:
            self._registered = False
            self._note(f"atropos: {self._client.url} has lost the registration of this trainer; registering again")
        except (Unavailable, RequestRejected) as error:
            # Register again: after a reset, atroposlib's /batch fails with status 500 until a trainer registers.
            self._registered = False
            self._num_failures += 1
            pause = min(MAX_RETRY_SECONDS, 2.0 ** (self._num_failures - 1) * POLL_SECONDS)
            if self._num_failures == 1 or pause == MAX_RETRY_SECONDS:
                self._note(
                    f"atropos: no batch from {self._client.url} ({error}); trying again, at most every "
                    f"{MAX_RETRY_SECONDS:g} s"
                )
            stop.wait(pause * random.uniform(0.5, 1.0))
        return bool(self._untrained)

    def _count(self, batch: ReadBatch) -> None:
        self._last.update(batch)
        self._unreported.update(batch)
        self._num_groups = len(batch.groups)
        self._num_sequences = sum(len(group.rollouts) for group in batch.groups)
        now = time.monotonic()
        if self._unreported.dropped and now - self._reported >= REPORT_SECONDS:
            self._note(f"atropos: dropped {_description(self._unreported)}")
            self._unreported, self._reported = ReadBatch(), now

    def _check_patience(self) -> None:
        """Raise NothingUsable once unusable batches have arrived for `unusable_timeout`.

        A client that posts invalid groups does not end the run as long as any other posts valid ones.
        """
        now = time.monotonic()
        if self._unusable_since is None:
            self._unusable_since = now
        if self._unusable_timeout is None or now - self._unusable_since < self._unusable_timeout:
            return
        problem = (
            f"environments: nothing that {self._client.url} sent for {self._unusable_timeout:g} s can be trained: "
            f"dropped {_description(self._last)}"
        )
        if MISSING_LOGPROBS in self._last.dropped:
            advice = "sample through managed_server with server_type vllm, or set missing_logprobs: recompute"
            raise NothingUsable(f"{NEEDS_LOGPROBS} {problem}; {advice} in the atropos entry")
        raise NothingUsable(f"{problem}; correct the environment, then resume")

    def _explain_missing_batch(self) -> None:
        try:
            status = self._client.status()
        except (Unavailable, RequestRejected):
            return
        num_waiting = int(status["queue_size"])
        if num_waiting >= self._client.batch_size:
            advice = self._explain_stall()
        elif num_waiting:
            advice = (
                "batches are made of whole groups whose sizes are powers of two that divide the batch of "
                f"{self._client.batch_size} sequences"
            )
        else:
            advice = (
                "is an environment running, with this --env.rollout_server_url, with --env.wandb_name and with this "
                "trainer's server as --openai.base_url?"
            )
        self._note(
            f"atropos: no batch for {EXPLAIN_SECONDS:g} s; {self._client.url} holds {num_waiting} groups; {advice}"
        )

    def _explain_stall(self) -> str:
        """Return why no batch comes from a queue that holds enough sequences for one."""
        batch_size, suspect = self._client.batch_size, ""
        with suppress(Unavailable, RequestRejected):
            size = self._client.latest_size()
            suspect = f" (the latest has {size})" if size and batch_size % size else ""
        return (
            f"these suffice for a batch of {batch_size} sequences, so a group of a size that does not divide "
            f"{batch_size}{suspect}, or an environment with min_batch_allocation that has ended, blocks this server: "
            "restart it, or use python -m colocated_grpo.atropos.api, which neither blocks"
        )

    def settle(self) -> None:
        """Mark the last batch as trained."""
        self._untrained.popleft()
        self._groups_read += self._num_groups

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the last batch."""
        row = {
            "atropos/dropped": float(self._last.dropped.total()),
            "atropos/unknown_origin": self._last.num_unknown / self._num_sequences if self._num_sequences else 0.0,
            "atropos/reconnects": float(self._num_reconnects),
        }
        row |= {f"atropos/dropped/{reason}": float(count) for reason, count in self._last.dropped.items()}
        return row | {f"atropos/{name}": value for name, value in self._status.items()}

    def state_dict(self) -> JsonObject:
        """Return the count of groups read, the untrained batches, and the origins of served completions: a few MB.

        The server's queue is not part of the state: it outlives this process.
        """
        origins = self._reader.origins.state_dict()
        return {"groups_read": self._groups_read, "taken": list(self._untrained), "origins": origins}

    def load_state_dict(self, state: JsonObject) -> None:
        """Restore a saved state. Its batches are trained before one that came with this process's registration.

        Raises EnvironmentSetupError for the state of another kind of source.
        """
        if "groups_read" not in state:
            raise EnvironmentSetupError(
                "environments: the checkpoint is from a run with other environments than this atropos entry; an exact "
                "resume needs the same ones"
            )
        self._groups_read = state["groups_read"]
        self._untrained.extendleft(reversed(state.get("taken", [])))
        self._reader.origins.load_state_dict(state.get("origins", []))


def _description(batch: ReadBatch) -> str:
    """Return how many sequences of which environments were dropped, and why."""
    reasons = ", ".join(f"{count} {reason}" for reason, count in batch.dropped.most_common())
    senders = [sender for sender, _ in batch.senders.most_common(MAX_NAMED)]
    others = [f"{len(batch.senders) - MAX_NAMED} others"] if len(batch.senders) > MAX_NAMED else []
    return f"{batch.dropped.total()} sequences of {', '.join([*senders, *others])}: {reasons}"
