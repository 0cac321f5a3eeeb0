"""The HTTP application. While the engines sleep, requests stay open and are answered after the next wake."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection
from typing import TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from colocated_grpo.servers import engine_control, rank_links, request_bodies, responses, text
from colocated_grpo.servers.request_bodies import ChatBody, CompletionBody, GenerateBody, SamplingParameters, TokensBody
from colocated_grpo.servers.sampler import CompletionPart, Sampler
from colocated_grpo.web.bodies import BodyLimit, BodyShape, InvalidBody, read_json
from colocated_grpo.web.server import ConcurrencyLimit, Hosts, OwnRequests, RareNote, RequireApiKey, error_response

T = TypeVar("T")

EVENT_STREAM, JSON_LINES = "text/event-stream", "application/x-ndjson"
PUBLIC_PATHS = frozenset({"/health"})
GENERATE, TOKENS = "/generate", "/inference/v1/generate"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SAMPLING_PATHS = frozenset({GENERATE, TOKENS, COMPLETIONS, CHAT})
MAX_VALUES, MAX_CONTAINERS, MAX_STRINGS, MAX_DEPTH = 1 << 20, 1 << 16, 1 << 16, 64
"""Bounds of a request body: values (256 prompts of 4,096 tokens), containers, strings and keys, nesting (tools)."""
MAX_BYTES, MAX_REQUESTS = 8 << 20, 4096
"""Bytes of a request body, and requests in flight, of servers that have no settings for them."""


class ClientDisconnected(Exception):
    """The client closed the connection before the response."""


STATUSES = {InvalidBody: 400, text.InvalidRequest: 400, rank_links.ServerClosing: 503, ClientDisconnected: 499}


def create_app(
    sampler: Sampler,
    model: str,
    *,
    hosts: Hosts,
    api_key: str | None,
    max_body_bytes: int = MAX_BYTES,
    max_requests: int = MAX_REQUESTS,
    state: Callable[[], str] = lambda: engine_control.SERVING,
    add_routes: Callable[[FastAPI], None] = lambda app: None,
    large_paths: Collection[str] = (),
) -> ASGIApp:
    """Return the application behind its guards. model: name shown to clients. hosts: not checked with an API key.

    state: `EngineControl.state`. Bodies on large_paths may have up to max_body_bytes.
    """
    max_tokens = sampler.limits.max_tokens
    # Atropos' clients do not log the text of an error response.
    app = new_app("colocated_grpo engine", model, max_tokens, RareNote(sampler.note))

    @app.get("/health")
    @app.get("/health_generate")
    async def health() -> JSONResponse:
        # 200 even while the engines sleep: clients drop their requests to an unhealthy server. Without whole weights,
        # no request is answered until a trainer has sent them.
        now = state()
        return JSONResponse({"status": now}, 503 if now == engine_control.NO_WEIGHTS else 200)

    _add_sampling_routes(app, sampler, model)
    add_routes(app)
    guarded = with_limits(app, max_tokens, SAMPLING_PATHS.union(large_paths), max_body_bytes, max_requests)
    if api_key is None:
        return OwnRequests(guarded, hosts)
    return OwnRequests(RequireApiKey(guarded, api_key, PUBLIC_PATHS), None)


def with_limits(
    app: ASGIApp, max_tokens: int, paths: Collection[str], max_bytes: int = MAX_BYTES, max_requests: int = MAX_REQUESTS
) -> ASGIApp:
    """Return the application behind its limits. max_tokens: context length. paths: those of large bodies."""
    shape = BodyShape(values=MAX_VALUES + max_tokens, containers=MAX_CONTAINERS, strings=MAX_STRINGS, depth=MAX_DEPTH)
    # A request counts once its body has arrived: unfinished bodies must not keep others out.
    return BodyLimit(ConcurrencyLimit(app, max_requests, PUBLIC_PATHS), max_bytes, shape, paths)


def new_app(title: str, model: str, max_tokens: int, note: Callable[[str], None] = lambda line: None) -> FastAPI:
    """Return an application that lists `model`, and answers rejected requests with OpenAI's errors.

    max_tokens: context length. note: logs a line about a POST with status 4xx.
    """
    app = FastAPI(title=title, docs_url=None, redoc_url=None, openapi_url=None)
    card = {"id": model, "object": "model", "created": 0, "owned_by": "colocated_grpo", "max_model_len": max_tokens}

    @app.get("/v1/models")
    async def models() -> JSONResponse:
        return JSONResponse({"object": "list", "data": [card]})

    async def reject(request: Request, error: Exception) -> JSONResponse:
        if isinstance(error, HTTPException):
            status, message = error.status_code, error.detail
        elif isinstance(error, RequestValidationError):
            status, message = 400, request_bodies.first_problem(error.errors())
        else:
            status, message = next(code for kind, code in STATUSES.items() if isinstance(error, kind)), str(error)
        if request.method == "POST" and status < 499:
            note(f"rejected POST {request.url.path} with {status}: {message}")
        return error_response(status, message, getattr(error, "headers", None))

    for kind in (HTTPException, RequestValidationError, *STATUSES):
        app.add_exception_handler(kind, reject)
    return app


def _add_sampling_routes(app: FastAPI, sampler: Sampler, model: str) -> None:
    codec = sampler.codec

    @app.post(GENERATE)
    async def generate(request: Request) -> Response:
        body = await read_json(request, GenerateBody.from_json)
        [prompt_ids] = await codec.encode_all([body.text_or_tokens])
        if body.stream:
            parts = sampler.stream([prompt_ids], body)
            chunks = responses.generate_chunks(await _start(request, parts))
            return responses.ClosingStream(responses.as_json_lines(chunks), parts.aclose, JSON_LINES)
        return await cancel_on_disconnect(request, _generate(sampler, prompt_ids, body))

    @app.post(TOKENS)
    async def generate_tokens(request: Request) -> Response:
        body = await read_json(request, TokensBody.from_json)
        parameters = body.sampling_params
        form = responses.TokensFormat(body.request_id, body.model or model, logprobs=parameters.logprobs is not None)
        return await _respond(request, sampler, form, [body.token_ids], parameters, stream=body.stream)

    @app.post(COMPLETIONS)
    async def completions(request: Request) -> Response:
        body = await read_json(request, CompletionBody.from_json)
        prompts = await codec.encode_all(body.prompts)
        form = responses.CompletionFormat(body, model, codec.detokenize, prompts, logprobs=body.logprobs is not None)
        parameters, k = body.sampling_parameters, body.logprobs or 0
        return await _respond(request, sampler, form, prompts, parameters, k, stream=body.stream)

    @app.post(CHAT)
    async def chat_completions(request: Request) -> Response:
        body = await read_json(request, ChatBody.from_json)
        prompt = await codec.encode_chat(body.plain_messages, body.template_settings)
        form = responses.ChatFormat(body, model, codec.detokenize, [prompt], logprobs=bool(body.logprobs))
        parameters, k = body.sampling_parameters, (body.top_logprobs or 0) if body.logprobs else 0
        return await _respond(request, sampler, form, [prompt], parameters, k, stream=body.stream)


async def _generate(sampler: Sampler, prompt_ids: list[int], body: GenerateBody) -> Response:
    completions = await sampler.sample([prompt_ids], body)
    k = body.prompt_logprobs
    prompt_logprobs = None if k is None else await sampler.prompt_logprobs(prompt_ids, k)
    prompt = sampler.codec.decode(prompt_ids)
    return JSONResponse(responses.generate_response(prompt, prompt_ids, completions, body, prompt_logprobs))


async def _respond(
    request: Request,
    sampler: Sampler,
    form: responses.Format,
    prompts: list[list[int]],
    parameters: SamplingParameters,
    num_top_logprobs: int = 0,
    *,
    stream: bool | None,
) -> Response:
    """Sample and return the completions, whole or as a stream of events."""
    if stream:
        parts = sampler.stream(prompts, parameters, num_top_logprobs)
        chunks = form.chunks(await _start(request, parts))
        return responses.ClosingStream(responses.as_server_sent_events(chunks), parts.aclose, EVENT_STREAM)
    sampled = await cancel_on_disconnect(request, sampler.sample(prompts, parameters, num_top_logprobs))
    return JSONResponse(form.response(sampled))


async def _start(request: Request, parts: AsyncGenerator[CompletionPart]) -> AsyncIterator[CompletionPart]:
    """Await the first part, then return all parts. An error in the first part still sets the response's status."""
    first = await cancel_on_disconnect(request, anext(parts))

    async def from_first() -> AsyncIterator[CompletionPart]:
        yield first
        async for part in parts:
            yield part

    return from_first()


async def cancel_on_disconnect(request: Request, work: Awaitable[T]) -> T:
    """Return the result of `work`. A disconnect, frequent with Atropos environments, cancels it and its requests."""

    async def disconnect() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, disconnected = asyncio.ensure_future(work), asyncio.ensure_future(disconnect())
    try:
        await asyncio.wait({task, disconnected}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnected
        return task.result()
    except asyncio.CancelledError:
        raise rank_links.ServerClosing from None  # uvicorn cancels requests that outlast its shutdown timeout
    finally:
        disconnected.cancel()
        task.cancel()
