"""Sources of prompts and rewards: tasks, datasets with reward functions, episodes, games and user code."""

from colocated_grpo.environments.base import AnswerError, EnvironmentSetupError, Episode, Scorer, Task
from colocated_grpo.environments.chat import AssistantMessage, ContextExhausted, Conversation

__all__ = [
    "AnswerError",
    "AssistantMessage",
    "ContextExhausted",
    "Conversation",
    "EnvironmentSetupError",
    "Episode",
    "Scorer",
    "Task",
]
