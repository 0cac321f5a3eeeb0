"""Runs a command, as several ranks, forwards the first stop signal so that they save, and leaves no process behind.

Also manages the launcher's temporary folder: each start removes the folders of killed launchers. Lists the GPUs.
"""

import ctypes
import fcntl
import math
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from itertools import cycle, islice, takewhile
from pathlib import Path
from typing import IO, NamedTuple

import psutil

from colocated_grpo.runtime.parents_death import signal_at_parents_death
from colocated_grpo.runtime.program import STORE_VARIABLE, stop_signals

REAP_SECONDS = 10.0
POLL_SECONDS = 0.05
LEAVE_SECONDS = 30.0
"""Time for the other ranks to end after one has failed. Their watchdogs need four, and more for a long report."""
DUPLICATE_SECONDS = 1.0
"""Repeated signals within this time count as one request, because a terminal and a wrapper may both send the signal."""
ENDED = os.WEXITED | os.WNOHANG | os.WNOWAIT
"""Options of `waitid`: return a child that has ended, if any, without reaping it."""
# Linux <sys/prctl.h>
PR_SET_CHILD_SUBREAPER = 36
PREFIX = "colocated-grpo-"
LOCK_FILE = "launcher.lock"
"""Locked while the launcher runs; the system releases the lock at any kind of exit. Process ids would not work, because
containers that share a temporary folder have separate process ids."""

BeginStop = Callable[[int], tuple[bytes, float | None]]
"""Maps the number of the first stop signal to the message to print, and to the seconds after which remaining processes
are killed; None: no limit."""


class Ended(NamedTuple):
    """How the ranks of this node have ended."""

    code: int
    """0; or the exit code of the rank that failed first, 128 + n if signal n ended it; or 128 + a stop signal."""
    local_rank: int = 0
    """The rank that failed first."""


def run_command(
    command: Sequence[str],
    environments: Sequence[Mapping[str, str]],
    redirect: Path | None,
    begin_stop: BeginStop,
    bound: socket.socket | None = None,
) -> Ended:
    """Run `command` once in each environment, and wait until all have ended. Call from the main thread.

    The first stop signal is forwarded as SIGTERM; the ranks may take any time to save. A second SIGINT or SIGTERM kills
    them. After a rank has failed, the others are killed unless they end within LEAVE_SECONDS. No process started by a
    rank is alive when this function returns. bound: a socket of `bind_store`, which the first rank takes over.
    """
    others = {child.pid for child in psutil.Process().children()}
    # Become the parent of orphaned descendants. Ranks have sessions of their own, so killpg would miss the ranks.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    file = nullcontext() if redirect is None else redirect.open("ab")
    with file as output, _StopSignals(others, begin_stop) as stop:
        try:
            with bound or nullcontext():
                for local_rank, environment in enumerate(environments):
                    stop.watch(_start(command, environment, output, bound if local_rank == 0 else None))
            ended = _wait(stop.ranks, spare=others)
        finally:
            kill_descendants(spare=others)
    return Ended(128 + stop.received[0]) if stop.received else ended


def _start(
    command: Sequence[str], environment: Mapping[str, str], output: IO[bytes] | None, bound: socket.socket | None
) -> subprocess.Popen[bytes]:
    passed = {} if bound is None else {STORE_VARIABLE: str(bound.fileno())}
    return subprocess.Popen(
        command,
        env={**environment, **passed},
        stdout=output,
        stderr=output,
        pass_fds=list(map(int, passed.values())),
        start_new_session=True,  # so that Ctrl-C in a terminal reaches only the launcher
        preexec_fn=signal_at_parents_death(signal.SIGKILL),  # until the rank handles its parent's death itself
    )


def _wait(ranks: Sequence[subprocess.Popen[bytes]], spare: set[int]) -> Ended:
    first, deadline = Ended(0), math.inf
    known = {rank.pid for rank in ranks} | spare
    while True:
        codes = [rank.poll() for rank in ranks]
        if first.code == 0 and any(codes):
            local_rank, code = next((local_rank, code) for local_rank, code in enumerate(codes) if code)
            first, deadline = Ended(code if code > 0 else 128 - code, local_rank), time.monotonic() + LEAVE_SECONDS
        if None not in codes or time.monotonic() > deadline:
            return first
        with suppress(ChildProcessError):  # reap orphans: rewards may leave thousands of ended processes in a long run
            while (ended := os.waitid(os.P_ALL, 0, ENDED)) and ended.si_pid not in known:
                os.waitpid(ended.si_pid, 0)
        time.sleep(POLL_SECONDS)


def bind_store(host: str, port: int) -> socket.socket:
    """Return a socket for the store of the ranks, which listens on a port. Raises OSError.

    Bound before the first rank starts, so that the other ranks know the port. Connections wait until the store serves
    them. host: an address; "": all interfaces. port: 0 for any free port.
    """
    dual_stack = not host and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual_stack or ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=socket.SOMAXCONN, dualstack_ipv6=dual_stack)


