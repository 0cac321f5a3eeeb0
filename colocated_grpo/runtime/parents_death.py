"""Makes the kernel end a process when its parent dies, even by SIGKILL.

Standard library only. Run as a file, this module replaces itself by a command: FILE PARENT COMMAND [ARGUMENTS].
"""

import ctypes
import os
import signal
import sys
from collections.abc import Callable

PR_SET_PDEATHSIG = 1
"""Linux <sys/prctl.h>"""


def die_with(parent: int) -> None:
    """Make the kernel kill this process when process `parent` ends, even while this one holds the interpreter lock."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)  # the parent died before the call to prctl


def continue_at_parents_death() -> None:
    """Make the kernel continue this process, if it is stopped (SIGSTOP), when its parent dies, so that it can end."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGCONT, 0, 0, 0)


def stop_at_parents_death() -> None:
    """Stop this process, as by SIGTERM, when its parent dies, also while it is stopped. Call from the main thread."""
    own, parent = os.getpid(), os.getppid()

    def on_continue(_number: int, _frame: object) -> None:
        if os.getpid() == own and os.getppid() != parent:  # a forked child, such as a reward worker, inherits this
            os.kill(own, signal.SIGTERM)

    signal.signal(signal.SIGCONT, on_continue)
    continue_at_parents_death()


def signal_at_parents_death(number: signal.Signals) -> Callable[[], None]:
    """Return a preexec function that makes the kernel signal the child when this process dies."""
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()  # before the fork: few calls are safe after a fork

    def prepare() -> None:
        prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return prepare


if __name__ == "__main__":
    die_with(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])
