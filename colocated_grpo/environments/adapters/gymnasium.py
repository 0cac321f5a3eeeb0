"""Gymnasium environments with a finite set of actions, played as text: `<action>left</action>`."""

from __future__ import annotations

import re
from contextlib import suppress
from random import Random
from typing import Any

from pydantic import Field, PrivateAttr

from colocated_grpo.environments.adapters.gymnasium_views import View, view_of
from colocated_grpo.environments.adapters.seeded import SeededEpisode, draw_seed
from colocated_grpo.environments.base import EnvironmentSetupError, Item, Split
from colocated_grpo.environments.conversation import ContextExhausted, Conversation
from colocated_grpo.environments.rewards.answers import tagged_parts, without_thoughts
from colocated_grpo.environments.user_code.loading import import_optional
from colocated_grpo.types import JsonObject

KEY = "environments 'gymnasium'"
ACTION = re.compile(r"<(action)>")


class Gymnasium(SeededEpisode):
    """Reward: the return, plus `invalid_reward` for each reply without an action."""

    environment: str
    """Id of the environment. Example: FrozenLake-v1"""
    options: JsonObject = {}
    """Keyword arguments of gymnasium.make. Example: {is_slippery: false}"""
    rules: str | None = None
    """Start of the prompt. The toy-text environments have a default."""
    actions: list[str] | None = None
    """Names of the actions in their order. A reply may always give the number of an action instead."""
    max_turns: int = Field(50, ge=1)
    """Turns of the policy in an episode."""
    max_turn_tokens: int = Field(64, ge=1)
    """Tokens of one turn of the policy."""
    invalid_reward: float = Field(-1.0, le=0)
    """Reward of a reply without an action. At 0, invalid replies would pay where every step has a cost."""

    _view: View = PrivateAttr()
    _prompt_env: Any = PrivateAttr()
    """Environment for the first observations of prompts. Episodes run in other threads and use their own."""
    _idle_envs: list[Any] = PrivateAttr(default_factory=list)
    """Environments of ended episodes, for reuse: some take longer to build than to play."""

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
        text = self._reset(env, item["seed"])
        earned, invalid, over = 0.0, 0, False
        with suppress(ContextExhausted):
            while not over and model.turns < self.max_turns:
                if model.turns:
                    model.observe(text)
                action = self._parse((await model.generate(self.max_turn_tokens)).text)
                if action is None:
                    invalid += 1
                    text = f"No action. {self._hint()}"
                    continue
                observation, reward, terminated, truncated, _ = env.step(action)
                earned += float(reward)
                over = terminated or truncated
                text = self._view.describe(env.unwrapped, observation)
        self._idle_envs.append(env)
        return {
            "reward": earned + self.invalid_reward * invalid,
            "return": earned,
            "invalid": invalid / max(model.turns, 1),
            "finished": float(over),
        }

    def _make(self) -> Any:
        from gymnasium import make

        return make(self.environment, disable_env_checker=True, **self.options)

    def _reset(self, env: Any, seed: int) -> str:
        """Start an episode and return its first observation as text."""
        observation, _ = env.reset(seed=seed)
        return self._view.describe(env.unwrapped, observation)

    def _hint(self) -> str:
        return f"Reply with one of them, such as <action>{self._view.actions[0]}</action>."

    def _parse(self, reply: str) -> int | None:
        """Return the number of the last action in a reply, thoughts ignored, or None."""
        found = [action for _, action in tagged_parts(without_thoughts(reply), ACTION)]
        name = found[-1].strip().lower() if found else ""
        names = [action.lower() for action in self._view.actions]
        if name in names:
            return names.index(name)
        return int(name) if name in map(str, range(len(names))) else None
