"""Games trained turn by turn. Each open turn gets a group of completions, and one of the completions is played.

The games live on rank 0. The rank that samples the completions of a turn scores them, by the game state in the turn.
Rank 0 then commits one completion of each turn.
"""

import json
import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any, NamedTuple

from colocated_grpo.environments.base import BatchResult, EnvironmentSetupError, Item, Items, ItemStream
from colocated_grpo.environments.prompts import BY_OPPONENT_KEY, PATTERN_KEY
from colocated_grpo.environments.registry import KINDS, find
from colocated_grpo.environments.rewards.scoring import as_number, as_score
from colocated_grpo.environments.turns.base import Turn, TurnEnvironment
from colocated_grpo.environments.user_code.loading import construct, errors_named, one_line
from colocated_grpo.errors import RunError
from colocated_grpo.settings.sources import TurnsSourceConfig
from colocated_grpo.types import Completion, Group, JsonObject, Prompt, Rollout, Score, shallow

TURN_KEY = "turn"
RATES = ("parse_rate", "legal_rate")
"""Parts of an outcome that are reported as metrics."""


def _as_result(outcome: Any) -> object:
    """Return what a task's score() would return: a dict of parts, or the number or None that a game returned."""
    return {**outcome.parts, "reward": outcome.reward} if hasattr(outcome, "parts") else outcome


def _errors_of(name: str, method: str) -> AbstractContextManager[None]:
    """Convert exceptions of the environment to RunError: after a failed method, a game has no valid state."""
    return errors_named(f"environments {name!r}: {method}() failed", RunError)


class TurnGames(Items):
    """The games of one `type: turns` entry, and their scorer."""

    def __init__(self, name: str, config: TurnsSourceConfig, seed: int) -> None:
        self.name = name
        self._key = f"environments {config.name!r}"
        self._config = config
        if "seed" in config.args:
            raise EnvironmentSetupError(f"{self._key}: args.seed is set by the run; remove it")
        self._factory, self._args = find(KINDS["turns"], config.name, config.args)
        self._scoring = self._build(seed)
        self.delayed = self._scoring.delayed

    def _build(self, seed: int, *, held_out: bool = False) -> TurnEnvironment:
        # Held-out games use odd seeds, so no run trains on the held-out games of another run.
        environment = construct(partial(self._factory, seed=2 * seed + held_out), self._args, self._key)
        if not isinstance(environment, TurnEnvironment):
            missing = [name for name in dir(TurnEnvironment) if name[0] != "_" and not hasattr(environment, name)]
            raise EnvironmentSetupError(f"{self._key}: not a turn environment, it has no {', '.join(missing)}")
        return environment

    def score(self, prompt: Prompt, completions: Sequence[Completion], texts: Sequence[str]) -> list[Score]:
        """Score the completions of one turn together. On any rank."""
        try:
            outcomes = self._scoring.score(prompt.item[TURN_KEY], texts)
            scores = [as_score(_as_result(each)) for each in outcomes]
            if len(scores) != len(texts):
                raise ValueError(f"score() returned {len(scores)} outcomes for {len(texts)} completions")
        except BaseException as error:  # see scoring.score_each
            return [Score(reward=None, error=one_line(error))] * len(texts)
        return scores

    def open_stream(self, seed: int) -> "TurnStream":
        return TurnStream(self.name, self._build(seed), self._config, seed)

    def held_out(self, seed: int) -> Iterator[Item]:
        """Yield the policy's turns of games in which a script plays all turns."""
        environment, played, own = self._build(seed, held_out=True), set(), 0
        with _errors_of(self.name, "next_batch(), pattern() or play_on"):
            while turns := environment.next_batch():
                for turn in turns:
                    if turn.id in played:
                        raise ValueError(f"turn {turn.id} is still open after play_on()")
                    played.add(turn.id)
                    if turn.trainable:
                        yield item_of(turn, structured=self._config.structured)
                        own = len(played)
                    environment.play_on(turn)
                if len(played) - own > 10_000:
                    raise ValueError(f"{len(played) - own} turns without one of the policy")


def item_of(turn: Turn, *, structured: bool) -> Item:
    item = {"prompt": turn.messages, TURN_KEY: turn, BY_OPPONENT_KEY: not turn.trainable}
    return item | {PATTERN_KEY: turn.pattern()} if structured else item


class _PendingGroup(NamedTuple):
    group: Group
    committed: int
    """Index of the committed completion. The return is added to the reward of this completion."""
    since: int
    """Step in which the group was sampled."""


