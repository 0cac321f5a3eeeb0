"""A chat whose lines a test writes, and whose replies it reads while they are sampled."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from tests.support.paths import ROOT

TIMEOUT = 300.0


class ChatProcess:
    """`python -m colocated_grpo.tools.chat` in a process. Leaving the context kills it."""

    def __init__(self, folder: Path, arguments: Sequence[str]) -> None:
        self.stderr = folder / "stderr"
        with self.stderr.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "colocated_grpo.tools.chat", *arguments],
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                bufsize=0,
            )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._lines, self._replies = self._process.stdin, self._process.stdout

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self._process.kill()
        self._process.communicate()

    def say(self, *lines: str) -> None:
        self._lines.write("".join(f"{line}\n" for line in lines).encode())

    def hear(self) -> str:
        """Return the next reply."""
        characters = []
        while (character := self.hear_begin()) != "\n":
            characters.append(character)
        return "".join(characters)

    def hear_begin(self) -> str:
        """Return the next character, which the models of the tests encode as one byte."""
        ready, _, _ = select.select([self._replies], [], [], TIMEOUT)
        assert ready, f"no reply within {TIMEOUT:g} s\n{self.stderr.read_text()}"
        character = self._replies.read(1)
        assert character, f"the chat has ended\n{self.stderr.read_text()}"
        return character.decode()

    def interrupt(self) -> None:
        """Press Ctrl-C."""
        self._process.send_signal(signal.SIGINT)

    def exit_code(self) -> int:
        return self._process.wait(TIMEOUT)
