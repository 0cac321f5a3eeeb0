"""The HTTP application. While the engines sleep, requests stay open and are answered after the next wake."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from colocated_grpo.serving.limits import InvalidRequest
from colocated_grpo.serving.load_balancer import ServerClosing
from colocated_grpo.serving.request_bodies import (
    ChatBody,
    CompletionBody,
    GenerateBody,
    TextPrompt,
    TokenPrompt,
    TokensBody,
)
from colocated_grpo.serving.response_bodies import (
    chat_response,
    completion_response,
    generate_response,
    models_response,
    tokens_response,
)
from colocated_grpo.serving.sampler import CompletionDelta, Sampler
from colocated_grpo.serving.streaming import (
    StreamingBody,
    as_json_lines,
    as_server_sent_events,
    chat_chunks,
    completion_chunks,
    generate_chunks,
    prepend,
    tokens_chunks,
)
from colocated_grpo.types import JsonObject
from colocated_grpo.web.bodies import BodyLimit
from colocated_grpo.web.guards import ConcurrencyLimit, RequireApiKey, error_response

T = TypeVar("T")

EVENT_STREAM, JSON_LINES = "text/event-stream", "application/x-ndjson"
PUBLIC_PATHS = frozenset({"/health"})
CLIENT_CLOSED_REQUEST = 499


class ClientDisconnected(Exception):
    """The client closed the connection before the response."""


def create_app(
    sampler: Sampler,
    model: str,
    max_tokens: int,
    *,
    api_key: str | None,
    max_body_bytes: int,
    max_requests: int,
    add_routes: Callable[[FastAPI], None] = lambda app: None,
) -> ASGIApp:
    """Return the application behind its guards. model, max_tokens: name and context length, as clients see them.

    add_routes: adds further routes.
    """
    app = FastAPI(title="colocated_grpo engine", docs_url=None, redoc_url=None, openapi_url=None)
    _add_exception_handlers(app)
    _add_status_routes(app, model, max_tokens)
    _add_token_routes(app, sampler, model)
    _add_openai_routes(app, sampler, model)
    add_routes(app)
    bounded = ConcurrencyLimit(BodyLimit(app, max_body_bytes, error_response), max_requests, PUBLIC_PATHS)
    return bounded if api_key is None else RequireApiKey(bounded, api_key, PUBLIC_PATHS)


def _add_exception_handlers(app: FastAPI) -> None:
    @app.exception_handler(RequestValidationError)
    async def malformed(_request: Request, error: RequestValidationError) -> JSONResponse:
        # For a union pydantic reports every variant. The one that fails deepest is probably the one that was meant.
        problem = max(error.errors(), key=lambda problem: len(problem["loc"]))
        where = ".".join(str(part) for part in problem["loc"] if part != "body")
        line = f"{where}: {problem['msg']}" if where else problem["msg"]
        return error_response(400, " ".join(line.split()))  # a key of the body may contain newlines

    @app.exception_handler(HTTPException)
    async def http_error(_request: Request, error: HTTPException) -> JSONResponse:
        return error_response(error.status_code, str(error.detail))

    @app.exception_handler(InvalidRequest)
    async def invalid_request(_request: Request, error: InvalidRequest) -> JSONResponse:
        return error_response(400, str(error))

    @app.exception_handler(ServerClosing)
    async def server_closing(_request: Request, error: ServerClosing) -> JSONResponse:
        return error_response(503, str(error))

    @app.exception_handler(ClientDisconnected)
    async def client_disconnected(_request: Request, _error: ClientDisconnected) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)


def _add_status_routes(app: FastAPI, model: str, max_tokens: int) -> None:
    @app.get("/health")
    @app.get("/health_generate")
    async def health() -> Response:
        # 200 also while the engines sleep: clients drop their requests when a server reports itself unhealthy.
        return Response()

    @app.get("/v1/models")
    async def models() -> JSONResponse:
        return JSONResponse(models_response(model, max_tokens))


def _add_token_routes(app: FastAPI, sampler: Sampler, model: str) -> None:
    @app.post("/generate")
    async def generate(body: GenerateBody, request: Request) -> Response:
        prompt_ids = _token_ids(sampler, body)
        if body.stream:
            deltas = sampler.stream([prompt_ids], body)
            started = await _start(request, deltas)
            chunks = generate_chunks(sampler.codec.decode(prompt_ids), body.n, started)
            return StreamingBody(as_json_lines(chunks), deltas, JSON_LINES)
        return await cancel_on_disconnect(request, _generate(sampler, prompt_ids, body))

    @app.post("/inference/v1/generate")
    async def generate_tokens(body: TokensBody, request: Request) -> Response:
        parameters, name = body.sampling_params, body.model or model
        if body.stream:
            deltas = sampler.stream([body.token_ids], parameters)
            started = await _start(request, deltas)
            chunks = tokens_chunks(body.request_id, name, started, logprobs=parameters.logprobs is not None)
            return StreamingBody(as_server_sent_events(chunks), deltas, EVENT_STREAM)
        completions = await cancel_on_disconnect(request, sampler.sample([body.token_ids], parameters))
        return JSONResponse(tokens_response(body.request_id, name, completions, parameters))


def _token_ids(sampler: Sampler, body: GenerateBody) -> list[int]:
    match body.prompt:
        case TokenPrompt(prompt_token_ids=token_ids) | list(token_ids):
            return token_ids
        case TextPrompt(prompt=text) | str(text):
            return sampler.codec.encode(text)


async def _generate(sampler: Sampler, prompt_ids: list[int], body: GenerateBody) -> Response:
    completions = await sampler.sample([prompt_ids], body)
    k = body.prompt_logprobs
    prompt_logprobs = None if k is None else await sampler.prompt_logprobs(prompt_ids, k)
    prompt = sampler.codec.decode(prompt_ids)
    return JSONResponse(generate_response(prompt, prompt_ids, completions, body, prompt_logprobs))


def _add_openai_routes(app: FastAPI, sampler: Sampler, model: str) -> None:
    detokenize = sampler.codec.detokenize

    @app.post("/v1/completions")
    async def completions(body: CompletionBody, request: Request) -> Response:
        prompts = [sampler.codec.encode(prompt) if isinstance(prompt, str) else prompt for prompt in body.prompts]
        name, logprobs, prompt_tokens = body.model or model, body.logprobs is not None, sum(map(len, prompts))
        if body.stream:
            deltas = sampler.stream(prompts, body.sampling_parameters, body.num_top_logprobs)
            started = await _start(request, deltas)
            chunks = completion_chunks(
                name, started, detokenize, prompt_tokens, logprobs=logprobs, include_usage=body.includes_usage
            )
            return StreamingBody(as_server_sent_events(chunks), deltas, EVENT_STREAM)
        work = sampler.sample(prompts, body.sampling_parameters, body.num_top_logprobs)
        sampled = await cancel_on_disconnect(request, work)
        return JSONResponse(completion_response(name, sampled, detokenize, prompt_tokens, logprobs=logprobs))

    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        prompt = _encode_chat(sampler, body)
        name, logprobs = body.model or model, bool(body.logprobs)
        if body.stream:
            deltas = sampler.stream([prompt], body.sampling_parameters, body.num_top_logprobs)
            started = await _start(request, deltas)
            chunks = chat_chunks(
                name, started, detokenize, len(prompt), logprobs=logprobs, include_usage=body.includes_usage
            )
            return StreamingBody(as_server_sent_events(chunks), deltas, EVENT_STREAM)
        work = sampler.sample([prompt], body.sampling_parameters, body.num_top_logprobs)
        sampled = await cancel_on_disconnect(request, work)
        return JSONResponse(chat_response(name, sampled, detokenize, len(prompt), logprobs=logprobs))


def _encode_chat(sampler: Sampler, body: ChatBody) -> list[int]:
    settings: JsonObject = {
        **(body.chat_template_kwargs or {}),
        "add_generation_prompt": body.add_generation_prompt and not body.continue_final_message,
        "continue_final_message": body.continue_final_message,
        "tools": body.tools,
    }
    messages = [message.model_dump(exclude_none=True) for message in body.messages]
    return sampler.codec.encode_chat(messages, settings)


async def _start(request: Request, deltas: AsyncGenerator[CompletionDelta]) -> AsyncIterator[CompletionDelta]:
    """Await the first delta and return all of them. An earlier error can still set the response's status."""
    return prepend(await cancel_on_disconnect(request, anext(deltas)), deltas)


async def cancel_on_disconnect(request: Request, work: Awaitable[T]) -> T:
    """Return the result of `work`, or cancel it when the client disconnects, which aborts its engine requests.

    Disconnects are frequent: Atropos environments cancel their tasks whenever a queue is full.
    """
    task, disconnected = asyncio.ensure_future(work), asyncio.ensure_future(_disconnect(request))
    try:
        await asyncio.wait({task, disconnected}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnected
        return task.result()
    except asyncio.CancelledError:
        raise ServerClosing from None  # uvicorn cancels requests that outlast its shutdown timeout
    finally:
        disconnected.cancel()
        task.cancel()


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
