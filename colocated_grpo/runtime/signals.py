"""The signals that stop a run, for the launcher and for the ranks."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence


def stop_signals() -> list[signal.Signals]:
    """Return the signals that stop a run: SIGTERM, SIGINT, and SIGHUP unless it is ignored, as under nohup."""
    hangup_ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [signal.SIGTERM, signal.SIGINT] + ([] if hangup_ignored else [signal.SIGHUP])


def reset_in_forked_children(signals: Sequence[signal.Signals]) -> None:
    """Restore the default action of `signals` in every child forked from now on, such as a reward's process pool.

    A child would otherwise inherit the rank's handler, survive SIGTERM, and block the process that joins it.
    """
    blocked = threading.local()

    def before_fork() -> None:
        # A signal that arrives before the child has reset its handlers would be caught by the inherited handler.
        blocked.previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, signals)

    def in_parent() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked.previous_mask)

    def in_child() -> None:
        for number in signals:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked.previous_mask)

    os.register_at_fork(before=before_fork, after_in_parent=in_parent, after_in_child=in_child)
