"""The launcher's part in the end of a run: stopping it, and recording a failure that no rank could record.

Ranks leave files next to the verdict for this; `runtime/verdict.py` lists them.
"""

from __future__ import annotations

import signal
from pathlib import Path

from colocated_grpo.runtime.processes import SAVING, STOP_RANKS, StopAction
from colocated_grpo.runtime.verdict import (
    FINISHED_SUFFIX,
    FOLDER_SUFFIX,
    RECORDED_SUFFIX,
    RUN_ERROR,
    STOPPED_SUFFIX,
    TRAINING_SUFFIX,
    read_verdict,
)

STARTING = b"\nstopping during start-up, before the first step\n"
START_SECONDS = 5.0
"""Time in which ranks must end that have not begun to train. One that is blocked in a library receives no signal."""
UNFINISHED = (
    "the run exited with code 0 before it was finished, for example by os._exit() in a reward or an environment; "
    "--resume auto continues from its last checkpoint"
)
KILLED_BY_USER = "killed on request, before the run had saved a checkpoint and ended"


def stop_action(verdict: Path) -> StopAction:
    """Return the effect of the first stop signal: a run that trains saves a checkpoint, one that starts just ends."""

    def begin(number: int) -> tuple[bytes, float | None]:
        if verdict.with_suffix(TRAINING_SUFFIX).exists():
            return SAVING, None
        # Keeps torchrun from reporting the ranks that end: this line is all there is to say.
        verdict.write_text(f"{128 + number}\n", encoding="utf-8")
        return STARTING, START_SECONDS

    return StopAction(begin=begin, targets=STOP_RANKS.targets)


def ending(code: int, verdict: Path) -> tuple[int, str]:
    """Return the run's exit code and the lines to show, and record a failure that no rank has recorded.

    code: of the command that ran the ranks. verdict: the file in which they leave code and lines; its folder may have
    been removed by a cleanup of /tmp.
    """
    if verdict.with_suffix(FINISHED_SUFFIX).exists() or not verdict.parent.is_dir():
        # Stopped by a signal that this launcher has not received: a scheduler must not take the run for finished.
        stopped = verdict.with_suffix(STOPPED_SUFFIX).exists()
        return (128 + signal.SIGTERM if stopped and code == 0 else code), ""
    lines = ""
    if code == 0:
        code, lines = RUN_ERROR, f"error: {UNFINISHED}"
    elif verdict.exists():
        code, lines = read_verdict(verdict)
        if not lines:  # stopped during its start
            return code, ""
    folder = verdict.with_suffix(FOLDER_SUFFIX)
    if folder.exists() and not verdict.with_suffix(RECORDED_SUFFIX).exists():
        training = verdict.with_suffix(TRAINING_SUFFIX).exists()
        _record(Path(folder.read_text(encoding="utf-8")), lines, code, training=training)
    return code, lines


def _record(run_dir: Path, lines: str, code: int, *, training: bool) -> None:
    # Imported here: the launcher of a run that ends well needs none of it.
    from colocated_grpo.tracking.ending import FAILED, KILLED, Failure, append_to_log, record_failure

    stopped = code > 128 and not lines
    error = KILLED_BY_USER if stopped else lines.removeprefix("error: ")
    unknown = f"the processes ended with exit code {code} and no error message: killed, for example out of memory"
    failure = Failure(error=error or unknown, where=None if training else "start-up", exit_code=code)
    record_failure(run_dir, failure, training=training, state=KILLED if stopped else FAILED)
    append_to_log(run_dir, [f"error: {failure.error}"])
