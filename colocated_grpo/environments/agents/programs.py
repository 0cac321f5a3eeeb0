"""User programs and functions that play whole episodes over HTTP. Every episode has its own address and key."""

import asyncio
import hmac
import json
import os
import secrets
import signal
import sys
from collections.abc import Awaitable, Callable, Generator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from inspect import iscoroutinefunction, signature
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

from colocated_grpo.environments.agents.sequences import AgentConversation
from colocated_grpo.environments.base import EnvironmentSetupError, Item
from colocated_grpo.environments.user_code.loading import load_object
from colocated_grpo.errors import shortened
from colocated_grpo.runtime import parents_death
from colocated_grpo.runtime.program import KEY_VARIABLE, URLS_VARIABLE
from colocated_grpo.types import Completion

PREFIX = "/episodes/"
ID_BYTES, KEY_BYTES = 16, 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Access:
    """Address and key for the agent of one episode."""

    base_url: str
    """Base URL of the chat API, as in OPENAI_BASE_URL."""
    api_key: str


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class OpenEpisode:
    """One running episode, as the HTTP server sees it."""

    key: str
    conversation: AgentConversation
    loop: asyncio.AbstractEventLoop
    """Event loop of the episode. The server runs on another loop."""
    sampled: dict[str, str] = field(default_factory=dict)
    """Texts of sampled messages, by the id of each tool call that was parsed from them."""

    def complete(
        self, prompt: list[int], max_tokens: int | None, n: int, stop: Sequence[str]
    ) -> Future[list[Completion]]:
        """Start `AgentConversation.complete` on the episode's loop. Thread-safe."""
        work = self.conversation.complete(prompt, max_tokens, n, stop)
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def reject(self, text: str) -> None:
        """Call `AgentConversation.reject` on the episode's loop, before a later response can end it. Thread-safe."""
        self.loop.call_soon_threadsafe(self.conversation.reject, text)


class OpenEpisodes:
    """The open episodes of this rank. Thread-safe."""

    def __init__(self) -> None:
        self._open: dict[str, OpenEpisode] = {}
        self.url = ""
        """Address of the server, set once the server listens."""

    @contextmanager
    def opened(self, conversation: AgentConversation) -> Generator[Access]:
        """Accept requests for a conversation until the block ends. Later requests are refused."""
        episode_id, key = secrets.token_urlsafe(ID_BYTES), secrets.token_urlsafe(KEY_BYTES)
        self._open[episode_id] = OpenEpisode(key=key, conversation=conversation, loop=asyncio.get_running_loop())
        try:
            yield Access(base_url=f"{self.url}{PREFIX}{episode_id}/v1", api_key=key)
        finally:
            del self._open[episode_id]

    def find(self, episode_id: str, key: bytes) -> OpenEpisode | None:
        """Return the open episode with this id; None if there is none, or if `key` is not its key."""
        episode = self._open.get(episode_id)
        return episode if episode and hmac.compare_digest(episode.key.encode(), key) else None


STARTER = parents_death.__file__
"""Script that asks the kernel to kill the process when the rank ends, then replaces itself by the program."""
OPENAI_URL, OPENAI_KEY = "OPENAI_BASE_URL", "OPENAI_API_KEY"
"""Environment variables that OpenAI's clients read."""
RANK_VARIABLES = {
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"),
    *("ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
    *(URLS_VARIABLE, KEY_VARIABLE),
}
"""Environment variables that programs do not inherit. With torchrun's, a program with torch would act as a rank."""
TAIL_BYTES = 1 << 16
MAX_SHOWN = 160


class AgentFailed(Exception):
    """The agent ended without a result. The message is one line."""


class Program:
    """A command that reads the item as one line of JSON from stdin. The last line of its output is the reward."""

    def __init__(self, program: str, arguments: list[str]) -> None:
        """program: a Python file, another executable, or a command in PATH."""
        path = Path(program)
        self._name = path.name
        interpreter = [sys.executable] if path.suffix == ".py" else []
        self._command = [*interpreter, str(path.resolve()) if path.is_file() else program, *arguments]

    async def __call__(self, item: Item, access: Access) -> object:
        """Run the program and return its result, or raise AgentFailed. Cancellation kills it and its children."""
        inherited = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
        with TemporaryFile() as given, TemporaryFile() as printed, TemporaryFile() as errors:
            given.write(json.dumps(item, default=str).encode() + b"\n")
            given.seek(0)
            # Files, not pipes: a process that the program leaves running could keep a pipe open for ever.
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", STARTER, str(os.getpid()), *self._command),
                stdin=given,
                stdout=printed,
                stderr=errors,
                env={**inherited, OPENAI_URL: access.base_url, OPENAI_KEY: access.api_key},
                start_new_session=True,  # Ctrl-C must reach the trainer only, and one kill must end the whole group
            )
            try:
                code = await process.wait()
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            if code:
                ending = f"exit code {code}" if code > 0 else f"killed by {signal.Signals(-code).name}"
                words = shortened(_last_line(errors), MAX_SHOWN)
                raise AgentFailed(f"{self._name}: {ending}{words and ': '}{words}")
            return self._result(_last_line(printed))

    def _result(self, line: str) -> object:
        with suppress(ValueError, RecursionError):
            if isinstance(result := json.loads(line), int | float | dict | None):
                return result
        rule = "the last line of its output must be a number or a JSON object with 'reward'"
        raise AgentFailed(f"{self._name}: {rule}, got {shortened(line, MAX_SHOWN)!r}")


def _last_line(file: IO[bytes]) -> str:
    """Return the last line that is not empty; '' if all lines are empty."""
    file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
    lines = [line.strip() for line in file.read().decode(errors="replace").splitlines()]
    return next((line for line in reversed(lines) if line), "")


Agent = Callable[[Item, Access], Awaitable[object]]
"""Plays the episode of an item by holding the conversation with the policy. Returns the reward, for `as_score`."""


class AgentEpisode:
    """Runs the agents of one environment."""

    def __init__(self, agent: Agent, endpoint: OpenEpisodes) -> None:
        self._agent = agent
        self._endpoint = endpoint

    async def run(self, item: Item, model: AgentConversation) -> object:
        """Return the reward; 0 if the agent fails after it exceeded a limit. Raises AgentFailed without a request."""
        with self._endpoint.opened(model) as access:
            try:
                result = await self._agent(item, access)
            except Exception:
                if model.exhausted:
                    return 0.0
                raise
        if not model.requests:
            raise AgentFailed("the agent has ended without a request to its base URL")
        return result


def build_agent(program: str, arguments: list[str], key: str) -> Agent:
    """Return the agent: an async function `f(item, base_url, api_key)`, or a program. Raises EnvironmentSetupError."""
    if ":" not in program:
        return Program(program, arguments)
    if arguments:
        raise EnvironmentSetupError(f"{key}: arguments={arguments}: a function has none; use a program")
    function = load_object(program, f"{key}: program")
    if not iscoroutinefunction(function):
        raise EnvironmentSetupError(f"{key}: program={program!r}: must be a coroutine function: write `async def`")
    try:
        signature(function).bind(None, None, None)
    except TypeError as error:
        rule = "must be called as `f(item, base_url, api_key)`"
        raise EnvironmentSetupError(f"{key}: program={program!r}: {rule}: {error}") from None
    return lambda item, access: function(item, access.base_url, access.api_key)
