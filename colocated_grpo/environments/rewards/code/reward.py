"""The built-in reward `run_code`: the fraction of a row's tests that the program in a completion passes."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, Self

from pydantic import Field, PrivateAttr, model_validator

from colocated_grpo.environments.rewards.builtin import Completions, completion_texts
from colocated_grpo.environments.rewards.code.answer import last_code_block
from colocated_grpo.environments.rewards.code.cases import Case, cases_of
from colocated_grpo.environments.rewards.code.processes import Runners
from colocated_grpo.environments.rewards.code.runner import SYSTEMS
from colocated_grpo.environments.rewards.scoring import NoReward
from colocated_grpo.settings.base import Positive, Section

MEGABYTE = 1 << 20


class RunCode(Section):
    """Fraction of passed tests. 0 without a closed code block; None for a row without tests."""

    language: Literal["python"] = "python"
    """Language of the programs."""
    tests_column: str = "tests"
    """Column of the tests."""
    timeout: float = Field(5.0, gt=0)
    """Seconds for all tests of a completion. Tests that are left then have failed."""
    memory_mb: Positive = 1024
    """Address space of a test's process."""
    file_mb: Positive = 16
    """Largest size of a file that a test writes, standard output included."""
    processes: Positive | None = None
    """Completions tested at a time, per rank. Default: the cores of the host, divided by its ranks."""

    _threads: ThreadPoolExecutor = PrivateAttr()
    _runners: Runners = PrivateAttr()

    @model_validator(mode="after")
    def _runs_here(self) -> Self:
        if platform.system() != "Linux" or platform.machine() not in SYSTEMS:
            raise ValueError(f"needs Linux on {' or '.join(SYSTEMS)}")
        try:
            limits_hold = self._passed("", cases_of("pass")) == 1
        except NoReward as failure:
            raise ValueError(str(failure)) from None
        if not limits_hold:
            raise ValueError("the limits cannot be set here: no seccomp, or memory_mb or timeout is too small")
        return self

    def model_post_init(self, _context: Any) -> None:
        self._threads = ThreadPoolExecutor(self.processes or _cores(), thread_name_prefix="run_code")
        self._runners = Runners()

    @property
    def required_columns(self) -> set[str]:
        return {self.tests_column}

    def __call__(self, completions: Completions, **columns: Sequence[Any]) -> list[float | NoReward | None]:
        """Return the fraction of passed tests of each completion. Raises ValueError for tests of an unknown form."""
        return list(self._threads.map(self._reward, completion_texts(completions), columns[self.tests_column]))

    def _reward(self, text: str, tests: Any) -> float | NoReward | None:
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
        return self._runners.passed({"program": program, "cases": cases, **limits}, self.timeout)


def _cores() -> int:
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, len(os.sched_getaffinity(0)) // ranks)
