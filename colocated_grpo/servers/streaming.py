"""Streamed responses: conversion of completion deltas to chunks in each route's format, and of chunks to lines."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from colocated_grpo.servers.detokenizer import Decode
from colocated_grpo.servers.limits import InvalidRequest
from colocated_grpo.servers.load_balancer import ServerClosing
from colocated_grpo.servers.response_bodies import (
    TokenLogprobs,
    chat_logprobs,
    text_logprobs,
    token_id_logprobs,
    usage,
)
from colocated_grpo.servers.sampler import CompletionDelta, TopLogprobs
from colocated_grpo.types import JsonObject
from colocated_grpo.web.guards import error_body


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
        values = token_id_logprobs(_token_logprobs(delta)) if logprobs else None
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
            choice["logprobs"] = text_logprobs(_token_logprobs(delta), _top_logprobs(delta), detokenize, start)
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
        values = chat_logprobs(_token_logprobs(delta), _top_logprobs(delta), detokenize) if logprobs else None
        yield {**head, "choices": [_choice(delta) | {"delta": {**role, "content": delta.text}, "logprobs": values}]}
    if include_usage:
        yield {**head, "choices": [], "usage": usage(prompt_tokens, completion_tokens)}


def _head(id_prefix: str, kind: str, model: str, *, include_usage: bool) -> JsonObject:
    head = {"id": f"{id_prefix}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": model}
    return head | ({"usage": None} if include_usage else {})


def _choice(delta: CompletionDelta) -> JsonObject:
    finish_reason = None if delta.final is None else delta.final.completion.finish_reason
    return {"index": delta.index, "finish_reason": finish_reason}


def _token_logprobs(delta: CompletionDelta) -> TokenLogprobs:
    return list(zip(delta.token_ids, delta.logprobs, strict=True))


def _top_logprobs(delta: CompletionDelta) -> TopLogprobs | None:
    """Return the completion's top log-probabilities. A completion that has them is a single delta."""
    return None if delta.final is None else delta.final.top_logprobs
