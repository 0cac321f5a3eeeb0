"""Sources of prompts and rewards: tasks, datasets with reward functions, episodes, games and user code."""

from colocated_grpo.environments.base import AnswerError, BatchSource, EnvironmentSetupError, Episode, Scorer, Task
from colocated_grpo.environments.build import Environments, build_environments
from colocated_grpo.environments.conversation import AssistantMessage, ContextExhausted, Conversation

# Names of earlier versions, which user episodes may import.
OutOfRoom = ContextExhausted
Turn = AssistantMessage

__all__ = [
    "AnswerError",
    "AssistantMessage",
    "BatchSource",
    "ContextExhausted",
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
