"""Completions in the words of each API that is spoken here."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from colocated_grpo.serving.detokenizer import Decode
from colocated_grpo.serving.request_bodies import SamplingWish
from colocated_grpo.serving.sampler import Served

Scored = list[tuple[int, float]]
"""Sampled tokens, each with its log-probability."""
Alternatives = list[dict[int, float]] | None


def generate_reply(
    prompt: str, prompt_ids: list[int], served: Sequence[Served], wish: SamplingWish, prompt_logprobs: Any
) -> dict[str, Any]:
    """POST /generate, as Atropos' environments read it."""
    reply: dict[str, Any] = {
        "text": [one.text for one in served],
        "prompt": prompt,
        "finish_reasons": [one.completion.finish_reason for one in served],
    }
    if wish.logprobs is not None:
        # One-element lists, and the sampled token first in its dictionary: the client takes the first key.
        reply["logprobs"] = [[[{token: value}] for token, value in _scored(one)] for one in served]
        reply["prompt_token_ids"] = prompt_ids
        reply["token_ids"] = [one.completion.token_ids for one in served]
    if prompt_logprobs is not None:
        reply["prompt_logprobs"] = prompt_logprobs
    return reply


def tokens_reply(request_id: str | None, model: str, served: Sequence[Served], wish: SamplingWish) -> dict[str, Any]:
    """POST /inference/v1/generate, as vLLM answers it."""
    return {
        "request_id": request_id or uuid.uuid4().hex,
        "model": model,
        "created": int(time.time()),
        "choices": [
            {
                "index": index,
                "token_ids": one.completion.token_ids,
                "finish_reason": one.completion.finish_reason,
                "logprobs": None if wish.logprobs is None else token_logprobs(_scored(one)),
            }
            for index, one in enumerate(served)
        ],
        "prompt_logprobs": None,
    }


def token_logprobs(scored: Scored) -> dict[str, Any]:
    return {"content": [_candidate(*pair) for pair in scored]}


def _candidate(token: int, value: float) -> dict[str, Any]:
    return {"token_id": token, "logprob": value, "rank": None, "top_logprobs": [{"token_id": token, "logprob": value}]}


def completion_reply(
    model: str, served: Sequence[Served], spell: Decode, prompt_tokens: int, *, logprobs: bool
) -> dict[str, Any]:
    """POST /v1/completions"""
    choices = [
        {
            "index": index,
            "text": one.text,
            "finish_reason": one.completion.finish_reason,
            "logprobs": text_logprobs(_scored(one), one.alternatives, spell) if logprobs else None,
        }
        for index, one in enumerate(served)
    ]
    return _envelope("cmpl", "text_completion", model, choices, served, prompt_tokens)


def text_logprobs(scored: Scored, alternatives: Alternatives, spell: Decode, start: int = 0) -> dict[str, Any]:
    """start: characters of the completion before these tokens."""
    pieces = [spell([token]) for token, _ in scored]
    return {
        "tokens": pieces,
        "token_logprobs": [value for _, value in scored],
        "top_logprobs": [_by_text(entry, spell) for entry in alternatives or [dict([pair]) for pair in scored]],
        "text_offset": list(accumulate(map(len, pieces), initial=start))[:-1],
    }


def _by_text(entry: dict[int, float], spell: Decode) -> dict[str, float]:
    """Tokens of the same text, such as parts of characters, are one: the sampled one, which comes first."""
    named: dict[str, float] = {}
    for token, value in entry.items():
        named.setdefault(spell([token]), value)
    return named


def chat_reply(
    model: str, served: Sequence[Served], spell: Decode, prompt_tokens: int, *, logprobs: bool
) -> dict[str, Any]:
    """POST /v1/chat/completions"""
    choices = [
        {
            "index": index,
            "message": {"role": "assistant", "content": one.text},
            "finish_reason": one.completion.finish_reason,
            "logprobs": chat_logprobs(_scored(one), one.alternatives, spell) if logprobs else None,
        }
        for index, one in enumerate(served)
    ]
    return _envelope("chatcmpl", "chat.completion", model, choices, served, prompt_tokens)


def chat_logprobs(scored: Scored, alternatives: Alternatives, spell: Decode) -> dict[str, Any]:
    def entry(token: int, value: float) -> dict[str, Any]:
        piece = spell([token])
        return {"token": piece, "logprob": value, "bytes": list(piece.encode())}

    likeliest = alternatives or [{} for _ in scored]
    content = [
        {**entry(*pair), "top_logprobs": [entry(*other) for other in others.items()]}
        for pair, others in zip(scored, likeliest, strict=True)
    ]
    return {"content": content, "refusal": None}


def _envelope(
    prefix: str, kind: str, model: str, choices: list[dict[str, Any]], served: Sequence[Served], prompt_tokens: int
) -> dict[str, Any]:
    return {
        "id": f"{prefix}-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "choices": choices,
        "usage": usage_of(prompt_tokens, sum(len(one.completion.token_ids) for one in served)),
    }


def usage_of(prompt_tokens: int, sampled: int) -> dict[str, int]:
    return {"prompt_tokens": prompt_tokens, "completion_tokens": sampled, "total_tokens": prompt_tokens + sampled}


def models_reply(model: str, max_tokens: int) -> dict[str, Any]:
    """GET /v1/models"""
    card = {"id": model, "object": "model", "created": 0, "owned_by": "colocated_grpo", "max_model_len": max_tokens}
    return {"object": "list", "data": [card]}


def _scored(one: Served) -> Scored:
    return list(zip(one.completion.token_ids, one.completion.sampling_logprobs, strict=True))
