"""The signals that stop a run, for the launcher and for the ranks."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Sequence

from colocated_grpo.runtime.verdict import first_report, report


def stop_signals() -> list[signal.Signals]:
    """Return the signals that stop a run: SIGTERM, SIGINT, and SIGHUP unless it is ignored, as under nohup."""
    hangup_ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [signal.SIGTERM, signal.SIGINT] + ([] if hangup_ignored else [signal.SIGHUP])


def exit_on_stop_signals(ending: Callable[[], str]) -> None:
    """End this process at once on a stop signal, with exit code 128 + its number: there is nothing to save yet.

    ending: cleans up and returns the line to print. It is called inside the signal handler. Raising an exception
    instead would not do: libraries catch it, or it is lost in a callback.
    """

    def on_signal(number: int, _frame: object) -> None:
        line = ending()
        if first_report() is None and os.environ.get("RANK", "0") == "0":  # one line, not one for each rank
            report(128 + number, [line])
        os._exit(128 + number)

    for number in stop_signals():
        signal.signal(number, on_signal)


def reset_in_forked_children(signals: Sequence[signal.Signals]) -> Callable[[], None]:
    """Restore the default action of `signals` in every child forked from now on, such as a reward's process pool.

    A child would otherwise inherit the rank's handler, survive SIGTERM, and block the process that joins it. Returns a
    function that ends this.
    """
    blocked, ended = threading.local(), threading.Event()

    def before_fork() -> None:
        # A signal that arrives before the child has reset its handlers would be caught by the inherited handler.
        blocked.previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, [] if ended.is_set() else signals)

    def in_parent() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked.previous_mask)

    def in_child() -> None:
        for number in [] if ended.is_set() else signals:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked.previous_mask)

    os.register_at_fork(before=before_fork, after_in_parent=in_parent, after_in_child=in_child)
    return ended.set
