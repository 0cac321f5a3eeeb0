"""Environments behind OpenEnv's protocol (openenv-core 0.3), which is implemented here without the package.

Each episode opens a WebSocket, a session with its own environment. Plain HTTP requests, each in a new environment, get
the first observation of an episode (/reset) and the fields of an action (/schema).
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any

from pydantic import Field, PrivateAttr, TypeAdapter, ValidationError

from colocated_grpo.environments.adapters import SeededEpisode, draw_seed
from colocated_grpo.environments.base import EnvironmentSetupError, Item, Split
from colocated_grpo.environments.chat import ContextExhausted, Conversation
from colocated_grpo.environments.rewards.builtin import without_thoughts
from colocated_grpo.environments.user_code.loading import import_optional
from colocated_grpo.types import JsonObject
from colocated_grpo.web.client import JsonClient, RequestRejected, Unavailable, until_available

if TYPE_CHECKING:
    from aiohttp import ClientWebSocketResponse

KEY = "environments 'openenv'"
HTTP_TIMEOUT = 30.0
BUSY_INTERVAL = 0.1
"""Seconds between two attempts to open a session on a server at its capacity."""
RESTART_TIMEOUT, RETRY_INTERVAL = 30.0, 0.5
"""Total seconds to wait for a server that restarts during a run, and seconds between two attempts."""
MAX_MESSAGE_BYTES = 16 << 20
JSON_OBJECT = TypeAdapter(JsonObject)
Send = Callable[[JsonObject], Awaitable[JsonObject]]
"""Sends one message of a session and returns the data of the response."""


class ServerError(RuntimeError):
    """The server returned an error. The text is the server's own."""


class ServerBusy(ServerError):
    """All sessions of the server are in use."""


class InvalidAction(ServerError):
    """The reply is not a valid action of this environment."""


ERRORS = {"CAPACITY_REACHED": ServerBusy, "VALIDATION_ERROR": InvalidAction}
"""Exceptions by the protocol's error code. Every other code raises ServerError."""


