"""The HTTP application for agents: OpenAI's chat API, with a separate path and key for each episode."""

import asyncio
import json
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from colocated_grpo.environments.agents.programs import PREFIX, OpenEpisode, OpenEpisodes
from colocated_grpo.environments.agents.sequences import TooManyRequests
from colocated_grpo.environments.chat import ContextExhausted
from colocated_grpo.environments.rewards.builtin import OPEN_CALL, read_calls
from colocated_grpo.servers.app import CHAT, EVENT_STREAM, cancel_on_disconnect, new_app, with_limits
from colocated_grpo.servers.request_bodies import ChatBody
from colocated_grpo.servers.responses import ChatFormat
from colocated_grpo.servers.sampler import CompletionPart
from colocated_grpo.servers.text import InvalidRequest, TextCodec, TooLong, before_stop
from colocated_grpo.types import JsonObject
from colocated_grpo.web.bodies import read_json
from colocated_grpo.web.server import OwnRequests, ServerThread, error_response, key_in

HOST = "127.0.0.1"
EPISODE = "episode"
"""Key of the open episode in the ASGI scope."""


def listen_for_agents(episodes: OpenEpisodes, codec: TextCodec, model: str, stop: Sequence[str] = ()) -> ServerThread:
    """Start the server on a free port, and write its address into `episodes`. stop: ends every completion."""
    server = ServerThread(create_agent_app(episodes, codec, model, stop), HOST, [0])
    episodes.url = f"http://{HOST}:{server.ports[0]}"
    # Agents, and the programs that inherit this environment, must not send these requests to an HTTP proxy.
    given = {name: os.environ.get(name, "") for name in ("no_proxy", "NO_PROXY")}
    for name, own in given.items():
        hosts = own or "".join(given.values())  # where one is empty, the other holds
        is_named = {HOST, "*"} & {*map(str.strip, hosts.split(","))}
        os.environ[name] = hosts if is_named else f"{hosts},{HOST}".strip(",")
    return server


@dataclass(eq=False)
class EpisodeGate:
    """Route `/episodes/<id>/<path>` with that episode's key to `<path>`, counting chat requests; else respond 401."""

    app: ASGIApp
    episodes: OpenEpisodes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        episode_id, _, path = scope["path"].removeprefix(PREFIX).partition("/")
        key = key_in(Headers(scope=scope).get("authorization", ""))
        episode = self.episodes.find(episode_id, key)
        if episode is None:
            await error_response(401, "no running episode has this path and API key")(scope, receive, send)
        else:
            episode.conversation.requests += f"/{path}" == CHAT  # counted here to include rejected requests
            reject = episode.reject

            async def respond(message: Message) -> None:
                if message.get("status") == 413:  # no context holds that much; its sequence is unknown
                    reject("")
                await send(message)

            await self.app({**scope, "path": f"/{path}", EPISODE: episode}, receive, respond)


def create_agent_app(episodes: OpenEpisodes, codec: TextCodec, model: str, stop: Sequence[str]) -> ASGIApp:
    """Return the application behind its guards. model: name shown to clients. stop: ends every completion."""
    max_tokens = codec.limits.max_tokens
    app = new_app("colocated_grpo agents", model, max_tokens)

    @app.post(CHAT)
    async def chat_completions(request: Request) -> Response:
        episode: OpenEpisode = request.scope[EPISODE]
        body = await read_json(request, ChatBody.from_json)
        parameters = body.sampling_parameters
        try:
            messages = as_sampled(body.plain_messages, episode.sampled)
            prompt = await codec.encode_chat(messages, body.template_settings)
            work = episode.complete(prompt, parameters.max_tokens, parameters.n, parameters.stop)
            completions = await cancel_on_disconnect(request, asyncio.wrap_future(work))
        except TooLong as error:
            episode.reject(error.text)
            raise
        except (ContextExhausted, TooManyRequests, ValueError) as error:
            raise InvalidRequest(str(error)) from None
        ends = () if parameters.include_stop_str_in_output else (*stop, *parameters.stop)
        parts = []
        for index, one in enumerate(completions):
            text = codec.decode(one.token_ids, skip_special_tokens=parameters.skip_special_tokens)
            parts.append(CompletionPart.whole(index, one, before_stop(text, ends)))
        response = ChatFormat(body, model, codec.detokenize, [prompt], logprobs=bool(body.logprobs)).response(parts)
        if body.tools:
            _parse_calls(response, episode)
        if not body.stream:
            return JSONResponse(response)
        # All events are sent at once, because agents wait for whole messages.
        events = [f"data: {json.dumps(chunk)}\n\n" for chunk in _chunks(response, include_usage=body.includes_usage)]
        return Response("".join([*events, "data: [DONE]\n\n"]), media_type=EVENT_STREAM)

    return OwnRequests(EpisodeGate(with_limits(app, max_tokens, {CHAT}), episodes), None)


def _parse_calls(response: JsonObject, episode: OpenEpisode) -> None:
    """Replace each choice's well-formed <tool_call> blocks by `tool_calls`, and record the sampled text of each."""
    for choice in response["choices"]:
        text = choice["message"]["content"]
        calls = [
            {
                "id": f"call_{uuid.uuid4().hex}",
                "type": "function",
                "function": {"name": call["name"], "arguments": json.dumps(call["arguments"])},
            }
            for call in read_calls(text) or ()
        ]
        if calls:
            content = text.partition(OPEN_CALL)[0].strip() or None
            choice["message"] = {"role": "assistant", "content": content, "tool_calls": calls}
            choice["finish_reason"] = "tool_calls"
            episode.sampled.update({call["id"]: text for call in calls})


def _chunks(response: JsonObject, *, include_usage: bool) -> Iterator[JsonObject]:
    head = {key: response[key] for key in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    for choice in response["choices"]:
        message, end = choice["message"], choice["finish_reason"]
        calls = [{"index": index, **call} for index, call in enumerate(message.get("tool_calls", ()))]
        delta = message | ({"tool_calls": calls} if calls else {})
        said = {"index": choice["index"], "delta": delta, "logprobs": choice["logprobs"], "finish_reason": None}
        yield {**head, "choices": [said]}
        yield {**head, "choices": [{"index": choice["index"], "delta": {}, "finish_reason": end}]}
    if include_usage:
        yield {**head, "choices": [], "usage": response["usage"]}


def as_sampled(messages: Sequence[JsonObject], sampled: Mapping[str, str]) -> list[JsonObject]:
    """Return the messages with tool calls as they were sampled: a template may render other spaces or another order."""
    written = []
    for message in messages:
        calls = message.get("tool_calls")
        first = calls[0] if isinstance(calls, list) and calls else None
        text = sampled.get(str(first.get("id"))) if isinstance(first, dict) else None
        written.append(message if text is None else {"role": message["role"], "content": text})
    return written
