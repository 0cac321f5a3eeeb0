"""The text of a run, on the console and in run.log, and how the run ended, in summary.json.

Output before the folder is known is kept in memory until then. A run ends as finished, stopped, failed (with the error
and its place) or killed. A failure is recorded by the rank that failed first, else by the launcher.
"""

import errno
import io
import json
import logging
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

from rich.console import Console

from colocated_grpo.errors import CONTINUES, ConfigError, RunError, in_one_line
from colocated_grpo.runtime import program, user_code
from colocated_grpo.runtime.run_folder import AUTO, remove_if_unused
from colocated_grpo.runtime.verdict import FAILED, KILLED, RUN_ERROR, USAGE_ERROR, ProcessEnd, ended_from_outside, leave
from colocated_grpo.tracking import files, report
from colocated_grpo.tracking.console import PlainDisplay, Row, StandardOutput, make_display
from colocated_grpo.tracking.text import figure
from colocated_grpo.types import STDERR, JsonObject

LOG_FILE = "run.log"
LOGGER = "colocated_grpo"
"""Parent of this package's loggers; their warnings go to run.log too."""
PATIENCE = 5.0
"""Seconds after which a plain console shows an unfinished phase."""


class LogFile(io.StringIO):
    """Text that is kept in memory until `open_at` names its file."""

    encoding = "utf-8"

    def __init__(self) -> None:
        super().__init__()
        self._file: TextIO | None = None
        self._handler = logging.StreamHandler(self)
        self._handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
        logging.getLogger(LOGGER).addHandler(self._handler)

    def leave_logger(self) -> None:
        """Receive no more warnings."""
        logging.getLogger(LOGGER).removeHandler(self._handler)

    def open_at(self, path: Path) -> None:
        """Append the text so far and all later text to the file. A second call has no effect."""
        if self._file is None:
            self._file = path.open("a", encoding="utf-8", errors="backslashreplace", buffering=1)
            self._file.write(self.getvalue())

    def write(self, text: str) -> int:
        return super().write(text) if self._file is None else self._file.write(text)


class RunOutput:
    """Output of rank 0; other ranks have no displays. A display whose terminal, pipe or file has closed is dropped."""

    def __init__(
        self, displays: Sequence[PlainDisplay] = (), log: LogFile | None = None, *, patience: float = PATIENCE
    ):
        self._displays = list(displays)
        self._log = log
        self._patience = patience
        self.phase_name: str | None = None
        """The unfinished phase of the start."""
        self.folder: Path | None = None
        """The run folder, once it is locked for this run."""
        self.trains = False
        """The start is over."""

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        """Show a phase of the start, and its seconds when it is finished."""
        self.phase_name, begin = name, time.monotonic()
        lasting = threading.Timer(self._patience, self._phase_lasts, [name])
        lasting.daemon = True
        lasting.start()
        self._show(lambda display: display.phase_begins(name))
        try:
            yield
        finally:
            lasting.cancel()
        self._show(lambda display: display.phase_ends(name, time.monotonic() - begin))
        self.phase_name = None  # after an exception the name stays: the run has failed in this phase

    def _phase_lasts(self, name: str) -> None:
        if self.phase_name == name:
            self._show(lambda display: display.phase_lasts(name))

    @property
    def start_phase(self) -> str | None:
        """The phase of the start; None if the run trains."""
        return None if self.trains else f"start-up ({self.phase_name})" if self.phase_name else "start-up"

    def open(self, facts: dict[str, str], first_step: int) -> None:
        """Show the banner; steps follow."""
        self._show(lambda display: display.open(facts, first_step))

    def step(self, step: int, row: Row) -> None:
        self._show(lambda display: display.step(step, row))

    def note(self, line: str) -> None:
        self._show(lambda display: display.note(line))

    def close(self) -> None:
        """Restore the terminal. Lines may still be shown."""
        self._show(lambda display: display.close())
        if self._log is not None:
            self._log.leave_logger()

    def _show(self, show: Callable[[PlainDisplay], None]) -> None:
        for display in list(self._displays):
            try:
                show(display)
            except (OSError, ValueError) as error:
                # ValueError: user code has closed the stdout that is written to.
                if isinstance(error, ValueError) and not display.console.file.closed:
                    raise
                self._displays.remove(display)

    def write_log(self, folder: Path) -> None:
        """Write the text so far, and all later text, to run.log in `folder`."""
        if self._log is not None:
            with suppress(OSError):
                self._log.open_at(folder / LOG_FILE)


