"""The address at which agents reach the policy: an own path and key for each episode, for as long as it runs."""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field

from colocated_grpo.environments.agents.conversation import AgentConversation
from colocated_grpo.types import Completion

PREFIX = "/episodes/"
ID_BYTES, KEY_BYTES = 16, 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Access:
    """Address and key of one agent."""

    base_url: str
    """Base URL of the chat API, as in OPENAI_BASE_URL."""
    api_key: str


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class OpenEpisode:
    """One running episode, as the HTTP server sees it."""

    key: str
    conversation: AgentConversation
    loop: asyncio.AbstractEventLoop
    """Runs the episode. The server has another one."""
    sampled: dict[str, str] = field(default_factory=dict)
    """Sampled messages by the ids of the tool calls that were parsed from them."""

    def complete(
        self, prompt: list[int], max_tokens: int | None, n: int, stop: Sequence[str]
    ) -> Future[list[Completion]]:
        """Start `AgentConversation.complete` on the episode's loop. Thread-safe."""
        work = self.conversation.complete(prompt, max_tokens, n, stop)
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def reject(self, text: str) -> None:
        """Call `AgentConversation.reject` on the episode's loop, before a later response can end it. Thread-safe."""
        self.loop.call_soon_threadsafe(self.conversation.reject, text)


class Endpoint:
    """The open episodes of this rank. Thread-safe."""

    def __init__(self) -> None:
        self._open: dict[str, OpenEpisode] = {}
        self.url = ""
        """Address of the server, set when it listens."""

    @contextmanager
    def opened(self, conversation: AgentConversation) -> Iterator[Access]:
        """Accept requests for a conversation. They are refused as soon as the block ends."""
        episode_id, key = secrets.token_urlsafe(ID_BYTES), secrets.token_urlsafe(KEY_BYTES)
        self._open[episode_id] = OpenEpisode(key=key, conversation=conversation, loop=asyncio.get_running_loop())
        try:
            yield Access(base_url=f"{self.url}{PREFIX}{episode_id}/v1", api_key=key)
        finally:
            del self._open[episode_id]

    def find(self, episode_id: str, key: bytes) -> OpenEpisode | None:
        """Return the open episode with this id, if the key is its own."""
        episode = self._open.get(episode_id)
        if episode is None or not hmac.compare_digest(episode.key.encode(), key):
            return None
        return episode
