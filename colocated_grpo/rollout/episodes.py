"""Episodes of this rank: user coroutines on an event-loop thread that sample their turns through the inbox.

The main thread drives the engine and keeps decoding while episodes wait for their tools.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial

from colocated_grpo.environments.base import AnswerError, Episode
from colocated_grpo.environments.chat import ChatCodec
from colocated_grpo.environments.conversation import ContextExhausted, Conversation
from colocated_grpo.environments.rewards.scoring import as_score
from colocated_grpo.environments.user_code.event_loops import retire_loop, start_loop
from colocated_grpo.environments.user_code.loading import one_line
from colocated_grpo.rollout.engine import Request
from colocated_grpo.rollout.inbox import Inbox
from colocated_grpo.rollout.prompt_queue import Job
from colocated_grpo.runtime.distributed import derive_seed
from colocated_grpo.types import Completion, Rollout, Score

GRACE_SECONDS = 2.0
"""An episode that has not ended this long after its deadline blocks its event loop."""


@dataclass(eq=False, kw_only=True, slots=True)
class _Playing:
    """One episode."""

    job: Job
    index: int
    sibling: int
    deadline: float | None
    """time.monotonic() by which its tools must return; None while the engine samples its turn."""
    loop: asyncio.AbstractEventLoop
    clock: asyncio.Timeout | None = None
    """The same deadline on the event loop, which cancels the episode."""
    conversation: Conversation | None = None
    task: Future[Rollout] | None = None
    turn: Future[Completion] | None = None
    abandoned: bool = False


@dataclass(kw_only=True, slots=True)
class _Group:
    """Finished siblings of one prompt."""

    size: int
    rollouts: dict[int, Rollout] = field(default_factory=dict)


class EpisodeRunner:
    """Runs the episodes of one rank. Public methods must be called on the thread that drives the engine."""

    def __init__(
        self, episodes: Mapping[str, Episode], codec: ChatCodec, inbox: Inbox, *, seed: int, tool_timeout: float
    ) -> None:
        self._episodes = episodes
        self._codec = codec
        self._inbox = inbox
        self._seed = seed
        self._tool_timeout = tool_timeout
        self._loop: asyncio.AbstractEventLoop | None = None
        self._playing: set[_Playing] = set()
        self._ended: deque[_Playing] = deque()
        self._groups: dict[int, _Group] = {}

    def plays(self, source: str) -> bool:
        return source in self._episodes

    def start(self, job: Job, index: int) -> None:
        """Start the episodes of one prompt of the job."""
        self._groups[index] = _Group(size=job.group_size)
        for sibling in range(job.group_size):
            loop = self._event_loop()
            playing = _Playing(job=job, index=index, sibling=sibling, deadline=self._new_deadline(), loop=loop)
            turn = partial(self._turn, playing)
            playing.conversation = Conversation(job.prompts[index], self._codec, job.sampling.max_tokens, turn)
            self._playing.add(playing)
            playing.task = asyncio.run_coroutine_threadsafe(self._play(playing), loop)
            playing.task.add_done_callback(partial(self._end, playing))

    def finished(self) -> Iterator[tuple[int, list[Rollout]]]:
        """Yield the prompts whose last episode has ended since the last call, with all rollouts."""
        while self._ended:
            playing = self._ended.popleft()
            if playing in self._playing:
                yield from self._store(playing, _task_of(playing).result())

    def give_up_overdue(self) -> Iterator[tuple[int, list[Rollout]]]:
        """End episodes past their deadline that block the event loop or suppress cancellation.

        A coroutine cannot be killed: it is abandoned with its thread, and later episodes get a new thread.
        """
        now = time.monotonic()
        overdue = [one for one in self._playing if one.deadline is not None and now > one.deadline + GRACE_SECONDS]
        for playing in overdue:
            playing.abandoned = True
            _task_of(playing).cancel()
            if playing.loop is self._loop:
                self._abandon_loop()
            error = f"{self._timeout_error()}; it blocks the event loop: run blocking code with asyncio.to_thread"
            yield from self._store(playing, self._rollout(playing, Score(reward=None, error=error)))

    def cancel(self) -> None:
        """Abandon every episode."""
        for playing in self._playing:
            playing.abandoned = True
            _task_of(playing).cancel()
        self._playing.clear()
        self._groups.clear()

    def close(self) -> None:
        self.cancel()
        if self._loop is not None:
            self._abandon_loop()

    def _event_loop(self) -> asyncio.AbstractEventLoop:
        """The one loop of all batches, because connections of user code belong to the loop that opened them."""
        if self._loop is None:
            self._loop = start_loop("episodes")
        return self._loop

    def _abandon_loop(self) -> None:
        """Later episodes get a new loop."""
        if self._loop is not None:
            retire_loop(self._loop)
        self._loop = None

    def _end(self, playing: _Playing, _task: Future[Rollout]) -> None:
        self._ended.append(playing)
        self._inbox.wake()

    def _store(self, playing: _Playing, rollout: Rollout) -> Iterator[tuple[int, list[Rollout]]]:
        """Yield the prompt with all its rollouts, in sibling order, if this one was the last."""
        self._playing.remove(playing)
        group = self._groups[playing.index]
        group.rollouts[playing.sibling] = rollout
        if len(group.rollouts) == group.size:
            del self._groups[playing.index]
            yield playing.index, [group.rollouts[sibling] for sibling in range(group.size)]

    def _new_deadline(self) -> float:
        return time.monotonic() + self._tool_timeout

    def _timeout_error(self) -> str:
        return f"no turn and no result within rollout.tool_timeout={self._tool_timeout:g} s"

    def _rollout(self, playing: _Playing, score: Score) -> Rollout:
        sampling = playing.job.sampling
        return replace(_conversation_of(playing).rollout(score, sampling.temperature), plain=sampling.is_plain)

    # The methods below run on the event loop.

    async def _play(self, playing: _Playing) -> Rollout:
        score = await self._score(playing)
        if playing.turn is not None:
            playing.turn.cancel()  # run() may return before a turn that it started; the engine must not continue it
        return self._rollout(playing, score)

    async def _score(self, playing: _Playing) -> Score:
        """Score of the episode. Any error of user code costs only this episode."""
        prompt = playing.job.prompts[playing.index]
        try:
            async with asyncio.timeout(self._tool_timeout) as playing.clock:
                item = deepcopy(prompt.item)  # an episode may change it, and siblings must not see that
                return as_score(await self._episodes[prompt.source].run(item, _conversation_of(playing)))
        except ContextExhausted:
            return Score(reward=0.0)
        except AnswerError as error:
            return Score(reward=error.reward, error=one_line(error))
        except BaseException as error:
            if playing.abandoned:
                raise
            late = playing.clock is not None and playing.clock.expired() and isinstance(error, TimeoutError)
            return Score(reward=None, error=self._timeout_error() if late else one_line(error))

    async def _turn(self, playing: _Playing, token_ids: list[int], max_tokens: int) -> Completion:
        """Sample one turn of the policy. The timeout does not run meanwhile."""
        if playing.abandoned:
            raise asyncio.CancelledError
        if playing.deadline is None:
            raise RuntimeError("generate() was called while another turn of the same episode is being sampled")
        clock = playing.clock
        assert clock is not None  # a turn is sampled inside run(), which _score starts
        clock.reschedule(None)
        playing.deadline = None
        playing.turn = self._inbox.put(self._request(playing, token_ids, max_tokens))
        # Set by the thread that completes the turn, not by the episode: a blocked event loop must not stop the clock.
        playing.turn.add_done_callback(lambda _: setattr(playing, "deadline", self._new_deadline()))
        try:
            return await asyncio.wrap_future(playing.turn)
        finally:
            if not _task_of(playing).done():
                clock.reschedule(asyncio.get_running_loop().time() + self._tool_timeout)

    def _request(self, playing: _Playing, token_ids: list[int], max_tokens: int) -> Request:
        job, turn = playing.job, _conversation_of(playing).turns
        prompt = job.prompts[playing.index]
        return Request(
            key=(job.name, playing.index, playing.sibling, turn),
            token_ids=token_ids,
            seed=derive_seed(self._seed, job.name, prompt.index, playing.sibling, turn),
            sampling=replace(job.sampling, max_tokens=max_tokens),
        )


def _task_of(playing: _Playing) -> Future[Rollout]:
    assert playing.task is not None  # set by `start`
    return playing.task


def _conversation_of(playing: _Playing) -> Conversation:
    assert playing.conversation is not None  # set by `start`
    return playing.conversation
