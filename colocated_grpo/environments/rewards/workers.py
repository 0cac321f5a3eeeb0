"""Worker processes for user reward functions, math-verify and programs in completions, kept between calls.

A call that never returns, holds the interpreter lock or crashes costs only its own completions and its process.
"""

import faulthandler
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from typing import Any

from colocated_grpo.runtime import parents_death, program, user_code

PROGRAM = (sys.executable, "-c", f"from {__name__} import main; main()")
"""Command of a worker that imports this package. Arguments: the descriptors of its connection and of the pipe for
stacks, and the id of this process."""
DUMP_SIGNAL = signal.SIGRTMIN + 11
"""Signal that makes a worker write its stack, inside the C-level handler. No library uses this number."""
DUMP_SECONDS = 1.0
EXIT_SECONDS = 1.0
START_SECONDS = 120.0
"""The start of a worker is excluded from the time limit of rewards for at most this many seconds."""
LATE = "the worker process does not answer"
"""Reason for ending a process at the time limit of a request."""
INVALID = "the worker process sent an invalid response"

_lock = threading.Lock()
_workers: "set[Worker]" = set()
# The kernel kills a worker when the thread that started it ends. The thread of this executor never ends.
_starter = ThreadPoolExecutor(1, thread_name_prefix="worker processes")


@dataclass(frozen=True, kw_only=True, slots=True)
class Started:
    """First message of a worker."""

    error: str | None = None
    """Reason why the worker cannot answer requests."""
    modules: Sequence[str] = ()
    """Names of imported modules that the parent process checks."""


Answer = Callable[[Any], Iterable[object]]
"""Function of a worker that returns the responses to a request."""
Prepare = Callable[[], tuple[Started, Answer]]
"""First message to a worker that imports this package: a function that loads the `Answer`."""


