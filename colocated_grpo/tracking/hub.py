"""Pushes of a run's exports to the Hugging Face Hub: in the background, one at a time, and never fatal."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from colocated_grpo.errors import RunError
from colocated_grpo.settings.hub import HubConfig
from colocated_grpo.settings.schema import Config
from colocated_grpo.tracking import hub_upload
from colocated_grpo.tracking.hub_upload import NOT_PUSHED
from colocated_grpo.tracking.model_card import write_card

STAGING = "hub"
"""Folder in the run folder with what is being pushed."""
LONGEST_ERROR = 300


@dataclass(frozen=True, kw_only=True)
class _Job:
    title: str
    folder: Path | None
    """Files to push; None: the repository is created."""
    then: str = "the run goes on"
    """Ends the line of a failure."""


class Hub:
    """The run's repository. Every rank has one, to know when a push is `due`; only rank 0 pushes.

    Each push runs in a process of its own, so a slow or broken connection costs training nothing.
    """

    def __init__(self, config: Config, settings: HubConfig, run_dir: Path, note: Callable[[str], None]) -> None:
        self._config = config
        self._settings = settings
        self._run_dir = run_dir
        self._note = note
        self._waiting: deque[_Job] = deque()
        self._running: _Job | None = None
        self._process: subprocess.Popen[str] | None = None
        self._deadline = 0.0
        self.failed = 0
        """Pushes that have failed."""

    def due(self, step: int) -> bool:
        """Return whether the weights after `step` steps are pushed. The last ones are pushed by `push_final`."""
        every = self._settings.every
        last = self._config.checkpoint.final and step >= self._config.training_steps
        return bool(every) and step % every == 0 and not last

    def start(self) -> None:
        """Create the repository, so that a wrong token is noted at the start of the run."""
        shutil.rmtree(self._run_dir / STAGING, ignore_errors=True)  # of a run that was killed
        self._begin(_Job(title=f"repository {self._settings.repo}", folder=None))

    def free(self, step: int) -> bool:
        """Return whether a push can begin; False, with a note, while the former one is not complete."""
        self._advance()
        busy = [job for job in (self._running, *self._waiting) if job is not None and job.folder is not None]
        if busy:
            self._note(f"hub: step {step} is not pushed, as {busy[0].title} is still being pushed")
        return not busy

    def staging(self, step: int) -> Path:
        """Return the folder into which the weights after `step` steps are exported for a push."""
        return self._run_dir / STAGING / f"step_{step}"

    def push(self, step: int) -> None:
        """Push `staging(step)` in the background."""
        self._push(self.staging(step), step, f"step {step}")

    def push_final(self, exported: Path, steps: int) -> None:
        """Push the run's final export."""
        folder = self._run_dir / STAGING / exported.name
        private = ["--private"] if self._settings.private else []
        command = ["hf", "upload", self._settings.repo, str(exported), *private, "--exclude", *NOT_PUSHED]
        by_hand = f"push it with: {shlex.join(command)}"
        try:
            # Links: the export is not written twice, and is not changed by the files that are added.
            shutil.copytree(exported, folder, copy_function=_link, dirs_exist_ok=True)
        except shutil.Error as error:  # of single files: (source, target, reason)
            self._fail(exported.name, error.args[0][0][2], by_hand)
        except OSError as error:
            self._fail(exported.name, f"{error.strerror}: {error.filename}", by_hand)
        else:
            self._push(folder, steps, exported.name, by_hand)

    def pending(self, seconds: float, *, stopped: bool) -> bool:
        """Wait up to `seconds`, and return whether a push is not complete yet. stopped: end it instead."""
        self._advance()
        if stopped:
            self.close()
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(max(0.0, min(seconds, self._deadline - time.monotonic())))
            self._advance()
        return self._running is not None or bool(self._waiting)

    def metrics(self) -> dict[str, float]:
        """Return the metrics of a step; collects the result of a push that has completed."""
        self._advance()
        return {"hub/failed": float(self.failed)}

    def close(self) -> None:
        """End what is being pushed."""
        self._waiting.clear()
        if self._running is not None and self._process is not None:
            job = self._running
            self._end()
            if job.folder is not None:
                self._fail(job.title, "the run ended first")
        shutil.rmtree(self._run_dir / STAGING, ignore_errors=True)

    def _push(self, folder: Path, step: int, title: str, then: str = _Job.then) -> None:
        try:
            write_card(folder, self._config, self._settings.repo, self._run_dir, step)
        except (
            OSError,
            RunError,
            ValueError,
            TypeError,
        ) as error:  # the card is made from files that a user may have changed
            self._note(f"hub: {title} is pushed without a card: {error}")
        self._waiting.append(_Job(title=title, folder=folder, then=then))
        self._advance()

    def _advance(self) -> None:
        """Collect the result of a process that has ended, end one that is late, and begin the next job."""
        if self._process is not None and self._running is not None:
            late = time.monotonic() > self._deadline
            if self._process.poll() is None and not late:
                return
            job, result = self._running, self._end()
            if "url" not in result:
                reason = result.get("error") or (
                    f"longer than hub.timeout={self._settings.timeout:g} s" if late else "the uploader was killed"
                )
                self._fail(job.title, reason[:LONGEST_ERROR], job.then)
            elif job.folder is not None:
                self._note(f"hub: pushed {job.title}: {result['url']}")
            if job.folder is not None:
                shutil.rmtree(job.folder, ignore_errors=True)
        while self._waiting and self._running is None:
            self._begin(self._waiting.popleft())

    def _begin(self, job: _Job) -> None:
        description = {
            "repo": self._settings.repo,
            "private": self._settings.private,
            "message": f"{job.title} of {self._run_dir.name}",
            "folder": None if job.folder is None else str(job.folder),
        }
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", hub_upload.__file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env={**os.environ, "HF_HUB_DISABLE_PROGRESS_BARS": "1"},
                start_new_session=True,  # Ctrl-C is for the run, which then ends the push
            )
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(description) + "\n")
            self._process.stdin.flush()
        except OSError as error:  # no memory for a process, or it has ended at once
            if self._process is not None:
                self._end()
            self._fail(job.title, str(error), job.then)
            if job.folder is not None:
                shutil.rmtree(job.folder, ignore_errors=True)
            return
        self._running, self._deadline = job, time.monotonic() + self._settings.timeout

    def _end(self) -> dict[str, str]:
        """Kill the process if it is alive, and return the result that it has printed whole; empty without one."""
        assert self._process is not None
        self._process.kill()
        printed, _ = self._process.communicate()
        self._process = self._running = None
        with suppress(ValueError, IndexError):
            result = json.loads(printed.splitlines()[-1])
            return result if isinstance(result, dict) else {}
        return {}

    def _fail(self, title: str, reason: str, then: str = "") -> None:
        self.failed += 1
        line = f"warning: hub: {title}: failed, number {self.failed} in this run: {reason}"
        self._note(f"{line}; {then}" if then else line)


def _link(source: str, target: str) -> str:
    """Make a hard link, or a copy where the file system has none."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
    return target
