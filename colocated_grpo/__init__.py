"""GRPO and related algorithms with an in-process vLLM engine beside every FSDP2 shard."""

import importlib.util
import os
import sys
from typing import Any

__version__ = "0.1.0"

_LAZY = ("Trainer", "Result", "RunState", "ConfigError", "RunError")
_NEEDED = ("pydantic", "yaml", "rich", "psutil", "huggingface_hub", "transformers", "torch")
"""Packages that every command needs to start. The doctor checks versions and all other packages."""


def __getattr__(name: str) -> Any:
    """Import the names of `_LAZY` on first use: their import takes half a second and sets environment variables."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from colocated_grpo.api import trainer

    return getattr(trainer, name)


def require_installation() -> None:
    """Exit with one line if this Python is too old or lacks the dependencies. Called where a command starts."""
    old = sys.version_info < (3, 11)
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if not old and not missing:
        return
    problem = "is older than 3.11" if old else "has no package " + missing[0]
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    activate = os.path.join(root, ".venv", "bin", "activate")
    install = "" if os.path.isfile(activate) else f"run make install in {root}, then "
    if root == os.getcwd():
        activate = os.path.relpath(activate)
    print(f"error: {sys.executable} {problem}; {install}activate the environment: source {activate}", file=sys.stderr)
    sys.exit(2)


if sys.argv[:1] == ["-m"]:  # python -m colocated_grpo...: the package is imported before the module that is run
    require_installation()
