"""Runs a command, forwards the first stop signal so that ranks can save, and leaves no process behind.

Also manages the launcher's temporary folder: each start removes the folders of killed launchers. Lists the GPUs.
"""

import ctypes
import fcntl
import math
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from itertools import cycle, islice, takewhile
from pathlib import Path

import psutil

from colocated_grpo.runtime.parents_death import signal_at_parents_death
from colocated_grpo.runtime.program import stop_signals

REAP_SECONDS = 10.0
DUPLICATE_SECONDS = 1.0
"""Repeated signals within this time count as one request, because a terminal and a wrapper may both send the signal."""
# Linux <sys/prctl.h>
PR_SET_CHILD_SUBREAPER = 36
PREFIX = "colocated-grpo-"
LOCK_FILE = "launcher.lock"
"""Locked while the launcher runs; the system releases the lock at any kind of exit. Process ids would not work, because
containers that share a temporary folder have separate process ids."""

BeginStop = Callable[[int], tuple[bytes, float | None]]
"""Maps the number of the first stop signal to the message to print, and to the seconds after which remaining processes
are killed; None: no limit."""


def run_command(
    command: Sequence[str], env: Mapping[str, str], redirect: Path | None, begin_stop: BeginStop, *, ranks: bool = True
) -> int:
    """Run `command` and return its exit code, or 128 + n if signal n ended it. Call from the main thread.

    The first stop signal is forwarded as SIGTERM. A second SIGINT or SIGTERM kills all processes. No process started by
    the command is alive when this function returns.

    ranks: the command is torchrun, whose children receive the SIGTERM, if it has started them. They may take any time
    to save. A SIGTERM to torchrun would make it kill them after a time limit, by default 30 seconds.
    """
    others = {child.pid for child in psutil.Process().children()}
    # Become the parent of orphaned descendants. Ranks have sessions of their own, so killpg would miss the ranks.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    file = nullcontext() if redirect is None else redirect.open("ab")
    with file as output, _StopSignals(others, begin_stop, ranks=ranks) as stop:
        try:
            process = subprocess.Popen(
                command,
                env=dict(env),
                stdout=output,
                stderr=output,
                start_new_session=True,  # so that Ctrl-C in a terminal reaches only the launcher
                preexec_fn=signal_at_parents_death(signal.SIGTERM),
            )
            stop.watch(process)
            code = process.wait()
        finally:
            kill_descendants(spare=others)
    if stop.received:
        return 128 + stop.received[0]
    return code if code >= 0 else 128 - code


class _StopSignals:
    """Context with signal handlers: the first request stops the process gracefully, the second kills it."""

    def __init__(self, spare: set[int], begin: BeginStop, *, ranks: bool) -> None:
        self.received: list[int] = []
        self._begin, self._ranks = begin, ranks
        self._spare = spare
        self._process: subprocess.Popen[bytes] | None = None
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

    def watch(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        if self.received:  # a signal arrived while the process was being started
            self._request_stop(process)

    def _on_signal(self, number: int, _frame: object) -> None:
        self.received.append(number)
        now = time.monotonic()
        duplicate = now - self._last.get(number, -math.inf) < DUPLICATE_SECONDS
        self._last[number] = now
        # SIGHUP never kills, because a closing terminal sends several and systemd sends one after its SIGTERM.
        self._kill_requests += not duplicate and number != signal.SIGHUP
        if self._kill_requests > 1:
            kill_descendants(spare=self._spare)
        elif len(self.received) == 1 and self._process is not None:
            self._request_stop(self._process)

    def _request_stop(self, process: subprocess.Popen[bytes]) -> None:
        message, limit = self._begin(self.received[0])
        with suppress(OSError):  # the terminal may be closed
            os.write(2, message)  # print is not reentrant, and this runs in a signal handler
        with suppress(psutil.NoSuchProcess):
            command = psutil.Process(process.pid)
            for target in (self._ranks and command.children()) or [command]:
                _signal(target, signal.SIGTERM)
        if limit is not None:
            self._limit = threading.Timer(limit, kill_descendants, [self._spare])
            self._limit.start()


def kill_descendants(spare: set[int]) -> None:
    """Send SIGKILL to every descendant of this process, except `spare` and their descendants, and reap them."""
    while victims := _descendants(psutil.Process(), spare):
        for victim in victims:
            _signal(victim, signal.SIGKILL)
        _, alive = psutil.wait_procs(victims, timeout=REAP_SECONDS)
        if alive:
            return  # the processes are blocked in the kernel, where signals are not delivered


def _descendants(process: psutil.Process, spare: set[int]) -> list[psutil.Process]:
    children: list[psutil.Process] = []
    with suppress(psutil.NoSuchProcess):
        children = [child for child in process.children() if child.pid not in spare]
    return [*children, *(below for child in children for below in _descendants(child, spare))]


def _signal(process: psutil.Process, number: signal.Signals) -> None:
    with suppress(psutil.NoSuchProcess):
        process.send_signal(number)


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
