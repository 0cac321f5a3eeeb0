"""State of Atropos' API server: one trainer's registration, its environments, and the groups queued for the trainer.

No HTTP here. Responses are those of atroposlib 0.4.0, with its defects fixed:
- A group posted before the trainer has registered does not prevent the registration.
- GET /batch after a reset returns the same as before the first registration, not an internal error.
- An environment without a name gets one.
- An unknown environment id gets an error that says what to do, not an internal error.
- A group of a size that can never be served is refused. In atroposlib it stops all other groups.
- Parts that add up to a group are served together. In atroposlib those of uneven sizes are never served.
- An environment that has died does not keep its reserved part of every batch for ever.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field

from colocated_grpo.atropos.grouping import choose_batch, choose_parts, is_servable
from colocated_grpo.atropos.posted import InvalidGroup, ScoredGroup
from colocated_grpo.atropos.wire import EnvRegistration, Registration
from colocated_grpo.types import JsonObject

MIN_WEIGHT = 0.01
DEFAULT_NAME = "env"
MAX_ENVIRONMENTS = 1 << 14
MAX_FORMED = 64
"""Batches formed together: each takes time linear in the queue."""
MAX_PARTS = 256
"""Parts of one environment that wait for others to complete a group. The oldest are dropped."""
SILENT_SECONDS = 600.0
"""An environment that neither posts nor asks for its status for so long has no reserved part until it does again.
Environments ask every second, and give up on a rollout after 600 s."""


class NotRegistered(Exception):
    """No trainer has registered since the server started or was reset."""


class UnknownEnvironment(Exception):
    """An environment id that this server has not assigned."""


class QueueFull(Exception):
    """The queue has reached its limit of sequences or bytes."""


@dataclass
class Environment:
    """A registered environment."""

    env_id: int
    settings: EnvRegistration
    group_size: int
    """The registered size, or the size of its largest group seen in the queue if that is larger."""
    connected: bool = True
    last_seen: float = field(default_factory=time.monotonic)

    @property
    def min_allocation(self) -> float | None:
        """Smallest fraction of a batch reserved for it; None while disconnected or silent."""
        is_alive = self.connected and time.monotonic() - self.last_seen < SILENT_SECONDS
        return self.settings.min_batch_allocation if is_alive else None

    @property
    def token_weight(self) -> float:
        return self.settings.max_token_length * self.settings.weight


@dataclass(frozen=True)
class QueuedGroup:
    """One unit of a batch: a group of its environment's full size, or parts that add up to it."""

    parts: list[ScoredGroup]
    """As posted. The trainer receives each as a group of its own, with its own baseline."""
    size: int
    """Number of sequences of all parts."""
    env_id: int | None


@dataclass
class Volume:
    """An amount of groups."""

    sequences: int = 0
    num_bytes: int = 0

    def add(self, groups: Iterable[ScoredGroup], sign: int = 1) -> None:
        for group in groups:
            self.sequences += sign * group.size
            self.num_bytes += sign * len(group.text)

    def remove(self, groups: Iterable[ScoredGroup]) -> None:
        self.add(groups, sign=-1)


