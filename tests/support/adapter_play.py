"""Plays episodes with a function in place of the model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from colocated_grpo.environments.base import Episode
from colocated_grpo.environments.chat import ChatCodec, Conversation
from colocated_grpo.environments.prompts import PromptEncoder
from colocated_grpo.environments.rewards.scoring import as_score
from colocated_grpo.tools.char_tokenizer import build_char_tokenizer
from colocated_grpo.types import Completion, Rollout

TOKENIZER = build_char_tokenizer()
ROOM = 20_000
USER = "<|user|>"

Policy = Callable[[str], str]
"""(latest observation) -> reply"""


def saying(*replies: str) -> Policy:
    """Return a policy that gives the replies one after the other, and then the last one forever."""
    remaining = list(replies)
    return lambda _: remaining.pop(0) if len(remaining) > 1 else remaining[0]


def conversation_of(item: dict[str, Any], policy: Policy, room: int = ROOM) -> Conversation:
    async def sample(token_ids: list[int], max_tokens: int) -> Completion:
        observation = TOKENIZER.decode(token_ids).rpartition(USER)[2]
        reply = [*TOKENIZER.encode(policy(observation)), TOKENIZER.eos_token_id]
        return Completion(
            token_ids=reply[:max_tokens],
            sampling_logprobs=[-0.5] * len(reply[:max_tokens]),
            finish_reason="stop" if len(reply) <= max_tokens else "length",
            policy_version=0,
        )

    prompt = PromptEncoder(TOKENIZER, ROOM).encode(item, index=0, source="adapter")
    return Conversation(prompt, ChatCodec(TOKENIZER), room, sample)


async def playing(episode: Episode, item: dict[str, Any], policy: Policy, room: int = ROOM) -> Rollout:
    conversation = conversation_of(item, policy, room)
    return conversation.rollout(as_score(await episode.run(item, conversation)), 1.0)


def played(episode: Episode, item: dict[str, Any], policy: Policy, room: int = ROOM) -> Rollout:
    return asyncio.run(playing(episode, item, policy, room))


def items(episode: Episode, count: int, seed: int = 0, split: str = "train") -> list[dict[str, Any]]:
    return list(islice(episode.prompts(seed, split), count))


def items_from(episode: Episode, start: int, count: int) -> list[dict[str, Any]]:
    return list(islice(episode.prompts_from(0, "train", start), count))


def observations(rollout: Rollout) -> Iterator[str]:
    """Yield the observations after the policy's turns."""
    for part in rollout.text.split(USER)[1:]:
        yield part.partition("<|end|>")[0]
