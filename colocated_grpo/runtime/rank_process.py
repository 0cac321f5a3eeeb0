"""This process as a rank: process group, stop request, watchdog and limit of user code, and their end."""

from __future__ import annotations

import logging
from contextlib import ExitStack

import torch.distributed as dist

from colocated_grpo.runtime.distributed import init_world, with_context
from colocated_grpo.runtime.joining import Joined
from colocated_grpo.runtime.user_code import UserCodeWatch
from colocated_grpo.runtime.verdict import stacks_file


class RankProcess:
    """One run's hold on this process. Construction is collective.

    A process that ends with its run calls `close` after a run without errors, and exits after any other. A process that
    goes on calls `abandon` then.
    """

    def __init__(
        self,
        joined: Joined,
        user_code_seconds: float,
        setting: str,
        *,
        replicate_nodes: bool = False,
        context_parallel: int = 1,
    ) -> None:
        """user_code_seconds: longest time that user code may block all threads, as `setting` says.

        replicate_nodes: as in `init_world`. context_parallel: as in `with_context`.
        """
        try:
            self.world = with_context(init_world(joined.store, replicate_nodes=replicate_nodes), context_parallel)
        except Exception as error:
            if (shown := joined.failure(error)) is error:
                raise
            raise shown from error
        self.stop = joined.stop
        self.failure = joined.failure
        """Makes the other ranks exit, and returns the exception to raise for an error of this rank's run."""
        self._watchdog = joined.watchdog
        warn = logging.getLogger(__name__).warning
        self._user_code = UserCodeWatch(user_code_seconds, setting, warn, stacks=stacks_file())
        self.resources = ExitStack()
        """Resources that the run has opened. Closed at the end of a run without errors, and by `abandon`."""

    def close(self) -> None:
        """Leave the process group and restore the signal handlers. Collective; the run is complete."""
        self._release()
        self._watchdog.close()
        self.world.barrier()
        self._watchdog.links.close()
        dist.destroy_process_group()

    def abandon(self) -> None:
        """Give back all that this process can give back after a failed run.

        With several ranks that is little: the others exit, and a process group without them cannot be left.
        """
        if self.world.size == 1:
            self.resources.close()
        self._release()
        if self.world.size == 1:
            self._watchdog.close()
            dist.destroy_process_group()

    def _release(self) -> None:
        self._user_code.close()
        self.stop.close()
