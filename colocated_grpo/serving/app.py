"""The HTTP application. Requests that come while the policy trains are held open and answered afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from colocated_grpo.serving.load_balancer import Unserved
from colocated_grpo.serving.request_bodies import (
    ChatBody,
    CompletionBody,
    GenerateBody,
    TextPrompt,
    TokenPrompt,
    TokensBody,
)
from colocated_grpo.serving.response_bodies import (
    chat_reply,
    completion_reply,
    generate_reply,
    models_reply,
    tokens_reply,
)
from colocated_grpo.serving.sampler import BadWish, Bit, Sampler
from colocated_grpo.serving.streaming import (
    Stream,
    as_events,
    as_lines,
    chat_chunks,
    completion_chunks,
    generate_chunks,
    preceded,
    tokens_chunks,
)
from colocated_grpo.web.bodies import RequestBodies
from colocated_grpo.web.guards import ApiKey, AtMost, refusal

T = TypeVar("T")

EVENTS = "text/event-stream"
UNGUARDED = frozenset({"/health"})


class Disconnected(Exception):
    """The client has gone; nobody reads the answer."""


def create_app(
    sampler: Sampler, model: str, max_tokens: int, *, api_key: str | None, max_body_bytes: int, max_requests: int
) -> ASGIApp:
    app = FastAPI(title="colocated_grpo engine", docs_url=None, redoc_url=None, openapi_url=None)
    _add_refusals(app)
    _add_status_routes(app, model, max_tokens)
    _add_token_routes(app, sampler, model)
    _add_openai_routes(app, sampler, model)
    guarded: ASGIApp = AtMost(RequestBodies(app, max_body_bytes, refusal), max_requests, UNGUARDED)
    return guarded if api_key is None else ApiKey(guarded, api_key, UNGUARDED)


def _add_refusals(app: FastAPI) -> None:
    @app.exception_handler(RequestValidationError)
    async def malformed(_request: Request, error: RequestValidationError) -> JSONResponse:
        # Where a value may take several forms, the form that fits furthest is probably the one that was meant.
        problem = max(error.errors(), key=lambda problem: len(problem["loc"]))
        where = ".".join(str(part) for part in problem["loc"] if part != "body")
        line = f"{where}: {problem['msg']}" if where else problem["msg"]
        return refusal(400, " ".join(line.split()))  # a key may hold newlines

    @app.exception_handler(HTTPException)
    async def refused(_request: Request, error: HTTPException) -> JSONResponse:
        return refusal(error.status_code, str(error.detail))

    @app.exception_handler(BadWish)
    async def bad_wish(_request: Request, error: BadWish) -> JSONResponse:
        return refusal(400, str(error))

    @app.exception_handler(Unserved)
    async def unserved(_request: Request, _error: Unserved) -> JSONResponse:
        return refusal(503, "the run is ending")

    @app.exception_handler(Disconnected)
    async def disconnected(_request: Request, _error: Disconnected) -> Response:
        return Response(status_code=499)


def _add_status_routes(app: FastAPI, model: str, max_tokens: int) -> None:
    @app.get("/health")
    @app.get("/health_generate")
    async def health() -> Response:
        # Also while the policy trains: environments drop what they have under way when a server seems ill.
        return Response()

    @app.get("/v1/models")
    async def models() -> JSONResponse:
        return JSONResponse(models_reply(model, max_tokens))


def _add_token_routes(app: FastAPI, sampler: Sampler, model: str) -> None:
    @app.post("/generate")
    async def generate(body: GenerateBody, request: Request) -> Response:
        prompt_ids = _token_ids(sampler, body)
        if body.stream:
            bits = sampler.stream([prompt_ids], body)
            chunks = generate_chunks(sampler.decode(prompt_ids), body.n, await _begun(request, bits))
            return Stream(as_lines(chunks), bits, "application/x-ndjson")
        return await unless_gone(request, _generate(sampler, prompt_ids, body))

    @app.post("/inference/v1/generate")
    async def generate_tokens(body: TokensBody, request: Request) -> Response:
        wish, name = body.sampling_params, body.model or model
        if body.stream:
            bits = sampler.stream([body.token_ids], wish)
            chunks = tokens_chunks(
                body.request_id, name, await _begun(request, bits), logprobs=wish.logprobs is not None
            )
            return Stream(as_events(chunks), bits, EVENTS)
        served = await unless_gone(request, sampler.sample([body.token_ids], wish))
        return JSONResponse(tokens_reply(body.request_id, name, served, wish))


def _token_ids(sampler: Sampler, body: GenerateBody) -> list[int]:
    match body.prompt:
        case TokenPrompt(prompt_token_ids=token_ids) | list(token_ids):
            return token_ids
        case TextPrompt(prompt=text) | str(text):
            return sampler.encode(text)


async def _generate(sampler: Sampler, prompt_ids: list[int], body: GenerateBody) -> Response:
    served = await sampler.sample([prompt_ids], body)
    scored = None if body.prompt_logprobs is None else await sampler.prompt_logprobs(prompt_ids, body.prompt_logprobs)
    return JSONResponse(generate_reply(sampler.decode(prompt_ids), prompt_ids, served, body, scored))


def _add_openai_routes(app: FastAPI, sampler: Sampler, model: str) -> None:
    @app.post("/v1/completions")
    async def completions(body: CompletionBody, request: Request) -> Response:
        prompts = [sampler.encode(prompt) if isinstance(prompt, str) else prompt for prompt in body.prompts]
        logprobs, length = body.logprobs is not None, sum(map(len, prompts))
        if body.stream:
            bits = sampler.stream(prompts, body.wish, body.alternatives)
            begun = await _begun(request, bits)
            chunks = completion_chunks(
                body.model or model, begun, sampler.spell, length, logprobs=logprobs, usage=body.counts_usage
            )
            return Stream(as_events(chunks), bits, EVENTS)
        served = await unless_gone(request, sampler.sample(prompts, body.wish, body.alternatives))
        return JSONResponse(completion_reply(body.model or model, served, sampler.spell, length, logprobs=logprobs))

    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        settings: dict[str, Any] = {
            **(body.chat_template_kwargs or {}),
            "add_generation_prompt": body.add_generation_prompt and not body.continue_final_message,
            "continue_final_message": body.continue_final_message,
            "tools": body.tools,
        }
        messages = [message.model_dump(exclude_none=True) for message in body.messages]
        prompt = sampler.encode_chat(messages, settings)
        name, logprobs = body.model or model, bool(body.logprobs)
        if body.stream:
            bits = sampler.stream([prompt], body.wish, body.alternatives)
            begun = await _begun(request, bits)
            chunks = chat_chunks(name, begun, sampler.spell, len(prompt), logprobs=logprobs, usage=body.counts_usage)
            return Stream(as_events(chunks), bits, EVENTS)
        served = await unless_gone(request, sampler.sample([prompt], body.wish, body.alternatives))
        return JSONResponse(chat_reply(name, served, sampler.spell, len(prompt), logprobs=logprobs))


async def _begun(request: Request, bits: AsyncGenerator[Bit]) -> AsyncIterator[Bit]:
    """The same bits once the first is there: what fails before it has a status of its own."""
    return preceded(await unless_gone(request, anext(bits)), bits)


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """The work's result. When the client disconnects first the work is cancelled, which frees its place in the engine.

    Environments end their own tasks all the time, for instance when a queue is full.
    """
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnect(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Disconnected
        return task.result()
    except asyncio.CancelledError:
        raise Unserved from None  # the server closes
    finally:
        gone.cancel()
        task.cancel()


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
