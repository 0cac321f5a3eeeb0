"""The score of one completion."""

from colocated_grpo.environments.base import Item, Task
from colocated_grpo.environments.rewards.scoring import score_texts
from colocated_grpo.types import Score


def score_text(task: Task, item: Item, text: str) -> Score:
    return score_texts(task, item, [text])[0]
