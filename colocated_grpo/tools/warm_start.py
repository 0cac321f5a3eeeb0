"""Supervised warm start on a noisy teacher of a task or an episode, so that RL starts with a reward above zero."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from random import Random
from typing import Any

import torch
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from colocated_grpo.environments.base import Episode, Split, Task
from colocated_grpo.environments.chat import ChatCodec, Conversation
from colocated_grpo.environments.prompts import PromptEncoder
from colocated_grpo.environments.rewards.scoring import TaskScorer
from colocated_grpo.environments.tasks.tool_use import ToolUse
from colocated_grpo.types import Completion, Prompt, Score

NO_SCORE = Score(reward=None)
IGNORE_INDEX = -100
"""Label of tokens without a loss; transformers' default."""
CHECK_EVERY = 25
EVAL_PROMPTS = 128

Example = tuple[list[int], list[int]]
"""Token ids and labels of one sequence, aligned; labels are IGNORE_INDEX outside the answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmStart:
    """Settings of a warm start, which ends at a mean sampled reward of `target` (tasks), or after `max_steps`."""

    target: float = 0.42
    max_steps: int = 250
    batch_size: int = 64
    lr: float = 2e-3
    seed: int = 0
    max_completion_tokens: int = 32
    slips: float = 0.35
    """Fraction of answer characters that the teacher gets wrong: the model then knows the task, but is uncertain of
    every character, which RL improves quickly."""


class Teacher:
    """Supervised examples of one task or episode."""

    def __init__(self, task: Any, tokenizer: PreTrainedTokenizerFast, settings: WarmStart) -> None:
        """task: a `Task` or an `Episode`."""
        self.task = task
        self.tokenizer = tokenizer
        self.settings = settings
        self.rng = Random(settings.seed)
        self._prompts = encoded_prompts(task, tokenizer, settings.seed, "train")

    def examples(self, count: int) -> list[Example]:
        """Return the next examples of the train split, with slips in the labels."""
        return [self._example(prompt) for prompt in islice(self._prompts, count)]

    def sampled_reward(self, model: PreTrainedModel, split: Split, count: int) -> float | None:
        """Return the mean reward of `count` prompts that are not among the examples(). None: not measured."""
        return None

    def _example(self, prompt: Prompt) -> Example:
        raise NotImplementedError


def warm_start(model: PreTrainedModel, teacher: Teacher, report: Callable[[int, float, float | None], None]) -> int:
    """Train `model` in place and return the number of steps. Reproducible on the same kind of device.

    Ends when two measurements on training prompts in a row, because one is noisy, reach the target on average.
    report(step, loss, reward) is called after each measurement, every CHECK_EVERY steps.
    """
    settings, pad_id = teacher.settings, teacher.tokenizer.pad_token_id
    torch.manual_seed(settings.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr)
    previous = 0.0
    for step in range(1, settings.max_steps + 1):
        batch = supervised_batch(teacher.examples(settings.batch_size), pad_id, model.device)
        loss = model(**batch).loss
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % CHECK_EVERY == 0:
            reward = teacher.sampled_reward(model, "train", EVAL_PROMPTS)
            report(step, loss.item(), reward)
            if reward is not None and (previous + reward) / 2 >= settings.target:
                return step
            previous = reward or 0.0
    return settings.max_steps


class TaskTeacher(Teacher):
    """Teacher of a single-turn task: each item's "answer", with slips."""

    task: Task

    def _example(self, prompt: Prompt) -> Example:
        if "answer" not in prompt.item:
            raise ValueError(f"{type(self.task).__name__}: its items have no 'answer' to learn from")
        answer = with_slips(prompt.item["answer"], self.settings.slips, self.rng)
        completion = [*self.tokenizer.encode(answer), self.tokenizer.eos_token_id]
        return prompt.token_ids + completion, [IGNORE_INDEX] * len(prompt.token_ids) + completion

    def sampled_reward(self, model: PreTrainedModel, split: Split, count: int) -> float:
        """A failed score counts as 0."""
        seed, scorer = self.settings.seed + (split == "train"), TaskScorer(self.task)
        prompts = list(islice(encoded_prompts(self.task, self.tokenizer, seed, split), count))
        texts = sample(model, self.tokenizer, [p.token_ids for p in prompts], self.settings.max_completion_tokens)
        scores = [scorer.score(prompt, (), [text])[0] for prompt, text in zip(prompts, texts, strict=True)]
        return sum(score.reward or 0.0 for score in scores) / len(scores)


