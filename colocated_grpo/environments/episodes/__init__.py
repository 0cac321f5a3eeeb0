"""The built-in episodes, and lookup of episodes by name."""

from __future__ import annotations

from inspect import iscoroutinefunction
from typing import Any

from colocated_grpo.environments.adapters import FORMS, build_adapter, is_adapted
from colocated_grpo.environments.agents.episode import AgentTasks
from colocated_grpo.environments.base import EnvironmentSetupError, Episode
from colocated_grpo.environments.episodes.tool_use import ToolUse
from colocated_grpo.environments.registry import check_methods, find_environment
from colocated_grpo.types import JsonObject

EPISODES = {"tool_use": ToolUse}


def build_episode(name: str, args: JsonObject, given: Any = None) -> Episode | AgentTasks:
    """Build an episode: built in, adapted from another library, installed, or the user's 'module:object'.

    given: the user's object itself, if a program has passed it.
    """
    if given is None and is_adapted(name):
        return build_adapter(name, args)
    episode = find_environment("episode", name, args, EPISODES, *FORMS, given=given)
    check_methods(episode, "an episode", ("prompts", "run"), name)
    if not iscoroutinefunction(episode.run):
        raise EnvironmentSetupError(f"environments {name!r}: run() must be a coroutine: write `async def run`")
    return episode
