"""Streams in the words of each API that is spoken here: bits of completions become chunks, and chunks events."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from colocated_grpo.serving.detokenizer import Decode
from colocated_grpo.serving.load_balancer import Unserved
from colocated_grpo.serving.response_bodies import chat_logprobs, text_logprobs, token_logprobs, usage_of
from colocated_grpo.serving.sampler import BadWish, Bit
from colocated_grpo.web.guards import refusal_body

Chunk = dict[str, Any]


class Stream(StreamingResponse):
    """Bits as they come. When the client leaves, their source is closed, which frees its places in the engine."""

    def __init__(self, lines: AsyncIterator[str], bits: AsyncGenerator[Bit], media_type: str) -> None:
        super().__init__(lines, media_type=media_type)
        self._bits = bits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._bits.aclose()


async def preceded(first: Bit, others: AsyncIterator[Bit]) -> AsyncIterator[Bit]:
    yield first
    async for bit in others:
        yield bit


async def as_events(chunks: AsyncIterator[Chunk]) -> AsyncIterator[str]:
    """Server-sent events. What goes wrong after the first one is an event too: the status has been sent."""
    try:
        async for chunk in chunks:
            yield f"data: {json.dumps(chunk)}\n\n"
    except (BadWish, Unserved) as error:
        yield f"data: {json.dumps(_failed(error))}\n\n"
    yield "data: [DONE]\n\n"


async def as_lines(chunks: AsyncIterator[Chunk]) -> AsyncIterator[str]:
    try:
        async for chunk in chunks:
            yield json.dumps(chunk) + "\n"
    except (BadWish, Unserved) as error:
        yield json.dumps(_failed(error)) + "\n"


def _failed(error: BadWish | Unserved) -> Chunk:
    return refusal_body(400, str(error)) if isinstance(error, BadWish) else refusal_body(503, "the run is ending")


async def generate_chunks(prompt: str, n: int, bits: AsyncIterator[Bit]) -> AsyncIterator[Chunk]:
    """POST /generate: the whole texts so far, each time, as vLLM's server of that name has it."""
    texts = [prompt] * n
    async for bit in bits:
        texts[bit.index] += bit.text
        yield {"text": list(texts)}


async def tokens_chunks(
    request_id: str | None, model: str, bits: AsyncIterator[Bit], *, logprobs: bool
) -> AsyncIterator[Chunk]:
    """POST /inference/v1/generate"""
    head = {"request_id": request_id or uuid.uuid4().hex, "model": model, "created": int(time.time())}
    async for bit in bits:
        choice = _choice(bit) | {"token_ids": bit.token_ids}
        yield {**head, "choices": [choice | {"logprobs": token_logprobs(_pairs(bit)) if logprobs else None}]}


async def completion_chunks(
    model: str, bits: AsyncIterator[Bit], spell: Decode, prompt_tokens: int, *, logprobs: bool, usage: bool
) -> AsyncIterator[Chunk]:
    """POST /v1/completions"""
    head = _head("cmpl", "text_completion", model) | ({"usage": None} if usage else {})
    written: dict[int, int] = {}
    sampled = 0
    async for bit in bits:
        choice = _choice(bit) | {"text": bit.text, "logprobs": None}
        if logprobs:
            start = written.get(bit.index, 0)
            choice["logprobs"] = text_logprobs(_pairs(bit), _alternatives(bit), spell, start)
            written[bit.index] = start + sum(map(len, choice["logprobs"]["tokens"]))
        sampled += len(bit.token_ids)
        yield {**head, "choices": [choice]}
    if usage:
        yield {**head, "choices": [], "usage": usage_of(prompt_tokens, sampled)}


async def chat_chunks(
    model: str, bits: AsyncIterator[Bit], spell: Decode, prompt_tokens: int, *, logprobs: bool, usage: bool
) -> AsyncIterator[Chunk]:
    """POST /v1/chat/completions"""
    head = _head("chatcmpl", "chat.completion.chunk", model) | ({"usage": None} if usage else {})
    begun: set[int] = set()
    sampled = 0
    async for bit in bits:
        role = {} if bit.index in begun else {"role": "assistant"}
        begun.add(bit.index)
        sampled += len(bit.token_ids)
        values = chat_logprobs(_pairs(bit), _alternatives(bit), spell) if logprobs else None
        yield {**head, "choices": [_choice(bit) | {"delta": {**role, "content": bit.text}, "logprobs": values}]}
    if usage:
        yield {**head, "choices": [], "usage": usage_of(prompt_tokens, sampled)}


def _head(prefix: str, kind: str, model: str) -> Chunk:
    return {"id": f"{prefix}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": model}


def _choice(bit: Bit) -> Chunk:
    return {"index": bit.index, "finish_reason": None if bit.served is None else bit.served.completion.finish_reason}


def _pairs(bit: Bit) -> list[tuple[int, float]]:
    return list(zip(bit.token_ids, bit.logprobs, strict=True))


def _alternatives(bit: Bit) -> list[dict[int, float]] | None:
    """Only where the whole completion is one bit."""
    return None if bit.served is None else bit.served.alternatives
