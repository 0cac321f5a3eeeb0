"""Environments behind OpenEnv's protocol (openenv-core 0.3), spoken without its package.

A WebSocket is one session with an environment of its own: one for each episode. Over plain HTTP every request meets a
new environment, which is enough for what an episode starts with (/reset) and for what it may say (/schema).
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from random import Random
from typing import Any

from pydantic import Field, PrivateAttr, TypeAdapter, ValidationError

from colocated_grpo.environments.adapters.seeded import SeededEpisode, draw_seed
from colocated_grpo.environments.base import EnvironmentSetupError, Split
from colocated_grpo.environments.conversation import ContextExhausted, Conversation
from colocated_grpo.environments.rewards.answers import without_thoughts
from colocated_grpo.environments.user_code.loading import import_optional
from colocated_grpo.web.client import JsonClient, RequestRejected, Unavailable

KEY = "environments 'openenv'"
BUSY = 0.1
"""Seconds between two attempts at a server that has all its sessions in use."""
HTTP_TIMEOUT = 30.0
PATIENCE, PAUSE = 30.0, 0.5
"""Seconds in all, and between two attempts, for a server that is started again while a run goes on."""
LARGEST_MESSAGE = 16 << 20
"""Bytes of one observation."""
JSON_OBJECT = TypeAdapter(dict[str, Any])
Ask = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]


class ServerError(RuntimeError):
    """The server failed, in its own words."""


class Busy(ServerError):
    """All its sessions are in use."""


class InvalidAction(ServerError):
    """The reply is no action of this environment."""


ERRORS = {"CAPACITY_REACHED": Busy, "VALIDATION_ERROR": InvalidAction}
"""By the protocol's code; every other code is a failure."""


class OpenEnv(SeededEpisode):
    """Reward: the sum of the steps' rewards, and `invalid_reward` for each reply that is no action."""

    url: str = Field(pattern=r"^https?://")
    """Of the server. Example: http://localhost:8000"""
    instruction: str = ""
    """Opens the prompt; the first observation follows."""
    action: str | None = None
    """Field of the action that takes the reply as text. Not given: the only field that is required, where that is text;
    else a reply is the whole action as a JSON object."""
    observation: str | None = None
    """Field of the observation that the policy reads. Not given: all of it, as JSON."""
    options: dict[str, Any] = {}
    """Further arguments of the environment's reset(), beside its seed."""
    max_turns: int = Field(20, ge=1)
    """Turns of the policy."""
    max_turn_tokens: int = Field(512, ge=1)
    """Longest turn of the policy."""
    invalid_reward: float = Field(-1.0, le=0)
    """Of a reply that is no action."""

    _schema: dict[str, Any] = PrivateAttr()
    """Of an action."""
    _field: str | None = PrivateAttr()

    def __init__(self, **args: Any) -> None:
        super().__init__(**args)
        import_optional("aiohttp", "aiohttp", KEY)
        health = self._ask("/health").get("status")
        if health != "healthy":
            raise EnvironmentSetupError(f"{KEY}: args.url={self.url!r}: the server says that it is {health}")
        self._schema = self._ask("/schema").get("action", {})
        self._field = self.action or text_field(self._schema)

    def _item(self, chance: Random, split: Split) -> dict[str, Any]:
        seed = draw_seed(chance, split)
        hint = "" if self._field else f"Reply with one JSON object of this schema: {json.dumps(self._schema)}"
        said = self._words(self._ask("/reset", self._reset(seed), patience=PATIENCE))
        return {"seed": seed, "said": said, "prompt": "\n\n".join(filter(None, [self.instruction, hint, said]))}

    async def run(self, item: dict[str, Any], model: Conversation) -> dict[str, float]:
        async with self._session(self._reset(item["seed"])) as (ask, first):
            said, over, earned, invalid = self._words(first), bool(first["done"]), 0.0, 0
            if said != item["said"]:
                raise RuntimeError("the environment does not repeat itself from its seed: siblings would differ")
            with suppress(ContextExhausted):
                while not over and model.turns < self.max_turns:
                    if model.turns:
                        model.observe(said)
                    reply = (await model.generate(self.max_turn_tokens)).text
                    try:
                        result = await ask({"type": "step", "data": self._action(reply)})
                    except InvalidAction as error:
                        invalid += 1
                        said = f"Invalid action: {error}"
                        continue
                    said, over = self._words(result), bool(result["done"])
                    earned += float(result["reward"] or 0.0)
        return {
            "reward": earned + self.invalid_reward * invalid,
            "return": earned,
            "invalid": invalid / max(model.turns, 1),
            "finished": float(over),
        }

    @asynccontextmanager
    async def _session(self, reset: dict[str, Any]) -> AsyncIterator[tuple[Ask, dict[str, Any]]]:
        """An environment of its own and what it answers to reset. Waits while the server has no session left."""
        from aiohttp import ClientSession

        async with ClientSession() as http:
            while True:
                async with http.ws_connect(f"{self.url.rstrip('/')}/ws", max_msg_size=LARGEST_MESSAGE) as socket:
                    ask = partial(_ask_session, socket)
                    try:
                        first = await ask({"type": "reset", "data": reset})
                    except Busy:
                        await asyncio.sleep(BUSY)
                    else:
                        yield ask, first
                        return

    def _reset(self, seed: int) -> dict[str, Any]:
        return {**self.options, "seed": seed}

    def _action(self, reply: str) -> dict[str, Any]:
        said = without_thoughts(reply).strip()
        if self._field:
            return {self._field: said}
        try:
            return JSON_OBJECT.validate_json(said)
        except ValidationError:
            raise InvalidAction("not a JSON object") from None

    def _words(self, result: dict[str, Any]) -> str:
        seen = result["observation"]
        return json.dumps(seen) if self.observation is None else str(seen[self.observation])

    def _ask(self, path: str, body: dict[str, Any] | None = None, *, patience: float = 0.0) -> dict[str, Any]:
        """GET, or POST of a body. patience: seconds for which a server that does not answer is asked again."""
        http, deadline = JsonClient(self.url, timeout=HTTP_TIMEOUT), time.monotonic() + patience
        while True:
            try:
                return JSON_OBJECT.validate_python(http.get(path) if body is None else http.post(path, body))
            except (Unavailable, RequestRejected, ValidationError) as error:
                if not isinstance(error, Unavailable) or time.monotonic() >= deadline:
                    why = "not a JSON object" if isinstance(error, ValidationError) else error
                    raise EnvironmentSetupError(
                        f"{KEY}: args.url={self.url!r}: no OpenEnv server answers {path}: {why}"
                    ) from error
                time.sleep(PAUSE)


async def _ask_session(socket: Any, message: dict[str, Any]) -> dict[str, Any]:
    """Raises ServerError for what the server refuses, ConnectionError where it is gone."""
    with suppress(ConnectionError):  # a server that hangs up may have said why
        await socket.send_json(message)
    received = await socket.receive()
    if received.type.name != "TEXT":
        raise ConnectionError("the server ended the session")
    answer = received.json()
    if answer["type"] == "error":
        code = answer["data"].get("code")
        raise ERRORS.get(code, ServerError)(f"{code}: {answer['data'].get('message')}")
    return answer["data"]


def text_field(schema: dict[str, Any]) -> str | None:
    """The only required field of an action, where it takes text."""
    required = schema.get("required", [])
    if len(required) != 1 or schema["properties"][required[0]].get("type") != "string":
        return None
    return required[0]
