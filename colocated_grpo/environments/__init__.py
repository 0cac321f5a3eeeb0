"""Where prompts and rewards come from: tasks, datasets with reward functions, user code."""

from colocated_grpo.environments.base import BatchSource, EnvironmentSetupError, Scorer, Task
from colocated_grpo.environments.build import Environments, build_environments

__all__ = ["BatchSource", "EnvironmentSetupError", "Environments", "Scorer", "Task", "build_environments"]
