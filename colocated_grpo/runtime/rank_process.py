"""This process as a rank: process group, stop request, watchdog and guard process, and their end."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack

import torch.distributed as dist

from colocated_grpo.errors import AlreadyReported, RunError
from colocated_grpo.runtime.blocking_code import BlockingCodeReporter
from colocated_grpo.runtime.distributed import init_world
from colocated_grpo.runtime.rank_guard import RankGuard
from colocated_grpo.runtime.supervision import StopRequest, Watchdog, explain_missing_ranks


class RankProcess:
    """One run's hold on this process. Construction is collective.

    A process that ends with its run calls `close` after a run without errors, and exits after any other. A process that
    goes on calls `abandon` then.
    """

    def __init__(self, user_code_seconds: float, setting: str, *, before_exit: Callable[[str | None], None]) -> None:
        """user_code_seconds: longest time that user code may block all threads, as `setting` says.

        before_exit: called before this process is ended because of another rank, as in `Watchdog`.
        """
        self.world = init_world()
        self.stop = StopRequest(self.world.store)
        self.guard = RankGuard(user_code_seconds, setting)
        self._watchdog = Watchdog(self.world, self.stop, before_exit=before_exit)
        warn = logging.getLogger(__name__).warning
        self._blocking_code = BlockingCodeReporter(warn, stop_requested=self.stop.requested)
        self.resources = ExitStack()
        """Resources that the run has opened. Closed at the end of a run without errors, and by `abandon`."""

    def failure(self, error: BaseException) -> BaseException:
        """Make the other ranks exit, and return the exception to raise for an error of this rank's run."""
        if not self._watchdog.report_failure():
            # The first rank's error again, or the connection that broke when that rank exited: it would mislead.
            return AlreadyReported()
        # A broken collective does not say why: name the ranks that died. Other errors of this rank are its own.
        broken = isinstance(error, RuntimeError) and not isinstance(error, RunError)
        if broken and (dead := self._watchdog.missing_ranks()):
            return RunError(explain_missing_ranks(dead))
        return error

    def close(self) -> None:
        """Leave the process group and restore the signal handlers. Collective; the run is complete."""
        self._release()
        self._watchdog.close()
        self.world.barrier()
        dist.destroy_process_group()

    def abandon(self) -> None:
        """Give back all that this process can give back after a failed run.

        With several ranks that is little: the others exit, and a process group without them cannot be left.
        """
        if self.world.size == 1:
            self.resources.close()
        self._release()
        if self.world.size == 1:
            dist.destroy_process_group()

    def _release(self) -> None:
        self._blocking_code.close()
        self.guard.close()
        self.stop.close()
