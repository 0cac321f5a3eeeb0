"""The trainer's side of Atropos' API: a client, and batches from a server that may start late, restart, be reset, or
send malformed groups."""

import random
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from colocated_grpo.atropos.reader import MISSING_LOGPROBS, GroupReader, ReadBatch, Registration
from colocated_grpo.environments.base import EnvironmentSetupError
from colocated_grpo.errors import NothingUsable
from colocated_grpo.settings.schema import Config
from colocated_grpo.types import Group, JsonObject
from colocated_grpo.web.client import JsonClient, RequestRejected, Unavailable, until_available
from colocated_grpo.web.server import RareNote

UNSET = -1
"""Reported by GET /info while no trainer is registered."""
BATCH_SECONDS = 300.0
"""Timeout of GET /batch. The server removes a batch from its queue before compressing it, which is slow for millions of
tokens. If the client times out before it has received the batch, the batch is lost."""
REGISTRATION_ATTEMPTS = 3
"""Maximum consecutive resets. An environment that posts between reset and registration makes an attempt fail."""
POLL_SECONDS = 0.5
MAX_RETRY_SECONDS = 30.0
EXPLAIN_SECONDS = 60.0
"""Wait for a batch before a log line with the number of groups in the server's queue. It doubles with each line."""

Number = Annotated[float, msgspec.Meta(ge=0, lt=2**53)]


def trainer_of(config: Config, folder: Path) -> Registration:
    """Return the registration of a run at the API server."""
    return Registration(
        batch_size=round(config.atropos_share) * config.rollout.group_size,
        max_token_len=config.max_sequence_tokens + 1,
        checkpoint_dir=str(folder),
        save_checkpoint_interval=config.checkpoint.every or config.training_steps,
        num_steps=config.training_steps,
        wandb_group=config.tracking.wandb_group or "",
        wandb_project=config.tracking.wandb_project,
    )


class AtroposClient:
    """HTTP calls of one trainer. Methods raise Unavailable without a usable response, RequestRejected on 4xx."""

    def __init__(
        self, url: str, trainer: Registration, *, may_reset: bool, timeout: float = 30.0, api_key: str | None = None
    ) -> None:
        """may_reset: allow deleting another trainer's registration with its queue and environments."""
        self.url = url
        self.batch_size = trainer.batch_size
        self._trainer = trainer
        self._may_reset = may_reset
        self._http = JsonClient(url, timeout=timeout, api_key=api_key)

    def is_registered(self) -> bool:
        """Return True if this trainer is registered. Raises EnvironmentSetupError if one with other settings is."""
        info = self.get("/info")
        expected = {"batch_size": self._trainer.batch_size, "max_token_len": self._trainer.max_token_len}
        registered = {name: info.get(name, UNSET) for name in expected}
        if registered != expected and registered["batch_size"] != UNSET and not self._may_reset:
            theirs, ours = (
                " and ".join(f"{name}={value}" for name, value in each.items()) for each in (registered, expected)
            )
            problem = f"{self.url} is registered with {theirs} and this run needs {ours}; restart the API server"
            advice = "set reset: true in the atropos entry to empty it (its queue and its environments are lost)"
            raise EnvironmentSetupError(f"environments: {problem}, or {advice}")
        return registered == expected

    def register(self, step: int, note: Callable[[str], None]) -> list[object] | None:
        """Register as the server's trainer. Return a batch if one was already waiting.

        GET /info verifies it: atroposlib's server silently keeps no registration if an environment has already posted.
        A registration with other settings is reset only with `may_reset`.
        """
        for _ in range(REGISTRATION_ATTEMPTS):
            self._http.post("/register", {**msgspec.structs.asdict(self._trainer), "starting_step": step})
            if self.is_registered():
                return self.batch()
            note(f"atropos: {self.url} did not keep this registration; resetting the server with GET /reset_data")
            self._http.get("/reset_data")
        raise Unavailable("it does not keep a registration")

    def batch(self) -> list[object] | None:
        """Return the groups of the next batch, unchecked; None while the server has none."""
        response = self.get("/batch", BATCH_SECONDS)
        if response.get("status") == "error":
            raise Unavailable("the registration was lost: the server was restarted or reset")
        if (batch := response.get("batch", 0)) is not None and not isinstance(batch, list):
            raise Unavailable("the batch of GET /batch is not a list")
        return batch or None

    def status(self) -> dict[str, float]:
        """Return current_step (batches formed, not trained) and queue_size (waiting groups)."""
        try:
            status = msgspec.convert(self.get("/status"), dict[str, Number])
            return {"current_step": status["current_step"], "queue_size": status["queue_size"]}
        except (msgspec.ValidationError, KeyError):
            raise Unavailable("the response of GET /status is not that of Atropos' API") from None

    def get(self, path: str, timeout: float | None = None) -> JsonObject:
        response = self._http.get(path, timeout)
        if not isinstance(response, dict):
            raise Unavailable(f"the response of GET {path} is not that of Atropos' API")
        return response