class OpenEnv(SeededEpisode):
    """An environment on an OpenEnv server.

    Reward: the sum of the steps' rewards, plus `invalid_reward` for each reply that is no valid action.
    """

    url: str = Field(pattern=r"^https?://")
    """URL of the server. Example: http://localhost:8000"""
    instruction: str = ""
    """Text at the start of the prompt. The first observation follows."""
    action: str | None = None
    """Field of the action that receives the reply as text. Default: the only required field, if it takes text;
    otherwise the reply is the whole action as a JSON object."""
    observation: str | None = None
    """Field of the observation that the policy reads. Default: the whole observation as JSON."""
    options: JsonObject = {}
    """Arguments of the environment's reset(), in addition to the seed."""
    max_turns: int = Field(20, ge=1)
    """Maximum turns of the policy in an episode."""
    max_turn_tokens: int = Field(512, ge=1)
    """Maximum tokens of one turn of the policy."""
    invalid_reward: float = Field(-1.0, le=0)
    """Reward of a reply that is no valid action. If every step costs, 0 would be better than a valid one's."""

    _action_schema: JsonObject = PrivateAttr()
    _field: str | None = PrivateAttr()

    def __init__(self, **args: Any) -> None:
        super().__init__(**args)
        import_optional("aiohttp", "aiohttp", KEY)
        if (health := self._request("/health").get("status")) != "healthy":
            raise EnvironmentSetupError(f"{KEY}: args.url={self.url!r}: the server reports its health as {health}")
        self._action_schema = self._request("/schema").get("action", {})
        required = self._action_schema.get("required", [])
        takes_text = len(required) == 1 and self._action_schema["properties"][required[0]].get("type") == "string"
        self._field = self.action or (required[0] if takes_text else None)

    def _item(self, rng: Random, split: Split) -> Item:
        seed = draw_seed(rng, split)
        hint = "" if self._field else f"Reply with one JSON object of this schema: {json.dumps(self._action_schema)}"
        first = self._observation_text(self._request("/reset", {**self.options, "seed": seed}, timeout=RESTART_TIMEOUT))
        prompt = "\n\n".join(filter(None, [self.instruction, hint, first]))
        return {"seed": seed, "observation": first, "prompt": prompt}

    async def run(self, item: Item, model: Conversation) -> dict[str, float]:
        async with self._session({**self.options, "seed": item["seed"]}) as (send, first):
            if self._observation_text(first) != item["observation"]:
                raise RuntimeError("the environment is not reproducible from its seed: siblings would differ")
            return await self._play(model, send, over=bool(first["done"]))

    async def _play(self, model: Conversation, send: Send, *, over: bool) -> dict[str, float]:
        text, earned, invalid = "", 0.0, 0
        with suppress(ContextExhausted):
            while not over and model.turns < self.max_turns:
                if model.turns:
                    model.observe(text)
                reply = (await model.generate(self.max_turn_tokens)).text
                try:
                    result = await send({"type": "step", "data": self._action(reply)})
                except InvalidAction as error:
                    invalid += 1
                    text = f"Invalid action: {error}"
                    continue
                text, over = self._observation_text(result), bool(result["done"])
                earned += float(result["reward"] or 0.0)
        return {
            "reward": earned + self.invalid_reward * invalid,
            "return": earned,
            "invalid": invalid / max(model.turns, 1),
            "finished": float(over),
        }

    @asynccontextmanager
    async def _session(self, reset_args: JsonObject) -> AsyncGenerator[tuple[Send, JsonObject]]:
        """Open a session and yield it with the result of its reset. Retries while the server is at its capacity."""
        from aiohttp import ClientSession

        async with ClientSession() as http:
            while True:
                async with http.ws_connect(f"{self.url.rstrip('/')}/ws", max_msg_size=MAX_MESSAGE_BYTES) as socket:
                    send = partial(_send, socket)
                    try:
                        first = await send({"type": "reset", "data": reset_args})
                    except ServerBusy:
                        await asyncio.sleep(BUSY_INTERVAL)
                    else:
                        yield send, first
                        return

    def _action(self, reply: str) -> JsonObject:
        text = without_thoughts(reply).strip()
        if self._field:
            return {self._field: text}
        try:
            return JSON_OBJECT.validate_json(text)
        except ValidationError:
            raise InvalidAction("not a JSON object") from None

    def _observation_text(self, result: JsonObject) -> str:
        observation = result["observation"]
        return json.dumps(observation) if self.observation is None else str(observation[self.observation])

    def _request(self, path: str, body: JsonObject | None = None, *, timeout: float = 0.0) -> JsonObject:
        """Send a GET request, or POST if there is a body. Retries an unavailable server for `timeout` seconds."""
        http = JsonClient(self.url, timeout=HTTP_TIMEOUT)
        call = partial(http.get, path) if body is None else partial(http.post, path, body)
        try:
            return JSON_OBJECT.validate_python(until_available(call, timeout, RETRY_INTERVAL))
        except (Unavailable, RequestRejected, ValidationError) as error:
            reason = "not a JSON object" if isinstance(error, ValidationError) else error
            line = f"{KEY}: args.url={self.url!r}: no OpenEnv server answers {path}: {reason}"
            raise EnvironmentSetupError(line) from error


async def _send(socket: "ClientWebSocketResponse", message: JsonObject) -> JsonObject:
    """Send a message and return the response's data. Raises ServerError, or ConnectionError for a closed session."""
    with suppress(ConnectionError):  # Before closing, the server may have sent the reason, which is read below.
        await socket.send_json(message)
    received = await socket.receive()
    if received.type.name != "TEXT":
        raise ConnectionError("the server ended the session")
    response = received.json()
    if response["type"] == "error":
        code = response["data"].get("code")
        raise ERRORS.get(code, ServerError)(f"{code}: {response['data'].get('message')}")
    return response["data"]
