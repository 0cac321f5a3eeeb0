"""Groups whose rewards are incomplete until their game has ended."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from colocated_grpo.types import Group, JsonObject, Prompt, Rollout, Score


@dataclass(frozen=True, slots=True)
class _PendingGroup:
    group: Group
    committed: int
    """Index of the committed completion. The return is added to the reward of this completion."""
    since: int
    """Step in which the group was sampled."""


class PendingGroups:
    """Groups by turn id.

    A group is released with the return of its committed completion, or without a return after `max_wait` steps.
    """

    def __init__(self, max_wait: int) -> None:
        self._max_wait = max_wait
        self._step = 0
        self._pending: dict[str, _PendingGroup] = {}

    def __len__(self) -> int:
        return len(self._pending)

    def add(self, turn_id: str, group: Group, committed: int) -> None:
        # The item's game state is needed only for scoring, and would dominate the checkpoint size.
        slim = replace(group, prompt=replace(group.prompt, item={}))
        self._pending[turn_id] = _PendingGroup(slim, committed, self._step)

    def end_step(self, returns: Mapping[str, float]) -> tuple[list[Group], list[Group]]:
        """Remove and return two lists: the groups completed by `returns`, and the overdue groups.

        returns: by turn id. A return for a group that was released earlier is ignored: the group has already trained.
        """
        complete = [
            _with_return(pending, value)
            for turn_id, value in returns.items()
            if (pending := self._pending.pop(turn_id, None)) is not None
        ]
        overdue = [key for key, pending in self._pending.items() if self._step - pending.since >= self._max_wait]
        self._step += 1
        late = [self._pending.pop(turn_id).group for turn_id in overdue]
        # Like game states, routes would dominate the checkpoint size. Without routes, the policy chooses the experts.
        for turn_id, pending in self._pending.items():
            self._pending[turn_id] = replace(pending, group=_without_routes(pending.group))
        return complete, late

    def state_dict(self) -> JsonObject:
        return {
            "step": self._step,
            "pending": {
                turn_id: [_group_state(pending.group), pending.committed, pending.since]
                for turn_id, pending in self._pending.items()
            },
        }

    def load_state_dict(self, state: JsonObject) -> None:
        self._step = state["step"]
        self._pending = {
            turn_id: _PendingGroup(_group_from(group), committed, since)
            for turn_id, (group, committed, since) in state["pending"].items()
        }


def _without_routes(group: Group) -> Group:
    if all(rollout.routes is None for rollout in group.rollouts):
        return group
    return replace(group, rollouts=[replace(rollout, routes=None) for rollout in group.rollouts])


def _with_return(pending: _PendingGroup, value: float) -> Group:
    rollouts = list(pending.group.rollouts)
    rollout = rollouts[pending.committed]
    score = rollout.score
    if score.reward is not None:
        score = replace(score, reward=score.reward + value, parts={**score.parts, "return": value})
    rollouts[pending.committed] = replace(rollout, score=score)
    return replace(pending.group, rollouts=rollouts)


def _group_state(group: Group) -> JsonObject:
    # Shallow: asdict() would copy every token of every pending rollout before each step.
    rollouts = [{**_fields(rollout), "score": _fields(rollout.score)} for rollout in group.rollouts]
    return {"prompt": _fields(group.prompt), "rollouts": rollouts}


def _fields(record: Prompt | Rollout | Score) -> JsonObject:
    return {each.name: getattr(record, each.name) for each in fields(record)}


def _group_from(state: JsonObject) -> Group:
    rows: list[JsonObject] = [{**row, "score": Score(**row["score"])} for row in state["rollouts"]]
    return Group(prompt=Prompt(**state["prompt"]), rollouts=[Rollout(**row) for row in rows])
