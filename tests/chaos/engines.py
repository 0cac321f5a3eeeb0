"""Kill the engine of a server, a trainer or an Atropos API at random moments, and compare the runs with whole ones.

    python -m tests.chaos.engines --repeat 10

A run that ends by itself is resumed. Every run must have trained each step once, on the completions of a run that was
not interrupted; with an API, on every group at most once. Prints a line for each kill and exits with 1 if one differs.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from colocated_grpo.benchmarks.results import describe
from colocated_grpo.tracking import files
from tests.support.atropos_environment import GROUP, environment
from tests.support.serve_process import START_SECONDS, ServeProcess
from tests.support.served_runs import SERVER_FLAGS, trained, work, write_task
from tests.support.servers import EMBEDDED, ApiProcess, free_port
from tests.support.training_runs import ForkedRun, Settings, TrainingRun, tiny_model, train, weights_of

STEPS = 12
API_STEPS = 6
MOST_RESUMES = 3
ADAPTER = {"lr": 0.02, "lora": {"rank": 4}}


@dataclass
class Tally:
    """Outcome of all kills of one kind."""

    kills: int = 0
    resumed: int = 0
    """Runs that ended with one line, and were resumed."""
    problems: list[str] = field(default_factory=list)


@contextmanager
def fresh_server() -> Iterator[ServeProcess]:
    """A server of its own for each kill: a server ends after several crashes in a row."""
    with ServeProcess(tiny_model(), "--enable-lora", *SERVER_FLAGS) as server:
        server.wait_until_ready()
        yield server


class Chaos:
    """Runs of one kind each, killed once at a moment that `moments` chooses."""

    def __init__(self, folder: Path, moments: random.Random) -> None:
        self._folder = folder
        self._task = write_task(folder)
        self._moments = moments
        self._whole: dict[str, tuple[TrainingRun, float]] = {}
        """Uninterrupted run by bridge, and its seconds."""

    def settings(self, server: ServeProcess, bridge: str) -> Settings:
        policy = {"policy": ADAPTER} if bridge == "adapter" else {}
        return work(self._task, server, engine={"bridge": bridge}, training_steps=STEPS, **policy)

    def whole(self, server: ServeProcess, bridge: str) -> tuple[TrainingRun, float]:
        if bridge not in self._whole:
            began = time.monotonic()
            run = train(self._folder / f"whole-{bridge}", self.settings(server, bridge))
            self._whole[bridge] = run, time.monotonic() - began
        return self._whole[bridge]

    def engine(self, bridge: str, number: int, tally: Tally) -> None:
        """Kill the server's engine."""
        with fresh_server() as server:
            whole, seconds = self.whole(server, bridge)
            settings, folder = self.settings(server, bridge), self._folder / f"engine-{bridge}-{number}"
            with ForkedRun(folder, settings) as run:
                process = server.engine()
                self._wait(run, seconds)
                process.kill()
                code = run.wait()
            tally.resumed += code != 0
            for _ in range(MOST_RESUMES):
                if code == 0:
                    break
                check_one_line(run, tally)
                with ForkedRun(folder, settings, "--resume", "auto") as run:
                    code = run.wait()
            compare(run, whole, tally, bit_for_bit=bridge == "broadcast")

    def trainer(self, number: int, tally: Tally) -> None:
        """Kill all processes of the run, and resume it with the same server."""
        with fresh_server() as server:
            whole, seconds = self.whole(server, "broadcast")
            settings, folder = self.settings(server, "broadcast"), self._folder / f"trainer-{number}"
            with ForkedRun(folder, settings) as run:
                self._wait(run, seconds)
                run.kill()
            tally.resumed += 1
            compare(train(folder, settings, "--resume", "auto"), whole, tally, bit_for_bit=True)

    def api(self, number: int, tally: Tally) -> None:
        """Kill the Atropos API of an environment that samples from the server, and start it again."""
        folder = self._folder / f"api-{number}"
        entry = {"type": "atropos", "connect_timeout": START_SECONDS, "server": {"port": free_port()}}
        with fresh_server() as server, ApiProcess(EMBEDDED) as api:
            settings = work(
                self._task,
                server,
                environments=[{**entry, "url": api.url}],
                deterministic=False,
                training_steps=API_STEPS,
                rollout={"prompts_per_step": 4, "group_size": GROUP},
                tracking={"rollouts_per_step": 4 * GROUP},
            )
            with ForkedRun(folder, settings) as run:
                with environment(folder, api.url, server.port):
                    run.wait_for_step(0)
                    self._wait(run, 2.0)
                    api.kill()
                api.start()
                with environment(folder, api.url, server.port):
                    run.finish()
        check_steps(run, API_STEPS, tally)
        rollouts = files.read_rollouts(run.folder)
        groups = Counter((row["step"], row["prompt_index"]) for row in rollouts)
        if set(groups.values()) != {GROUP}:
            tally.problems.append(f"{run.folder}: incomplete groups: {groups}")
        texts = Counter((row["prompt"], row["completion"]) for row in rollouts)
        if twice := [text for text, count in texts.items() if count > GROUP]:
            tally.problems.append(f"{run.folder}: trained twice: {twice[:3]}")

    def _wait(self, run: TrainingRun, seconds: float) -> None:
        """Wait for a random part of the time, or for the end of the run."""
        until = time.monotonic() + self._moments.uniform(0, seconds)
        while time.monotonic() < until and any(psutil.pid_exists(process.pid) for process in run.processes()):
            time.sleep(0.02)


