"""State of Atropos' API server: one trainer's registration, its environments, and the groups queued for the trainer.

No HTTP here. Responses are those of atroposlib 0.4.0, with four of its defects fixed:
- A group posted before the trainer has registered does not prevent the registration.
- GET /batch after a reset returns the same as before the first registration, not an internal error.
- An environment without a name gets one.
- An unknown environment id gets an error that says what to do, not an internal error.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass

from colocated_grpo.atropos.grouping import choose_batch, choose_parts
from colocated_grpo.atropos.wire import EnvRegistration, Registration, ScoredData
from colocated_grpo.types import JsonObject

MIN_WEIGHT = 0.01
DEFAULT_NAME = "env"
NOT_REGISTERED: JsonObject = {
    "status": "error",
    "message": "Trainer not registered. Call /register first.",
    "batch": [],
}


class UnknownEnvironment(Exception):
    """An environment id that this server has not assigned."""


class QueueFull(Exception):
    """The queue has reached its limit of sequences."""


@dataclass
class Environment:
    """A registered environment."""

    env_id: int
    settings: EnvRegistration
    group_size: int
    """The registered size, or the size of its largest group seen in the queue if that is larger."""
    connected: bool = True

    @property
    def min_allocation(self) -> float | None:
        """Smallest fraction of a batch reserved for it; None while disconnected."""
        return self.settings.min_batch_allocation if self.connected else None

    @property
    def token_weight(self) -> float:
        return self.settings.max_token_length * self.settings.weight


class Exchange:
    """The server's state. Not thread-safe."""

    def __init__(self, max_queued: int) -> None:
        """max_queued: in sequences."""
        self._max_queued = max_queued
        self.reset()

    def reset(self) -> None:
        self._trainer: Registration | None = None
        self._started = False
        """True after the trainer's first request for a batch. Environments can register from then on."""
        self._step = 0
        self._envs: list[Environment] = []
        self._queue: list[ScoredData] = []
        self._parts: dict[int, list[ScoredData]] = {}
        """Environment id -> groups of a size other than its group size, kept until some add up to it."""
        self._formed: list[list[ScoredData]] = []
        """Batches taken off the queue and not yet sent."""
        self._latest: ScoredData | None = None

    def register(self, registration: Registration) -> JsonObject:
        """Register the trainer. Later registrations have no effect until a reset."""
        if self._trainer is None:
            self._trainer = registration
            self._step = registration.starting_step
        return {"uuid": uuid.uuid4().int}

    def register_env(self, settings: EnvRegistration) -> JsonObject:
        if self._trainer is None or not self._started:
            return {"status": "wait for trainer to start"}
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
        return {"current_step": self._step, "queue_size": len(self._queue)}

    def latest_example(self) -> JsonObject:
        if self._latest is not None:
            return self._latest.as_json()
        empty = ["tokens", "masks", "scores", "advantages", "ref_logprobs", "generation_params", "inference_logprobs"]
        return {name: [] for name in [*empty, "messages", "images"]}

    def post(self, group: ScoredData) -> JsonObject:
        """Queue a group, or buffer it until parts from its environment add up to a group. Raises QueueFull."""
        return self.post_all([group])[0]

    def post_all(self, groups: list[ScoredData]) -> list[JsonObject]:
        """Queue all groups or none. Clients resend a rejected list, and a group kept from it would be trained twice."""
        queued = self._num_queued()
        if queued + sum(map(_queue_size, groups)) > self._max_queued:
            raise QueueFull(f"{queued} sequences are waiting for the trainer; the limit is {self._max_queued}")
        return [self._post(group) for group in groups]

    def _post(self, group: ScoredData) -> JsonObject:
        env_id = group.env_id
        if env_id is not None and 0 <= env_id < len(self._envs):
            group_size = self._envs[env_id].group_size
            if group.size != group_size:
                return self._post_part(env_id, group, group_size)
        self._enqueue(group)
        return {"status": "received"}

    def _post_part(self, env_id: int, group: ScoredData, group_size: int) -> JsonObject:
        parts = self._parts.setdefault(env_id, [])
        parts.append(group)
        chosen = set(choose_parts([part.size for part in parts], group_size))
        for position in sorted(chosen):
            self._enqueue(parts[position])
        remaining = [part for position, part in enumerate(parts) if position not in chosen]
        self._parts[env_id] = remaining
        return {"status": "buffered", "buffer_size": sum(part.size for part in remaining)}

    def _enqueue(self, group: ScoredData) -> None:
        self._queue.append(group)
        self._latest = group

    def _num_queued(self) -> int:
        return sum(
            _queue_size(group) for groups in (self._queue, *self._parts.values(), *self._formed) for group in groups
        )

    def batch(self) -> JsonObject:
        """Return the most recently formed batch. When none is left, form as many as the queue allows."""
        if self._trainer is None:
            return NOT_REGISTERED
        self._started = True
        if not self._formed:
            while batch := self._form_batch(self._trainer.batch_size):
                self._formed.append(batch)
            self._step += len(self._formed)
        return {"batch": [group.as_json() for group in self._formed.pop()] if self._formed else None}

    def _form_batch(self, batch_size: int) -> list[ScoredData]:
        allocations = {env.env_id: env.min_allocation for env in self._envs if env.min_allocation is not None}
        sizes, envs = [group.size for group in self._queue], [group.env_id for group in self._queue]
        chosen = choose_batch(sizes, envs, batch_size, allocations)
        batch = [self._queue[position] for position in chosen]
        remaining = set(range(len(self._queue))) - set(chosen)
        self._queue = [self._queue[position] for position in sorted(remaining)]
        return batch

    def status_env(self, env_id: int) -> JsonObject:
        """Return the values by which an environment paces itself. Queue sizes are in units of its group size."""
        env = self._env(env_id)
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


def _queue_size(group: ScoredData) -> int:
    """Return the group's size for the queue limit: at least 1, since a group without sequences may hold much text."""
    return max(1, group.size)
