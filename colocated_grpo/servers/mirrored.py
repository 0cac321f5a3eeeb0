"""An engine that spans several ranks and serves requests of one: each call is repeated on every rank, in order."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from colocated_grpo.rollout.engine import Finished, Part, Request, RolloutEngine, TokenDelta

END = "end"


class EveryRank:
    """Runs named commands on all ranks of a group: rank 0 calls, the others `follow`."""

    def __init__(
        self,
        commands: Mapping[str, Callable[..., Any]],
        group: dist.ProcessGroup | None,
        may_fail_on_one: Collection[str] = (),
    ) -> None:
        """group: None for a single rank.

        may_fail_on_one: commands that may raise ValueError on some ranks only; rank 0 then raises it too.
        """
        self._commands = commands
        self._may_fail_on_one = may_fail_on_one
        self._group = group

    def call(self, name: str, *arguments: Any) -> Any:
        """Broadcast the call, then return this rank's result. Arguments must be picklable. Rank 0 only."""
        self._send(name, arguments)
        return self._run(name, arguments)

    def _run(self, name: str, arguments: tuple[Any, ...]) -> Any:
        if self._group is None or name not in self._may_fail_on_one:
            return self._commands[name](*arguments)
        result, problem = None, None
        try:
            result = self._commands[name](*arguments)
        except ValueError as error:
            problem = str(error)
        problems: list[str | None] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(problems, problem, group=self._group)
        for rank, text in enumerate(problems):
            if text is not None:
                raise ValueError(f"rank {rank} of the engine: {text}")
        return result

    def follow(self) -> None:
        """Run rank 0's calls until `end`. A ValueError is rank 0's to report. Other ranks only."""
        while True:
            box: list[Any] = [None]
            dist.broadcast_object_list(box, src=0, group=self._group)
            name, arguments = box[0]
            if name == END:
                return
            with suppress(ValueError):
                self._run(name, arguments)

    def end(self) -> None:
        """Let the other ranks return from `follow`. Rank 0 only."""
        self._send(END, ())

    def _send(self, name: str, arguments: tuple[Any, ...]) -> None:
        if self._group is not None:
            dist.broadcast_object_list([(name, arguments)], src=0, group=self._group)


def engine_commands(engine: RolloutEngine) -> dict[str, Callable[..., Any]]:
    """Return the commands that `MirroredEngine` calls."""
    return {
        "submit": engine.submit,
        "step": engine.step,
        "abort": engine.abort,
        "top_logprobs": engine.top_logprobs,
        "weights_changed": engine.weights_changed,
        "wake": engine.wake,
        "sleep": engine.sleep,
    }


class MirroredEngine:
    """`RolloutEngine` of rank 0 whose calls run on every rank of the engine."""

    def __init__(self, engine: RolloutEngine, every_rank: EveryRank) -> None:
        """every_rank: has the `engine_commands` of this engine."""
        self._engine = engine
        self._every_rank = every_rank
        self.max_num_seqs = engine.max_num_seqs
        self.admission_cost = engine.admission_cost

    def submit(self, requests: Iterable[Request]) -> None:
        self._every_rank.call("submit", list(requests))

    def step(self) -> Finished:
        return self._every_rank.call("step")

    def deltas(self) -> list[tuple[Hashable, TokenDelta]]:
        return self._engine.deltas()

    def abort(self, keys: Collection[Hashable] | None = None) -> None:
        self._every_rank.call("abort", None if keys is None else list(keys))

    def top_logprobs(self, token_ids: Sequence[int], k: int) -> list[dict[int, float]]:
        return self._every_rank.call("top_logprobs", list(token_ids), k)

    def weights_changed(self, policy_version: int) -> None:
        self._every_rank.call("weights_changed", policy_version)

    def wake(self, part: Part) -> None:
        self._every_rank.call("wake", part)

    def sleep(self) -> None:
        self._every_rank.call("sleep")

    def close(self) -> None:
        """End the other ranks, then this rank's engine."""
        self._every_rank.end()
        self._engine.close()
