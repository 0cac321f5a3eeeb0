"""Reward calls on threads while the engine decodes. A call that never returns costs only its own prompt."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

from colocated_grpo.environments.rewards.scoring import REWARD_LOOP
from colocated_grpo.environments.rewards.workers import end_busy_workers, last_ready
from colocated_grpo.runtime.user_code import limited, line_of_thread
from colocated_grpo.types import Completion, Prompt, Score

STOP_SECONDS = 5.0
"""Longest wait for rewards after a stop request."""
POLL_SECONDS = 0.5
END_SECONDS = 5.0
"""Longest wait for calls whose worker processes were ended."""

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
    thread: int | None = None
    place: str = ""
    """Position of a timed-out call, for its error: ', in judge (my_rewards.py, line 12)'."""

    def judged(self) -> Judged | None:
        """The result; None if the call timed out. Raises the judge's exception."""
        return self.future.result() if self.future.done() and not self.future.cancelled() else None


class RewardCalls:
    """Calls `judge`, the scoring function, on `workers` threads."""

    def __init__(
        self, judge: Judge, *, workers: int, timeout: float, stop_requested: Callable[[], bool] = lambda: False
    ) -> None:
        self._judge = judge
        self._workers = workers
        self._timeout = timeout
        self._stop_requested = stop_requested
        self.timeout_error = f"no reward within rollout.reward_timeout={timeout:g} s"
        self._pool = self._new_pool()

    def submit(self, prompt: Prompt, completions: Sequence[Completion]) -> RewardCall:
        call = RewardCall(prompt, completions)
        call.future = self._pool.submit(self._run, call)
        return call

    def wait(self, calls: Sequence[RewardCall], since: float) -> bool:
        """Wait until each call is done or has timed out. The timeout starts at `since`, or later when a call begins or
        ends: calls of a reward model wait for each other.

        The timeout does not include the start of a worker process, which imports the user's modules.

        If all started calls are overdue, the remaining calls wait behind hanging calls. The remaining calls are then
        queued again with new workers. This repeats only while new workers finish calls: otherwise a reward that always
        hangs would cost one timeout for every few prompts.

        Returns False if a stop was requested and the rewards are not ready soon after the request.
        """
        done_before: int | None = None
        ended = left = 0
        stopping: float | None = None
        while late := [call for call in calls if not call.future.done()]:
            now = time.monotonic()
            left, since = len(late), now if len(late) < left else since
            begins = [call.began for call in late if call.began is not None]
            due = max([since, last_ready(), *begins]) + self._timeout
            if self._stop_requested():
                stopping = now if stopping is None else stopping
                due = min(due, stopping + STOP_SECONDS)
            if due > now:
                wait([call.future for call in late], timeout=min(due - now, POLL_SECONDS))
                continue
            queued = [call for call in late if call.future.cancel()]
            hanging = [call for call in late if not call.future.done()]
            self._end(hanging)
            if stopping is not None:
                return False
            done = len(calls) - len(late) - ended
            if not queued or done == done_before:
                return True
            ended += sum(call.future.done() for call in hanging)
            done_before, since = done, time.monotonic()
            for call in queued:
                call.future = self._pool.submit(self._run, call)
        return True

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _run(self, call: RewardCall) -> Judged:
        call.thread, call.began = threading.get_ident(), time.monotonic()
        with limited():
            return self._judge(call.prompt, call.completions)

    def _end(self, hanging: Sequence[RewardCall]) -> None:
        """End the worker processes of hanging calls. Threads cannot be ended: they are abandoned and replaced."""
        if end_busy_workers(self.timeout_error):
            wait([call.future for call in hanging], timeout=END_SECONDS)
        for call in hanging:
            if line := line_of_thread(call.thread):
                call.place = f", in {line}"
        self._pool.shutdown(wait=False, cancel_futures=True)
        REWARD_LOOP.retire_if_blocked()
        self._pool = self._new_pool()

    def _new_pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self._workers, thread_name_prefix="reward")