def make_output(mode: str, total_steps: int, *, is_main: bool, console: Console | None = None) -> RunOutput:
    """Return the output of rank 0 (`is_main`), or the silent one of other ranks. mode: tracking.console."""
    if not is_main:
        return RunOutput()
    log = LogFile()
    logged = PlainDisplay(Console(file=log), total_steps)
    logged.note(f"--- started at {datetime.now(UTC).isoformat(timespec='seconds')}")
    return RunOutput([make_display(mode, console or StandardOutput(), total_steps), logged], log)


HELD_OUT_REWARD = "held_out/reward"
DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.ESTALE}
"""Full disk, quota, file size limit, file system remounted read-only, disk failure, lost network share."""
BY_USER_CODE = f"for example os._exit() in an installed package, or exit() in a C library; {CONTINUES}"
UNFINISHED = f"the run exited with code 0 before it was finished: {BY_USER_CODE}"
KILLED_BY_USER = "killed on request, before the run had saved a checkpoint and ended"


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Cause of a run's failure."""

    error: str
    where: str | None
    """Phase of the start, or function, file and line."""
    exit_code: int
    rank: int | None = None
    """The rank that failed first; None: unknown."""


def write_summary(run_dir: Path, state: str, failure: Failure | None = None, *, training: bool = True) -> JsonObject:
    """Write summary.json and return its contents. training: False if the run failed during its start."""
    rows = list(files.read_rows(run_dir / files.METRICS_FILE))
    steps = max((row["step"] for row in rows if row["kind"] == files.TRAIN), default=-1) + 1
    summary: JsonObject = {"state": state, "steps": steps}
    if failure is not None:
        summary |= {**asdict(failure), "step": steps if training else None}
    if (held_out := files.first_and_last(rows, HELD_OUT_REWARD)) is not None:
        values = {"value": HELD_OUT_REWARD, "value" + STDERR: HELD_OUT_REWARD + STDERR}
        summary["held_out_reward"] = {
            when: {"step": row["step"], **{name: row[key] for name, key in values.items() if key in row}}
            for when, row in zip(("before", "after"), held_out, strict=True)
        }
    files.write_atomically(run_dir / files.SUMMARY_FILE, json.dumps(summary, indent=2) + "\n")
    return summary


def summary_line(summary: JsonObject) -> str:
    """Return one line with the number of completed steps and the held-out reward."""
    line = f"{summary['state']} after {summary['steps']} step{'s' * (summary['steps'] != 1)}"
    if "held_out_reward" in summary:
        before, after = summary["held_out_reward"]["before"], summary["held_out_reward"]["after"]
        moved = before["step"] < after["step"]
        line += f": held-out reward {figure(before, 'value')}" + (f" -> {figure(after, 'value')}" if moved else "")
        line += f" (steps {before['step']} -> {after['step']})" if moved else f" (step {before['step']})"
    return line


def record_failure(run_dir: Path, failure: Failure, *, training: bool, state: str = FAILED) -> list[str]:
    """Write summary.json and the report of a failed run, and return lines to show; none if the folder is damaged."""
    lines: list[str] = []
    with suppress(OSError, RunError):
        run_dir.mkdir(parents=True, exist_ok=True)
        lines.append(summary_line(write_summary(run_dir, state, failure, training=training)))
        lines.append(f"report: {report.write_report(run_dir)}")
    return lines


def record_ending(output: RunOutput, error: BaseException, run_folders: Sequence[str | None]) -> tuple[int, list[str]]:
    """Close the output, and record this rank's error, the first. Returns the exit code, and lines unless a defect."""
    if isinstance(error, ConfigError) and not output.trains:  # the run has not begun
        output.close()
        leave(recorded=True)  # else the launcher would make the run folder again, for a report
        return USAGE_ERROR, program.error_text(str(error).splitlines())
    lines: list[str] = []
    if isinstance(error, RunError | ConfigError):
        lines = program.error_text(str(error).splitlines())
    elif isinstance(error, OSError) and (line := explain_os_error(error, [output.folder, *run_folders])):
        lines = [f"error: {line}"]
    elif not isinstance(error, Exception) and (own := user_code.innermost(user_code.lines_of_error(error))) is not None:
        lines = [f"error: {in_one_line(error).removesuffix(':')}, raised by {own}"]
    text = " ".join(lines).removeprefix("error: ") or in_one_line(error)
    where = "; ".join(place for place in (output.start_phase, place_of(error)) if place) or None
    failure = Failure(error=text, where=where, exit_code=RUN_ERROR, rank=int(os.environ["RANK"]))
    _record(output, failure, lines or "".join(traceback.format_exception(error)).splitlines())
    return RUN_ERROR, lines


