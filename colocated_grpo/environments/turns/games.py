"""Games trained turn by turn: one group of completions for each open turn, of which one is carried out.

Rank 0 holds the games. A turn travels to the rank that samples its completions and is judged there, on the frozen state
that it carries; after the groups are gathered rank 0 carries one completion of each turn out.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from typing import Any

from colocated_grpo.config.turns import TurnsSourceConfig
from colocated_grpo.environments.base import EnvironmentSetupError, Settled
from colocated_grpo.environments.prompts import BY_OPPONENT, PATTERN
from colocated_grpo.environments.rewards.scoring import as_number, as_score
from colocated_grpo.environments.turns.base import Turn, TurnEnvironment
from colocated_grpo.environments.turns.pending import HeldGroups
from colocated_grpo.environments.user_code.loading import one_line
from colocated_grpo.errors import RunError
from colocated_grpo.types import Completion, Group, Prompt, Score

TURN = "turn"
"""Key of the turn in an item."""
RATES = ("parse_rate", "legal_rate")
"""Parts of an outcome that become curves of their own."""
Factory = Callable[[int], TurnEnvironment]
"""From a seed."""


class TurnScorer:
    """Judges the completions of one turn together, on any rank."""

    def __init__(self, environment: TurnEnvironment) -> None:
        self._environment = environment

    def score(self, prompt: Prompt, completions: Sequence[Completion], texts: Sequence[str]) -> list[Score]:
        try:
            outcomes = self._environment.score(prompt.item[TURN], texts)
            scores = [as_score({**each.parts, "reward": each.reward}) for each in outcomes]
            if len(scores) != len(texts):
                raise ValueError(f"score() gave {len(scores)} outcomes for {len(texts)} completions")
        except BaseException as error:  # see score_text
            return [Score(reward=None, error=one_line(error))] * len(texts)
        return scores


class TurnGames:
    """One entry of the config."""

    def __init__(self, name: str, factory: Factory, config: TurnsSourceConfig, seed: int) -> None:
        self.name = name
        self._factory = factory
        self._config = config
        environment = factory(_training(seed))
        self.delayed = environment.delayed
        self.scorer = TurnScorer(environment)

    def open_stream(self, seed: int) -> TurnStream:
        return TurnStream(self.name, self._factory(_training(seed)), self._config, seed)

    def held_out(self, seed: int) -> Iterator[dict[str, Any]]:
        """Turns of other games, which play themselves on."""
        environment = self._factory(_training(seed) + 1)
        while turns := environment.next_batch():
            for turn in turns:
                if turn.trainable:
                    yield item_of(turn, structured=self._config.structured)
                environment.play_on(turn)


def _training(seed: int) -> int:
    """Even, so that no run trains on another's held-out games."""
    return 2 * seed


def item_of(turn: Turn, *, structured: bool) -> dict[str, Any]:
    item = {"prompt": turn.messages, TURN: turn, BY_OPPONENT: not turn.trainable}
    return item | {PATTERN: turn.pattern()} if structured else item


@dataclass(slots=True)
class EarlyStop:
    """Says stop once the parse rate has stood at the threshold for a number of windows in a row."""

    threshold: float
    consecutive: int
    reached: int = 0

    def due(self, parse_rate: float | None) -> bool:
        """Counts one window. None, a window without turns, neither helps nor hurts."""
        if parse_rate is not None:
            self.reached = self.reached + 1 if parse_rate >= self.threshold else 0
        return self.reached >= self.consecutive