class Exchange:
    """The server's state. Not thread-safe."""

    def __init__(self, limit: Volume) -> None:
        """limit: of groups that wait for the trainer."""
        self._limit = limit
        self.reset()

    def reset(self) -> None:
        self._trainer: Registration | None = None
        self._started = False
        """True after the trainer's first request for a batch. Environments can register from then on."""
        self._step = 0
        self._envs: list[Environment] = []
        self._queue: list[QueuedGroup] = []
        self._parts: dict[int, list[ScoredGroup]] = {}
        """Environment id -> groups of a size other than its group size, kept until some add up to it."""
        self._waiting = Volume()
        """All of the queue, the parts and the formed batches."""
        self._formed: list[list[ScoredGroup]] = []
        """Batches taken off the queue and not yet sent."""
        self._latest: ScoredGroup | None = None

    def register(self, registration: Registration) -> JsonObject:
        """Register the trainer. Later registrations have no effect until a reset."""
        if self._trainer is None:
            self._trainer = registration
            self._step = registration.starting_step
            self._drop_unservable(registration.batch_size)
        return {"uuid": uuid.uuid4().int}

    def _drop_unservable(self, batch_size: int) -> None:
        """Drop groups posted before the batch size was known that can never be served."""
        never = [group for group in self._queue if not is_servable(group.size, batch_size)]
        self._waiting.remove(_parts_of(never))
        self._queue = [group for group in self._queue if is_servable(group.size, batch_size)]

    def register_env(self, settings: EnvRegistration) -> JsonObject:
        if self._trainer is None or not self._started:
            return {"status": "wait for trainer to start"}
        self._check_size(settings.group_size)
        if len(self._envs) >= MAX_ENVIRONMENTS:
            raise QueueFull(f"{MAX_ENVIRONMENTS} environments have registered; restart the server")
        namesakes = sum(env.settings.desired_name == settings.desired_name for env in self._envs)
        env = Environment(len(self._envs), settings, settings.group_size)
        self._envs.append(env)
        return {
            "status": "success",
            "env_id": env.env_id,
            "wandb_name": f"{settings.desired_name or DEFAULT_NAME}_{namesakes}",
            "checkpoint_dir": self._trainer.checkpoint_dir,
            "starting_step": self._step,
            "checkpoint_interval": self._trainer.save_checkpoint_interval,
            "num_steps": self._trainer.num_steps,
        }

    def disconnect_env(self, env_id: int) -> JsonObject:
        try:
            self._env(env_id).connected = False
        except UnknownEnvironment as error:
            return {"status": "failure", "error": str(error)}
        return {"status": "success"}

    def _env(self, env_id: int) -> Environment:
        if not 0 <= env_id < len(self._envs):
            raise UnknownEnvironment(f"env_id={env_id}: unknown environment; register again with POST /register-env")
        return self._envs[env_id]

    def wandb_info(self) -> dict[str, str | None]:
        if self._trainer is None:
            return {"group": None, "project": None}
        return {"group": self._trainer.wandb_group, "project": self._trainer.wandb_project}

    def info(self) -> dict[str, int]:
        if self._trainer is None:
            return {"batch_size": -1, "max_token_len": -1}
        return {"batch_size": self._trainer.batch_size, "max_token_len": self._trainer.max_token_len}

    def status(self) -> dict[str, int]:
        return {"current_step": self._step, "queue_size": sum(len(group.parts) for group in self._queue)}

    def latest_example(self) -> ScoredGroup | None:
        return self._latest

    def post(self, group: ScoredGroup) -> JsonObject:
        """Queue a group, or buffer it until parts from its environment add up to a group.

        Raises QueueFull, and InvalidGroup for a size that can never be served.
        """
        return self.post_all([group])[0]

    def post_all(self, groups: list[ScoredGroup]) -> list[JsonObject]:
        """Queue all groups or none. Clients resend a rejected list, and a group kept from it would be trained twice."""
        for group in groups:
            self._check_group(group)
        if self._excess(groups):
            self._drop_parts()
        if excess := self._excess(groups):
            raise QueueFull(excess)
        self._waiting.add(groups)
        return [self._post(group) for group in groups]

    def _excess(self, groups: list[ScoredGroup]) -> str | None:
        """Return which limit the queue would exceed with these groups; None if it would not."""
        new, now = Volume(), self._waiting
        new.add(groups)
        if now.sequences + new.sequences > self._limit.sequences:
            return f"{now.sequences} sequences are waiting for the trainer; the limit is {self._limit.sequences}"
        if now.num_bytes + new.num_bytes > self._limit.num_bytes:
            return f"{now.num_bytes} bytes are waiting for the trainer; the limit is {self._limit.num_bytes}"
        return None

    def _drop_parts(self) -> None:
        """Give up incomplete groups, which may never be completed, in favour of whole ones."""
        for parts in self._parts.values():
            self._waiting.remove(parts)
        self._parts.clear()

    def _check_group(self, group: ScoredGroup) -> None:
        env = self._known(group.env_id)
        if env is None or group.size == env.group_size:
            self._check_size(group.size)
        elif not 0 < group.size < env.group_size:
            raise InvalidGroup(
                f"a group of {group.size} sequences can never be served: environment {env.env_id} has registered a "
                f"group size of {env.group_size}, and smaller groups are collected until they add up to it"
            )

    def _check_size(self, size: int) -> None:
        """Raise InvalidGroup where groups of this size never make a batch."""
        if size == 0:
            raise InvalidGroup("a group needs at least one sequence")
        if self._trainer is not None and not is_servable(size, self._trainer.batch_size):
            raise InvalidGroup(
                f"a group of {size} sequences can never be served: groups are not split, and a batch has "
                f"{self._trainer.batch_size} sequences; use a group size that divides it"
            )

    def _known(self, env_id: int | None) -> Environment | None:
        """Return a registered environment."""
        return self._envs[env_id] if env_id is not None and 0 <= env_id < len(self._envs) else None

    def _post(self, group: ScoredGroup) -> JsonObject:
        env = self._known(group.env_id)
        if env is not None:
            env.last_seen = time.monotonic()
            if group.size != env.group_size:
                return self._post_part(env.env_id, group, env.group_size)
        self._enqueue([group])
        return {"status": "received"}

    def _post_part(self, env_id: int, group: ScoredGroup, group_size: int) -> JsonObject:
        parts = [*self._parts.get(env_id, []), group]
        self._waiting.remove(parts[:-MAX_PARTS])
        parts = parts[-MAX_PARTS:]
        chosen = set(choose_parts([part.size for part in parts], group_size))
        if chosen:
            self._enqueue([parts[position] for position in sorted(chosen)])
        remaining = [part for position, part in enumerate(parts) if position not in chosen]
        self._parts[env_id] = remaining
        return {"status": "buffered", "buffer_size": sum(part.size for part in remaining)}

    def _enqueue(self, parts: list[ScoredGroup]) -> None:
        self._queue.append(QueuedGroup(parts, sum(part.size for part in parts), parts[0].env_id))
        self._latest = parts[-1]

    def batch(self) -> list[ScoredGroup] | None:
        """Return the most recently formed batch. When none is left, form as many as the queue allows.

        Raises NotRegistered.
        """
        if self._trainer is None:
            raise NotRegistered
        self._started = True
        if not self._formed:
            while len(self._formed) < MAX_FORMED and (batch := self._form_batch(self._trainer.batch_size)):
                self._formed.append(batch)
            self._step += len(self._formed)
        if not self._formed:
            return None
        batch = self._formed.pop()
        self._waiting.remove(batch)
        return batch

    def _form_batch(self, batch_size: int) -> list[ScoredGroup]:
        allocations = {env.env_id: env.min_allocation for env in self._envs if env.min_allocation is not None}
        # Of so many groups whose sizes divide the batch, some make a batch: the sum of n's divisors is below 16 n.
        first = self._queue if allocations else self._queue[: 16 * batch_size]
        sizes, envs = [group.size for group in first], [group.env_id for group in first]
        chosen = choose_batch(sizes, envs, batch_size, allocations)
        batch = _parts_of(first[position] for position in chosen)
        taken = set(chosen)
        rest = [group for position, group in enumerate(first) if position not in taken]
        self._queue[: len(first)] = rest
        return batch

    def status_env(self, env_id: int) -> JsonObject:
        """Return the values by which an environment paces itself. Queue sizes are in units of its group size."""
        env = self._env(env_id)
        env.last_seen = time.monotonic()
        own = [group.size for group in self._queue if group.env_id == env_id]
        env.group_size = max([env.group_size, *own])
        largest = max([1, *(group.size for group in self._queue)])
        allocated = sum(other.min_allocation for other in self._envs if other.min_allocation is not None)
        return {
            "current_step": self._step,
            "queue_size": (sum(own) + self._num_from_others(env_id, largest)) // env.group_size,
            "unallocated_fraction": 1.0 - min(allocated, 1.0),
            "self_queue_size": sum(own) // env.group_size,
            "max_group_size": largest,
            "env_weight": self._weight(env),
        }

    def _num_from_others(self, env_id: int, largest: int) -> int:
        """Return the queued sequences of other environments, in whole packs, beyond their reserved numbers."""
        if largest == 1:
            return 0
        counts: dict[int | None, int] = {}
        for group in self._queue:
            if group.env_id != env_id:
                counts[group.env_id] = counts.get(group.env_id, 0) + group.size
        batch_size = self._trainer.batch_size if self._trainer else 0
        reserved: dict[int | None, int] = {
            env.env_id: int(batch_size * env.min_allocation) for env in self._envs if env.min_allocation is not None
        }
        return sum(max(0, -(-count // largest) * largest - reserved.get(env, 0)) for env, count in counts.items())

    def _weight(self, env: Environment) -> float:
        total = sum(max(0.0, other.token_weight) for other in self._envs if other.connected)
        return max(MIN_WEIGHT, env.token_weight / total) if total else MIN_WEIGHT


def _parts_of(groups: Iterable[QueuedGroup]) -> list[ScoredGroup]:
    """Return the groups as they were posted."""
    return [part for group in groups for part in group.parts]
