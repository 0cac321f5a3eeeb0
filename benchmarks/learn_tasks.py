"""Tasks of `benchmarks.learn`, each for both trainers: an environment entry of ours, and rows and rewards for TRL."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice, takewhile
from random import Random
from typing import Any

from colocated_grpo.environments.base import AnswerError, Item, Split
from colocated_grpo.environments.chat import Conversation
from colocated_grpo.environments.rewards.builtin import last_number
from colocated_grpo.environments.tasks.procedural import Procedural, ReasoningGym, Template, split_items
from colocated_grpo.types import JsonObject

GYM = "reasoning_gym:"
CALL = re.compile(r"<price>(.*?)(?:</price>|$)", re.DOTALL)
"""A call of the shop's tool. An unterminated call extends to the end of the message, as in transformers' parser."""


class Sums(Procedural):
    """Sums of two numbers of two digits. Reward 1 if the last number of the completion is the sum, else 0."""

    template: Template = "What is {question}?"
    first_line: bool = False
    """Read the first line only: a base model goes on with further questions."""

    def score(self, item: Item, completion: str) -> float:
        answer = completion.strip().partition("\n")[0] if self.first_line else completion
        return float(last_number(answer) == item["answer"])

    def _draw(self, rng: Random) -> Item:
        left, right = rng.randint(10, 99), rng.randint(10, 99)
        return {"question": f"{left} + {right}", "answer": str(left + right)}


class Counting(Procedural):
    """Count up to a number of log-uniform size, so that lengths are uneven. Reward: the fraction that is right."""

    template: Template = "Write the numbers from 1 to {question}, separated by commas."
    largest: int = 120

    def score(self, item: Item, completion: str) -> float:
        written, wanted = re.findall(r"\d+", completion), list(map(str, range(1, int(item["question"]) + 1)))
        right = takewhile(lambda pair: pair[0] == pair[1], zip(written, wanted, strict=False))
        return len(list(right)) / max(len(written), len(wanted))

    def _draw(self, rng: Random) -> Item:
        return {"question": str(round(math.exp(rng.uniform(math.log(3), math.log(self.largest)))))}


class Gym(ReasoningGym):
    """A dataset of reasoning-gym with two solved questions before each question, which show the form of an answer."""

    def __init__(self, dataset: str, **args: Any) -> None:
        super().__init__(dataset, instruction="", **args)
        self.examples = [
            {"role": role, "content": str(entry[key])}
            for entry in (self.judge[0], self.judge[1])
            for role, key in (("user", "question"), ("assistant", "answer"))
        ]

    def prompts(self, seed: int, split: Split) -> Iterator[Item]:
        for item in super().prompts(seed, split):
            yield {**item, "prompt": [*self.examples, {"role": "user", "content": item["prompt"]}]}


class Shop:
    """Two turns: the policy asks a tool for the price of an article and then states it.

    Reward 1 if the last number of the second message is the price, else 0. Prices are hashes of article numbers, so
    they cannot be guessed, and held-out articles are not seen in training.
    """

    template = "What is the price of article {question}?"

    def prompts(self, seed: int, split: Split) -> Iterator[Item]:
        rng = Random(seed)
        for item in split_items(iter(lambda: self._draw(rng), None), self.template, split):
            yield {**item, "prompt": [*EXAMPLE, {"role": "user", "content": item["prompt"]}]}

    def _draw(self, rng: Random) -> Item:
        article = str(rng.randint(1000, 9999))
        return {"question": article, "answer": price(article)}

    async def run(self, item: Item, model: Conversation) -> float:
        calls = CALL.findall((await model.generate()).text)
        if not calls:
            return 0.0
        model.observe([{"role": "tool", "name": "price", "content": price(article)} for article in calls])
        return self.score(item, CALL.sub("", (await model.generate()).text))

    def score(self, item: Item, completion: str) -> float:
        return float(last_number(completion) == item["answer"])


def price(article: str) -> str:
    """
    Look up the price of an article.

    Args:
        article: The number of the article.

    Returns:
        The price.
    """
    # As parsed by TRL, an unterminated call also contains the token that ended the message.
    number = article.partition("<|")[0].strip()
    return str(10 + blake2b(number.encode(), digest_size=4).digest()[0] % 90)


EXAMPLE: list[JsonObject] = [
    {"role": "system", "content": "Look up prices with <price>NUMBER</price>."},
    {"role": "user", "content": "What is the price of article 1234?"},
    {"role": "assistant", "content": "<price>1234</price>"},
    {"role": "tool", "content": price("1234")},
    {"role": "assistant", "content": f"The price is {price('1234')}."},
]
"""Example conversation before each question: SmolLM2 calls no tool from a description alone."""
SHOP_PARSER: JsonObject = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open": "<price>",
            "close_pattern": r"</price>\s*",
            "repeats": True,
            "content": "text",
            "transform": {"type": "function", "function": {"name": "price", "arguments": {"article": "{content}"}}},
        },
        "content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"},
    },
}
"""transformers' response template for the shop's calls (ChatML models). Neither SmolLM2 nor TRL has one."""


@dataclass(frozen=True, kw_only=True)
class LearnTask:
    """One task and the lengths that it needs, in tokens."""

    name: str
    environment: type[Sums] | type[Counting] | type[Gym] | type[Shop]
    args: JsonObject = field(default_factory=dict)
    max_prompt: int = 128
    max_completion: int = 40

    @property
    def is_episode(self) -> bool:
        return self.environment is Shop

    @property
    def source(self) -> JsonObject:
        """Entry of `environments`, or the source of an evaluation set."""
        name = f"{self.environment.__module__}:{self.environment.__qualname__}"
        return {"type": "episode" if self.is_episode else "task", "name": name, "args": dict(self.args)}

    def build(self) -> Sums | Counting | Gym | Shop:
        return self.environment(**self.args)


TASKS = {
    task.name: task
    for task in (
        LearnTask(name="sums", environment=Sums),
        LearnTask(name="first_line_sums", environment=Sums, args={"first_line": True}, max_completion=16),
        LearnTask(name="counting", environment=Counting, max_completion=512),
        LearnTask(name="shop", environment=Shop, max_prompt=192, max_completion=96),
    )
}
GYM_ARGS: dict[str, JsonObject] = {
    "chain_sum": {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 2},
    "spell_backward": {"min_word_len": 3, "max_word_len": 4},
    "number_sorting": {"min_numbers": 3, "max_numbers": 4, "min_value": 0, "max_value": 99},
    "word_sorting": {"min_words": 3, "max_words": 4},
    "letter_counting": {"min_words": 3, "max_words": 5},
    "leg_counting": {"min_animals": 1, "max_animals": 2, "min_instances": 1, "max_instances": 4},
    "simple_equations": {"min_terms": 2, "max_terms": 2, "max_value": 20},
    "base_conversion": {"max_value": 99},
    "gcd": {"max_value": 100},
    "lcm": {"max_value": 100},
    "count_bits": {"min_n": 1, "max_n": 9999},
    "basic_arithmetic": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2},
    "decimal_chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    "calendar_arithmetic": {},
    "time_intervals": {},
    "number_filtering": {"min_numbers": 3, "max_numbers": 4, "min_value": 0, "max_value": 99},
}
"""Candidates of `learn probe`, made easier than their defaults for a small model."""


def task_of(name: str) -> LearnTask:
    """Return a task by name: one of TASKS, or 'reasoning_gym:<dataset>'. Raises ValueError."""
    if name in TASKS:
        return TASKS[name]
    if not name.startswith(GYM):
        raise ValueError(f"--task={name}: unknown; choose {', '.join(TASKS)} or {GYM}<dataset>")
    dataset = name.removeprefix(GYM)
    args = {"dataset": dataset, **GYM_ARGS.get(dataset, {})}
    return LearnTask(name=name, environment=Gym, args=args, max_prompt=768, max_completion=40)


def chats(task: LearnTask, seed: int, count: int) -> list[JsonObject]:
    """Return the first `count` rows for TRL, in our trainer's order: chat messages, and the item as JSON."""
    items = islice(task.build().prompts(seed, "train"), count)
    return [{"prompt": _messages(item["prompt"]), "item": json.dumps(item, default=str)} for item in items]


def _messages(prompt: str | list[JsonObject]) -> list[JsonObject]:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def score_chat(task: LearnTask, environment: Any, item: JsonObject, messages: Sequence[Mapping[str, Any]]) -> float:
    """Return the reward of TRL's messages of one completion, as our trainer computes it."""
    if task.is_episode and (len(messages) < 2 or messages[-1]["role"] != "assistant"):
        return 0.0
    try:
        return float(environment.score(item, messages[-1]["content"]))
    except AnswerError as error:
        return error.reward
