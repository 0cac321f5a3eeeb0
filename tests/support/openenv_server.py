"""A small server of OpenEnv's protocol: a number-guessing game, with the failures that the tests need."""

from __future__ import annotations

import asyncio
import json
import threading
from random import Random
from typing import Any

from aiohttp import web

TEXT_ACTION = {
    "type": "object",
    "properties": {"metadata": {"type": "object"}, "message": {"type": "string"}},
    "required": ["message"],
}
NUMBER_ACTION = {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]}


class Guess:
    """One environment. The seed determines the secret."""

    def __init__(self) -> None:
        self.secret = 0
        self.steps = 0

    def reset(self, seed: int = 0, highest: int = 9) -> dict[str, Any]:
        self.secret = Random(seed).randint(1, highest)
        return self._result(f"1 to {highest}, {'odd' if self.secret % 2 else 'even'}", None, False)

    def step(self, action: dict[str, Any]) -> dict[str, Any]:
        self.steps += 1
        guess = str(next(iter(action.values())))
        if guess == "crash":
            raise RuntimeError("the environment crashed")
        right = guess == str(self.secret)
        return self._result("yes" if right else "no", 1.0 if right else -0.125, right)

    def _result(self, text: str, reward: float | None, done: bool) -> dict[str, Any]:
        return {"observation": {"text": text, "steps": self.steps}, "reward": reward, "done": done}


class Server:
    """A context manager that serves on a free loopback port."""

    def __init__(self, action: dict[str, Any] = TEXT_ACTION, *, capacity: int = 100, health: str = "healthy") -> None:
        self.action, self.capacity, self.health = action, capacity, health
        self.open = self.most_open = self.sessions = 0
        self.repeatable = True
        self._closing = threading.Condition()

    def __enter__(self) -> Server:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()
        return self

    def __exit__(self, *_exception: object) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)

    def all_sessions_ended(self) -> bool:
        """Wait until every session has ended, at most 120 s: the server notices a closed connection later."""
        with self._closing:
            return self._closing.wait_for(lambda: self.open == 0, timeout=120)

    async def _start(self) -> None:
        app = web.Application()
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/schema", self._schema),
                web.post("/reset", self._reset),
                web.get("/ws", self._session),
            ]
        )
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def _health(self, _request: web.Request) -> web.Response:
        return web.json_response({"status": self.health})

    async def _schema(self, _request: web.Request) -> web.Response:
        return web.json_response({"action": self.action, "observation": {}, "state": {}})

    async def _reset(self, request: web.Request) -> web.Response:
        return web.json_response(Guess().reset(**await request.json()))

    async def _session(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        if self.open == self.capacity:
            await socket.send_json({"type": "error", "data": {"code": "CAPACITY_REACHED", "message": "full"}})
            await socket.close()
            return socket
        self.open, self.sessions = self.open + 1, self.sessions + 1
        self.most_open = max(self.most_open, self.open)
        try:
            await self._serve(socket, Guess())
        finally:
            with self._closing:
                self.open -= 1
                self._closing.notify_all()
        return socket

    async def _serve(self, socket: web.WebSocketResponse, game: Guess) -> None:
        async for received in socket:
            message = json.loads(received.data)
            if message["data"].get("message") == "hang up":
                return
            if message["data"].get("message") == "hang":
                continue
            try:
                answer = {"type": "observation", "data": self._answer(game, message)}
            except (KeyError, ValueError) as error:
                answer = {"type": "error", "data": {"code": "VALIDATION_ERROR", "message": repr(error)}}
            except RuntimeError as error:
                answer = {"type": "error", "data": {"code": "EXECUTION_ERROR", "message": str(error)}}
            await socket.send_json(answer)

    def _answer(self, game: Guess, message: dict[str, Any]) -> dict[str, Any]:
        if message["type"] == "reset":
            return game.reset(**message["data"] if self.repeatable else {"highest": 1000})
        if set(message["data"]) != set(self.action["required"]):
            raise ValueError("wrong fields")
        return game.step(message["data"])
