"""Which signals ask a run to stop: the launcher and the ranks agree on them."""

import signal


def stop_signals() -> list[signal.Signals]:
    """SIGHUP comes when a terminal is closed, but not where the user has said nohup."""
    nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [signal.SIGTERM, signal.SIGINT] + ([] if nohup else [signal.SIGHUP])
