"""The names that `colocated_grpo` itself provides to Python programs."""

from colocated_grpo.api.result import Result
from colocated_grpo.api.trainer import Trainer
from colocated_grpo.callbacks import RunState
from colocated_grpo.errors import RunError
from colocated_grpo.settings.errors import ConfigError

__all__ = ["ConfigError", "Result", "RunError", "RunState", "Trainer"]
