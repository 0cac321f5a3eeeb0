"""Groups whose reward is not complete before their game has ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from colocated_grpo.types import Group, Prompt, Rollout, Score


@dataclass(frozen=True, slots=True)
class _Held:
    group: Group
    carried_out: int
    """Position of the sibling whose return is awaited."""
    since: int


class HeldGroups:
    """By turn. Given out with the return of the sibling that was carried out, or as they are after `max_wait` steps."""

    def __init__(self, max_wait: int) -> None:
        self._max_wait = max_wait
        self._step = 0
        self._held: dict[str, _Held] = {}

    def __len__(self) -> int:
        return len(self._held)

    def add(self, turn_id: str, group: Group, carried_out: int) -> None:
        # The frozen game was for the score; kept, it would be most of a checkpoint.
        slim = replace(group, prompt=replace(group.prompt, item={}))
        self._held[turn_id] = _Held(slim, carried_out, self._step)

    def end_step(self, returns: Mapping[str, float]) -> tuple[list[Group], list[Group]]:
        """Groups that are complete now, and groups that have waited too long. returns: by turn.

        A return for a turn that is not held comes too late: the turn was trained without it.
        """
        ended = [(held, value) for key, value in returns.items() if (held := self._held.pop(key, None)) is not None]
        overdue = [key for key, held in self._held.items() if self._step - held.since >= self._max_wait]
        self._step += 1
        return [_with_return(*each) for each in ended], [self._held.pop(key).group for key in overdue]

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": self._step,
            "held": [
                {"turn": key, "group": _plain(held.group), "carried_out": held.carried_out, "since": held.since}
                for key, held in self._held.items()
            ],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._step = state["step"]
        self._held = {
            row["turn"]: _Held(_group(row["group"]), row["carried_out"], row["since"]) for row in state["held"]
        }


def _with_return(held: _Held, value: float) -> Group:
    rollouts = list(held.group.rollouts)
    rollout = rollouts[held.carried_out]
    score = rollout.score
    if score.reward is not None:
        score = replace(score, reward=score.reward + value, parts={**score.parts, "return": value})
    rollouts[held.carried_out] = replace(rollout, score=score)
    return replace(held.group, rollouts=rollouts)


def _plain(group: Group) -> dict[str, Any]:
    """Shallow: asdict would copy every token of every held rollout before each step."""
    rollouts = [{**_fields(rollout), "score": _fields(rollout.score)} for rollout in group.rollouts]
    return {"prompt": _fields(group.prompt), "rollouts": rollouts}


def _fields(record: Any) -> dict[str, Any]:
    return {each.name: getattr(record, each.name) for each in fields(record)}


def _group(plain: dict[str, Any]) -> Group:
    rollouts = [Rollout(**{**row, "score": Score(**row["score"])}) for row in plain["rollouts"]]
    return Group(prompt=Prompt(**plain["prompt"]), rollouts=rollouts)
