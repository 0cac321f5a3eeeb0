"""The promises of a server, checked after each generated case, beside an honest client.

A case that breaks one is shrunk, and printed with a seed that repeats it.
"""

from __future__ import annotations

import socket
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, field
from http.client import HTTPException
from itertools import chain
from pathlib import Path
from typing import Self

import hypothesis
import psutil
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Flaky

from colocated_grpo.types import JsonObject
from colocated_grpo.web.client import RequestRejected
from tests.chaos.generators import Endpoint, cases
from tests.chaos.sent import MIB, RESPONSE_SECONDS, SILENT, Json, Sent, call

HEALTH_SECONDS = 2.0
PROCESSOR_SECONDS = 1.0
"""Bound of a server's processor time for a request, apart from sampling."""
MEMORY_MIB = 256
"""Bound of a server's memory above that at its start, at any moment."""
HELD = 32
"""Connections that stay open beside later cases."""
ATTEMPTS = 3
"""Repetitions of a case that takes too long, because other programs use the machine too."""
SHRINK_SECONDS = 60.0
SHOWN = 1500
TOO_LATE = "too late"
TRACEBACK = "Traceback"


class Broken(AssertionError):
    """A promise that a server has not kept."""


def family(pid: int) -> list[psutil.Process]:
    """Return a process and its descendants, without those that have ended."""
    process = psutil.Process(pid)
    return [each for each in [process, *process.children(recursive=True)] if each.status() != psutil.STATUS_ZOMBIE]


@dataclass
class Running:
    """A server under attack."""

    port: int
    processes: Callable[[], Sequence[psutil.Process]]
    """Return the processes of the server that are alive."""
    log: Path
    honest: Callable[[], None]
    """Send an honest request and check its response."""
    health: tuple[str, int]
    """A path, and the status of its response while the server is well."""
    prefix: str = ""
    """Of all paths."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Of most of the generated requests."""


@dataclass(frozen=True)
class Server:
    """A server that can be started."""

    name: str
    endpoints: Sequence[Endpoint]
    examples: dict[str, Json]
    """Valid bodies by path, where a schema cannot express them."""
    start: Callable[[Path], AbstractContextManager[Running]]
    samples: bool = True
    """True if accepted requests cost what they sample."""


