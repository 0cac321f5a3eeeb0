"""Response bodies: completions in the format of each route."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from itertools import accumulate

from colocated_grpo.servers.detokenizer import Decode
from colocated_grpo.servers.request_bodies import SamplingParameters
from colocated_grpo.servers.sampler import ServedCompletion, TopLogprobs
from colocated_grpo.types import JsonObject

TokenLogprobs = list[tuple[int, float]]
"""Sampled tokens, each with its log-probability."""


def generate_response(
    prompt: str,
    prompt_ids: list[int],
    completions: Sequence[ServedCompletion],
    parameters: SamplingParameters,
    prompt_logprobs: list[dict[int, float] | None] | None,
) -> JsonObject:
    """POST /generate, in the format that Atropos' managed servers parse."""
    response: JsonObject = {
        "text": [one.text for one in completions],
        "prompt": prompt,
        "finish_reasons": [one.completion.finish_reason for one in completions],
    }
    if parameters.logprobs is not None:
        # For each token a list with a single dictionary, whose first key clients read as the sampled token.
        response["logprobs"] = [[[{token: value}] for token, value in _token_logprobs(one)] for one in completions]
        response["prompt_token_ids"] = prompt_ids
        response["token_ids"] = [one.completion.token_ids for one in completions]
    if prompt_logprobs is not None:
        response["prompt_logprobs"] = prompt_logprobs
    return response


def tokens_response(
    request_id: str | None, model: str, completions: Sequence[ServedCompletion], parameters: SamplingParameters
) -> JsonObject:
    """POST /inference/v1/generate, in vLLM's format."""
    return {
        "request_id": request_id or uuid.uuid4().hex,
        "model": model,
        "created": int(time.time()),
        "choices": [
            {
                "index": index,
                "token_ids": one.completion.token_ids,
                "finish_reason": one.completion.finish_reason,
                "logprobs": None if parameters.logprobs is None else token_id_logprobs(_token_logprobs(one)),
            }
            for index, one in enumerate(completions)
        ],
        "prompt_logprobs": None,
    }


def token_id_logprobs(token_logprobs: TokenLogprobs) -> JsonObject:
    """Return the `logprobs` of a choice of /inference/v1/generate."""
    return {
        "content": [
            {
                "token_id": token,
                "logprob": value,
                "rank": None,
                "top_logprobs": [{"token_id": token, "logprob": value}],
            }
            for token, value in token_logprobs
        ]
    }


def completion_response(
    model: str, completions: Sequence[ServedCompletion], detokenize: Decode, prompt_tokens: int, *, logprobs: bool
) -> JsonObject:
    """POST /v1/completions"""
    choices = [
        {
            "index": index,
            "text": one.text,
            "finish_reason": one.completion.finish_reason,
            "logprobs": text_logprobs(_token_logprobs(one), one.top_logprobs, detokenize) if logprobs else None,
        }
        for index, one in enumerate(completions)
    ]
    return _openai_response("cmpl", "text_completion", model, choices, completions, prompt_tokens)


def text_logprobs(
    token_logprobs: TokenLogprobs, top_logprobs: TopLogprobs | None, detokenize: Decode, start: int = 0
) -> JsonObject:
    """Return the `logprobs` of a choice of /v1/completions. start: characters of the completion before these tokens."""
    texts = [detokenize([token]) for token, _ in token_logprobs]
    return {
        "tokens": texts,
        "token_logprobs": [value for _, value in token_logprobs],
        "top_logprobs": [_by_text(entry, detokenize) for entry in top_logprobs or [{t: v} for t, v in token_logprobs]],
        "text_offset": list(accumulate(map(len, texts), initial=start))[:-1],
    }


def _by_text(entry: dict[int, float], detokenize: Decode) -> dict[str, float]:
    """Return log-probabilities by text. Tokens can share a text, such as partial characters; the first is kept."""
    named: dict[str, float] = {}
    for token, value in entry.items():
        named.setdefault(detokenize([token]), value)
    return named


def chat_response(
    model: str, completions: Sequence[ServedCompletion], detokenize: Decode, prompt_tokens: int, *, logprobs: bool
) -> JsonObject:
    """POST /v1/chat/completions"""
    choices = [
        {
            "index": index,
            "message": {"role": "assistant", "content": one.text},
            "finish_reason": one.completion.finish_reason,
            "logprobs": chat_logprobs(_token_logprobs(one), one.top_logprobs, detokenize) if logprobs else None,
        }
        for index, one in enumerate(completions)
    ]
    return _openai_response("chatcmpl", "chat.completion", model, choices, completions, prompt_tokens)


def chat_logprobs(token_logprobs: TokenLogprobs, top_logprobs: TopLogprobs | None, detokenize: Decode) -> JsonObject:
    """Return the `logprobs` of a choice of /v1/chat/completions."""

    def entry(token: int, value: float) -> JsonObject:
        text = detokenize([token])
        return {"token": text, "logprob": value, "bytes": list(text.encode())}

    content = [
        {**entry(*pair), "top_logprobs": [entry(*other) for other in others.items()]}
        for pair, others in zip(token_logprobs, top_logprobs or [{} for _ in token_logprobs], strict=True)
    ]
    return {"content": content, "refusal": None}


def _openai_response(
    id_prefix: str,
    kind: str,
    model: str,
    choices: list[JsonObject],
    completions: Sequence[ServedCompletion],
    prompt_tokens: int,
) -> JsonObject:
    return {
        "id": f"{id_prefix}-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "choices": choices,
        "usage": usage(prompt_tokens, sum(len(one.completion.token_ids) for one in completions)),
    }


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def models_response(model: str, max_tokens: int) -> JsonObject:
    """GET /v1/models"""
    card = {"id": model, "object": "model", "created": 0, "owned_by": "colocated_grpo", "max_model_len": max_tokens}
    return {"object": "list", "data": [card]}


def _token_logprobs(one: ServedCompletion) -> TokenLogprobs:
    return list(zip(one.completion.token_ids, one.completion.sampling_logprobs, strict=True))