@dataclass(eq=False)
class AtroposSource:
    """Batches for rank 0. `wait_for_groups` may run on another thread while no other method is called."""

    client: AtroposClient
    reader: GroupReader
    connect_timeout: float
    unusable_timeout: float | None
    """In seconds; None: no limit."""
    note: Callable[[str], None]
    keep: Callable[[list[object]], None]

    def __post_init__(self) -> None:
        self._registered = False
        self._num_registrations = 0
        self._num_failures = 0
        """Consecutive failed requests for a batch."""
        self._unusable_since: float | None = None
        """Arrival time of the first batch without a valid sequence. Reset by a batch with a valid sequence."""
        self._note_dropped = RareNote(self.note)
        self._untrained: deque[list[object]] = deque()
        """Received batches that are not yet trained, oldest first. The server no longer has them."""
        self._groups_read = 0
        """Number of groups in all batches trained so far: the prompt index of the next batch's first group."""
        self._last = ReadBatch()
        """Groups of the last batch, and counts of all batches read by the last `wait_for_groups`."""
        self._status: dict[str, float] = {}
        """The server's status after the last usable batch, for the metrics."""

    def connect(self) -> None:
        """Wait until the server is reachable, and check its registration. Raises EnvironmentSetupError."""
        try:
            until_available(self.client.is_registered, self.connect_timeout, POLL_SECONDS)
        except (Unavailable, RequestRejected) as error:
            reason = f"within {self.connect_timeout:g} s ({error})" if isinstance(error, Unavailable) else str(error)
            problem = f"no Atropos API there, {reason}; start run-api, or python -m colocated_grpo.atropos.api"
            raise EnvironmentSetupError(f"environments: atropos: url={self.client.url!r}: {problem}") from None

    def wait_for_groups(self, step: int, policy_version: int, stop: threading.Event) -> list[Group] | None:
        """Return the next batch, the same until `settle` is called; None once `stop` is set. Raises NothingUsable."""
        began, due = time.monotonic(), EXPLAIN_SECONDS
        self._last = ReadBatch()
        while not stop.is_set():
            if self._untrained:
                if groups := self._read(self._untrained[0], policy_version):
                    return groups
                self._untrained.popleft()
                self._check_patience()
            elif pause := self.fetch(step):
                if (waited := time.monotonic() - began) > due:
                    due *= 2
                    self._explain_missing_batch(waited)
                stop.wait(pause)
        return None

    def fetch(self, step: int) -> float:
        """Request a batch, after registering if needed. Returns 0 if a batch has arrived, else the seconds to wait."""
        try:
            if self._registered:
                items = self.client.batch()
            else:
                items = self.client.register(step, self.note)
                if self._num_registrations:
                    self.note(f"atropos: registered again at {self.client.url}")
                self._registered = True
                self._num_registrations += 1
            self._num_failures = 0
        except (Unavailable, RequestRejected) as error:
            # Register again after any failure: after a reset, atroposlib's /batch responds with status 500.
            self._registered = False
            self._num_failures += 1
            pause = min(MAX_RETRY_SECONDS, 2.0 ** (self._num_failures - 1) * POLL_SECONDS)
            if self._num_failures == 1 or pause == MAX_RETRY_SECONDS:
                often = f"at most every {MAX_RETRY_SECONDS:g} s"
                self.note(f"atropos: no batch from {self.client.url} ({error}); trying again, {often}")
            return pause * random.uniform(0.5, 1.0)
        if not items:
            return POLL_SECONDS * random.uniform(0.5, 1.5)
        self._untrained.append(items)
        return 0.0

    def _read(self, items: list[object], policy_version: int) -> list[Group]:
        self.keep(items)
        batch = self.reader.read(items, self._groups_read, policy_version)
        self._last.update(batch)
        if batch.dropped:
            self._note_dropped(f"atropos: dropped {self._last.description()}")
        if batch.groups:
            self._unusable_since = None
            with suppress(Unavailable, RequestRejected):
                self._status = self.client.status()
        return batch.groups

    def _check_patience(self) -> None:
        """Raise NothingUsable once batches have arrived for `unusable_timeout` and none of them was usable."""
        now = time.monotonic()
        if self._unusable_since is None:
            self._unusable_since = now
        if self.unusable_timeout is None or now - self._unusable_since < self.unusable_timeout:
            return
        problem = (
            f"environments: nothing that {self.client.url} sent for {self.unusable_timeout:g} s can be trained: "
            f"dropped {self._last.description()}"
        )
        if MISSING_LOGPROBS in self._last.dropped:
            raise NothingUsable(  # first sentence as in Atropos' own trainer
                f"GRPO requires inference_logprobs for importance sampling! {problem}; sample through managed_server "
                "with server_type vllm, or set missing_logprobs: recompute in the atropos entry"
            )
        raise NothingUsable(f"{problem}; correct the environment, then resume")

    def _explain_missing_batch(self, waited: float) -> None:
        try:
            num_waiting = int(self.client.status()["queue_size"])
        except (Unavailable, RequestRejected):
            return
        if num_waiting:
            advice = (
                f"batches are made of whole groups whose sizes divide {self.client.batch_size} sequences; in run-api, "
                "a group of another size, or an environment with min_batch_allocation that has ended, blocks all "
                "others: restart it, or use python -m colocated_grpo.atropos.api"
            )
        elif self.reader.origins:
            advice = (
                "environments have sampled here, but post no group: do they skip groups of equal scores "
                "(--env.ensure_scores_are_not_same False, or easier items), and is this their --env.rollout_server_url?"
            )
        else:
            advice = (
                "is an environment running, with this --env.rollout_server_url, with --env.wandb_name and with this "
                "trainer's server as --openai.base_url (server.more_ports: [9004, 9005, 9006, 9007] if it ignores it)?"
            )
        self.note(f"atropos: no batch for {waited:.0f} s; {self.client.url} holds {num_waiting} groups; {advice}")

    def settle(self) -> None:
        """Mark the last batch as trained."""
        self._untrained.popleft()
        self._groups_read += len(self._last.groups)

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the last batch."""
        num_sequences = sum(len(group.rollouts) for group in self._last.groups)
        row = {
            "atropos/dropped": float(self._last.dropped.total()),
            "atropos/unknown_origin": self._last.num_unknown / num_sequences if num_sequences else 0.0,
            "atropos/reconnects": float(max(0, self._num_registrations - 1)),
        }
        row |= {f"atropos/dropped/{reason}": float(count) for reason, count in self._last.dropped.items()}
        return row | {f"atropos/{name}": value for name, value in self._status.items()}

    def state_dict(self) -> JsonObject:
        """Return groups read, untrained batches and origins: a few MB. The server's queue outlives this process."""
        origins = self.reader.origins.state_dict()
        return {"groups_read": self._groups_read, "taken": list(self._untrained), "origins": origins}

    def load_state_dict(self, state: JsonObject) -> None:
        """Restore a state, whose batches come first. Raises EnvironmentSetupError for another kind of source."""
        if "groups_read" not in state:
            raise EnvironmentSetupError(
                "environments: the checkpoint is from a run with other environments than this atropos entry; an exact "
                "resume needs the same ones"
            )
        self._groups_read = state["groups_read"]
        self._untrained.extendleft(reversed(state.get("taken", [])))
        self.reader.origins.load_state_dict(state.get("origins", []))
