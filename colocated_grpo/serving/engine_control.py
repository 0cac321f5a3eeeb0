"""Pauses an engine, and puts it to sleep, between two decode steps. For servers without a trainer in their process."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from colocated_grpo.rollout.engine import RolloutEngine
from colocated_grpo.rollout.inbox import IDLE_SECONDS, Driver, Inbox
from colocated_grpo.types import JsonObject


class EngineControl:
    """Commands for one engine. `run` executes them on the driving thread; the other methods may be called from any.

    Requests that arrive while the engine is paused or asleep wait. A command that does not fit the state raises
    ValueError through its future.
    """

    def __init__(self, engine: RolloutEngine, inbox: Inbox, driver: Driver) -> None:
        self._engine = engine
        self._inbox = inbox
        self._driver = driver
        self._commands: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self.is_paused = False
        self.is_sleeping = False

    def run(self, stop_requested: Callable[[], bool]) -> None:
        """Serve requests and commands on this thread until a stop is requested."""
        try:
            while not stop_requested():
                self._run_commands()
                if self.is_paused or self.is_sleeping:
                    self._inbox.wait(IDLE_SECONDS)
                else:
                    self._driver.step()
        finally:
            self._driver.abort()
            for _, future in self._commands:
                future.cancel()

    def pause(self) -> Future[None]:
        """Stop after the current decode step. Running requests keep their tokens and KV cache."""
        return self.submit(lambda: self._set_paused(True))

    def resume(self) -> Future[None]:
        return self.submit(lambda: self._set_paused(False))

    def sleep(self) -> Future[None]:
        """Finish running requests, then free the KV cache. Weights stay."""
        return self.submit(self._sleep)

    def wake_up(self) -> Future[None]:
        return self.submit(self._wake_up)

    def state_dict_info(self) -> Future[JsonObject]:
        """Return shape and type of each of the engine's parameters, by vLLM's names."""
        return self.submit(
            lambda: {
                name: {"shape": list(parameter.shape), "dtype": str(parameter.dtype).removeprefix("torch.")}
                for name, parameter in self._engine.model.named_parameters()
            }
        )

    def submit_idle(self, command: Callable[[], Any]) -> Future[Any]:
        """Finish running requests, then run `command` on the driving thread. Returns the future of its result."""

        def when_idle() -> Any:
            self._finish_requests()
            return command()

        return self.submit(when_idle)

    def submit(self, command: Callable[[], Any]) -> Future[Any]:
        """Run `command` on the driving thread between two decode steps. Returns the future of its result."""
        future: Future[Any] = Future()
        self._commands.append((command, future))
        self._inbox.wake()
        return future

    def _run_commands(self) -> None:
        while self._commands:
            command, future = self._commands.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(command())
            except ValueError as error:
                future.set_exception(error)
            except BaseException as error:
                future.set_exception(error)
                raise

    def _set_paused(self, paused: bool) -> None:
        self.is_paused = paused

    def _sleep(self) -> None:
        if self.is_sleeping:
            return
        self._finish_requests()
        self._engine.sleep()
        self.is_sleeping = True

    def _finish_requests(self) -> None:
        if self.is_paused and self._driver.running:
            raise ValueError("the engine is paused with running requests; POST /bridge/resume first")
        self._driver.drain()

    def _wake_up(self) -> None:
        if self.is_sleeping:
            self._engine.wake("weights")
            self._engine.wake("kv_cache")
            self.is_sleeping = False