class PendingGroups:
    """Groups by turn id. Each waits for the return of its committed completion, for at most `max_wait` steps."""

    def __init__(self, max_wait: int) -> None:
        self._max_wait = max_wait
        self._step = 0
        self.groups: dict[str, _PendingGroup] = {}

    def add(self, turn_id: str, group: Group, committed: int) -> None:
        # The item's game state is needed only for scoring, and would dominate the checkpoint size.
        slim = replace(group, prompt=replace(group.prompt, item={}))
        self.groups[turn_id] = _PendingGroup(slim, committed, self._step)

    def end_step(self, returns: Mapping[str, float]) -> tuple[list[Group], list[Group]]:
        """Remove and return the groups completed by `returns`, by turn id, and the groups that have waited too long."""
        complete = [
            _with_return(pending, value)
            for turn_id, value in returns.items()
            if (pending := self.groups.pop(turn_id, None)) is not None
        ]
        overdue = [key for key, pending in self.groups.items() if self._step - pending.since >= self._max_wait]
        late = [self.groups.pop(turn_id).group for turn_id in overdue]
        # Like game states, routes would dominate the checkpoint size. Without routes, the policy chooses the experts.
        for turn_id, pending in self.groups.items():
            if pending.since == self._step:
                rollouts = [replace(rollout, routes=None) for rollout in pending.group.rollouts]
                self.groups[turn_id] = pending._replace(group=replace(pending.group, rollouts=rollouts))
        self._step += 1
        return complete, late

    def state_dict(self) -> JsonObject:
        pending: JsonObject = {}
        for turn_id, (group, committed, since) in self.groups.items():
            rollouts = [{**shallow(rollout), "score": shallow(rollout.score)} for rollout in group.rollouts]
            pending[turn_id] = [{"prompt": shallow(group.prompt), "rollouts": rollouts}, committed, since]
        return {"step": self._step, "pending": pending}

    def load_state_dict(self, state: JsonObject) -> None:
        self._step = state["step"]
        self.groups = {}
        for turn_id, (group, committed, since) in state["pending"].items():
            rows: list[JsonObject] = [{**row, "score": Score(**row["score"])} for row in group["rollouts"]]
            restored = Group(prompt=Prompt(**group["prompt"]), rollouts=[Rollout(**row) for row in rows])
            self.groups[turn_id] = _PendingGroup(restored, committed, since)


def _with_return(pending: _PendingGroup, value: float) -> Group:
    rollouts = list(pending.group.rollouts)
    score = rollouts[pending.committed].score
    if score.reward is not None:
        score = replace(score, reward=score.reward + value, parts={**score.parts, "return": value})
        rollouts[pending.committed] = replace(rollouts[pending.committed], score=score)
    return replace(pending.group, rollouts=rollouts)


