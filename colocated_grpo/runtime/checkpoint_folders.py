"""Where the checkpoints of a run lie, and of which model the newest is. Without torch: a launcher looks as well."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

FOLDER = "checkpoints"
STATE_FILE = "trainer.json"
MODEL_SHAPE = "model_shape"
"""Key in a checkpoint's state: what the config.json of its model says about the shapes of the weights."""
OWN_NAME = re.compile(r"step_(\d{6,})")
"""Of a whole checkpoint. What a person makes beside it (step_best, step_000003 copy) is neither resumed nor deleted."""


def complete_checkpoints(folder: Path) -> list[Path]:
    """Oldest first."""
    return sorted(filter(is_complete, folder.glob("step_*")), key=_step)


def is_complete(folder: Path) -> bool:
    return OWN_NAME.fullmatch(folder.name) is not None and (folder / STATE_FILE).exists()


def saved_shape(checkpoint: Path) -> dict[str, Any]:
    """Empty where the checkpoint does not say it, or is damaged: whoever restores it reads all of it, and complains."""
    try:
        return dict(json.loads((checkpoint / STATE_FILE).read_text())["state"][MODEL_SHAPE])
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _step(folder: Path) -> int:
    return int(OWN_NAME.fullmatch(folder.name)[1])
