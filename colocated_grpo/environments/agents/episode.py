"""An agent as an episode: it is started with an address of its own, and its result is the reward."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from inspect import iscoroutinefunction
from typing import Any, Protocol, runtime_checkable

from colocated_grpo.environments.agents.conversation import AgentConversation
from colocated_grpo.environments.agents.endpoint import Access, Endpoint
from colocated_grpo.environments.agents.program import AgentFailed, Program
from colocated_grpo.environments.base import EnvironmentSetupError, Item, Split
from colocated_grpo.environments.user_code.loading import load_object
from colocated_grpo.settings.sources import AgentSourceConfig


class Agent(Protocol):
    """Code of the user that holds the conversation."""

    async def play(self, item: Item, access: Access) -> Any:
        """Return the reward in a form that `as_score` reads."""
        ...


@runtime_checkable
class AgentTasks(Agent, Protocol):
    """Tasks of another library, with the agent that plays them."""

    max_requests: int
    max_running: int

    def prompts(self, seed: int, split: Split) -> Iterator[Item]:
        """Yield items, as Task.prompts does. The agent writes its own messages; "prompt" shows where they start."""
        ...


class Function:
    """An async function of the user: `await function(item, base_url, api_key)`."""

    def __init__(self, name: str, key: str) -> None:
        self._function = load_object(name, f"{key}: program")
        if not iscoroutinefunction(self._function):
            raise EnvironmentSetupError(f"{key}: program={name!r}: must be a coroutine function: write `async def`")

    async def play(self, item: Item, access: Access) -> Any:
        return await self._function(item, access.base_url, access.api_key)


class AgentEpisode:
    """Runs the agents of one environment."""

    def __init__(self, agent: Agent, endpoint: Endpoint) -> None:
        self._agent = agent
        self._endpoint = endpoint

    async def run(self, item: Item, model: AgentConversation) -> Any:
        """Return the agent's reward.

        An agent that fails after a request exceeded the context or `max_requests` has reward 0, as an episode that does
        not catch ContextExhausted. Raises AgentFailed for one that made no request, and what the agent itself raises.
        """
        with self._endpoint.opened(model) as access:
            try:
                result = await self._agent.play(item, access)
            except asyncio.CancelledError:
                raise
            except Exception:
                if model.exhausted:
                    return 0.0
                raise
        if not model.requests:
            raise AgentFailed("the agent has ended without a request to its base URL")
        return result


def build_agent(entry: AgentSourceConfig, key: str) -> Agent:
    """Return the program, which the launcher has looked up, or import the function. Raises EnvironmentSetupError."""
    if ":" in entry.program:
        if entry.arguments:
            raise EnvironmentSetupError(f"{key}: arguments={entry.arguments}: a function has none; use a program")
        return Function(entry.program, key)
    return Program(entry.program, entry.arguments)
