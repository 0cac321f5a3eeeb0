"""Gymnasium environments with a finite set of actions, played as text: `<action>left</action>`."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import PrivateAttr

from colocated_grpo.environments.adapters.seeded import InvalidReply, SteppedEpisode, draw_seed
from colocated_grpo.environments.base import EnvironmentSetupError, Item, Split
from colocated_grpo.environments.chat import Conversation
from colocated_grpo.environments.rewards.answers import tagged_parts, without_thoughts
from colocated_grpo.environments.user_code.loading import import_optional
from colocated_grpo.types import JsonObject

if TYPE_CHECKING:
    from gymnasium import Env
    from gymnasium.envs.toy_text import CliffWalkingEnv, FrozenLakeEnv, TaxiEnv

_COLOUR_CODE = re.compile(r"\x1b\[[\d;]*m")


class View(NamedTuple):
    """Text view of an environment for the policy."""

    rules: str
    actions: Sequence[str]
    describe: Callable[[Any, Any], str]
    """(unwrapped environment, observation) -> text"""


def _lake(env: FrozenLakeEnv, observation: int) -> str:
    rows = [[cell.decode() for cell in row] for row in env.desc]
    return _with_player(rows, divmod(int(observation), env.ncol))


def _cliff(env: CliffWalkingEnv, observation: int) -> str:
    height, width = env.shape
    rows = [["."] * width for _ in range(height)]
    rows[-1] = ["S", *"C" * (width - 2), "G"]
    return _with_player(rows, divmod(int(observation), width))


def _taxi(env: TaxiEnv, observation: int) -> str:
    row, column, passenger, destination = env.decode(observation)
    stands = [f"{name} (row {place[0]}, column {place[1]})" for name, place in zip("RGYB", env.locs, strict=True)]
    where = "in the taxi" if passenger == len(stands) else f"at {stands[passenger]}"
    return f"Taxi at row {row}, column {column}. Passenger {where}. Destination {stands[destination]}."


def _blackjack(_env: Env, observation: tuple[int, int, int]) -> str:
    total, dealer, usable_ace = map(int, observation)
    return f"You have {total}{' with an ace that counts 11' if usable_ace else ''}. The dealer shows {dealer}."


def _plain(env: Any, observation: object) -> str:
    """Return the rendered text of an environment made with render_mode 'ansi', else the observation itself."""
    if env.render_mode == "ansi":
        return _COLOUR_CODE.sub("", env.render()).strip()
    return str(observation)


def _with_player(rows: list[list[str]], place: tuple[int, int]) -> str:
    rows[place[0]][place[1]] = "P"
    return "\n".join(" ".join(row) for row in rows)


_LAKE = View(
    "Walk over the ice from S to G. P is you, F is ice, H is a hole that ends the walk. "
    "Where the ice is slippery a move may go to its left or right instead.",
    ("left", "down", "right", "up"),
    _lake,
)
_CLIFF = View(
    "Walk from S to G. P is you. Each step costs 1; C is a cliff: it costs 100 and puts you back to S.",
    ("up", "right", "down", "left"),
    _cliff,
)
_TAXI = View(
    "Drive to the passenger, pick it up, drive to the destination and drop it off for 20. Each step costs 1, a wrong "
    "pickup or dropoff 10. Rows count from the top and columns from the left, from 0; | is a wall.\n{map}",
    ("south", "north", "east", "west", "pickup", "dropoff"),
    _taxi,
)
_BLACKJACK = View(
    "Come closer to 21 than the dealer, and not above it. Hit takes a card, stick ends your turn.",
    ("stick", "hit"),
    _blackjack,
)
_VIEWS = {"FrozenLakeEnv": _LAKE, "CliffWalkingEnv": _CLIFF, "TaxiEnv": _TAXI, "BlackjackEnv": _BLACKJACK}


def view_of(env: Any, rules: str | None, actions: Sequence[str] | None) -> View:
    """Return the view of an unwrapped environment. `rules` and `actions` replace the defaults of the view if given."""
    numbers = tuple(map(str, range(int(env.action_space.n))))
    own = _VIEWS.get(type(env).__name__, View("", numbers, _plain))
    if "{map}" in own.rules:
        own = own._replace(rules=own.rules.replace("{map}", "\n".join(b"".join(row).decode() for row in env.desc)))
    return View(own.rules if rules is None else rules, actions or own.actions, own.describe)


KEY = "environments 'gymnasium'"
ACTION = re.compile(r"<(action)>")


class Gymnasium(SteppedEpisode):
    """An environment of gymnasium.make."""

    environment: str
    """Id of the environment. Example: FrozenLake-v1"""
    options: JsonObject = {}
    """Keyword arguments of gymnasium.make. Example: {is_slippery: false}"""
    rules: str | None = None
    """Text at the start of the prompt. The toy-text environments have a default."""
    actions: list[str] | None = None
    """Names of the actions in order. A reply may always give an action's number instead."""
    _view: View = PrivateAttr()
    _prompt_env: Env = PrivateAttr()
    """Environment for the first observations of prompts. Episodes run in other threads and use other environments."""
    _idle_envs: list[Env] = PrivateAttr(default_factory=list)
    """Environments of ended episodes, for reuse: some environments take longer to build than to play."""

    def __init__(self, **args: Any) -> None:
        super().__init__(**args)
        library = import_optional("gymnasium", "gymnasium", KEY)
        self._prompt_env = env = self._make()
        if not isinstance(env.action_space, library.spaces.Discrete) or env.action_space.start != 0:
            raise EnvironmentSetupError(
                f"{KEY}: {self.environment} has the action space {env.action_space}; only Discrete from 0 is supported"
            )
        self._view = view_of(env.unwrapped, self.rules, self.actions)
        if len(self._view.actions) != env.action_space.n:
            raise EnvironmentSetupError(
                f"{KEY}: args.actions={self.actions}: {self.environment} has {env.action_space.n} actions"
            )
        if self._reset(env, 0) != self._reset(self._make(), 0):
            raise EnvironmentSetupError(
                f"{KEY}: {self.environment} is not reproducible from its seed: siblings would play different games"
            )

    def _item(self, rng: Random, split: Split) -> Item:
        seed = draw_seed(rng, split)
        parts = [self._view.rules, f"Actions: {', '.join(self._view.actions)}.", self._hint()]
        return {"seed": seed, "prompt": "\n".join([*filter(None, parts), "", self._reset(self._prompt_env, seed)])}

    async def run(self, item: Item, model: Conversation) -> dict[str, float]:
        env = self._idle_envs.pop() if self._idle_envs else self._make()
        self._reset(env, item["seed"])

        async def step(reply: str) -> tuple[str, float, bool]:
            action = self._parse(reply)
            if action is None:
                raise InvalidReply(f"No action. {self._hint()}")
            observation, reward, terminated, truncated, _ = env.step(action)
            return self._view.describe(env.unwrapped, observation), float(reward), terminated or truncated

        score = await self._play(model, step)
        self._idle_envs.append(env)
        return score

    def _make(self) -> Env:
        from gymnasium import make

        return make(self.environment, disable_env_checker=True, **self.options)

    def _reset(self, env: Env, seed: int) -> str:
        """Start an episode and return its first observation as text."""
        observation, _ = env.reset(seed=seed)
        return self._view.describe(env.unwrapped, observation)

    def _hint(self) -> str:
        return f"Reply with one of them, such as <action>{self._view.actions[0]}</action>."

    def _parse(self, reply: str) -> int | None:
        """Return the number of the last action in a reply; None if it is not valid. Thoughts are ignored."""
        found = [action for _, action in tagged_parts(without_thoughts(reply), ACTION)]
        name = found[-1].strip().lower() if found else ""
        names = [action.lower() for action in self._view.actions]
        if name in names:
            return names.index(name)
        return int(name) if name in map(str, range(len(names))) else None
