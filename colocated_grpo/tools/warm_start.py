"""Teach a small model its task half-way by supervision, so that reinforcement finds some reward to start from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from random import Random

import torch
from torch.nn.utils import clip_grad_norm_
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from colocated_grpo.environments.base import Split, Task
from colocated_grpo.environments.prompts import PromptEncoder
from colocated_grpo.environments.scoring import score_text
from colocated_grpo.types import Prompt

IGNORED = -100
CHECK_EVERY = 25
PROBES = 128


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


def warm_start(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    task: Task,
    settings: WarmStart,
    report: Callable[[int, float, float], None],
) -> int:
    """Train `model` in place on the task's own answers; return the steps taken. Repeatable on one kind of machine.

    Stops on the mean of the last two measurements: one alone is too noisy to land near the target. They are made on
    training prompts, so that the held-out split stays unseen. report(step, loss, reward) is called at each of them.
    """
    torch.manual_seed(settings.seed)
    lessons = encoded_prompts(task, tokenizer, settings.seed, "train")
    slips = Random(settings.seed)
    probes = list(islice(encoded_prompts(task, tokenizer, settings.seed + 1, "train"), PROBES))
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr)
    previous = 0.0
    for step in range(1, settings.max_steps + 1):
        pairs = [
            (p.token_ids, with_slips(p.item["answer"], settings.slips, slips))
            for p in islice(lessons, settings.batch_size)
        ]
        loss = model(**supervised_batch(tokenizer, pairs, model.device)).loss
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % CHECK_EVERY == 0:
            reward = sampled_reward(model, tokenizer, task, probes, settings.max_completion_tokens)
            report(step, loss.item(), reward)
            if (previous + reward) / 2 >= settings.target:
                return step
            previous = reward
    return settings.max_steps


def encoded_prompts(task: Task, tokenizer: PreTrainedTokenizerFast, seed: int, split: Split) -> Iterator[Prompt]:
    """The task's prompts as a run reads them, without those that the model has no room for."""
    encoder = PromptEncoder(tokenizer, max_prompt_tokens=tokenizer.model_max_length // 2)
    for index, item in enumerate(task.prompts(seed, split)):
        prompt = encoder.encode(item, index=index, source=type(task).__name__)
        if prompt is not None:
            yield prompt


def with_slips(answer: str, share: float, rng: Random) -> str:
    """The answer with that share of its characters replaced by others that occur in it."""
    return "".join(rng.choice(answer) if rng.random() < share else character for character in answer)


def supervised_batch(
    tokenizer: PreTrainedTokenizerFast, lessons: Iterable[tuple[list[int], str]], device: torch.device
) -> dict[str, torch.Tensor]:
    """Right-padded (prompt, answer) pairs; only the answer and the end of turn carry a label."""
    pairs = [(question, [*tokenizer.encode(answer), tokenizer.eos_token_id]) for question, answer in lessons]
    width = max(len(question) + len(answer) for question, answer in pairs)
    ids = torch.full((len(pairs), width), tokenizer.pad_token_id)
    labels = torch.full_like(ids, IGNORED)
    mask = torch.zeros_like(ids)
    for row, (question, answer) in enumerate(pairs):
        end = len(question) + len(answer)
        ids[row, :end] = torch.tensor(question + answer)
        labels[row, len(question) : end] = torch.tensor(answer)
        mask[row, :end] = 1
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device), "labels": labels.to(device)}


@torch.no_grad()
def sampled_reward(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    task: Task,
    prompts: list[Prompt],
    max_completion_tokens: int,
) -> float:
    """Mean reward of one completion for each prompt, sampled at temperature 1; a failed score counts as 0."""
    # The tokenizer pads on the left: every completion starts in the same column.
    padded = tokenizer.pad({"input_ids": [prompt.token_ids for prompt in prompts]}, return_tensors="pt")
    output = model.generate(
        **padded.to(model.device), do_sample=True, temperature=1.0, top_k=0, max_new_tokens=max_completion_tokens
    )
    completions = output[:, padded["input_ids"].shape[1] :]
    texts = tokenizer.batch_decode(completions, skip_special_tokens=True)
    rewards = [score_text(task, prompt.item, text).reward or 0.0 for prompt, text in zip(prompts, texts, strict=True)]
    return sum(rewards) / len(rewards)
