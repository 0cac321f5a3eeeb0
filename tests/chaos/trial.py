"""One attack, run in a process of its own, and its result as JSON.

    python -m tests.chaos.trial kills --seconds 600 --seed 1 --output docs/results

`tests.chaos` runs all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil

from benchmarks.results import describe
from colocated_grpo.types import JsonObject

RESULT = "chaos_{name}_{cores}cores.json"


class Trial:
    """The folder, the seed and the time of one attack, and the problems that it has found."""

    def __init__(self, folder: Path, seed: int, seconds: float, only: str = "") -> None:
        """only: text in the names of the servers to attack."""
        self.folder = folder
        self.only = only
        self.seed = seed
        self.random = random.Random(seed)
        self.problems: list[str] = []
        self._until = time.monotonic() + seconds

    def seconds_left(self) -> float:
        return max(0.0, self._until - time.monotonic())

    def check(self, holds: bool, problem: str) -> None:
        """Record and print `problem` unless the condition holds."""
        if not holds:
            self.problems.append(problem)
            self.say(f"PROBLEM {problem}")

    def say(self, line: str) -> None:
        print(line, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one attack. Returns 1 if it has found a problem; its files are then kept."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.trial", description="Run one attack.")
    parser.add_argument("name", help="module of tests/chaos")
    parser.add_argument("--seconds", type=float, default=600.0, help="after which no further round begins")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--only", default="", metavar="TEXT", help="attack only servers with this text in their names")
    parser.add_argument("--output", type=Path, help="folder of the JSON file")
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parser.parse_args(arguments)
    folder = Path(tempfile.mkdtemp(prefix=f"chaos-{options.name}-"))
    trial = Trial(folder, options.seed, options.seconds, options.only)
    trial.say(f"{options.name}: seed {options.seed}, {options.seconds:.0f} s, files in {folder}")
    began, busy = time.monotonic(), psutil.cpu_times()
    figures: JsonObject = import_module(f"tests.chaos.{options.name}").attack(trial)
    result = _origin(options.name, arguments) | {
        "seconds": round(time.monotonic() - began),
        "machine_load": _load(busy, psutil.cpu_times()),
        **figures,
        "problems": trial.problems,
    }
    print(json.dumps({key: value for key, value in result.items() if key != "packages"}, indent=1), flush=True)
    if not trial.problems:
        shutil.rmtree(folder, ignore_errors=True)
    if options.output is not None:
        options.output.mkdir(parents=True, exist_ok=True)
        file = options.output / RESULT.format(name=options.name, cores=len(os.sched_getaffinity(0)))
        file.write_text(json.dumps(result, indent=1) + "\n")
    return int(bool(trial.problems))


def _origin(name: str, arguments: Sequence[str]) -> JsonObject:
    origin = describe(name, [], ranks=1)
    del origin["benchmark"], origin["ranks"]
    return origin | {"command": shlex.join(["python", "-m", "tests.chaos.trial", *_without_output(arguments)])}


def _without_output(arguments: Sequence[str]) -> list[str]:
    """Drop the folder of the result, which says nothing about it."""
    return [word for at, word in enumerate(arguments) if "--output" not in (word, arguments[at - 1] if at else "")]


def _load(before: Any, after: Any) -> JsonObject:
    """Return the load of the machine while the attack ran: of all programs, not of the attack alone."""
    spent = {name: getattr(after, name) - getattr(before, name) for name in before._fields}
    return {
        "load_average": round(os.getloadavg()[2], 1),
        "idle_share": round(spent["idle"] / max(sum(spent.values()), 1e-9), 3),
    }


if __name__ == "__main__":
    sys.exit(main())
