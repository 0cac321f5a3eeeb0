"""Runs programs with their tests, each test in its own process. Executed as a script.

Receives jobs, {"program", "cases", "folder", "seconds", "memory", "file"}, each followed by a nonce, and sends back the
nonce, which no program finds in memory as it is read after the tests, and the number of passed tests. The process of a
test has limits on time, memory and the size of a file. A seccomp filter blocks new processes, sockets and signals to
other processes, so one kill ends the whole test. A program cannot access the memory, the descriptors and the
environment of other processes. This guards against accidents. It is not a sandbox.
"""

import ctypes
import errno
import json
import os
import platform
import resource
import select
import signal
import struct
import sys
import tempfile
import time
import types
from contextlib import suppress
from multiprocessing.connection import Connection

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 1, 4, 38, 22, 2
"""Constants of Linux's <sys/prctl.h>"""
LANDLOCK_CREATE_RULESET, LANDLOCK_RESTRICT_SELF, LANDLOCK_ACCESS_FS_MAKE_BLOCK = 444, 446, 1 << 11
"""Constants of Linux's <linux/landlock.h>, and the numbers of its system calls"""
CAPABILITY_VERSION_3 = 0x20080522
CLONE_THREAD = 0x10000
ALLOW, REFUSE, UNKNOWN = 0x7FFF0000, 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS
"""Results of a seccomp filter. UNKNOWN makes libc try clone: a filter cannot read the flags of clone3."""
LOAD, EQUAL, ANY_BIT, RETURN = 0x20, 0x15, 0x45, 0x06
"""Instructions of a seccomp filter"""
NUMBER, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16
"""Offsets in struct seccomp_data"""
SYSTEMS = {
    # audit architecture, clone, clone3, tgkill, then: fork, vfork, socket, kill, tkill, ptrace, process_vm_writev,
    # rt_sigqueueinfo, rt_tgsigqueueinfo, pidfd_send_signal, io_uring_setup
    "x86_64": (0xC000003E, 56, 435, 234, [57, 58, 41, 62, 200, 101, 311, 129, 297, 424, 425]),
    "aarch64": (0xC00000B7, 220, 435, 131, [198, 129, 130, 117, 271, 138, 240, 424, 425]),
}
"""System call numbers by platform.machine()."""
MAX_OPEN_FILES = 64


def passed(job: dict) -> int:
    """Return the number of tests that the program passes before the job's time is up."""
    deadline = time.monotonic() + job["seconds"]
    return sum(_passes(case, job, deadline) for case in job["cases"])


def _passes(case: dict, job: dict, deadline: float) -> bool:
    if time.monotonic() >= deadline:
        return False
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as printed, tempfile.TemporaryFile() as mark:
        given.write(case["stdin"].encode())
        given.seek(0)
        if (child := os.fork()) == 0:
            _be_the_test(case, job, given.fileno(), printed.fileno(), mark.fileno())
        in_time = _wait(child, deadline)
        # The mark is written after the end of the test, so a program that exits early has not passed.
        if not in_time or os.fstat(mark.fileno()).st_size == 0:
            return False
        printed.seek(0)
        return case["check"] is not None or _lines(printed.read().decode(errors="replace")) == _lines(case["stdout"])


def _wait(child: int, deadline: float) -> bool:
    """Return whether the process ends before the deadline. At the deadline, the process is killed."""
    descriptor = os.pidfd_open(child)
    try:
        in_time = bool(select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0])
        if not in_time:
            os.kill(child, signal.SIGKILL)
    finally:
        os.close(descriptor)
    os.waitpid(child, 0)
    return in_time


def _be_the_test(case: dict, job: dict, given: int, printed: int, mark: int) -> None:
    """Run the program and its test, then exit. Never returns."""
    try:
        os.chdir(job["folder"])
        os.dup2(given, 0)
        os.dup2(printed, 1)
        os.closerange(3, mark)
        os.closerange(mark + 1, MAX_OPEN_FILES)
        _limit(job)
        sys.stdin, sys.stdout = os.fdopen(0), os.fdopen(1, "w")
        _execute(job["program"], case["check"])
        sys.stdout.flush()
        os.write(mark, b"1")
    finally:
        os._exit(0)


