"""What Atropos' API server keeps: one trainer's wishes, its environments, and scored groups on their way between them.

Plain state without HTTP. It answers as atroposlib 0.4.0 does, but for accidents there that help nobody: a group that
comes before the trainer does not spoil its registration, a batch asked for after a reset gets the same answer as before
the first registration, an environment without a name gets one, and an unknown one is told so instead of failing.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Any

from colocated_grpo.atropos.grouping import choose_batch, parts_of_a_group
from colocated_grpo.atropos.wire import EnvRegistration, Registration

Group = dict[str, Any]

LEAST_WEIGHT = 0.01
NAMELESS = "env"
NOT_REGISTERED = {"status": "error", "message": "Trainer not registered. Call /register first.", "batch": []}


class UnknownEnvironment(Exception):
    """An environment id that this server has not given."""


class QueueFull(Exception):
    """More sequences are waiting than the server wants to hold."""


@dataclass
class Env:
    env_id: int
    settings: EnvRegistration
    group_size: int
    connected: bool = True

    @property
    def share(self) -> float | None:
        """Least share of a batch that is owed to it now."""
        return self.settings.min_batch_allocation if self.connected else None


class Exchange:
    def __init__(self, max_queued: int) -> None:
        """max_queued: sequences; posting more raises QueueFull."""
        self._max_queued = max_queued
        self.reset()

    def reset(self) -> None:
        self._trainer: Registration | None = None
        self._started = False
        self._step = 0
        self._envs: list[Env] = []
        self._queue: list[Group] = []
        self._parts: dict[int, list[Group]] = {}
        self._formed: list[list[Group]] = []
        self._latest: Group | None = None

    def register(self, registration: Registration) -> dict[str, Any]:
        """The first registration counts until a reset."""
        if self._trainer is None:
            self._trainer = registration
            self._step = registration.starting_step
        return {"uuid": uuid.uuid4().int}

    def register_env(self, settings: EnvRegistration) -> dict[str, Any]:
        if self._trainer is None or not self._started:
            return {"status": "wait for trainer to start"}
        namesakes = sum(env.settings.desired_name == settings.desired_name for env in self._envs)
        env = Env(len(self._envs), settings, settings.group_size)
        self._envs.append(env)
        return {
            "status": "success",
            "env_id": env.env_id,
            "wandb_name": f"{settings.desired_name or NAMELESS}_{namesakes}",
            "checkpoint_dir": self._trainer.checkpoint_dir,
            "starting_step": self._step,
            "checkpoint_interval": self._trainer.save_checkpoint_interval,
            "num_steps": self._trainer.num_steps,
        }

    def disconnect_env(self, env_id: int) -> dict[str, Any]:
        try:
            self._env(env_id).connected = False
        except UnknownEnvironment as error:
            return {"status": "failure", "error": str(error)}
        return {"status": "success"}

    def _env(self, env_id: int) -> Env:
        if not 0 <= env_id < len(self._envs):
            raise UnknownEnvironment(f"no environment has the id {env_id}; register again with POST /register-env")
        return self._envs[env_id]

    def wandb_info(self) -> dict[str, Any]:
        trainer = self._trainer
        return {"group": trainer and trainer.wandb_group, "project": trainer and trainer.wandb_project}

    def info(self) -> dict[str, int]:
        if self._trainer is None:
            return {"batch_size": -1, "max_token_len": -1}
        return {"batch_size": self._trainer.batch_size, "max_token_len": self._trainer.max_token_len}

    def status(self) -> dict[str, int]:
        return {"current_step": self._step, "queue_size": len(self._queue)}

    def latest_example(self) -> Group:
        empty = ["tokens", "masks", "scores", "advantages", "ref_logprobs", "generation_params", "inference_logprobs"]
        return self._latest or {name: [] for name in [*empty, "messages", "images"]}

    def post(self, group: Group) -> dict[str, Any]:
        """Queue a group; a part of one waits until its environment's parts add up to a whole group."""
        return self.post_all([group])[0]

    def post_all(self, groups: list[Group]) -> list[dict[str, Any]]:
        """All or none: who is refused sends the whole list again, and what was kept would be trained twice."""
        if self._queued() + sum(map(_room, groups)) > self._max_queued:
            raise QueueFull(f"{self._queued()} sequences are waiting for the trainer; the limit is {self._max_queued}")
        return [self._post(group) for group in groups]

    def _post(self, group: Group) -> dict[str, Any]:
        env_id = group["env_id"]
        if env_id is not None and 0 <= env_id < len(self._envs):
            wanted = self._envs[env_id].group_size
            if len(group["tokens"]) != wanted:
                return self._post_part(env_id, group, wanted)
        self._enqueue(group)
        return {"status": "received"}

    def _post_part(self, env_id: int, group: Group, wanted: int) -> dict[str, Any]:
        parts = self._parts.setdefault(env_id, [])
        parts.append(group)
        chosen = set(parts_of_a_group([_size(part) for part in parts], wanted))
        for position in sorted(chosen):
            self._enqueue(parts[position])
        self._parts[env_id] = [part for position, part in enumerate(parts) if position not in chosen]
        return {"status": "buffered", "buffer_size": sum(map(_size, self._parts[env_id]))}

    def _enqueue(self, group: Group) -> None:
        self._queue.append(group)
        self._latest = group

    def _queued(self) -> int:
        waiting = [self._queue, *self._parts.values(), *self._formed]
        return sum(_room(group) for groups in waiting for group in groups)

    def batch(self) -> dict[str, Any]:
        """The newest batch formed; forms all that the queue allows when none is left."""
        if self._trainer is None:
            return NOT_REGISTERED
        self._started = True
        if not self._formed:
            while batch := self._form():
                self._formed.append(batch)
            self._step += len(self._formed)
        return {"batch": self._formed.pop() if self._formed else None}

    def _form(self) -> list[Group]:
        least = {env.env_id: env.share for env in self._envs if env.share is not None}
        sizes, envs = [_size(group) for group in self._queue], [group["env_id"] for group in self._queue]
        chosen = choose_batch(sizes, envs, self._trainer.batch_size, least)
        batch = [self._queue[position] for position in chosen]
        left = set(range(len(self._queue))) - set(chosen)
        self._queue = [self._queue[position] for position in sorted(left)]
        return batch

    def status_env(self, env_id: int) -> dict[str, Any]:
        """How much this environment shall produce: queued groups in its own size, and its weight among the others."""
        env = self._env(env_id)
        own = [_size(group) for group in self._queue if group["env_id"] == env_id]
        env.group_size = max([env.group_size, *own])
        largest = max([1, *map(_size, self._queue)])
        allocated = sum(other.share for other in self._envs if other.share is not None)
        return {
            "current_step": self._step,
            "queue_size": (sum(own) + self._of_others(env_id, largest)) // env.group_size,
            "unallocated_fraction": 1.0 - min(allocated, 1.0),
            "self_queue_size": sum(own) // env.group_size,
            "max_group_size": largest,
            "env_weight": self._weight(env),
        }

    def _of_others(self, env_id: int, largest: int) -> int:
        """Sequences of other environments, in whole packs, beyond what is owed to them anyway."""
        if largest == 1:
            return 0
        counts: dict[int | None, int] = {}
        for group in self._queue:
            if group["env_id"] != env_id:
                counts[group["env_id"]] = counts.get(group["env_id"], 0) + _size(group)
        batch_size = self._trainer.batch_size if self._trainer else 0
        owed = {env.env_id: int(batch_size * env.share) for env in self._envs if env.share is not None}
        return sum(max(0, -(-count // largest) * largest - owed.get(env, 0)) for env, count in counts.items())

    def _weight(self, env: Env) -> float:
        def size(one: Env) -> float:
            return one.settings.max_token_length * one.settings.weight

        total = sum(max(0.0, size(other)) for other in self._envs if other.connected)
        return max(LEAST_WEIGHT, size(env) / total) if total else LEAST_WEIGHT


def _size(group: Group) -> int:
    return len(group["tokens"])


def _room(group: Group) -> int:
    """What it counts against the limit: a group without sequences may hold any amount of text."""
    return max(1, _size(group))
