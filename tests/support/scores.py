"""The scores of completions by a task."""

from collections.abc import Sequence

from colocated_grpo.environments.base import Item, Task
from colocated_grpo.environments.rewards.scoring import TaskScorer
from colocated_grpo.types import Prompt, Score


def score_texts(task: Task, item: Item, texts: Sequence[str]) -> list[Score]:
    return TaskScorer(task).score(Prompt(index=0, token_ids=[], text="", item=item, source="task"), (), texts)


def score_text(task: Task, item: Item, text: str) -> Score:
    return score_texts(task, item, [text])[0]