def _execute(program: str, check: str | None) -> None:
    """Execute the program, then the check in its namespace. Without a check, exit code 0 is a normal end."""
    module = types.ModuleType("__main__" if check is None else "solution")
    sys.modules[module.__name__] = module
    try:
        exec(compile(program, "<program>", "exec"), module.__dict__)
        if check is not None:
            exec(compile(check, "<test>", "exec"), module.__dict__)
    except SystemExit as end:
        if check is not None or end.code not in (None, 0):
            raise


def _limit(job: dict) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    for limit, value in (
        (resource.RLIMIT_AS, job["memory"]),
        (resource.RLIMIT_FSIZE, job["file"]),
        (resource.RLIMIT_NOFILE, MAX_OPEN_FILES),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (value, value))
    code = seccomp_filter(os.getpid(), *SYSTEMS[platform.machine()])
    buffer = ctypes.create_string_buffer(code)
    # struct sock_fprog: the number of instructions, and a pointer to them
    program = ctypes.create_string_buffer(struct.pack("HL", len(code) // 8, ctypes.addressof(buffer)))
    if (
        libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        or libc.capset(struct.pack("Ii", CAPABILITY_VERSION_3, 0), bytes(24))  # root, too, has no capabilities
        or libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program, 0, 0)
    ):
        os._exit(1)
    # A process in a Landlock domain has no access to processes outside it. The ruleset itself matters little: it
    # refuses new block devices. Kernels without Landlock protect those of root and, by PR_SET_DUMPABLE, the runners.
    ruleset = libc.syscall(LANDLOCK_CREATE_RULESET, struct.pack("Q", LANDLOCK_ACCESS_FS_MAKE_BLOCK), 8, 0)
    if ruleset >= 0:
        libc.syscall(LANDLOCK_RESTRICT_SELF, ruleset, 0)
        os.close(ruleset)


def seccomp_filter(process: int, architecture: int, clone: int, clone3: int, tgkill: int, refused: list[int]) -> bytes:
    """Return the code of a filter that refuses `refused`, clone except for threads, and tgkill to other processes."""
    lines = [
        (LOAD, 0, 0, ARCHITECTURE),
        (EQUAL, 1, 0, architecture),
        (RETURN, 0, 0, REFUSE),
        (LOAD, 0, 0, NUMBER),
        (EQUAL, 0, 1, clone3),
        (RETURN, 0, 0, UNKNOWN),
        (EQUAL, 0, 4, tgkill),
        (LOAD, 0, 0, FIRST_ARGUMENT),
        (EQUAL, 0, 1, process),
        (RETURN, 0, 0, ALLOW),
        (RETURN, 0, 0, REFUSE),
    ]
    for number in refused:
        lines += [(EQUAL, 0, 1, number), (RETURN, 0, 0, REFUSE)]
    lines += [
        (EQUAL, 0, 3, clone),
        (LOAD, 0, 0, FIRST_ARGUMENT),
        (ANY_BIT, 1, 0, CLONE_THREAD),
        (RETURN, 0, 0, REFUSE),
        (RETURN, 0, 0, ALLOW),
    ]
    return b"".join(struct.pack("HBBI", *line) for line in lines)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


def main() -> None:
    given, dumps = map(int, sys.argv[1:3])
    with Connection(os.dup(given)) as connection, suppress(EOFError):
        # These two descriptors are closed here, because a test closes only descriptors below MAX_OPEN_FILES.
        os.close(given)
        os.close(dumps)
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        # The processes of tests inherit this flag. /proc/PID of such a process belongs to root.
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
        while True:
            count = passed(connection.recv())
            connection.send_bytes(json.dumps([connection.recv(), count]).encode())


if __name__ == "__main__":
    main()
