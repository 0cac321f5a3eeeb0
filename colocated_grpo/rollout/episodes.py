"""Episodes under way on this rank: user coroutines on a thread of their own, their turns through the inbox.

The main thread drives the engine and never waits for an episode's tools while there is something to decode.
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

from colocated_grpo.environments.base import Episode
from colocated_grpo.environments.chat import ChatCodec
from colocated_grpo.environments.conversation import Conversation, OutOfRoom
from colocated_grpo.environments.rewards.scoring import as_score
from colocated_grpo.environments.user_code.event_loops import leave_loop, start_loop
from colocated_grpo.environments.user_code.loading import one_line
from colocated_grpo.rollout.engine import Request
from colocated_grpo.rollout.inbox import Inbox
from colocated_grpo.rollout.prompt_queue import Job
from colocated_grpo.runtime.distributed import derive_seed
from colocated_grpo.types import Completion, Rollout, Score

GRACE = 2.0
"""Seconds after its deadline for which an episode may still end by itself; then its thread counts as blocked."""


@dataclass(eq=False, kw_only=True, slots=True)
class _Playing:
    """One episode. `deadline` is when its tools must be done; None while the engine has the word."""

    job: Job
    index: int
    sibling: int
    deadline: float | None
    loop: asyncio.AbstractEventLoop
    clock: asyncio.Timeout | None = None
    """The same deadline on the event loop, where it ends the episode."""
    conversation: Conversation | None = None
    task: Future[Rollout] | None = None
    turn: Future[Completion] | None = None
    given_up: bool = False


@dataclass(kw_only=True, slots=True)
class _Group:
    """Siblings of one prompt, as far as they have ended."""

    missing: int
    rollouts: list[Rollout | None] = field(default_factory=list)


class EpisodeRunner:
    """Plays episodes for one rank. Every method is for the thread that drives the engine."""

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
        """Begin the episodes of one prompt of the job."""
        self._groups[index] = _Group(missing=job.group_size, rollouts=[None] * job.group_size)
        for sibling in range(job.group_size):
            loop = self._event_loop()
            playing = _Playing(job=job, index=index, sibling=sibling, deadline=self._new_deadline(), loop=loop)
            turn = partial(self._turn, playing)
            playing.conversation = Conversation(job.prompts[index], self._codec, job.sampling.max_tokens, turn)
            self._playing.add(playing)
            playing.task = asyncio.run_coroutine_threadsafe(self._play(playing), loop)
            playing.task.add_done_callback(partial(self._end, playing))

    def finished(self) -> Iterator[tuple[int, list[Rollout]]]:
        """Prompts all of whose episodes have ended since the last call."""
        while self._ended:
            playing = self._ended.popleft()
            if playing in self._playing:
                yield from self._put_away(playing, playing.task.result())

    def give_up_overdue(self) -> Iterator[tuple[int, list[Rollout]]]:
        """End what did not end at its deadline, because it blocks the event loop or will not be cancelled.

        Coroutines cannot be ended by force: they are left behind with their thread, and later episodes get a new one.
        """
        now = time.monotonic()
        overdue = [one for one in self._playing if one.deadline is not None and now > one.deadline + GRACE]
        for playing in overdue:
            playing.given_up = True
            playing.task.cancel()
            if playing.loop is self._loop:
                self._leave_loop()
            error = f"{self._late()}; it blocks the event loop: run blocking code with asyncio.to_thread"
            yield from self._put_away(playing, self._rollout(playing, Score(reward=None, error=error)))

    def cancel(self) -> None:
        """Give up every episode."""
        for playing in self._playing:
            playing.given_up = True
            playing.task.cancel()
        self._playing.clear()
        self._groups.clear()

    def close(self) -> None:
        self.cancel()
        if self._loop is not None:
            self._leave_loop()

    def _event_loop(self) -> asyncio.AbstractEventLoop:
        """One loop for all batches: connections of user code belong to the loop that first used them."""
        if self._loop is None:
            self._loop = start_loop("episodes")
        return self._loop

    def _leave_loop(self) -> None:
        """Later episodes get a new one."""
        leave_loop(self._loop)
        self._loop = None

    def _end(self, playing: _Playing, _task: Future[Rollout]) -> None:
        self._ended.append(playing)
        self._inbox.ring()

    def _put_away(self, playing: _Playing, rollout: Rollout) -> Iterator[tuple[int, list[Rollout]]]:
        self._playing.remove(playing)
        group = self._groups[playing.index]
        group.rollouts[playing.sibling] = rollout
        group.missing -= 1
        if not group.missing:
            del self._groups[playing.index]
            yield playing.index, group.rollouts

    def _new_deadline(self) -> float:
        return time.monotonic() + self._tool_timeout

    def _late(self) -> str:
        return f"no turn and no result within rollout.tool_timeout={self._tool_timeout:g} s"

    def _rollout(self, playing: _Playing, score: Score) -> Rollout:
        return playing.conversation.rollout(score, playing.job.sampling.temperature)

    # From here on: on the event loop.

    async def _play(self, playing: _Playing) -> Rollout:
        score = await self._score(playing)
        if playing.turn is not None:
            playing.turn.cancel()  # run() may end before a turn that it asked for; the engine must not go on with it
        return self._rollout(playing, score)

    async def _score(self, playing: _Playing) -> Score:
        """What the episode says of itself; whatever user code does costs this episode only."""
        prompt = playing.job.prompts[playing.index]
        try:
            async with asyncio.timeout(self._tool_timeout) as playing.clock:
                # A copy: siblings must not see what one of them does to the item.
                return as_score(await self._episodes[prompt.source].run(deepcopy(prompt.item), playing.conversation))
        except OutOfRoom:
            return Score(reward=0.0)
        except BaseException as error:
            if playing.given_up:
                raise
            late = playing.clock.expired() and isinstance(error, TimeoutError)
            return Score(reward=None, error=self._late() if late else one_line(error))

    async def _turn(self, playing: _Playing, token_ids: list[int], max_tokens: int) -> Completion:
        """One turn of the policy. While the engine has the word, no clock runs."""
        if playing.given_up:
            raise asyncio.CancelledError
        if playing.deadline is None:
            raise RuntimeError("generate() was called while another turn of the same episode is being sampled")
        playing.clock.reschedule(None)
        playing.deadline = None
        playing.turn = self._inbox.put(self._request(playing, token_ids, max_tokens))
        # By whoever ends the turn and not by the episode: a blocked event loop must not stop the clock.
        playing.turn.add_done_callback(lambda _: setattr(playing, "deadline", self._new_deadline()))
        try:
            return await asyncio.wrap_future(playing.turn)
        finally:
            if not playing.task.done():
                playing.clock.reschedule(asyncio.get_running_loop().time() + self._tool_timeout)

    def _request(self, playing: _Playing, token_ids: list[int], max_tokens: int) -> Request:
        job, turn = playing.job, playing.conversation.turns
        prompt = job.prompts[playing.index]
        return Request(
            key=(job.name, playing.index, playing.sibling, turn),
            token_ids=token_ids,
            seed=derive_seed(self._seed, job.name, prompt.index, playing.sibling, turn),
            sampling=replace(job.sampling, max_tokens=max_tokens),
        )
