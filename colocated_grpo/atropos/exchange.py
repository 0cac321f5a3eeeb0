"""State of Atropos' API server: the trainer's registration, the environments, and the queued groups.

No HTTP here. Responses are those of atroposlib 0.4.0, except for these fixed defects:
- A group posted before the trainer has registered does not prevent the registration.
- GET /batch after a reset returns the same as before the first registration, not an internal error.
- An environment without a name gets a name. An unknown environment id gets an error that says what to do.
- A group of a size that can never be served is rejected. In atroposlib, such a group blocks all other groups.
- Parts that add up to a group are served together. atroposlib never serves parts of uneven sizes.
- An environment reserves its part of each batch only while its groups arrive.
- Batches are served oldest first and counted when served, not newest first and counted when formed.
"""

import uuid
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from msgspec import Meta, Struct

from colocated_grpo.atropos.reader import Count, Name, Registration
from colocated_grpo.types import JsonObject

MIN_WEIGHT = 0.01
DEFAULT_NAME = "env"
MAX_ENVIRONMENTS = 1 << 10
"""One more registration replaces the environment that has been silent for longest, which then has to register again."""
MAX_PARTS = 256
"""Maximum number of an environment's parts that wait for a complete group. Then the oldest parts are dropped."""
PATIENCE = 120
"""Unsuccessful batch requests since an environment's last group that end its reservation: two requests a second."""


class EnvRegistration(Struct):
    """POST /register-env: an environment."""

    max_token_length: Count
    desired_name: Name | None
    """None if the environment was started without --env.wandb_name."""
    weight: Annotated[float, Meta(ge=0, le=1e6)]
    group_size: Count
    min_batch_allocation: Annotated[float, Meta(ge=0, le=1)] | None = None
    """Minimum fraction of every batch from this environment."""


class InvalidGroup(Exception):
    """A rejected group. The message names the violated rule."""


class UnknownEnvironment(Exception):
    """An environment id that this server has not assigned."""


class QueueFull(Exception):
    """The queue has reached its limit of sequences or bytes."""


@dataclass(frozen=True)
class ScoredGroup:
    """A group of sequences, or several parts of a group that were posted separately."""

    size: int
    env_id: int | None
    texts: tuple[bytes, ...]
    """JSON objects as posted. The trainer receives each object as a separate group with its own baseline."""


@dataclass
class RegisteredEnvironment:
    env_id: int
    settings: EnvRegistration
    connected: bool = True
    vain_requests: int = PATIENCE
    """Unsuccessful batch requests since the environment's last group."""
    parts: list[ScoredGroup] = field(default_factory=list)
    """Groups smaller than the environment's group size."""

    @property
    def allocation(self) -> float:
        """Fraction of a batch that is reserved for the environment."""
        is_active = self.connected and self.vain_requests < PATIENCE
        return (is_active and self.settings.min_batch_allocation) or 0.0

    @property
    def token_weight(self) -> float:
        return self.settings.max_token_length * self.settings.weight if self.connected else 0.0


