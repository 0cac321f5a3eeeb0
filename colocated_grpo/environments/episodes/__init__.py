"""The built-in episodes, and episodes by name."""

from __future__ import annotations

from inspect import iscoroutinefunction
from typing import Any

from colocated_grpo.environments.base import EnvironmentSetupError, Episode
from colocated_grpo.environments.registry import check_methods, find_environment

EPISODES: dict[str, type] = {}


def build_episode(name: str, args: dict[str, Any]) -> Episode:
    """A built-in episode, an installed one, or the user's 'module:object'."""
    episode = find_environment("episode", name, args, EPISODES)
    check_methods(episode, "an episode", ("prompts", "run"), name)
    if not iscoroutinefunction(episode.run):
        raise EnvironmentSetupError(f"environments {name!r}: run() must be a coroutine: write `async def run`")
    return episode
