"""Worker processes for reward functions of the user.

A function that never returns, holds the interpreter lock or crashes costs its own completions: the process is killed
and replaced. Processes are started when more calls run at a time than before, at most one for each reward thread.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from io import BufferedRWPair
from math import inf
from pathlib import Path
from queue import Empty, SimpleQueue

from colocated_grpo.environments.base import EnvironmentSetupError
from colocated_grpo.environments.rewards.functions import FunctionResult, RewardInputs
from colocated_grpo.environments.user_code.loading import one_line
from colocated_grpo.runtime.blocking_code import LIBRARIES, PACKAGE
from colocated_grpo.runtime.guard_process import DUMP_SIGNAL, read_dump, user_place
from colocated_grpo.settings.sources import RewardConfig

DEVICE_LIBRARIES = {"cupy", "jax", "sentence_transformers", "tensorflow", "torch", "transformers", "triton", "vllm"}
"""Libraries that hold device memory. Their import alone takes seconds, and half a gigabyte in each process."""
MODULE = "colocated_grpo.environments.rewards.worker_process"
DUMP_SECONDS = 1.0
EXIT_SECONDS = 1.0
START_SECONDS = 120.0
"""Longest start that the time limit of rewards does not include."""
NOT_SENDABLE = (pickle.PicklingError, TypeError, AttributeError, RecursionError)
"""Errors that pickle raises for an object that it cannot send."""

Results = dict[str, list[FunctionResult]]

_lock = threading.Lock()
_workers: set[Worker] = set()
"""All workers of this process."""
# The kernel kills a worker when the thread that started it ends, so this one never does.
_starter = ThreadPoolExecutor(1, thread_name_prefix="reward processes")


@dataclass(frozen=True, kw_only=True, slots=True)
class Started:
    """First message of a worker."""

    error: str | None = None
    """Why the functions cannot be loaded."""
    device_libraries: Sequence[str] = ()
    """Those that are imported."""


@dataclass(eq=False, slots=True)
class Worker:
    """One process, and the connection to it."""

    process: subprocess.Popen[bytes]
    stream: BufferedRWPair
    dumps: int
    busy: bool = False
    ended: str | None = None
    """Why this process has ended it."""
    started: Started | None = None
    ready: float = inf
    """time.monotonic() at which it was ready."""
    launched: float = field(default_factory=time.monotonic)

    def wait_until_started(self) -> Started:
        if self.started is None:
            self.started = pickle.load(self.stream)
            self.ready = time.monotonic()
        assert self.started is not None
        return self.started

    def ask(self, request: bytes, functions: Sequence[str]) -> Iterator[tuple[str, list[FunctionResult]]]:
        """Yield each function's results when it has returned. Raises EOFError or OSError if the process ends."""
        if error := self.wait_until_started().error:
            raise EnvironmentSetupError(error)
        self.stream.write(request)
        self.stream.flush()
        for name in functions:
            yield name, pickle.load(self.stream)

    def end(self, reason: str) -> None:
        """Kill the process. `ended` is then the reason and the line of user code."""
        self.process.send_signal(DUMP_SIGNAL)
        dump = ""
        with suppress(OSError):  # closed, because the process has died meanwhile
            dump = read_dump(self.dumps, DUMP_SECONDS)
        place = user_place([dump], [*LIBRARIES, PACKAGE], PACKAGE)
        self.ended = reason if place is None else f"{reason}, in {place}"
        self.process.kill()

    def discard(self) -> int:
        """Close the connection, upon which an idle process exits, and return its exit code."""
        with _lock:
            _workers.discard(self)
        with suppress(OSError):
            self.stream.close()
        os.close(self.dumps)
        try:
            return self.process.wait(EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


class RewardWorkers:
    """The processes that run the functions of one dataset."""

    def __init__(self, named: Sequence[tuple[str, RewardConfig]], key: str) -> None:
        """named: functions with their names. One process is started at once."""
        # Those of weight 0 are called last: one that ends the process then costs no completion its reward.
        self._named, self._key = sorted(named, key=lambda one: one[1].weight == 0), key
        self._idle: SimpleQueue[Worker] = SimpleQueue()
        self._first = self._start()
        self._idle.put(self._first)

    def started(self) -> Started:
        """Wait for the first process."""
        try:
            return self._first.wait_until_started()
        except (EOFError, OSError):
            return Started(error=f"{self._key}: {_ending(self._first.process.wait())}")

    def close(self) -> None:
        """End the idle processes."""
        with suppress(Empty):
            while True:
                self._idle.get_nowait().discard()

    def results(self, inputs: RewardInputs) -> Results:
        """Return the results by function. Those that have not returned fail if the process ends."""
        try:
            request = pickle.dumps(inputs)
        except NOT_SENDABLE as error:
            return self._failed(inputs, f"run_in: cannot send the prompt to a process: {one_line(error)}; set thread")
        try:
            worker = self._idle.get_nowait()
        except Empty:
            worker = self._start()
        worker.busy = True
        results: Results = {}
        try:
            results.update(worker.ask(request, [name for name, _ in self._named]))
        except (EOFError, OSError, pickle.UnpicklingError):
            return self._failed(inputs, self._replace(worker)) | results
        except EnvironmentSetupError as error:
            worker.discard()
            return self._failed(inputs, str(error))
        with _lock:
            worker.busy = False
            usable = worker.ended is None
        if usable:
            self._idle.put(worker)
        else:
            self._replace(worker)
        return results

    def _start(self) -> Worker:
        worker = _starter.submit(_start_worker).result()
        with suppress(OSError):  # it has died at once: the first answer says so
            pickle.dump((self._named, self._key), worker.stream)
            worker.stream.flush()
        return worker

    def _replace(self, worker: Worker) -> str:
        """Start another process, whose imports then do not delay the next call. Return why this one ended."""
        code = worker.discard()
        self._idle.put(self._start())
        return worker.ended or _ending(code)

    def _failed(self, inputs: RewardInputs, error: str) -> Results:
        return {name: [FunctionResult(error=error)] * len(inputs.texts) for name, _ in self._named}


def last_ready() -> float:
    """Return when the last process with a call was ready, as time.monotonic(): now if one is still starting."""
    now = time.monotonic()
    with _lock:
        busy = [worker for worker in _workers if worker.busy]
    return max((min(worker.ready, now) for worker in busy if now < worker.launched + START_SECONDS), default=0.0)


def end_busy_workers(reason: str) -> bool:
    """Kill all processes that run a function. Returns False if there are none."""
    with _lock:
        busy = [worker for worker in _workers if worker.busy and worker.ended is None]
        for worker in busy:
            worker.ended = reason
    for worker in busy:
        worker.end(reason)
    return bool(busy)


def end_idle_workers() -> None:
    """End all processes that run no function."""
    with _lock:
        idle = [worker for worker in _workers if not worker.busy]
    for worker in idle:
        worker.discard()


def _start_worker() -> Worker:
    connection, other = socket.socketpair()
    dumps, writer = os.pipe()
    with connection, other:
        path = [str(Path(PACKAGE).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        process = subprocess.Popen(
            [sys.executable, "-m", MODULE, str(other.fileno()), str(writer), str(os.getpid())],
            # Without GPUs: a library that allocates memory on one would do so in each process.
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path), "CUDA_VISIBLE_DEVICES": ""},
            stdin=subprocess.DEVNULL,
            pass_fds=[other.fileno(), writer],
            start_new_session=True,  # Ctrl-C in a terminal is for the launcher
        )
        os.close(writer)
        worker = Worker(process, connection.makefile("rwb"), dumps)
    with _lock:
        _workers.add(worker)
    return worker


def _ending(code: int) -> str:
    if code < 0:
        return f"the reward process was ended by {signal.Signals(-code).name}"
    return f"the reward process ended with exit code {code}"
