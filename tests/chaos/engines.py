"""Engines, trainers and Atropos APIs killed at random moments beside an engine server.

A run that ends by itself is resumed. Every run must have trained each step once, on the completions of a run that was
not interrupted; with an API, on every group at most once.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import cycle

import psutil

from colocated_grpo.tracking import files
from colocated_grpo.types import JsonObject
from tests.chaos.trial import Trial
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


@contextmanager
def fresh_server() -> Generator[ServeProcess]:
    """A server of its own for each kill: a server ends after several crashes in a row."""
    with ServeProcess(tiny_model(), "--enable-lora", *SERVER_FLAGS) as server:
        server.wait_until_ready()
        yield server


class Kills:
    """Runs of one kind each, killed once at a random moment."""

    def __init__(self, trial: Trial) -> None:
        self._trial = trial
        self._task = write_task(trial.folder)
        self._whole: dict[str, tuple[TrainingRun, float]] = {}
        """Uninterrupted run by bridge, and its seconds."""

    def settings(self, server: ServeProcess, bridge: str) -> Settings:
        policy = {"policy": ADAPTER} if bridge == "adapter" else {}
        return work(self._task, server, engine={"bridge": bridge}, training_steps=STEPS, **policy)

    def whole(self, server: ServeProcess, bridge: str) -> tuple[TrainingRun, float]:
        if bridge not in self._whole:
            began = time.monotonic()
            run = train(self._trial.folder / f"whole-{bridge}", self.settings(server, bridge))
            self._whole[bridge] = run, time.monotonic() - began
        return self._whole[bridge]

    def engine(self, bridge: str, number: int, tally: Tally) -> None:
        """Kill the server's engine."""
        with fresh_server() as server:
            whole, seconds = self.whole(server, bridge)
            settings, folder = self.settings(server, bridge), self._trial.folder / f"engine-{bridge}-{number}"
            with ForkedRun(folder, settings) as run:
                process = server.engine()
                self._wait(run, seconds)
                process.kill()
                code = run.wait()
            tally.resumed += code != 0
            for _ in range(MOST_RESUMES):
                if code == 0:
                    break
                self._check_one_line(run)
                with ForkedRun(folder, settings, "--resume", "auto") as run:
                    code = run.wait()
            self._compare(run, whole, bit_for_bit=bridge == "broadcast")

    def trainer(self, number: int, tally: Tally) -> None:
        """Kill all processes of the run, and resume it with the same server."""
        with fresh_server() as server:
            whole, seconds = self.whole(server, "broadcast")
            settings, folder = self.settings(server, "broadcast"), self._trial.folder / f"trainer-{number}"
            with ForkedRun(folder, settings) as run:
                self._wait(run, seconds)
                run.kill()
            tally.resumed += 1
            with ForkedRun(folder, settings, "--resume", "auto") as run:
                run.wait()
            self._compare(run, whole, bit_for_bit=True)

    def api(self, number: int, _tally: Tally) -> None:
        """Kill the Atropos API of an environment that samples from the server, and start it again."""
        folder = self._trial.folder / f"api-{number}"
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
                    run.wait()
        self._check_steps(run, API_STEPS)
        rollouts = files.read_rollouts(run.folder)
        groups = Counter((row["step"], row["prompt_index"]) for row in rollouts)
        self._trial.check(set(groups.values()) == {GROUP}, f"{run.folder}: incomplete groups: {groups}")
        texts = Counter((row["prompt"], row["completion"]) for row in rollouts)
        twice = [text for text, count in texts.items() if count > GROUP]
        self._trial.check(not twice, f"{run.folder}: trained twice: {twice[:3]}")

    def _wait(self, run: TrainingRun, seconds: float) -> None:
        """Wait for a random part of the time, or for the end of the run."""
        until = time.monotonic() + self._trial.random.uniform(0, seconds)
        while time.monotonic() < until and any(psutil.pid_exists(process.pid) for process in run.processes()):
            time.sleep(0.02)

    def _check_one_line(self, run: TrainingRun) -> None:
        errors = [line for line in run.stderr.splitlines() if line.startswith("error: ")]
        one = len(errors) == 1 and "Traceback" not in run.stderr
        self._trial.check(one, f"{run.folder}: ended without one line: {run.tail()}")

    def _check_steps(self, run: TrainingRun, steps: int) -> None:
        found = [row["step"] for row in run.rows(files.TRAIN)]
        self._trial.check(found == list(range(steps)), f"{run.folder}: trained steps {found}\n{run.tail()}")

    def _compare(self, run: TrainingRun, whole: TrainingRun, *, bit_for_bit: bool) -> None:
        self._check_steps(run, STEPS)
        same = files.read_rollouts(run.folder) == files.read_rollouts(whole.folder)
        self._trial.check(same, f"{run.folder}: other completions than {whole.folder}")
        if bit_for_bit:
            same = (weights_of(run), trained(run)) == (weights_of(whole), trained(whole))
            self._trial.check(same, f"{run.folder}: other weights or metrics than {whole.folder}")


def attack(trial: Trial) -> JsonObject:
    """Kill processes of all kinds in turn until the time is up, each kind at least once."""
    kills = Kills(trial)
    kinds: dict[str, Callable[[int, Tally], None]] = {
        "engine, broadcast": partial(kills.engine, "broadcast"),
        "engine, adapter": partial(kills.engine, "adapter"),
        "trainer, broadcast": kills.trainer,
        "API of Atropos": kills.api,
    }
    tallies = {kind: Tally() for kind in kinds}
    for number, kind in enumerate(cycle(kinds)):
        if not trial.seconds_left() and number >= len(kinds):
            break
        try:
            kinds[kind](number, tallies[kind])
        except AssertionError as error:  # such as a run that does not end
            trial.check(False, f"{kind}: {error}")
        tallies[kind].kills += 1
        trial.say(f"{kind}: {tallies[kind].kills} kills, {tallies[kind].resumed} resumed")
    return {
        "what": "processes killed at random moments of runs with an engine server, which end as whole runs do",
        "compared": "steps, completions and rewards, with the bridge broadcast also weights and metrics, bit for bit; "
        "beside an API, groups are complete and none is trained twice",
        "kinds": {kind: asdict(tally) for kind, tally in tallies.items()},
    }