class TurnStream:
    """The games of one training run, on rank 0. Its state is exact between steps."""

    patience = 1000

    def __init__(self, name: str, environment: TurnEnvironment, config: TurnsSourceConfig, seed: int) -> None:
        self._name = name
        self._label = name.rpartition(":")[2]
        """Heads its metrics: of 'folder/my_game.py:Sticks' the last part."""
        self._environment = environment
        self._config = config
        self._seed = seed
        self._held = HeldGroups(config.max_wait)
        self._early_stop = EarlyStop(config.stop_at_parse_rate or math.inf, config.stop_after)
        self._forget()

    def _forget(self) -> None:
        """Nothing is asked; what is open has to be looked up."""
        self._asked: dict[str, Turn] = {}
        self._open: deque[Turn] = deque()
        self._looked = False

    def take(self) -> dict[str, Any]:
        """A turn that waits for an answer; further games are started where all others have been given."""
        for _ in range(self.patience):
            if self._open:
                turn = self._open.popleft()
                self._asked[turn.id] = turn
                return item_of(turn, structured=self._config.structured)
            self._find_turns()
        raise EnvironmentSetupError(f"environments {self._name!r}: {self.patience} games gave no turn to train on")

    def _find_turns(self) -> None:
        with self._blamed("add_game" if self._looked else "next_batch"):
            fresh = self._environment.add_game() if self._looked else self._environment.next_batch()
        self._looked = True
        for turn in fresh:
            if not turn.trainable and self._config.opponent is None:
                raise EnvironmentSetupError(
                    f"environments {self._name!r}: turn {turn.id} is of a seat that is not trained; its entry needs a "
                    "frozen model that plays it, opponent: {name: initial}"
                )
        self._open.extend(turn for turn in fresh if turn.id not in self._asked)

    def reject(self, item: dict[str, Any]) -> None:
        """A script takes the turn, or its game would stand still for ever."""
        del self._asked[item[TURN].id]
        with self._blamed("play_on"):
            self._environment.play_on(item[TURN])
        self._open.clear()
        self._looked = False

    def record(self, groups: Sequence[Group]) -> Settled:
        in_order = sorted(groups, key=lambda group: group.prompt.index)
        for group in in_order:
            turn = self._asked.pop(group.prompt.item[TURN].id)
            chosen = self._choose(turn, group)
            with self._blamed("commit"):
                self._environment.commit(turn, group.rollouts[chosen].text)
            if self._environment.delayed and turn.trainable:
                self._held.add(turn.id, group, chosen)
        self._forget()
        trained = [place for place, group in enumerate(groups) if not group.prompt.by_opponent]
        rates = sampled_rates([group for group in in_order if not group.prompt.by_opponent])
        metrics = self._stats() | rates
        if self._config.opponent is not None:
            metrics["opponent_turns"] = len(groups) - len(trained)
        complete, overdue = self._held.end_step(self._returns())
        if self._environment.delayed:
            metrics |= {"turns_waiting": len(self._held), "turns_overdue": len(overdue)}
        return Settled(
            now=[] if self._environment.delayed else trained,
            late=complete + overdue,
            metrics={f"{self._label}/{key}": float(value) for key, value in metrics.items()},
            games=self._games(),
            finished=self._early_stop.due(metrics.get("parse_rate")),
        )

    def _stats(self) -> dict[str, float]:
        with self._blamed("drain_stats"):
            return {name: float(value) for name, value in self._environment.drain_stats().items()}

    def _returns(self) -> dict[str, float]:
        """By turn."""
        with self._blamed("drain_returns"):
            return {each.turn_id: _finite(each.value) for each in self._environment.drain_returns()}

    def _games(self) -> list[dict[str, Any]]:
        with self._blamed("drain_games"):
            games = [{"source": self._name, **game} for game in self._environment.drain_games()]
            json.dumps(games, allow_nan=False)  # Here it is known who is to blame, and not where the file is written.
        return games

    @contextmanager
    def _blamed(self, method: str) -> Iterator[None]:
        """One line for what the environment's own code raises: games have no state to go on from after it."""
        try:
            yield
        except (Exception, SystemExit) as error:
            raise RunError(f"environments {self._name!r}: {method}() failed: {one_line(error)}") from error

    def _choose(self, turn: Turn, group: Group) -> int:
        """Position of the completion that is carried out."""
        rewards = [rollout.score.reward for rollout in group.rollouts]
        if self._config.commit == "random":
            return Random(f"{self._seed}/{turn.id}").randrange(len(rewards))
        if self._config.commit == "best":
            return max(range(len(rewards)), key=lambda place: -math.inf if rewards[place] is None else rewards[place])
        return 0

    def state_dict(self) -> dict[str, Any]:
        with self._blamed("snapshot"):
            games = self._environment.snapshot()
        return {
            "games": games,
            "held": self._held.state_dict(),
            "early_stop": self._early_stop.reached,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        try:
            self._environment.restore(state["games"])
        except (Exception, SystemExit) as error:
            raise EnvironmentSetupError(
                f"environments {self._name!r}: the games of the checkpoint cannot be restored: {one_line(error)}"
            ) from error
        self._held.load_state_dict(state["held"])
        self._early_stop.reached = state["early_stop"]
        self._forget()


def _finite(value: Any) -> float:
    number = as_number(value)
    if number is None:
        raise ValueError(f"a return must be a finite number, got {value!r}")
    return number


def sampled_rates(groups: Sequence[Group]) -> dict[str, float]:
    """Means over all completions, carried out or not: of the parts in RATES, and of the reward by phase."""
    values: dict[str, list[float]] = {}
    for group in groups:
        for rollout in group.rollouts:
            for name in RATES:
                if name in rollout.score.parts:
                    values.setdefault(name, []).append(rollout.score.parts[name])
            if rollout.score.reward is not None:
                values.setdefault(f"reward/{group.prompt.item[TURN].phase}", []).append(rollout.score.reward)
    return {name: sum(each) / len(each) for name, each in values.items()}
