"""Environments of gymnasium with a finite set of actions, played in words: `<action>left</action>`."""

from __future__ import annotations

import re
from contextlib import suppress
from random import Random
from typing import Any

from pydantic import Field, PrivateAttr

from colocated_grpo.environments.adapters.gymnasium_views import View, view_of
from colocated_grpo.environments.adapters.seeded import SeededEpisode, draw_seed
from colocated_grpo.environments.base import EnvironmentSetupError, Split
from colocated_grpo.environments.conversation import ContextExhausted, Conversation
from colocated_grpo.environments.rewards.answers import without_thoughts
from colocated_grpo.environments.user_code.loading import import_optional

KEY = "environments 'gymnasium'"
ACTION = re.compile(r"<action>(.*?)</action>", re.DOTALL)


class Gymnasium(SeededEpisode):
    """Reward: the return, and `invalid_reward` for each reply without an action."""

    environment: str
    """Its id. Example: FrozenLake-v1"""
    options: dict[str, Any] = {}
    """Keyword arguments of gymnasium.make. Example: {is_slippery: false}"""
    rules: str | None = None
    """Opens the prompt. The toy-text environments have their own."""
    actions: list[str] | None = None
    """Names of the actions, in their order. Without names, and beside them, numbers are understood."""
    max_turns: int = Field(50, ge=1)
    """Turns of the policy."""
    max_turn_tokens: int = Field(64, ge=1)
    """Longest turn of the policy."""
    invalid_reward: float = Field(-1.0, le=0)
    """Of a reply without an action. At 0, saying nothing would beat an environment whose steps cost."""

    _view: View = PrivateAttr()
    _asking: Any = PrivateAttr()
    """The environment whose first observations open the prompts. Episodes run in another thread and have their own."""
    _idle: list[Any] = PrivateAttr(default_factory=list)
    """Environments between two episodes: some take longer to build than to play."""

    def __init__(self, **args: Any) -> None:
        super().__init__(**args)
        library = import_optional("gymnasium", "gymnasium", KEY)
        self._asking = env = self._new()
        if not isinstance(env.action_space, library.spaces.Discrete) or env.action_space.start != 0:
            raise EnvironmentSetupError(f"{KEY}: {self.environment} has no numbered actions but {env.action_space}")
        self._view = view_of(env.unwrapped, self.rules, self.actions)
        if len(self._view.actions) != env.action_space.n:
            raise EnvironmentSetupError(
                f"{KEY}: args.actions={self.actions}: {self.environment} has {env.action_space.n} actions"
            )
        if self._begin(env, 0) != self._begin(self._new(), 0):
            raise EnvironmentSetupError(
                f"{KEY}: {self.environment} does not repeat itself from its seed: siblings would play different games"
            )

    def _item(self, chance: Random, split: Split) -> dict[str, Any]:
        seed = draw_seed(chance, split)
        parts = [self._view.rules, f"Actions: {', '.join(self._view.actions)}.", self._hint()]
        return {"seed": seed, "prompt": "\n".join([*filter(None, parts), "", self._begin(self._asking, seed)])}

    async def run(self, item: dict[str, Any], model: Conversation) -> dict[str, float]:
        env = self._idle.pop() if self._idle else self._new()
        said = self._begin(env, item["seed"])
        earned, invalid, over = 0.0, 0, False
        with suppress(ContextExhausted):
            while not over and model.turns < self.max_turns:
                if model.turns:
                    model.observe(said)
                action = self._read((await model.generate(self.max_turn_tokens)).text)
                if action is None:
                    invalid += 1
                    said = f"No action. {self._hint()}"
                    continue
                observation, reward, terminated, truncated, _ = env.step(action)
                earned += float(reward)
                over = terminated or truncated
                said = self._view.describe(env.unwrapped, observation)
        self._idle.append(env)
        return {
            "reward": earned + self.invalid_reward * invalid,
            "return": earned,
            "invalid": invalid / max(model.turns, 1),
            "finished": float(over),
        }

    def _new(self) -> Any:
        from gymnasium import make

        return make(self.environment, disable_env_checker=True, **self.options)

    def _begin(self, env: Any, seed: int) -> str:
        """What the first observation says."""
        observation, _ = env.reset(seed=seed)
        return self._view.describe(env.unwrapped, observation)

    def _hint(self) -> str:
        return f"Reply with one of them, such as <action>{self._view.actions[0]}</action>."

    def _read(self, reply: str) -> int | None:
        """The last action of a reply, thoughts left out."""
        found = ACTION.findall(without_thoughts(reply))
        name = found[-1].strip().lower() if found else ""
        names = [action.lower() for action in self._view.actions]
        if name in names:
            return names.index(name)
        return int(name) if name in map(str, range(len(names))) else None
