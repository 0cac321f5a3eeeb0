"""Completions in the words of each API that is spoken here."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from colocated_grpo.rollout.server.sampler import Served
from colocated_grpo.rollout.server.wishes import SamplingWish

Decode = Callable[[Sequence[int]], str]


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
                "logprobs": None
                if wish.logprobs is None
                else {"content": [_candidate(*pair) for pair in _scored(one)]},
            }
            for index, one in enumerate(served)
        ],
        "prompt_logprobs": None,
    }


def _candidate(token: int, value: float) -> dict[str, Any]:
    return {"token_id": token, "logprob": value, "rank": None, "top_logprobs": [{"token_id": token, "logprob": value}]}


def completion_reply(
    model: str, served: Sequence[Served], decode: Decode, prompt_tokens: int, *, logprobs: bool
) -> dict[str, Any]:
    """POST /v1/completions"""
    choices = [
        {
            "index": index,
            "text": one.text,
            "finish_reason": one.completion.finish_reason,
            "logprobs": _text_logprobs(one, decode) if logprobs else None,
        }
        for index, one in enumerate(served)
    ]
    return _envelope("cmpl", "text_completion", model, choices, served, prompt_tokens)


def _text_logprobs(one: Served, decode: Decode) -> dict[str, Any]:
    pieces = [decode([token]) for token in one.completion.token_ids]
    values = one.completion.sampling_logprobs
    offsets = [0]
    for piece in pieces[:-1]:
        offsets.append(offsets[-1] + len(piece))
    return {
        "tokens": pieces,
        "token_logprobs": values,
        "top_logprobs": [{piece: value} for piece, value in zip(pieces, values, strict=True)],
        "text_offset": offsets[: len(pieces)],
    }


def chat_reply(
    model: str, served: Sequence[Served], decode: Decode, prompt_tokens: int, *, logprobs: bool
) -> dict[str, Any]:
    """POST /v1/chat/completions"""
    choices = [
        {
            "index": index,
            "message": {"role": "assistant", "content": one.text},
            "finish_reason": one.completion.finish_reason,
            "logprobs": _chat_logprobs(one, decode) if logprobs else None,
        }
        for index, one in enumerate(served)
    ]
    return _envelope("chatcmpl", "chat.completion", model, choices, served, prompt_tokens)


def _chat_logprobs(one: Served, decode: Decode) -> dict[str, Any]:
    entries = []
    for token, value in _scored(one):
        piece = decode([token])
        entry = {"token": piece, "logprob": value, "bytes": list(piece.encode())}
        entries.append({**entry, "top_logprobs": [entry]})
    return {"content": entries, "refusal": None}


def _envelope(
    prefix: str, kind: str, model: str, choices: list[dict[str, Any]], served: Sequence[Served], prompt_tokens: int
) -> dict[str, Any]:
    sampled = sum(len(one.completion.token_ids) for one in served)
    return {
        "id": f"{prefix}-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "choices": choices,
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": sampled,
            "total_tokens": prompt_tokens + sampled,
        },
    }


def as_events(reply: dict[str, Any]) -> str:
    """A finished reply as a stream of one piece: text is known once a completion has ended, not before."""
    choices = []
    for choice in reply["choices"]:
        piece = {key: value for key, value in choice.items() if key != "message"}
        choices.append(piece | ({"delta": choice["message"]} if "message" in choice else {}))
    kind = reply["object"].replace("chat.completion", "chat.completion.chunk")
    return f"data: {json.dumps({**reply, 'object': kind, 'choices': choices})}\n\ndata: [DONE]\n\n"


def models_reply(model: str, max_tokens: int) -> dict[str, Any]:
    """GET /v1/models"""
    card = {"id": model, "object": "model", "created": 0, "owned_by": "colocated_grpo", "max_model_len": max_tokens}
    return {"object": "list", "data": [card]}


def _scored(one: Served) -> list[tuple[int, float]]:
    return list(zip(one.completion.token_ids, one.completion.sampling_logprobs, strict=True))
