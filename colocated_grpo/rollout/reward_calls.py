"""Rewards on threads, beside the engine: a call that never returns costs its own prompt and no other."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from colocated_grpo.environments.rewards.scoring import AWAITED
from colocated_grpo.types import Completion, Prompt, Score

Judged = tuple[list[str], list[Score]]
"""The completions of one prompt as text, and their scores."""
Judge = Callable[[Prompt, Sequence[Completion]], Judged]


@dataclass(eq=False, slots=True)
class RewardCall:
    """The rewards of one prompt, waited for or there."""

    prompt: Prompt
    completions: Sequence[Completion]
    future: Future[Judged] | None = None
    began: float | None = None

    def judged(self) -> Judged | None:
        """None where nothing came. Raises what the judge raised."""
        return self.future.result() if self.future.done() and not self.future.cancelled() else None


class RewardCalls:
    """Calls of a judge on `workers` threads."""

    def __init__(self, judge: Judge, *, workers: int, timeout: float) -> None:
        self._judge = judge
        self._workers = workers
        self._timeout = timeout
        self._pool = self._new_pool()

    def submit(self, prompt: Prompt, completions: Sequence[Completion]) -> RewardCall:
        call = RewardCall(prompt, completions)
        self._queue(call)
        return call

    def wait(self, calls: Sequence[RewardCall], since: float) -> None:
        """Until each call is done or has had its timeout, which runs from `since` at the earliest.

        Where all that have begun are overdue, those that have not are queued behind calls that hang: they get new
        workers. Not without end, or a reward that always hangs would be waited for once for every few prompts: new
        workers that finish nothing are the last ones.
        """
        done_before = None
        while late := [call for call in calls if not call.future.done()]:
            due = max([since, *(call.began for call in late if call.began is not None)]) + self._timeout
            if (left := due - time.monotonic()) > 0:
                wait([call.future for call in late], timeout=left)
                continue
            queued = [call for call in late if call.future.cancel()]
            self._replace_pool()
            done = len(calls) - len(late)
            if not queued or done == done_before:
                return
            done_before, since = done, time.monotonic()
            for call in queued:
                self._queue(call)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _queue(self, call: RewardCall) -> None:
        call.future = self._pool.submit(self._run, call)

    def _run(self, call: RewardCall) -> Judged:
        call.began = time.monotonic()
        return self._judge(call.prompt, call.completions)

    def _replace_pool(self) -> None:
        """Leave calls that hang behind: they cannot be ended, and would keep workers from everything later."""
        self.close()
        AWAITED.leave_if_blocked()
        self._pool = self._new_pool()

    def _new_pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self._workers, thread_name_prefix="reward")
