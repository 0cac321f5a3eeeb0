"""Agents that are programs of the user, each episode a process of its own."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

from colocated_grpo.environments.agents.endpoint import Access
from colocated_grpo.environments.base import Item
from colocated_grpo.runtime import parents_death
from colocated_grpo.runtime.program import KEY_VARIABLE, URLS_VARIABLE

STARTER = parents_death.__file__
"""Becomes the program, which the kernel then kills when the rank ends."""
OPENAI_URL, OPENAI_KEY = "OPENAI_BASE_URL", "OPENAI_API_KEY"
"""Variables that OpenAI's clients read."""
RANK_VARIABLES = {
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"),
    *("ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
    *(URLS_VARIABLE, KEY_VARIABLE),
}
"""Removed: with torchrun's variables, a program that uses torch would act as a rank."""
TAIL_BYTES = 1 << 16
MAX_SHOWN = 160


class AgentFailed(Exception):
    """The agent has ended without a result. The message is one line."""


class Program:
    """A command that gets the item as one line of JSON on stdin, and prints its reward in the last line of stdout."""

    def __init__(self, program: str, arguments: list[str]) -> None:
        """program: a Python file, another executable, or a command in PATH."""
        path = Path(program)
        self._name = path.name
        interpreter = [sys.executable] if path.suffix == ".py" else []
        self._command = [*interpreter, str(path.resolve()) if path.is_file() else program, *arguments]

    async def play(self, item: Item, access: Access) -> Any:
        """Run the program and return its result. Raises AgentFailed. Cancellation kills it with all it has started."""
        with TemporaryFile() as given, TemporaryFile() as printed, TemporaryFile() as errors:
            given.write(json.dumps(item, default=str).encode() + b"\n")
            given.seek(0)
            # Files and not pipes: what the program leaves running could keep a pipe open for ever.
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", STARTER, str(os.getpid()), *self._command),
                stdin=given,
                stdout=printed,
                stderr=errors,
                env=_environment(access),
                start_new_session=True,  # Ctrl-C must reach the trainer only; and it makes a group that one kill ends
            )
            try:
                code = await process.wait()
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            if code:
                raise AgentFailed(f"{self._name}: {_ending(code)}{_last_words(errors)}")
            return self._result(_last_line(printed))

    def _result(self, line: str) -> Any:
        with suppress(ValueError, RecursionError):
            result = json.loads(line)
            if result is None or isinstance(result, int | float | dict):
                return result
        raise AgentFailed(
            f"{self._name}: the last line of its output must be a number or a JSON object with 'reward', got "
            f"{_shown(line)!r}"
        )


def _environment(access: Access) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
    return {**inherited, OPENAI_URL: access.base_url, OPENAI_KEY: access.api_key}


def _ending(code: int) -> str:
    return f"exit code {code}" if code > 0 else f"killed by {signal.Signals(-code).name}"


def _last_words(errors: IO[bytes]) -> str:
    line = _last_line(errors)
    return f": {_shown(line)}" if line else ""


def _shown(line: str) -> str:
    return line if len(line) <= MAX_SHOWN else line[: MAX_SHOWN - 3] + "..."


def _last_line(file: IO[bytes]) -> str:
    """Return the last line that is not empty; '' if there is none."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - TAIL_BYTES))
    lines = [line.strip() for line in file.read().decode(errors="replace").splitlines()]
    return next((line for line in reversed(lines) if line), "")
