"""Responses in each route's format: completions, whole or as a stream of chunks. Both have the same format and code."""

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from itertools import accumulate

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from colocated_grpo.servers.rank_links import ServerClosing
from colocated_grpo.servers.request_bodies import OpenAIBody, SamplingParameters
from colocated_grpo.servers.sampler import CompletionPart, TopLogprobs
from colocated_grpo.servers.text import Decode, InvalidRequest
from colocated_grpo.types import JsonObject
from colocated_grpo.web.server import error_body


def generate_response(
    prompt: str,
    prompt_ids: list[int],
    completions: Sequence[CompletionPart],
    parameters: SamplingParameters,
    prompt_logprobs: list[dict[int, float] | None] | None,
) -> JsonObject:
    """POST /generate, in the format that Atropos' managed servers parse."""
    reasons = [one.finish_reason for one in completions]
    response: JsonObject = {"text": [one.text for one in completions], "prompt": prompt, "finish_reasons": reasons}
    if parameters.logprobs is not None:
        # One list per token, with a single dictionary. Clients read its first key as the sampled token.
        response["logprobs"] = [[[{token: value}] for token, value in one.token_logprobs] for one in completions]
        response["prompt_token_ids"] = prompt_ids
        response["token_ids"] = [one.token_ids for one in completions]
    if prompt_logprobs is not None:
        response["prompt_logprobs"] = prompt_logprobs
    return response


async def generate_chunks(parts: AsyncIterator[CompletionPart]) -> AsyncIterator[JsonObject]:
    """POST /generate. Each chunk has the next text and tokens of one completion."""
    async for part in parts:
        yield {
            "index": part.index,
            "text": part.text,
            "token_ids": part.token_ids,
            "logprobs": [[{token: value}] for token, value in part.token_logprobs],
            "finish_reason": part.finish_reason,
        }


class TokensFormat:
    """POST /inference/v1/generate, in vLLM's format."""

    def __init__(self, request_id: str | None, model: str, *, logprobs: bool) -> None:
        self._head = {"request_id": request_id or uuid.uuid4().hex, "model": model, "created": int(time.time())}
        self._logprobs = logprobs

    def response(self, completions: Sequence[CompletionPart]) -> JsonObject:
        return {**self._head, "choices": [self._choice(one) for one in completions], "prompt_logprobs": None}

    async def chunks(self, parts: AsyncIterator[CompletionPart]) -> AsyncIterator[JsonObject]:
        async for part in parts:
            yield {**self._head, "choices": [self._choice(part)]}

    def _choice(self, part: CompletionPart) -> JsonObject:
        entries = [
            {"token_id": token, "logprob": value, "rank": None, "top_logprobs": [{"token_id": token, "logprob": value}]}
            for token, value in part.token_logprobs
        ]
        return {
            "index": part.index,
            "token_ids": part.token_ids,
            "finish_reason": part.finish_reason,
            "logprobs": {"content": entries} if self._logprobs else None,
        }


class OpenAIFormat:
    """The format of one response of OpenAI's API. Subclasses format choices."""

    id_prefix: str
    kind: str
    chunk_kind: str

    def __init__(
        self, body: OpenAIBody, model: str, detokenize: Decode, prompts: Sequence[list[int]], *, logprobs: bool
    ) -> None:
        """model: model name for a body without a name."""
        name = body.model or model
        self._head = {"id": f"{self.id_prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": name}
        self._detokenize = detokenize
        self._prompt_tokens = sum(map(len, prompts))
        self._logprobs = logprobs
        self._include_usage = body.includes_usage
        self._offsets: dict[int, int] = {}
        """Number of characters so far in the tokens of each completion, for /v1/completions."""

    def response(self, completions: Sequence[CompletionPart]) -> JsonObject:
        return {
            **self._head,
            "object": self.kind,
            "choices": [self._choice(one, "message") for one in completions],
            "usage": self._usage(sum(len(one.token_ids) for one in completions)),
        }

    async def chunks(self, parts: AsyncIterator[CompletionPart]) -> AsyncIterator[JsonObject]:
        head = {**self._head, "object": self.chunk_kind, **({"usage": None} if self._include_usage else {})}
        completion_tokens = 0
        async for part in parts:
            completion_tokens += len(part.token_ids)
            yield {**head, "choices": [self._choice(part, "delta")]}
        if self._include_usage:
            yield {**head, "choices": [], "usage": self._usage(completion_tokens)}

    def _choice(self, part: CompletionPart, message: str) -> JsonObject:
        """message: key of the chat message in the choice."""
        raise NotImplementedError

    def _usage(self, completion_tokens: int) -> dict[str, int]:
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": self._prompt_tokens + completion_tokens,
        }