class Exchange:
    """The server's state. Not thread-safe."""

    def __init__(self, max_sequences: int, max_bytes: int) -> None:
        """max_sequences, max_bytes: limits of the groups that wait for the trainer."""
        self._limits = {"sequences": max_sequences, "bytes": max_bytes}
        self.reset()

    def reset(self) -> None:
        self.trainer: Registration | None = None
        self._started = False  # set by the trainer's first request for a batch
        self._step = 0
        self._envs: dict[int, RegisteredEnvironment] = {}
        """By id, the most recently active last."""
        self._num_registered = 0
        self._queue: list[ScoredGroup] = []
        self._waiting: Counter[str] = Counter()
        """Sequences and bytes of the queue and the parts."""
        self.latest: bytes | None = None

    def register(self, registration: Registration) -> JsonObject:
        """Register the trainer. Later registrations have no effect until a reset."""
        if self.trainer is None:
            self.trainer = registration
            self._step = registration.starting_step
            # The batch size was unknown when the queued groups were posted.
            self._queue = [group for group in self._queue if registration.batch_size % group.size == 0]
            self._waiting = _volume(self._queue)
        return {"uuid": uuid.uuid4().int}

    def register_env(self, settings: EnvRegistration) -> JsonObject:
        if self.trainer is None or not self._started:
            return {"status": "wait for trainer to start"}
        self._check_size(settings.group_size)
        if len(self._envs) >= MAX_ENVIRONMENTS:
            silent = self._envs.pop(next(iter(self._envs)))
            self._waiting.subtract(_volume(silent.parts))
        namesakes = sum(env.settings.desired_name == settings.desired_name for env in self._envs.values())
        env = RegisteredEnvironment(self._num_registered, settings)
        self._envs[env.env_id] = env
        self._num_registered += 1
        return {
            "status": "success",
            "env_id": env.env_id,
            "wandb_name": f"{settings.desired_name or DEFAULT_NAME}_{namesakes}",
            "checkpoint_dir": self.trainer.checkpoint_dir,
            "starting_step": self._step,
            "checkpoint_interval": self.trainer.save_checkpoint_interval,
            "num_steps": self.trainer.num_steps,
        }

    def disconnect_env(self, env_id: int) -> JsonObject:
        if (env := self._env(env_id)) is None:
            return {"status": "failure", "error": _unknown(env_id)}
        env.connected = False
        return {"status": "success"}

    def _env(self, env_id: int | None) -> RegisteredEnvironment | None:
        """Return the environment that sends a request, and mark it as active; None if the id is not known."""
        env = None if env_id is None else self._envs.pop(env_id, None)
        if env is not None:
            self._envs[env.env_id] = env
        return env

    def status(self) -> dict[str, int]:
        return {"current_step": self._step, "queue_size": sum(len(group.texts) for group in self._queue)}

    def post(self, groups: Sequence[ScoredGroup]) -> list[JsonObject]:
        """Queue all groups or none: clients resend a rejected list, so an accepted part of it would be trained twice.

        Smaller groups than the environment's wait until some add up to its size. Raises QueueFull or InvalidGroup.
        """
        for group in groups:
            if (env := self._env(group.env_id)) is None or group.size == 0:
                self._check_size(group.size)
            elif group.size > env.settings.group_size:
                sizes = f"environment {env.env_id} has registered a group size of {env.settings.group_size}"
                raise InvalidGroup(f"a group of {group.size} sequences can never be served: {sizes}")
        if self._excess(groups):  # drop incomplete groups, which may never be completed
            for env in self._envs.values():
                env.parts.clear()
            self._waiting = _volume(self._queue)
        if excess := self._excess(groups):
            raise QueueFull(excess)
        self._waiting.update(_volume(groups))
        return [self._post(group) for group in groups]

    def _excess(self, groups: Iterable[ScoredGroup]) -> str | None:
        """Return a line about the limit that the queue would exceed with these groups; None if there is none."""
        new = _volume(groups)
        for unit, limit in self._limits.items():
            if (waiting := self._waiting[unit]) + new[unit] > limit:
                return f"{waiting} {unit} are waiting for the trainer; the limit is {limit}"
        return None

    def _check_size(self, size: int) -> None:
        """Raise InvalidGroup if groups of this size can never form a batch."""
        if size == 0:
            raise InvalidGroup("a group needs at least one sequence")
        if self.trainer is not None and self.trainer.batch_size % size:
            rule = f"groups are not split, and a batch has {self.trainer.batch_size} sequences"
            advice = "use a group size that divides it"
            raise InvalidGroup(f"a group of {size} sequences can never be served: {rule}; {advice}")

    def _post(self, group: ScoredGroup) -> JsonObject:
        env, self.latest = self._env(group.env_id), group.texts[-1]
        response: JsonObject = {"status": "received"}
        if env is not None and group.size < (size := env.settings.group_size):
            env.parts.append(group)
            self._waiting.subtract(_volume(env.parts[:-MAX_PARTS]))
            del env.parts[:-MAX_PARTS]
            chosen = choose_parts([part.size for part in env.parts], size)
            group = ScoredGroup(size, env.env_id, tuple(text for each in chosen for text in env.parts[each].texts))
            env.parts = [part for position, part in enumerate(env.parts) if position not in chosen]
            response = {"status": "buffered", "buffer_size": sum(part.size for part in env.parts)}
            if not chosen:
                return response
        self._queue.append(group)
        if env is not None:
            env.vain_requests = 0
        return response

    def batch(self) -> list[ScoredGroup] | None:
        """Take a batch off the queue; None if none can be formed. A trainer must have registered."""
        assert self.trainer is not None
        self._started = True
        size = self.trainer.batch_size
        reserved = self._reserved(size)
        # Group sizes divide the batch size n, and the sum of n's divisors is below 16 n. So 16 n groups hold a batch.
        first = self._queue if reserved else self._queue[: 16 * size]
        chosen = choose_batch([group.size for group in first], [group.env_id for group in first], size, reserved)
        if not chosen:
            for env in self._envs.values():
                env.vain_requests += 1
            return None
        self._step += 1
        batch, taken = [first[position] for position in chosen], set(chosen)
        self._queue[: len(first)] = [group for position, group in enumerate(first) if position not in taken]
        self._waiting.subtract(_volume(batch))
        return batch

    def _reserved(self, batch_size: int) -> dict[int, int]:
        """Return how many sequences of a batch each environment has reserved, scaled down if they exceed the batch."""
        counts = {env.env_id: int(batch_size * env.allocation) for env in self._envs.values()}
        excess = max(1.0, sum(counts.values()) / batch_size)
        return {env_id: max(1, int(count / excess)) for env_id, count in counts.items() if count}

    def status_env(self, env_id: int) -> JsonObject:
        """Return the values by which an environment paces itself. Queue sizes are in units of its group size."""
        if (env := self._env(env_id)) is None or self.trainer is None:
            raise UnknownEnvironment(_unknown(env_id))
        counts: Counter[int | None] = Counter()
        for group in self._queue:
            counts[group.env_id] += group.size
        own, largest = counts.pop(env_id, 0), max((group.size for group in self._queue), default=1)
        reserved = self._reserved(self.trainer.batch_size)
        # Sequences of other environments, in whole packs of the largest size, without their reserved sequences.
        others = sum(
            max(0, -(-count // largest) * largest - (reserved.get(other, 0) if other is not None else 0))
            for other, count in counts.items()
        )
        total = sum(each.token_weight for each in self._envs.values())
        return {
            "current_step": self._step,
            "queue_size": (own + (others if largest > 1 else 0)) // env.settings.group_size,
            "unallocated_fraction": 1.0 - min(sum(each.allocation for each in self._envs.values()), 1.0),
            "self_queue_size": own // env.settings.group_size,
            "max_group_size": largest,
            "env_weight": max(MIN_WEIGHT, env.token_weight / total if total else 0.0),
        }


def _volume(groups: Iterable[ScoredGroup]) -> Counter[str]:
    volume: Counter[str] = Counter()
    for group in groups:
        volume["sequences"] += group.size
        volume["bytes"] += sum(map(len, group.texts))
    return volume


def _unknown(env_id: int) -> str:
    return f"env_id={env_id}: unknown environment; register again with POST /register-env"


def choose_batch(
    sizes: Sequence[int], envs: Sequence[int | None], batch_size: int, reserved: Mapping[int, int]
) -> list[int]:
    """Return queue positions of groups that form a batch of exactly `batch_size`; empty if there are none.

    Groups are never split. Groups of equal size are collected into packs as large as the largest group, and whole packs
    are taken in order of completion. If the largest groups do not fill a batch, smaller groups are packed without them;
    atroposlib forms no batch in this case.

    sizes, envs: of the queued groups. reserved: environment -> sequences to take from it first, or no batch is formed.
    """
    for pack_size in sorted(set(sizes), reverse=True) if sum(sizes) >= batch_size else []:
        packed = _in_complete_packs(sizes, pack_size)
        if not reserved.keys() <= {envs[position] for position in packed}:
            continue
        chosen: dict[int, None] = {}
        taken: Counter[int | None] = Counter()
        total = 0
        for reserved_only in (True, False):
            for position in packed:
                env, size = envs[position], sizes[position]
                wanted = not reserved_only or (env is not None and taken[env] < reserved.get(env, 0))
                if wanted and position not in chosen and total + size <= batch_size:
                    chosen[position] = None
                    taken[env] += size
                    total += size
        if total == batch_size:
            return list(chosen)
    return []


def _in_complete_packs(sizes: Sequence[int], pack_size: int) -> list[int]:
    """Return the positions in complete packs, pack by pack."""
    open_packs: dict[int, list[int]] = defaultdict(list)
    packed: list[int] = []
    for position, size in enumerate(sizes):
        members = open_packs[size]
        members.append(position)
        if len(members) * size == pack_size:
            packed += members
            members.clear()
    return packed


def choose_parts(sizes: Sequence[int], group_size: int) -> list[int]:
    """Return positions, in order, whose sizes add up to exactly `group_size`; empty if no sizes do."""
    # Subset sum. reached[total]: the position that first reached this total, and the previous total.
    reached: dict[int, tuple[int, int]] = {0: (-1, 0)}
    for position, size in enumerate(sizes):
        for total in list(reached):
            if total + size <= group_size:
                reached.setdefault(total + size, (position, total))
    chosen, total = [], group_size if group_size in reached else 0
    while total:
        position, total = reached[total]
        chosen.append(position)
    return chosen[::-1]
