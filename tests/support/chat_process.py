"""A chat whose lines a test writes, and whose replies it reads while they are sampled."""

from __future__ import annotations

import io
import os
import runpy
import select
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from colocated_grpo.launch.launcher import child_environment
from tests.support.ranks import Ranks

TIMEOUT = 60.0


class ChatProcess:
    """`python -m colocated_grpo.tools.chat` in a forked process. Leaving the context kills it."""

    def __init__(self, folder: Path, arguments: Sequence[str]) -> None:
        self.stderr = folder / "stderr"
        stdin, stdout = folder / "stdin", folder / "stdout"
        for pipe in (stdin, stdout):
            os.mkfifo(pipe)
        self._ranks = Ranks(_chat, 1, list(arguments), stdin, stdout, self.stderr)
        # Each open waits for the other side.
        self._lines = stdin.open("w", encoding="utf-8")
        self._replies = stdout.open("rb", buffering=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self._ranks.kill()
        self._replies.close()

    def say(self, *lines: str) -> None:
        self._lines.write("".join(f"{line}\n" for line in lines))
        self._lines.flush()

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
        os.kill(self._ranks.processes[0].pid, signal.SIGINT)

    def exit_code(self) -> int | None:
        return self._ranks.exit_codes(TIMEOUT)[0]


def _chat(arguments: list[str], stdin: Path, stdout: Path, stderr: Path) -> None:
    os.environ.update(child_environment(os.environ, 0, 1, "INFO"))
    for file, mode, number in ((stdin, "r", 0), (stdout, "w", 1), (stderr, "w", 2)):
        with file.open(mode) as opened:
            os.dup2(opened.fileno(), number)
    sys.stdin = io.TextIOWrapper(io.FileIO(0, closefd=False), encoding="utf-8")
    sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), encoding="utf-8", write_through=True)
    sys.argv[1:] = arguments
    runpy.run_module("colocated_grpo.tools.chat", run_name="__main__")