class CompletionFormat(OpenAIFormat):
    """POST /v1/completions"""

    id_prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def _choice(self, part: CompletionPart, message: str) -> JsonObject:
        logprobs = self._text_logprobs(part) if self._logprobs else None
        return {"index": part.index, "text": part.text, "finish_reason": part.finish_reason, "logprobs": logprobs}

    def _text_logprobs(self, part: CompletionPart) -> JsonObject:
        texts = [self._detokenize([token]) for token in part.token_ids]
        *offsets, self._offsets[part.index] = accumulate(map(len, texts), initial=self._offsets.get(part.index, 0))
        top = part.top_logprobs or [{token: value} for token, value in part.token_logprobs]
        return {
            "tokens": texts,
            "token_logprobs": part.logprobs,
            "top_logprobs": [self._by_text(entry) for entry in top],
            "text_offset": offsets,
        }

    def _by_text(self, entry: dict[int, float]) -> dict[str, float]:
        """Return log-probabilities by token text. If tokens have equal text (partial characters), the first is kept."""
        named: dict[str, float] = {}
        for token, value in entry.items():
            named.setdefault(self._detokenize([token]), value)
        return named


class ChatFormat(OpenAIFormat):
    """POST /v1/chat/completions"""

    id_prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def _choice(self, part: CompletionPart, message: str) -> JsonObject:
        role = {"role": "assistant"} if part.start == 0 else {}
        logprobs = None
        if self._logprobs:
            top: TopLogprobs = part.top_logprobs or [{}] * len(part.token_ids)
            content = [
                {**self._entry(*pair), "top_logprobs": [self._entry(*other) for other in others.items()]}
                for pair, others in zip(part.token_logprobs, top, strict=True)
            ]
            logprobs = {"content": content, "refusal": None}
        return {
            "index": part.index,
            message: {**role, "content": part.text},
            "finish_reason": part.finish_reason,
            "logprobs": logprobs,
        }

    def _entry(self, token: int, value: float) -> JsonObject:
        text = self._detokenize([token])
        return {"token": text, "logprob": value, "bytes": list(text.encode())}


Format = TokensFormat | OpenAIFormat


class ClosingStream(StreamingResponse):
    """A response sent line by line. `close` is called when it ends, for whatever reason."""

    def __init__(self, lines: AsyncIterator[str], close: Callable[[], Awaitable[None]], media_type: str) -> None:
        super().__init__(lines, media_type=media_type)
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._close()


async def as_server_sent_events(chunks: AsyncIterator[JsonObject]) -> AsyncIterator[str]:
    """Yield `data:` events and the final [DONE]."""
    async for line in as_json_lines(chunks):
        yield f"data: {line}\n"
    yield "data: [DONE]\n\n"


async def as_json_lines(chunks: AsyncIterator[JsonObject]) -> AsyncIterator[str]:
    """Yield one line per chunk. An error becomes the last line, since the status has already been sent."""
    try:
        async for chunk in chunks:
            yield json.dumps(chunk) + "\n"
            await asyncio.sleep(0)  # other requests' turn, which a stream with many chunks ready would not give them
    except (InvalidRequest, ServerClosing) as error:
        yield json.dumps(error_body(400 if isinstance(error, InvalidRequest) else 503, str(error))) + "\n"