@dataclass(eq=False, slots=True)
class Worker:
    """A worker process, and the connection to it."""

    process: subprocess.Popen[bytes]
    connection: Connection
    dumps: int
    busy: bool = False
    ended: str | None = None
    """Reason why the parent process killed the worker."""
    started: Started | None = None
    ready: float = inf
    """time.monotonic() at which the worker was ready."""
    launched: float = field(default_factory=time.monotonic)

    def wait_until_started(self) -> Started:
        """Return the first message. If the process ends without a message, `error` says how it ended."""
        if self.started is None:
            try:
                self.started = self.connection.recv()
            except (EOFError, OSError):
                self.started = Started(error=_ending(self.process.wait()))
            self.ready = time.monotonic()
        assert self.started is not None
        return self.started

    def end(self, reason: str) -> None:
        """Kill the process. `ended` then contains the reason and the line of user code that was running."""
        self.process.send_signal(DUMP_SIGNAL)
        dump = ""
        with suppress(OSError):  # discard() may have closed the pipe
            dump = _read_dump(self.dumps)
        self.ended = ", in ".join([reason, *map(str, user_code.lines_in_dump(dump))])
        self.kill()

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def discard(self) -> int:
        """Close the connection, so that an idle process exits, and return its exit code. Later calls return 0."""
        with _lock:
            if self not in _workers:
                return 0
            _workers.remove(self)
        if self.ended is not None:
            self.kill()
        self.connection.close()
        os.close(self.dumps)
        try:
            return self.process.wait(EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            return self.process.wait()


class WorkerPool:
    """Worker processes that answer the same kind of request."""

    def __init__(
        self,
        prepare: Prepare | None = None,
        *,
        command: Sequence[str] = PROGRAM,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """prepare: first message, for PROGRAM only. environment: None: this process's, with all GPUs hidden."""
        self._prepare, self._command, self._environment = prepare, command, environment
        self._idle: SimpleQueue[Worker] = SimpleQueue()

    def start(self) -> Worker:
        """Start an idle process, so that its imports do not delay the next request."""
        worker = self._new()
        self._idle.put(worker)
        return worker

    def _new(self) -> Worker:
        worker = _starter.submit(_start, self._command, self._environment).result()
        if self._prepare is None:
            worker.started, worker.ready = Started(), worker.launched
        else:
            with suppress(OSError):  # if the process died at once, the first request reports it
                worker.connection.send(self._prepare)
        return worker

    def _take(self) -> Worker:
        """Return a process for a request: an idle process that has not been discarded, or a new process."""
        while True:
            try:
                worker = self._idle.get_nowait()
            except Empty:
                worker = self._new()
            with _lock:
                if worker in _workers:
                    worker.busy = True
                    return worker

    def ask(
        self,
        *request: object,
        read: Callable[[bytes], Any] = pickle.loads,
        names: Sequence[str] = ("",),
        seconds: float | None = None,
    ) -> tuple[list[Any], str | None]:
        """Return a response for each name, and the reason if there are fewer: LATE, INVALID, or how the process ended.

        names: prefixes of the reason, in the order of the responses. read: decodes a response, or raises ValueError.
        seconds: time limit of each; None: `end_busy_workers` ends it.
        Raises the errors of pickle for messages that cannot be serialized.
        """
        messages = [pickle.dumps(message) for message in request]
        worker = self._take()
        responses = []
        if (error := worker.wait_until_started().error) is None:
            try:
                for message in messages:
                    worker.connection.send_bytes(message)
                while len(responses) < len(names):
                    if seconds is not None and not worker.connection.poll(seconds):
                        worker.ended = LATE
                        break
                    responses.append(read(worker.connection.recv_bytes()))
            except (ValueError, pickle.UnpicklingError):
                worker.ended = INVALID
            except (EOFError, OSError):
                pass  # the process has ended
        with _lock:
            worker.busy = False
            ended = worker.ended
        complete = len(responses) == len(names)
        if ended is None and complete:
            self._idle.put(worker)
            return responses, None
        code = worker.discard()
        if error is None:
            self.start()
        return responses, None if complete else ended or error or names[len(responses)] + _ending(code)

    def close(self) -> None:
        """End the idle processes."""
        with suppress(Empty):
            while True:
                self._idle.get_nowait().discard()


def last_ready() -> float:
    """Return the latest time.monotonic() at which a busy process was ready; now while one starts; 0 if none is busy."""
    now = time.monotonic()
    with _lock:
        busy = [worker for worker in _workers if worker.busy]
    return max((min(worker.ready, now) for worker in busy if now < worker.launched + START_SECONDS), default=0.0)


def end_busy_workers(reason: str) -> bool:
    """Kill all processes that are answering a request. Returns False if there are none."""
    with _lock:
        busy = [worker for worker in _workers if worker.busy and worker.ended is None]
        for worker in busy:
            worker.ended = reason
    for worker in busy:
        worker.end(reason)
    return bool(busy)


def end_idle_workers() -> None:
    """End all processes that are not answering a request."""
    with _lock:
        idle = [worker for worker in _workers if not worker.busy]
    for worker in idle:
        worker.discard()


def _start(command: Sequence[str], environment: Mapping[str, str] | None) -> Worker:
    if environment is None:
        # GPUs are hidden: a library that allocates GPU memory would allocate it in each process.
        environment = {**os.environ, "PYTHONPATH": program.python_path(os.environ), "CUDA_VISIBLE_DEVICES": ""}
    own, other = socket.socketpair()
    dumps, writer = os.pipe()
    with other:
        process = subprocess.Popen(
            [*command, str(other.fileno()), str(writer), str(os.getpid())],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            pass_fds=[other.fileno(), writer],
            start_new_session=True,  # Ctrl-C in a terminal is for the launcher, and one kill ends the whole group
        )
        os.close(writer)
        worker = Worker(process, Connection(own.detach()), dumps)
    with _lock:
        _workers.add(worker)
    return worker


def _read_dump(descriptor: int) -> str:
    """Return the text from the pipe: the first part within DUMP_SECONDS, then all parts up to a short pause."""
    parts = []
    while select.select([descriptor], [], [], 0.05 if parts else DUMP_SECONDS)[0]:
        if not (part := os.read(descriptor, 1 << 16)):
            break
        parts.append(part)
    return b"".join(parts).decode(errors="replace")


def _ending(code: int) -> str:
    if code < 0:
        return f"the worker process was ended by {signal.Signals(-code).name}"
    return f"the worker process ended with exit code {code}"


def main() -> None:
    """Answer requests. Entry point of a worker process."""
    descriptor, dumps, parent = map(int, sys.argv[1:])
    parents_death.die_with(parent)
    # Batch systems signal every process of a job, but the rank still needs the rewards of its current step.
    for number in program.stop_signals():
        signal.signal(number, lambda *_: None)  # SIG_IGN would be inherited by programs that a reward starts
    program.reset_in_forked_children(program.stop_signals())
    faulthandler.enable()
    faulthandler.register(DUMP_SIGNAL, file=dumps, all_threads=False)
    with Connection(descriptor) as connection:
        started, answer = connection.recv()()
        with suppress(EOFError, ConnectionError):  # the parent has closed the connection, or has ended
            connection.send(started)
            while started.error is None:
                for response in answer(connection.recv()):
                    connection.send(response)
