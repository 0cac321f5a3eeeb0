"""Finds and verifies checkpoints on disk."""

import errno
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from colocated_grpo.checkpoint.storage import LAYOUT_FILE, Layout, metadata_of
from colocated_grpo.errors import RunError, in_one_line
from colocated_grpo.runtime.checksums import damage
from colocated_grpo.runtime.run_folder import FILES, FORMAT, STATE_FILE, read_record, saved_checkpoints
from colocated_grpo.types import JsonObject

SET_ASIDE = ".damaged"
READ_ERRORS = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EIO}
"""Errors caused by damage. Other errors, such as a lost network share, may be temporary and end the resume."""


@dataclass(frozen=True, kw_only=True)
class SavedCheckpoint:
    """A checkpoint whose files match their checksums."""

    folder: Path
    step: int
    policy_version: int
    world_size: int
    state: JsonObject
    layout: Layout


class DamagedCheckpoint(Exception):
    """A checkpoint is damaged. The message describes the damage."""


def newest_whole(folder: Path, note: Callable[[str], None]) -> SavedCheckpoint | None:
    """Return the newest intact checkpoint in `folder`; None if there is no checkpoint at all.

    Damaged checkpoints that are newer are renamed, so that no run resumes from them and checkpoint.keep_last does not
    count them. If all checkpoints are damaged, raises RunError and renames nothing.
    """
    damaged: dict[Path, str] = {}
    for checkpoint in reversed(saved_checkpoints(folder)):
        try:
            found = read_whole(checkpoint)
        except DamagedCheckpoint as error:
            damaged[checkpoint] = str(error)
            continue
        if damaged:
            names = ", ".join(path.name for path in damaged)
            note(f"resuming from {checkpoint.name}: damaged and renamed to *.damaged: {names} ({_first(damaged)})")
            for path in damaged:
                target = path.with_suffix(SET_ASIDE)
                shutil.rmtree(target, ignore_errors=True)
                path.rename(target)
        return found
    if damaged:
        raise RunError(
            f"checkpoints {folder}: none of {len(damaged)} is whole ({_first(damaged)}); put back a copy of one, or "
            "start a new run"
        )
    return None


def read_whole(folder: Path) -> SavedCheckpoint:
    """Return a checkpoint's contents, except for its tensors.

    Raises DamagedCheckpoint if it is damaged, and RunError if another version of this package has written it.
    """
    try:
        record = read_record(folder)
        if (version := record.get("format")) != FORMAT:
            raise RunError(
                f"checkpoint {folder}: has format {version}, but this version of colocated_grpo reads format {FORMAT}; "
                "resume with the version that wrote it, or start a new run"
            )
        problem = damage(folder, record[FILES])
        if problem is not None:
            raise DamagedCheckpoint(problem)
        layout = json.loads((folder / LAYOUT_FILE).read_text(encoding="utf-8"))
        metadata_of(layout, folder)
        saved = SavedCheckpoint(
            folder=folder,
            step=int(record["step"]),
            policy_version=int(record["policy_version"]),
            world_size=int(record["world_size"]),
            state=dict(record["state"]),
            layout=layout,
        )
        if folder.name != f"step_{saved.step:06d}" or saved.policy_version < 0:
            raise DamagedCheckpoint(f"{STATE_FILE} has step {saved.step} and policy_version {saved.policy_version}")
        return saved
    except (DamagedCheckpoint, RunError):
        raise
    except OSError as error:
        if error.errno not in READ_ERRORS:
            raise
        missing = error.errno == errno.ENOENT and error.filename is not None
        raise DamagedCheckpoint(f"{Path(error.filename).name} is missing" if missing else in_one_line(error)) from error
    except Exception as error:  # a damaged layout raises many kinds of errors
        raise DamagedCheckpoint(in_one_line(error)) from error


def _first(damaged: dict[Path, str]) -> str:
    path, problem = next(iter(damaged.items()))
    return f"{path.name}: {problem}"
