"""Becomes an agent's program, which the kernel then kills when the rank ends. Run as a file."""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
"""Linux <sys/prctl.h>"""


def main(rank: int, command: list[str]) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != rank:
        os._exit(1)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
