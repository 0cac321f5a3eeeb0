"""Responses: completions in the format of each route, whole or as a stream of chunks."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from itertools import accumulate

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from colocated_grpo.servers.load_balancer import ServerClosing
from colocated_grpo.servers.request_bodies import SamplingParameters
from colocated_grpo.servers.sampler import CompletionDelta, ServedCompletion, TopLogprobs
from colocated_grpo.servers.text import Decode, InvalidRequest
from colocated_grpo.types import JsonObject
from colocated_grpo.web.guards import error_body

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


class StreamingBody(StreamingResponse):
    """A response sent line by line. At its end it closes `deltas`, which aborts requests still in the engine."""

    def __init__(self, lines: AsyncIterator[str], deltas: AsyncGenerator[CompletionDelta], media_type: str) -> None:
        super().__init__(lines, media_type=media_type)
        self._deltas = deltas

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._deltas.aclose()


async def prepend(first: CompletionDelta, others: AsyncIterator[CompletionDelta]) -> AsyncIterator[CompletionDelta]:
    yield first
    async for delta in others:
        yield delta


async def as_server_sent_events(chunks: AsyncIterator[JsonObject]) -> AsyncIterator[str]:
    """Yield `data:` events and the final [DONE]. An error becomes an event, since the status has already been sent."""
    try:
        async for chunk in chunks:
            yield f"data: {json.dumps(chunk)}\n\n"
    except (InvalidRequest, ServerClosing) as error:
        yield f"data: {json.dumps(_error_chunk(error))}\n\n"
    yield "data: [DONE]\n\n"


async def as_json_lines(chunks: AsyncIterator[JsonObject]) -> AsyncIterator[str]:
    """Yield one line per chunk. An error becomes the last line."""
    try:
        async for chunk in chunks:
            yield json.dumps(chunk) + "\n"
    except (InvalidRequest, ServerClosing) as error:
        yield json.dumps(_error_chunk(error)) + "\n"


def _error_chunk(error: InvalidRequest | ServerClosing) -> JsonObject:
    return error_body(400 if isinstance(error, InvalidRequest) else 503, str(error))


async def generate_chunks(prompt: str, n: int, deltas: AsyncIterator[CompletionDelta]) -> AsyncIterator[JsonObject]:
    """POST /generate. As in vLLM's api_server, every chunk repeats the whole texts so far, prompt included."""
    texts = [prompt] * n
    async for delta in deltas:
        texts[delta.index] += delta.text
        yield {"text": list(texts)}


async def tokens_chunks(
    request_id: str | None, model: str, deltas: AsyncIterator[CompletionDelta], *, logprobs: bool
) -> AsyncIterator[JsonObject]:
    """POST /inference/v1/generate"""
    head = {"request_id": request_id or uuid.uuid4().hex, "model": model, "created": int(time.time())}
    async for delta in deltas:
        values = token_id_logprobs(_delta_logprobs(delta)) if logprobs else None
        yield {**head, "choices": [_choice(delta) | {"token_ids": delta.token_ids, "logprobs": values}]}


async def completion_chunks(
    model: str,
    deltas: AsyncIterator[CompletionDelta],
    detokenize: Decode,
    prompt_tokens: int,
    *,
    logprobs: bool,
    include_usage: bool,
) -> AsyncIterator[JsonObject]:
    """POST /v1/completions"""
    head = _head("cmpl", "text_completion", model, include_usage=include_usage)
    offsets: dict[int, int] = {}
    completion_tokens = 0
    async for delta in deltas:
        choice = _choice(delta) | {"text": delta.text, "logprobs": None}
        if logprobs:
            start = offsets.get(delta.index, 0)
            choice["logprobs"] = text_logprobs(_delta_logprobs(delta), _top_logprobs(delta), detokenize, start)
            offsets[delta.index] = start + sum(map(len, choice["logprobs"]["tokens"]))
        completion_tokens += len(delta.token_ids)
        yield {**head, "choices": [choice]}
    if include_usage:
        yield {**head, "choices": [], "usage": usage(prompt_tokens, completion_tokens)}


async def chat_chunks(
    model: str,
    deltas: AsyncIterator[CompletionDelta],
    detokenize: Decode,
    prompt_tokens: int,
    *,
    logprobs: bool,
    include_usage: bool,
) -> AsyncIterator[JsonObject]:
    """POST /v1/chat/completions"""
    head = _head("chatcmpl", "chat.completion.chunk", model, include_usage=include_usage)
    started: set[int] = set()
    completion_tokens = 0
    async for delta in deltas:
        role = {} if delta.index in started else {"role": "assistant"}
        started.add(delta.index)
        completion_tokens += len(delta.token_ids)
        values = chat_logprobs(_delta_logprobs(delta), _top_logprobs(delta), detokenize) if logprobs else None
        yield {**head, "choices": [_choice(delta) | {"delta": {**role, "content": delta.text}, "logprobs": values}]}
    if include_usage:
        yield {**head, "choices": [], "usage": usage(prompt_tokens, completion_tokens)}


def _head(id_prefix: str, kind: str, model: str, *, include_usage: bool) -> JsonObject:
    head = {"id": f"{id_prefix}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": model}
    return head | ({"usage": None} if include_usage else {})


def _choice(delta: CompletionDelta) -> JsonObject:
    finish_reason = None if delta.final is None else delta.final.completion.finish_reason
    return {"index": delta.index, "finish_reason": finish_reason}


def _delta_logprobs(delta: CompletionDelta) -> TokenLogprobs:
    return list(zip(delta.token_ids, delta.logprobs, strict=True))


def _top_logprobs(delta: CompletionDelta) -> TopLogprobs | None:
    """Return the completion's top log-probabilities. A completion that has them is a single delta."""
    return None if delta.final is None else delta.final.top_logprobs