class _StopSignals:
    """Context with signal handlers: the first request stops the ranks gracefully, the second kills them."""

    def __init__(self, spare: set[int], begin: BeginStop) -> None:
        self.received: list[int] = []
        self.ranks: list[subprocess.Popen[bytes]] = []
        self._begin = begin
        self._spare = spare
        self._last: dict[int, float] = {}
        self._kill_requests = 0
        self._limit: threading.Timer | None = None

    def __enter__(self) -> "_StopSignals":
        self._before = {number: signal.signal(number, self._on_signal) for number in stop_signals()}
        return self

    def __exit__(self, *_exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._limit is not None:
            self._limit.cancel()

    def watch(self, rank: subprocess.Popen[bytes]) -> None:
        self.ranks.append(rank)
        if self.received:  # a signal arrived while the rank was being started
            rank.terminate()

    def _on_signal(self, number: int, _frame: object) -> None:
        self.received.append(number)
        now = time.monotonic()
        duplicate = now - self._last.get(number, -math.inf) < DUPLICATE_SECONDS
        self._last[number] = now
        # SIGHUP never kills, because a closing terminal sends several and systemd sends one after its SIGTERM.
        self._kill_requests += not duplicate and number != signal.SIGHUP
        if self._kill_requests > 1:
            kill_descendants(spare=self._spare)
        elif len(self.received) == 1:
            self._request_stop()

    def _request_stop(self) -> None:
        message, limit = self._begin(self.received[0])
        with suppress(OSError):  # the terminal may be closed
            os.write(2, message)  # print is not reentrant, and this runs in a signal handler
        for rank in self.ranks:
            rank.terminate()
        if limit is not None:
            self._limit = threading.Timer(limit, kill_descendants, [self._spare])
            self._limit.start()


def kill_descendants(spare: set[int]) -> None:
    """Send SIGKILL to every descendant of this process, except `spare` and their descendants, and reap them."""
    while victims := _descendants(psutil.Process(), spare):
        for victim in victims:
            with suppress(psutil.NoSuchProcess):
                victim.kill()
        _, alive = psutil.wait_procs(victims, timeout=REAP_SECONDS)
        if alive:
            return  # the processes are blocked in the kernel, where signals are not delivered


def _descendants(process: psutil.Process, spare: set[int]) -> list[psutil.Process]:
    children: list[psutil.Process] = []
    with suppress(psutil.NoSuchProcess):
        children = [child for child in process.children() if child.pid not in spare]
    return [*children, *(below for child in children for below in _descendants(child, spare))]


@contextmanager
def scratch_folder() -> Generator[Path]:
    """Remove the folders of killed launchers. Yield a temporary folder with only a lock; remove it at the end."""
    _remove_abandoned()
    with tempfile.TemporaryDirectory(prefix=PREFIX) as name:
        new = Path(name) / f"{LOCK_FILE}.new"
        with new.open("w") as lock:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(lock, fcntl.LOCK_EX)
            new.rename(new.with_name(LOCK_FILE))  # the file is locked before another start can find it
            yield Path(name)


def _remove_abandoned() -> None:
    """Remove this user's launcher folders whose lock is free. A folder without a lock file is not a launcher's."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):  # already removed by another start, or still locked
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            # Do not create the lock: it must be a launcher's. Open it for writing: network file systems require this.
            descriptor = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
            finally:
                os.close(descriptor)


SMI_SECONDS = 10
FIELDS = ("index", "name", "memory.total", "memory.used", "driver_version")
MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Gpu:
    index: int
    name: str
    total: int | None
    """Bytes. None if nvidia-smi cannot read it, as in some containers with a part of a GPU (MIG)."""
    used: int | None
    """Bytes, of all processes."""
    driver: str


@dataclass(frozen=True, kw_only=True)
class GpuListing:
    """The GPUs of this machine, or the reason why they cannot be listed."""

    gpus: tuple[Gpu, ...] = ()
    error: str | None = None
    """The message of nvidia-smi. None if nvidia-smi works or is not installed."""


def list_gpus() -> GpuListing:
    """Ask nvidia-smi, because importing torch takes seconds."""
    command = ["nvidia-smi", f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SMI_SECONDS)
    except FileNotFoundError:
        return GpuListing()
    except subprocess.TimeoutExpired:
        return GpuListing(error=f"nvidia-smi did not answer within {SMI_SECONDS} s")
    except OSError as error:
        return GpuListing(error=f"nvidia-smi cannot be started ({error.strerror})")
    return parse_listing(done.returncode, done.stdout.strip() or done.stderr.strip())


def parse_listing(code: int, output: str) -> GpuListing:
    """Parse the exit code and the output of nvidia-smi for `FIELDS`."""
    rows = [[cell.strip() for cell in line.split(",")] for line in output.splitlines()]
    if code or not all(len(row) == len(FIELDS) and row[0].isdigit() for row in rows):
        return GpuListing(error=" ".join(output.split()) or f"nvidia-smi exited with code {code}")
    return GpuListing(
        gpus=tuple(
            Gpu(index=int(index), name=name, total=_bytes(total), used=_bytes(used), driver=driver)
            for index, name, total, used, driver in rows
        )
    )


def _bytes(text: str) -> int | None:
    return int(text) * MIB if text.isdigit() else None


def visible(gpus: Sequence[Gpu], environment: Mapping[str, str]) -> tuple[Gpu, ...]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES selects by number. If it has ids, return as many GPUs as ids."""
    setting, by_number = environment.get("CUDA_VISIBLE_DEVICES"), {str(gpu.index): gpu for gpu in gpus}
    if setting is None:
        return tuple(gpus)
    chosen = [device.strip() for device in setting.split(",") if device.strip()]
    if any(device.startswith(("GPU-", "MIG-")) for device in chosen):
        return tuple(islice(cycle(gpus), len(chosen)))  # several parts (MIG) may be of one GPU
    # CUDA ignores an invalid number and everything after it.
    return tuple(by_number[device] for device in takewhile(by_number.__contains__, chosen))
