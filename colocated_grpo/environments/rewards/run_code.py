"""The built-in reward `run_code`: the fraction of a row's tests that the program in a completion passes."""

import json
import os
import platform
import secrets
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, Self

from pydantic import Field, PrivateAttr, model_validator

from colocated_grpo.environments.rewards import builtin, code_runner, workers
from colocated_grpo.environments.rewards.scoring import NoReward
from colocated_grpo.settings.base import Positive, Section

MEGABYTE = 1 << 20
FENCE = "```"
GRACE = 10.0
"""Seconds to wait for a process after the time limit of its tests."""
Case = dict[str, str | None]
"""One test: `check`, statements to run after the program; or `stdin`, and the expected `stdout`."""


class RunCode(Section):
    """Reward: the fraction of passed tests.

    The reward is 0 if the completion has no closed code block, and None if the row has no tests.
    """

    language: Literal["python"] = "python"
    """Language of the programs."""
    tests_column: str = "tests"
    """Name of the column with the tests."""
    timeout: float = Field(5.0, gt=0)
    """Time limit in seconds for all tests of a completion together. Tests not finished by then count as failed."""
    memory_mb: Positive = 1024
    """Maximum address space of a test's process, in MiB."""
    file_mb: Positive = 16
    """Maximum size of each file that a test writes, in MiB. Standard output counts as a file."""
    processes: Positive | None = None
    """Completions tested at a time, per rank. Default: the available cores of the host, divided by its ranks."""

    _threads: ThreadPoolExecutor = PrivateAttr()
    _runners: workers.WorkerPool = PrivateAttr()

    @model_validator(mode="after")
    def _runs_here(self) -> Self:
        if platform.system() != "Linux" or platform.machine() not in code_runner.SYSTEMS:
            raise ValueError(f"needs Linux on {' or '.join(code_runner.SYSTEMS)}")
        try:
            limits_hold = self._passed("", cases_of("bytes(1 << 20)")) == 1  # more than what is free already
        except NoReward as failure:
            raise ValueError(str(failure)) from None
        if not limits_hold:
            raise ValueError("the limits cannot be set here: no seccomp, or memory_mb or timeout is too small")
        return self

    def model_post_init(self, _context: object) -> None:
        cores = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self._threads = ThreadPoolExecutor(self.processes or max(1, cores), thread_name_prefix="run_code")
        self._runners = workers.WorkerPool(
            # -I: the environment and the working folder must not change what a program imports.
            command=[sys.executable, "-I", str(Path(code_runner.__file__))],
            # Not the environment variables of this process: they may contain API keys.
            environment={"PATH": os.defpath, "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )

    @property
    def required_columns(self) -> set[str]:
        return {self.tests_column}

    def __call__(self, completions: builtin.Completions, **columns: Sequence[object]) -> list[float | NoReward | None]:
        """Return the fraction of passed tests of each completion. Raises ValueError for tests of an unknown form."""
        return list(self._threads.map(self._reward, builtin.completion_texts(completions), columns[self.tests_column]))

    def _reward(self, text: str, tests: object) -> float | NoReward | None:
        cases = cases_of(tests)
        program = last_code_block(text)
        if not cases:
            return None
        if program is None:
            return 0.0
        try:
            return self._passed(program, cases) / len(cases)
        except NoReward as failure:
            return failure

    def _passed(self, program: str, cases: Sequence[Case]) -> int:
        limits = {"seconds": self.timeout, "memory": self.memory_mb * MEGABYTE, "file": self.file_mb * MEGABYTE}
        # The working folder of the tests is empty, and is removed afterwards.
        with TemporaryDirectory(prefix="run_code_", ignore_cleanup_errors=True) as folder:
            job = {"program": program, "cases": cases, "folder": folder, **limits}
            nonce = secrets.token_hex()
            read = partial(_passed_tests, nonce, len(cases))
            responses, ended = self._runners.ask(job, nonce, read=read, seconds=self.timeout + GRACE)
        if ended is not None:
            raise NoReward(ended)
        return responses[0]


def _passed_tests(nonce: str, most: int, response: bytes) -> int:
    """Return the number in a runner's response. Raises ValueError if it does not answer this job."""
    match json.loads(response):
        case [str(answered), int(count)] if answered == nonce and 0 <= count <= most:
            return count
    raise ValueError("not a response to this job")


def last_code_block(text: str) -> str | None:
    """Return the content of the last closed ``` block, without the rest of its opening line; None if there is none."""
    parts = text.split(FENCE)
    blocks = [part for part in parts[1:-1:2] if "\n" in part]
    return blocks[-1].partition("\n")[2] if blocks else None


def cases_of(tests: object) -> list[Case]:
    """Return the tests in a cell of the tests column. Raises ValueError for an unknown form.

    Known forms: Python statements, as text or as a list of texts; a list of {"input", "output"} pairs; {"inputs":
    [...], "outputs": [...]}. Lists and mappings may also be given as JSON text.
    """
    if isinstance(tests, str):
        if tests.lstrip()[:1] not in ("[", "{"):
            return [_case(tests)] if tests.strip() else []
        tests = json.loads(tests)
    if isinstance(tests, Mapping) and {"inputs", "outputs"} <= tests.keys():
        pairs = zip(tests["inputs"], tests["outputs"], strict=True)
        tests = [{"input": given, "output": expected} for given, expected in pairs]
    if isinstance(tests, list | tuple):
        return [_case(test) for test in tests]
    raise ValueError(f"tests must be statements, a list of them or of input and output pairs, got {tests!r:.80}")


def _case(test: object) -> Case:
    if isinstance(test, str):
        return {"check": test, "stdin": "", "stdout": ""}
    if isinstance(test, Mapping) and {"input", "output"} <= test.keys():
        return {"check": None, "stdin": _lines(test["input"]), "stdout": _lines(test["output"])}
    raise ValueError(f'a test must be statements, or have "input" and "output", got {test!r:.80}')


def _lines(value: object) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)