def explain_os_error(error: OSError, run_folders: Sequence[Path | str | None]) -> str | None:
    """Return one line for a disk error, the limit on open files, or a file in `run_folders`; None for other errors."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return f"{error.strerror}: raise the limit on open files (ulimit -n)"
    if error.errno in DISK_ERRORS:
        place = error.filename or f"while writing into {next(filter(None, run_folders))}"
        return f"{error.strerror}: {place}; {CONTINUES}"
    if isinstance(error.filename, str):
        file = Path(error.filename).absolute()
        if any(file.is_relative_to(Path(folder).absolute()) for folder in run_folders if folder not in (None, AUTO)):
            return f"{error.strerror}: {error.filename}"
    return None


def _record(output: RunOutput, failure: Failure, log_lines: Sequence[str]) -> None:
    output.close()
    if output.folder is None:
        return
    lines = record_failure(output.folder, failure, training=output.trains)
    output.write_log(output.folder)
    for line in lines:
        output.note(line)
    append_to_log(output.folder, log_lines)
    leave(recorded=True)


def leave_start(output: RunOutput) -> str:
    """Clean up after a signal that stops the start, or the end of a run, and return the line to show."""
    output.close()
    if output.folder is not None:
        remove_if_unused(output.folder)
    leave(recorded=True)
    where = f"during {output.start_phase}, before the first step" if output.start_phase else "while the run was ending"
    return f"stopped {where}"


def leave_with_other_rank(output: RunOutput, line: str | None) -> None:
    """Restore the terminal before the watchdog ends this rank. line: the reason, if no rank is alive to record it."""
    output.close()
    if line is not None:
        _record(output, Failure(error=line, where=output.start_phase, exit_code=RUN_ERROR), [f"error: {line}"])
    leave(recorded=True)


def ending(code: int, verdicts: Sequence[ProcessEnd] | None, rank: int) -> tuple[int, list[str]]:
    """Return the run's exit code and lines to show, and record a failure that no rank has recorded. For the launcher.

    code: of `rank`, which failed first. verdicts: how ranks ended; None if a cleanup of /tmp has removed them.
    """
    if verdicts is None:
        return code, []
    if any(verdict.finished for verdict in verdicts):
        if any(verdict.stopped for verdict in verdicts):
            # Also by a signal that this launcher has not received: a scheduler must not take the run for finished.
            return code or 128 + signal.SIGTERM, []
        return (0 if code > 128 else code), []  # a signal after the last step has stopped nothing
    lines: list[str] = []
    first = verdicts[0] if verdicts else ProcessEnd()
    folder = next((Path(verdict.folder) for verdict in verdicts if verdict.folder is not None), None)
    silent = not any(verdict.rank == rank and verdict.code is not None for verdict in verdicts)
    handled = program.stop_signals() if verdicts else []  # without a verdict, the rank had no handler yet
    killed = silent and code - 128 in {*signal.Signals} - {*handled}
    if killed:  # the other ranks report and record only that it is missing
        code, lines = RUN_ERROR, [ended_from_outside(f"rank {rank} by {signal.Signals(code - 128).name}")]
    elif code == 0:
        code, lines = RUN_ERROR, [f"error: {UNFINISHED}"]
    elif first.code is not None:
        code, lines = first.code, list(first.lines)
        if not lines:  # stopped during its start
            if folder is not None:
                remove_if_unused(folder)  # a rank that was blocked has been killed, and has removed nothing
            return code, lines
    if folder is not None and (killed or not any(verdict.recorded for verdict in verdicts)):
        stopped = not lines and code - 128 in program.stop_signals()
        if not (lines or stopped):
            lines = [f"error: the processes ended with exit code {code} and no error message: {BY_USER_CODE}"]
        error = KILLED_BY_USER if stopped else "\n".join(lines).removeprefix("error: ")
        training = any(verdict.training for verdict in verdicts)
        where = None if training else "start-up"
        failure = Failure(error=error, where=where, exit_code=code, rank=rank if killed else None)
        record_failure(folder, failure, training=training, state=KILLED if stopped else FAILED)
        append_to_log(folder, [f"error: {failure.error}"])
    return code, lines


def append_to_log(run_dir: Path, lines: Sequence[str]) -> None:
    """Append lines to run.log. Any process may do so: a rank other than 0, or the launcher."""
    with suppress(OSError), (run_dir / LOG_FILE).open("a", encoding="utf-8", errors="backslashreplace") as log:
        log.writelines(f"{line}\n" for line in lines)


def place_of(error: BaseException) -> str | None:
    """Return the innermost line of user code, else ours, as 'judge (my_rewards.py, line 12)'; of the error's cause."""
    lines = user_code.lines_of_error(error.__cause__ or error)
    found = user_code.innermost(lines) or next((line for line in lines if line.is_ours()), None)
    return None if found is None else str(found)
