"""Where prompts and rewards come from: tasks, datasets with reward functions, episodes, games, user code."""

from colocated_grpo.environments.base import BatchSource, EnvironmentSetupError, Episode, Scorer, Task
from colocated_grpo.environments.build import Environments, build_environments
from colocated_grpo.environments.conversation import Conversation, OutOfRoom, Turn

__all__ = [
    "BatchSource",
    "Conversation",
    "EnvironmentSetupError",
    "Environments",
    "Episode",
    "OutOfRoom",
    "Scorer",
    "Task",
    "Turn",
    "build_environments",
]
