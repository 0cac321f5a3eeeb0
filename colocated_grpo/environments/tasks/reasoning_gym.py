"""The procedural datasets of the reasoning-gym package, scored by their own scorers."""

from collections.abc import Iterator
from hashlib import sha256
from itertools import count
from typing import Any

from colocated_grpo.environments.base import AnswerError, EnvironmentSetupError, Item, Split
from colocated_grpo.environments.rewards.answers import final_answer
from colocated_grpo.environments.tasks.procedural import split_items
from colocated_grpo.environments.user_code.loading import import_optional, one_line, unknown_name
from colocated_grpo.types import JsonObject

CHUNK = 500
"""Questions per reasoning-gym dataset object. The number is limited because some generators prepare or store all
questions of an object at once."""


class ReasoningGym:
    """One reasoning-gym dataset. Args: the fields of its config, and `instruction`, which ends each prompt."""

    def __init__(
        self, dataset: str, *, instruction: str = "Give the final answer between <answer> and </answer>.", **args: Any
    ) -> None:
        for reserved in {"seed", "size"} & args.keys():
            raise EnvironmentSetupError(f"reasoning_gym:{dataset}: args.{reserved} is set by the run; remove it")
        factory = import_optional("reasoning_gym.factory", "reasoning-gym", f"reasoning_gym:{dataset}")
        if dataset not in factory.DATASETS:
            raise unknown_name("environments", "reasoning_gym dataset", dataset, factory.DATASETS)
        self.dataset = dataset
        self.template = "{question}\n" + instruction if instruction else "{question}"
        self.args = args
        self.judge = self._chunk(seed=0)

    def prompts(self, seed: int, split: Split) -> Iterator[Item]:
        return split_items(self._entries(seed), self.template, split)

    def score(self, item: Item, completion: str) -> float:
        """Return the dataset's own score. Raises AnswerError if this answer, but not the item's own, makes it fail."""
        try:
            return float(self.judge.score_answer(final_answer(completion), item))
        except Exception as error:
            self.judge.score_answer(item["answer"], item)  # raises if the scorer itself is broken
            raise AnswerError(one_line(error)) from error

    def _entries(self, seed: int) -> Iterator[Item]:
        for number in count():
            # A hashed seed: generators seed question i with seed + i, so adjacent seeds would repeat questions.
            digest = sha256(f"{seed}:{number}".encode()).digest()
            dataset = self._chunk(int.from_bytes(digest[:4], "big"))
            yield from (dataset[index] for index in range(CHUNK))

    def _chunk(self, seed: int) -> Any:
        from reasoning_gym.composite import DatasetSpec
        from reasoning_gym.factory import create_dataset

        args = dict(self.args)
        if self.dataset == "composite":
            defaults: JsonObject = {"weight": 1.0, "config": {}}
            args["datasets"] = [DatasetSpec(**{**defaults, **spec}) for spec in args.get("datasets", [])]
        return create_dataset(self.dataset, seed=seed, size=CHUNK, **args)