class TurnStream(ItemStream):
    """The games of one training run, on rank 0. state_dict() is exact only between steps."""

    def __init__(self, name: str, environment: TurnEnvironment, config: TurnsSourceConfig, seed: int) -> None:
        self._name = name
        self._errors_of = partial(_errors_of, name)
        self._metric_prefix = name.rpartition(":")[2]  # "Sticks" for "folder/my_game.py:Sticks"
        self._environment = environment
        self._config = config
        self._seed = seed
        self._pending = PendingGroups(config.max_wait)
        self._steps_at_goal = 0
        """Steps in a row with a parse rate of at least `stop_at_parse_rate`."""
        self._start_step()

    def _start_step(self) -> None:
        self._taken: dict[str, Turn] = {}
        """Turns handed out in this step, by id."""
        self._open: deque[Turn] = deque()
        """Turns that can still be handed out."""
        self._batch_fetched = False

    def take(self) -> Item:
        """Return an open turn. If all open turns have been handed out, start further games."""
        for _ in range(self.max_attempts):
            if self._open:
                turn = self._open.popleft()
                self._taken[turn.id] = turn
                with self._errors_of("pattern"):
                    return item_of(turn, structured=self._config.structured)
            self._fetch_turns()
        problem = f"no open turn after {self.max_attempts} calls of next_batch() and add_game()"
        raise EnvironmentSetupError(f"environments {self._name!r}: {problem}")

    def _fetch_turns(self) -> None:
        with self._errors_of("add_game" if self._batch_fetched else "next_batch"):
            turns = list(self._environment.add_game() if self._batch_fetched else self._environment.next_batch())
            known = {turn.id: (turn.messages, turn.phase, turn.trainable) for turn in turns}
            if wrong := [key for key in known if not isinstance(key, str) or key in self._pending.groups]:
                raise ValueError(f"turn {wrong[0]!r}: an id must be text, and not that of a turn that was committed")
            if len(known) < len(turns):
                raise ValueError(f"two turns have the same id, of {', '.join(known)}")
        self._batch_fetched = True
        for turn in turns:
            if not turn.trainable and self._config.opponent is None:
                problem = f"turn {turn.id} belongs to a seat that is not trained"
                advice = "set opponent: {name: initial} to have a frozen model play it"
                raise EnvironmentSetupError(f"environments {self._name!r}: {problem}; {advice}")
        self._open.extend(turn for turn in turns if turn.id not in self._taken)

    def reject(self, item: Item) -> None:
        """Have a script play the turn, so that its game continues."""
        del self._taken[item[TURN_KEY].id]
        with self._errors_of("play_on"):
            self._environment.play_on(item[TURN_KEY])
        self._open.clear()
        self._batch_fetched = False

    def record(self, groups: Sequence[Group]) -> BatchResult:
        in_order = sorted(groups, key=lambda group: group.prompt.index)
        for group in in_order:
            turn = self._taken.pop(group.prompt.item[TURN_KEY].id)
            chosen = self._choose(turn, group)
            with self._errors_of("commit"):
                self._environment.commit(turn, group.rollouts[chosen].text)
            if self._environment.delayed and turn.trainable:
                self._pending.add(turn.id, group, chosen)
        self._start_step()
        trained = [position for position, group in enumerate(groups) if not group.prompt.by_opponent]
        with self._errors_of("drain_stats"):
            metrics = {name: float(value) for name, value in self._environment.drain_stats().items()}
        metrics |= completion_rates([group for group in in_order if not group.prompt.by_opponent])
        with self._errors_of("drain_returns"):
            returns = self._drain_returns()
        with self._errors_of("drain_games"):
            # Errors are raised here, not in the writer and the readers of the run folder, to name the environment.
            games = [{**_checked(game), "source": self._name} for game in self._environment.drain_games()]
            json.dumps(games, allow_nan=False)
        if self._config.opponent is not None:
            metrics["opponent_turns"] = len(groups) - len(trained)
        complete, overdue = self._pending.end_step(returns)
        if self._environment.delayed:
            metrics |= {"turns_waiting": len(self._pending.groups), "turns_overdue": len(overdue)}
        return BatchResult(
            trained_now=[] if self._environment.delayed else trained,
            released=complete + overdue,
            metrics={f"{self._metric_prefix}/{key}": float(value) for key, value in metrics.items()},
            games=games,
            finished=self.reached_goal(metrics.get("parse_rate")),
        )

    def _drain_returns(self) -> dict[str, float]:
        """Return the sum of the returns of each turn, by its id."""
        returns: dict[str, float] = {}
        for each in self._environment.drain_returns():
            if (value := as_number(each.value)) is None:
                raise ValueError(f"a return must be a finite number, got {each.value!r}")
            returns[each.turn_id] = returns.get(each.turn_id, 0.0) + value
        if any(returns.values()) and not self._environment.delayed:
            raise ValueError("turns with a return train after their game has ended, so `delayed` must be True")
        return returns

    def reached_goal(self, parse_rate: float | None) -> bool:
        """Count one step and return whether to stop. parse_rate: None, if no completion was rated, counts nothing."""
        goal = self._config.stop_at_parse_rate or math.inf
        if parse_rate is not None:
            self._steps_at_goal = self._steps_at_goal + 1 if parse_rate >= goal else 0
        return self._steps_at_goal >= self._config.stop_after

    def _choose(self, turn: Turn, group: Group) -> int:
        """Return the position of the completion to commit."""
        if self._config.commit == "random":
            return Random(f"{self._seed}/{turn.id}").randrange(len(group.rollouts))
        if self._config.commit == "best":
            known = [-math.inf if (reward := each.score.reward) is None else reward for each in group.rollouts]
            return known.index(max(known))
        return 0

    def state_dict(self) -> JsonObject:
        with self._errors_of("snapshot"):
            # A copy: the games may go on before it is written. An error here names the environment.
            games = json.loads(json.dumps(self._environment.snapshot()))
        return {"games": games, "pending": self._pending.state_dict(), "early_stop": self._steps_at_goal}

    def load_state_dict(self, state: JsonObject) -> None:
        with errors_named(f"environments {self._name!r}: the games of the checkpoint cannot be restored"):
            self._environment.restore(state["games"])
        self._pending.load_state_dict(state["pending"])
        self._steps_at_goal = state["early_stop"]
        self._start_step()


def _checked(game: JsonObject) -> JsonObject:
    """Return the record of a game. Raises TypeError if a value is not of the type that readers need."""
    rows = [*game.get("seats", ()), *game.get("events", ())]
    typed = isinstance(game.get("game"), int) and isinstance(game.get("transcript", ""), str) and "winner" in game
    if not typed or not all(isinstance(row, dict) for row in rows):
        raise TypeError(f"a record has a number 'game', a 'winner', a text 'transcript', and rows, got {game!r:.80}")
    return game


def completion_rates(groups: Sequence[Group]) -> dict[str, float]:
    """Return means over all completions, committed or not: the parts in RATES, and the reward by phase."""
    values: dict[str, list[float]] = {}
    for group in groups:
        for rollout in group.rollouts:
            for name in RATES:
                if name in rollout.score.parts:
                    values.setdefault(name, []).append(rollout.score.parts[name])
            if rollout.score.reward is not None:
                values.setdefault(f"reward/{group.prompt.item[TURN_KEY].phase}", []).append(rollout.score.reward)
    return {name: sum(each) / len(each) for name, each in values.items()}
