"""Pauses an engine, or changes its weights, between two decode steps. For servers in processes without a trainer."""

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from colocated_grpo.rollout.engine import RolloutEngine
from colocated_grpo.rollout.inbox import IDLE_SECONDS, Calls, Driver, Inbox

T = TypeVar("T")
SERVING, NO_WEIGHTS = "serving", "waiting for weights"


class EngineControl:
    """Commands for one engine. `run` executes them on the driving thread; other methods may be called from any thread.

    Requests wait while the engine is paused. A command that is invalid in the current state sets ValueError
    on its future.
    """

    def __init__(self, engine: RolloutEngine, inbox: Inbox, driver: Driver) -> None:
        self._engine = engine
        self._inbox = inbox
        self._driver = driver
        self._commands = Calls(inbox.wake)
        """Run between two decode steps."""
        self.is_paused = False
        self._has_trainer = False
        """True while a trainer has joined to send weights. False after it is lost."""
        self.has_whole_weights = True
        """False after a failed change of the weights."""
        self.has_received_weights = False
        """True once a trainer has written into the model's own weights."""
        self.policy_version: int | None = None
        """Version of the weights; None until a trainer has set a version."""

    @property
    def state(self) -> str:
        """State of the engine for clients: whether requests are answered, or what they wait for."""
        if not self.has_whole_weights:
            return NO_WEIGHTS
        return "paused" if self.is_paused else SERVING

    def run(self, stop_requested: Callable[[], bool]) -> None:
        """Serve requests and commands on this thread until a stop is requested."""
        try:
            while not stop_requested():
                self._commands.run()
                if self.state != SERVING:
                    self._inbox.wait(IDLE_SECONDS)
                else:
                    self._driver.step()
        finally:
            self._driver.abort()
            self._commands.cancel()

    def pause(self) -> Future[None]:
        """Stop after the current decode step. Running requests keep their tokens and KV cache."""
        return self._commands.submit(partial(setattr, self, "is_paused", True))

    def resume(self) -> Future[None]:
        return self._commands.submit(partial(setattr, self, "is_paused", False))

    def set_version(self, policy_version: int) -> Future[None]:
        """Finish running requests, drop cached prefixes and stamp later completions with `policy_version`.

        Repeated calls have no effect: each rank of a trainer calls this after a sync.
        """

        def set_version() -> None:
            if policy_version != self.policy_version:
                self._finish_requests()
                self._engine.weights_changed(policy_version)
                self.policy_version = policy_version

        return self._commands.submit(set_version)

    def change_weights(self, change: Callable[[], T]) -> Future[T]:
        """Finish running requests, then run `change`. Once it has succeeded, trainers' requests are rejected until the
        next `set_version`."""

        def changed() -> T:
            result = change()
            self.policy_version = None
            return result

        return self.submit_idle(changed)

    def join_trainer(self, join: Callable[[], T]) -> Future[T]:
        """Finish running requests, then run `join`. Weights can be received once it has succeeded."""

        def joined() -> T:
            self._has_trainer = False
            result = join()
            self._has_trainer = True
            return result

        return self.submit_idle(joined)

    def receive_weights(self, receive: Callable[[], T]) -> Future[T]:
        """Run `receive` like `change_weights`. Sets ValueError if no trainer has joined.

        After a failure, some weights may be new and others old, so all requests wait until a later call succeeds.
        """

        def received() -> T:
            if not self._has_trainer:  # a stranger's request must not mark the weights as damaged
                raise ValueError("no trainer has joined since this server started; POST /bridge/init first")
            self.policy_version, self.has_received_weights = None, True
            self._has_trainer = False
            try:
                result = receive()
            except BaseException:
                self.has_whole_weights = False
                raise
            self.has_whole_weights = self._has_trainer = True
            return result

        return self.submit_idle(received)

    def submit_idle(self, command: Callable[[], T]) -> Future[T]:
        """Finish running requests, then run `command` on the driving thread. Returns the future of its result."""

        def when_idle() -> T:
            self._finish_requests()
            return command()

        return self._commands.submit(when_idle)

    def _finish_requests(self) -> None:
        if self.is_paused and self._driver.running:
            raise ValueError("the engine is paused with running requests; POST /bridge/resume first")
        self._driver.drain()