@dataclass
class Attack:
    """The generated cases of one server, and the outcomes of all requests.

    A context: the server starts with it. It starts again only to shrink a case, because a start takes as long as a
    hundred cases or more.
    """

    server: Server
    folder: Path
    problems: list[str] = field(default_factory=list)
    num_cases: int = 0
    honest_requests: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    latencies: list[float] = field(default_factory=list)
    """Seconds of each request for the server's health."""
    peaks: list[float] = field(default_factory=list)
    """MiB above the server's memory at its start, the largest during each case."""

    def __post_init__(self) -> None:
        self._choose(self.server.endpoints)
        self._stack = ExitStack()
        self._held: deque[socket.socket] = deque()

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self._end()

    def _choose(self, endpoints: Sequence[Endpoint]) -> None:
        self._endpoints = endpoints
        self._cases = cases(endpoints, self.server.examples)

    def round(self, seed: int, share: float = 1.0) -> None:
        """Attack each endpoint that has no problem yet. share: of the usual number of cases."""
        for endpoint in self._endpoints:
            self._attack(endpoint, seed, max(1, round(share * endpoint.num_cases)))

    def figures(self, seconds: float) -> JsonObject:
        """Return the outcomes. seconds: duration of the attack."""
        latencies = sorted(self.latencies)
        return {
            "endpoints": len(self.server.endpoints),
            "cases": self.num_cases,
            "cases_per_hour": round(3600 * self.num_cases / seconds),
            "outcomes": dict(sorted(self.outcomes.items())),
            "honest_requests": self.honest_requests,
            "health_seconds_max": round(latencies[-1], 3),
            "health_seconds_p99": round(latencies[int(0.99 * len(latencies))], 3),
            "memory_mib_max": round(max(self.peaks), 1),
            "problems": len(self.problems),
        }

    def _attack(self, endpoint: Endpoint, seed: int, num_cases: int) -> None:
        self._failure: tuple[list[Sent], Broken] | None = None
        """The last case that has failed, which is the smallest."""

        @hypothesis.seed(f"{seed} {endpoint.name}")
        @settings(
            max_examples=num_cases,
            database=None,
            deadline=None,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        )
        @given(self._cases[endpoint.name])
        def attack(case: list[Sent]) -> None:
            self._try(case)

        with suppress(Broken, Flaky):  # flaky: not again alone, or not after SHRINK_SECONDS
            attack()
        if self._failure is not None:
            case, error = self._failure
            self._choose([each for each in self._endpoints if each is not endpoint])
            self.problems.append(f"{self.server.name}, {endpoint.name}: {error}; seed {seed}; {str(case)[:SHOWN]}")
            self._start()

    def _try(self, case: list[Sent]) -> None:
        if self._failure is None:
            self._shrinks_until = time.monotonic() + SHRINK_SECONDS
        elif time.monotonic() > self._shrinks_until:
            return
        else:
            self._start()
        self.num_cases += 1
        try:
            for attempt in range(ATTEMPTS):
                try:
                    return self._check(case)
                except (OSError, psutil.NoSuchProcess) as error:
                    raise Broken(f"the server, or one of its processes, has ended: {error}") from None
                except Broken as error:
                    if TOO_LATE not in str(error) or attempt == ATTEMPTS - 1:
                        raise
        except Broken as error:
            self._failure = case, error
            raise

    def _start(self) -> None:
        """Start the server, or start it again."""
        self._end()
        self._running = self._stack.enter_context(self.server.start(self.folder))
        self._running.honest()
        self._log_bytes = self._running.log.stat().st_size
        self._memory = memory(self._running.processes())

    def _end(self) -> None:
        self._stack.close()
        while self._held:
            self._held.popleft().close()

    def _check(self, case: list[Sent]) -> None:
        """Send the requests of a case and check the promises."""
        running = self._running
        processes = running.processes()
        forget_peaks(processes)
        used = _processor_seconds(processes)
        opened = [sent.send(running.port, running.prefix, running.headers) for sent in case]
        self._check_health()
        self._check_honest()
        outcomes = [self._outcome(*each) for each in zip(case, opened, strict=True)]
        self.outcomes.update(outcomes)
        self._check_health()
        used = _processor_seconds(processes) - used
        samples = self.server.samples and not all(outcome.startswith("4") for outcome in outcomes)
        if not samples and used > PROCESSOR_SECONDS * len(outcomes):
            raise Broken(f"{TOO_LATE}: {used:.1f} s of processor time for responses {outcomes}")
        self._check_memory(processes)
        with self._running.log.open(errors="replace") as log:
            log.seek(self._log_bytes)
            if TRACEBACK in (text := log.read()):
                self._log_bytes += len(text.encode())
                raise Broken(f"a traceback in the log: {' '.join(text.split())[-SHOWN:]}")

    def _check_health(self) -> None:
        began, (path, expected) = time.monotonic(), self._running.health
        status, _ = call(self._running.port, "GET", path)
        self.latencies.append(time.monotonic() - began)
        if status != expected:
            raise Broken(f"GET {path}: {status}")
        if self.latencies[-1] > HEALTH_SECONDS:
            raise Broken(f"{TOO_LATE}: GET {path} took {self.latencies[-1]:.1f} s")

    def _check_honest(self) -> None:
        try:
            self._running.honest()
        except (OSError, HTTPException, RequestRejected, AssertionError) as error:
            raise Broken(f"an honest request: {error!r}") from None
        self.honest_requests += 1

    def _check_memory(self, processes: Sequence[psutil.Process]) -> None:
        peak = peak_memory(processes) - self._memory
        self.peaks.append(peak)
        if peak > MEMORY_MIB:
            raise Broken(f"{peak:.0f} MiB above the memory at the start")

    def _outcome(self, sent: Sent, connection: socket.socket) -> str:
        if sent.ending == "hold":
            self._held.append(connection)
            if len(self._held) > HELD:
                self._held.popleft().close()
            return "held"
        outcome = sent.outcome(connection)
        if outcome == SILENT and sent.is_whole:
            raise Broken(f"no response within {RESPONSE_SECONDS:g} s")
        if outcome.startswith("5") and outcome != "503":
            raise Broken(f"status {outcome}")
        return outcome


def _processor_seconds(processes: Sequence[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def memory(processes: Iterable[psutil.Process]) -> float:
    """Return the memory of the processes in MiB."""
    return sum(process.memory_info().rss for process in processes) / MIB


def peak_memory(processes: Iterable[psutil.Process]) -> float:
    """Return the sum of the most memory that each process has had since `forget_peaks`, in MiB."""
    lines = [Path(f"/proc/{process.pid}/status").read_text().splitlines() for process in processes]
    return sum(int(line.split()[1]) for line in chain(*lines) if line.startswith("VmHWM")) / 1024


def forget_peaks(processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        Path(f"/proc/{process.pid}/clear_refs").write_text("5")
