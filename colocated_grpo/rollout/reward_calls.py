"""Reward calls on threads while the engine decodes. A call that never returns costs only its own prompt."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

from colocated_grpo.environments.rewards.scoring import REWARD_LOOP
from colocated_grpo.types import Completion, Prompt, Score

Judged = tuple[list[str], list[Score]]
"""Texts and scores of one prompt's completions."""
Judge = Callable[[Prompt, Sequence[Completion]], Judged]


@dataclass(eq=False, slots=True)
class RewardCall:
    """The rewards of one prompt, pending or done."""

    prompt: Prompt
    completions: Sequence[Completion]
    future: Future[Judged] = field(default_factory=Future)
    began: float | None = None

    def judged(self) -> Judged | None:
        """The result; None if the call timed out. Raises the judge's exception."""
        return self.future.result() if self.future.done() and not self.future.cancelled() else None


class RewardCalls:
    """Calls `judge`, the scoring function, on `workers` threads."""

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
        """Wait until each call is done or has timed out. The timeout starts at `since` or when the call begins.

        If all started calls are overdue, the others are queued behind hanging calls and get new workers. This repeats
        only while new workers finish something: otherwise a reward that always hangs would cost one timeout for every
        few prompts.
        """
        done_before: int | None = None
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
        """Abandon hanging calls with their threads, which cannot be ended, and start new workers."""
        self.close()
        REWARD_LOOP.retire_if_blocked()
        self._pool = self._new_pool()

    def _new_pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self._workers, thread_name_prefix="reward")
