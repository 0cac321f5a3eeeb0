"""Teach a small model its task half-way by supervision, so that reinforcement finds some reward to start from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from random import Random
from typing import Protocol

import torch
from torch.nn.utils import clip_grad_norm_
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from colocated_grpo.environments.base import Episode, Split, Task
from colocated_grpo.environments.prompts import PromptEncoder
from colocated_grpo.environments.rewards.scoring import score_text
from colocated_grpo.types import Prompt

IGNORED = -100
CHECK_EVERY = 25
PROBES = 128

Lesson = tuple[list[int], list[int]]
"""Tokens of one example, and their labels: IGNORED where nothing is to be learnt."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmStart:
    """How far to teach: until the mean sampled reward reaches `target`, but no more than `max_steps`."""

    target: float = 0.42
    max_steps: int = 250
    batch_size: int = 64
    lr: float = 2e-3
    seed: int = 0
    max_completion_tokens: int = 32
    slips: float = 0.35
    """Share of answer characters that the teacher gets wrong. A student of such a teacher knows the task and is unsure
    of each character: much to gain by reinforcement, and quickly. One that was merely taught too little has to find
    the task out by trial."""


class Lessons(Protocol):
    """What a warm start needs of a task or an episode."""

    def take(self, count: int) -> list[Lesson]:
        """The next examples of the train split, in the words of a teacher who slips."""

    def sampled_reward(self, model: PreTrainedModel, split: Split, count: int) -> float:
        """Mean reward of one completion for each of `count` prompts, at temperature 1; a failed score counts as 0.

        Of the train split these are other prompts than the lessons'.
        """


def warm_start(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    lessons: Lessons,
    settings: WarmStart,
    report: Callable[[int, float, float], None],
) -> int:
    """Train `model` in place on the teacher's words; return the steps taken. Repeatable on one kind of machine.

    Stops on the mean of the last two measurements: one alone is too noisy to land near the target. They are made on
    training prompts, so that the held-out split stays unseen. report(step, loss, reward) is called at each of them.
    """
    torch.manual_seed(settings.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr)
    previous = 0.0
    for step in range(1, settings.max_steps + 1):
        batch = supervised_batch(lessons.take(settings.batch_size), tokenizer.pad_token_id, model.device)
        loss = model(**batch).loss
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % CHECK_EVERY == 0:
            reward = lessons.sampled_reward(model, "train", PROBES)
            report(step, loss.item(), reward)
            if (previous + reward) / 2 >= settings.target:
                return step
            previous = reward
    return settings.max_steps


class TaskLessons:
    """Single answers: the task's own, with slips."""

    def __init__(self, task: Task, tokenizer: PreTrainedTokenizerFast, settings: WarmStart) -> None:
        self._task = task
        self._tokenizer = tokenizer
        self._settings = settings
        self._prompts = encoded_prompts(task, tokenizer, settings.seed, "train")
        self._slips = Random(settings.seed)

    def take(self, count: int) -> list[Lesson]:
        return [self._lesson(prompt) for prompt in islice(self._prompts, count)]

    def _lesson(self, prompt: Prompt) -> Lesson:
        answer = with_slips(prompt.item["answer"], self._settings.slips, self._slips)
        said = [*self._tokenizer.encode(answer), self._tokenizer.eos_token_id]
        return prompt.token_ids + said, [IGNORED] * len(prompt.token_ids) + said

    def sampled_reward(self, model: PreTrainedModel, split: Split, count: int) -> float:
        prompts = probes(self._task, self._tokenizer, self._settings.seed, split, count)
        answers = sample(model, self._tokenizer, [p.token_ids for p in prompts], self._settings.max_completion_tokens)
        texts = self._tokenizer.batch_decode(answers, skip_special_tokens=True)
        scores = [score_text(self._task, prompt.item, text) for prompt, text in zip(prompts, texts, strict=True)]
        return sum(score.reward or 0.0 for score in scores) / len(scores)


def encoded_prompts(
    task: Task | Episode, tokenizer: PreTrainedTokenizerFast, seed: int, split: Split
) -> Iterator[Prompt]:
    """The task's prompts as a run reads them, without those that the model has no room for."""
    encoder = PromptEncoder(tokenizer, max_prompt_tokens=tokenizer.model_max_length // 2)
    for index, item in enumerate(task.prompts(seed, split)):
        prompt = encoder.encode(item, index=index, source=type(task).__name__)
        if prompt is not None:
            yield prompt


def probes(
    task: Task | Episode, tokenizer: PreTrainedTokenizerFast, seed: int, split: Split, count: int
) -> list[Prompt]:
    """Prompts to measure on: held-out ones, or training ones of another seed than the lessons'."""
    return list(islice(encoded_prompts(task, tokenizer, seed + (split == "train"), split), count))


def with_slips(answer: str, share: float, rng: Random) -> str:
    """The answer with that share of its characters replaced by others that occur in it."""
    return "".join(rng.choice(answer) if rng.random() < share else character for character in answer)


def supervised_batch(lessons: Sequence[Lesson], padding: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Right-padded lessons."""
    width = max(len(token_ids) for token_ids, _ in lessons)
    ids = torch.full((len(lessons), width), padding)
    labels = torch.full_like(ids, IGNORED)
    mask = torch.zeros_like(ids)
    for row, (token_ids, wanted) in enumerate(lessons):
        ids[row, : len(token_ids)] = torch.tensor(token_ids)
        labels[row, : len(wanted)] = torch.tensor(wanted)
        mask[row, : len(token_ids)] = 1
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device), "labels": labels.to(device)}


@torch.no_grad()
def sample(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, prompts: Sequence[list[int]], max_tokens: int
) -> list[list[int]]:
    """One completion for each prompt at temperature 1, its end of turn included."""
    # The tokenizer pads on the left: every completion starts in the same column.
    padded = tokenizer.pad({"input_ids": list(prompts)}, return_tensors="pt")
    output = model.generate(
        **padded.to(model.device), do_sample=True, temperature=1.0, top_k=0, max_new_tokens=max_tokens
    )
    return [cut_at(row, tokenizer.eos_token_id) for row in output[:, padded["input_ids"].shape[1] :].tolist()]


def cut_at(token_ids: list[int], end: int) -> list[int]:
    """Without what follows the first `end`."""
    return token_ids[: token_ids.index(end) + 1] if end in token_ids else token_ids