def encoded_prompts(
    task: Task | Episode, tokenizer: PreTrainedTokenizerFast, seed: int, split: Split
) -> Iterator[Prompt]:
    """Yield the task's prompts as a run encodes them. Skips prompts longer than half of the model's context."""
    encoder = PromptEncoder(tokenizer, max_prompt_tokens=tokenizer.model_max_length // 2)
    for index, item in enumerate(task.prompts(seed, split)):
        if (prompt := encoder.encode(item, index=index, source=type(task).__name__)) is not None:
            yield prompt


def with_slips(answer: str, fraction: float, rng: Random) -> str:
    """Replace each character, with probability `fraction`, by a random character of the answer."""
    return "".join(rng.choice(answer) if rng.random() < fraction else character for character in answer)


def supervised_batch(examples: Sequence[Example], pad_id: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Return the model inputs of right-padded examples, each tensor of shape (examples, longest)."""
    rows, targets = ([torch.tensor(tokens, device=device) for tokens in each] for each in zip(*examples, strict=True))
    pad = partial(pad_sequence, batch_first=True)
    return {
        "input_ids": pad(rows, padding_value=pad_id),
        "attention_mask": pad([torch.ones_like(row) for row in rows]),
        "labels": pad(targets, padding_value=IGNORE_INDEX),
    }


@torch.no_grad()
def sample(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, prompts: Sequence[list[int]], max_tokens: int
) -> list[str]:
    """Return the text of one completion per prompt, sampled at temperature 1."""
    # The tokenizer pads on the left: every completion starts in the same column.
    padded = tokenizer.pad({"input_ids": list(prompts)}, return_tensors="pt")
    # Causal language models inherit generate() from GenerationMixin, which PreTrainedModel does not declare.
    output = model.generate(  # pyrefly: ignore[not-callable]
        **padded.to(model.device), do_sample=True, temperature=1.0, top_k=0, max_new_tokens=max_tokens
    )
    return tokenizer.batch_decode(output[:, padded["input_ids"].shape[1] :], skip_special_tokens=True)


class EpisodeTeacher(Teacher):
    """Plays an episode correctly, with slips in the labels only: a wrong call would derail the conversation."""

    task: ToolUse

    def _example(self, prompt: Prompt) -> Example:
        async def teach(_token_ids: list[int], _max_tokens: int) -> Completion:
            turn = self.tokenizer.encode(self.task.teach(prompt.item, conversation.turns))
            return taught([*turn, self.tokenizer.eos_token_id])

        codec, limit = ChatCodec(self.tokenizer), self.settings.max_completion_tokens
        conversation = Conversation(prompt, codec, limit, teach)
        asyncio.run(self.task.run(prompt.item, conversation))
        rollout = conversation.rollout(NO_SCORE, temperature=1.0)
        labels = [
            self._label(token) if sampled else IGNORE_INDEX
            for token, sampled in zip(rollout.token_ids, rollout.loss_mask, strict=True)
        ]
        return rollout.token_ids, labels

    def _label(self, token: int) -> int:
        slip = token != self.tokenizer.eos_token_id and self.rng.random() < self.settings.slips
        return self.rng.choice(self.tokenizer.encode("0123456789")) if slip else token


def taught(token_ids: list[int]) -> Completion:
    """Return a completion whose log-probabilities are not used."""
    unused = [0.0] * len(token_ids)
    return Completion(token_ids=token_ids, sampling_logprobs=unused, finish_reason="stop", policy_version=0)