def check_one_line(run: TrainingRun, tally: Tally) -> None:
    errors = [line for line in run.stderr.splitlines() if line.startswith("error: ")]
    if len(errors) != 1 or "Traceback" in run.stderr:
        tally.problems.append(f"{run.folder}: ended without one line: {run.tail()}")


def check_steps(run: TrainingRun, steps: int, tally: Tally) -> None:
    trained_steps = [row["step"] for row in run.rows(files.TRAIN)]
    if trained_steps != list(range(steps)):
        tally.problems.append(f"{run.folder}: trained steps {trained_steps}\n{run.tail()}")


def compare(run: TrainingRun, whole: TrainingRun, tally: Tally, *, bit_for_bit: bool) -> None:
    check_steps(run, STEPS, tally)
    if files.read_rollouts(run.folder) != files.read_rollouts(whole.folder):
        tally.problems.append(f"{run.folder}: other completions than {whole.folder}")
    if bit_for_bit and (weights_of(run), trained(run)) != (weights_of(whole), trained(whole)):
        tally.problems.append(f"{run.folder}: other weights or metrics than {whole.folder}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.engines", description=__doc__)
    parser.add_argument("--repeat", type=int, default=10, help="kills of each kind (default: 10)")
    parser.add_argument("--seed", type=int, default=None, help="of the moments (default: random, and printed)")
    parser.add_argument("--output", type=Path, help="JSON file for the result")
    options = parser.parse_args(arguments)
    seed = random.SystemRandom().randrange(1 << 31) if options.seed is None else options.seed
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    print(f"seed {seed}, runs in {folder}", flush=True)
    chaos = Chaos(folder, random.Random(seed))
    kinds: dict[str, Callable[[int, Tally], None]] = {
        "engine, broadcast": partial(chaos.engine, "broadcast"),
        "engine, adapter": partial(chaos.engine, "adapter"),
        "trainer, broadcast": chaos.trainer,
        "run-api": chaos.api,
    }
    tallies = {kind: Tally() for kind in kinds}
    for number in range(options.repeat):
        for kind, kill in kinds.items():
            tally = tallies[kind]
            kill(number, tally)
            tally.kills += 1
            print(f"{kind}: {tally.kills} kills, {tally.resumed} resumed", *tally.problems, sep="\n  ", flush=True)
    result: dict[str, Any] = describe("none", [], ranks=1) | {
        "what": "processes killed at random moments of runs with an engine server, which end as whole runs do",
        "command": f"python -m tests.chaos.engines --repeat {options.repeat} --seed {seed}",
        "kills": {kind: asdict(tally) for kind, tally in tallies.items()},
    }
    del result["benchmark"]
    if options.output is not None:
        options.output.write_text(json.dumps(result, indent=1) + "\n")
    return int(any(tally.problems for tally in tallies.values()))


if __name__ == "__main__":
    sys.exit(main())
