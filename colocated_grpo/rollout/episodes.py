"""Episodes of this rank: user coroutines on an event-loop thread that sample their turns through the inbox.

The main thread drives the engine and keeps decoding while episodes wait for their tools.
"""

import asyncio
import sys
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial

from colocated_grpo.environments.agents.sequences import AgentConversation
from colocated_grpo.environments.base import AgentLimits, AnswerError, Playable
from colocated_grpo.environments.chat import ChatCodec, ContextExhausted, Conversation
from colocated_grpo.environments.rewards.scoring import as_score
from colocated_grpo.environments.user_code.loading import one_line, retire_loop, start_loop
from colocated_grpo.rollout.engine import Request, only_temperature
from colocated_grpo.rollout.inbox import Inbox
from colocated_grpo.rollout.prompt_queue import Job
from colocated_grpo.runtime.distributed import derive_seed
from colocated_grpo.runtime.user_code import Line, innermost, limited, line_of_thread, lines_of_error
from colocated_grpo.types import Completion, Prompt, Rollout, Score

GRACE_SECONDS = 2.0
"""Grace period after a deadline. An episode that still runs blocks the event loop or suppresses cancellation."""
OVERDUE_CHECK_SECONDS = 0.5

Ended = Callable[[list[Rollout]], None]
"""Takes all rollouts of a prompt, in sibling order, after its last episode."""


@dataclass(eq=False, kw_only=True, slots=True)
class _Playing:
    """One episode."""

    job: Job
    index: int
    sibling: int
    group: dict[int, Rollout]
    """Finished siblings of the prompt."""
    ended: Ended
    deadline: float | None = None
    """Deadline of the episode's tools, in time.monotonic(). None before it begins and while the engine samples."""
    clock: asyncio.Timeout | None = None
    """The event loop's timeout for the same deadline, which cancels the episode. None if the episode is not running."""
    conversation: Conversation | AgentConversation = field(init=False)
    loop: asyncio.AbstractEventLoop | None = None
    """None before the episode begins."""
    task: Future[Rollout] = field(init=False)
    """Set when the episode begins."""
    requests: int = 0
    """Turns that were requested so far."""
    sampling: set[Future[Completion]] = field(default_factory=set)
    """Turns being sampled. An agent may request several at once."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Guards `sampling` and `deadline`, which the engine's thread changes too."""
    abandoned: bool = False

    @property
    def prompt(self) -> Prompt:
        return self.job.prompts[self.index]

    def set_clock(self, when: float | None) -> None:
        """Move the event loop's timeout if the episode runs and the timeout has not expired."""
        if self.clock is not None and not self.clock.expired():
            self.clock.reschedule(when)


@dataclass(eq=False)
class EpisodeRunner:
    """Runs the episodes of one rank. Public methods must be called on the thread that drives the engine."""

    episodes: Mapping[str, Playable]
    codec: ChatCodec
    inbox: Inbox
    seed: int = field(kw_only=True)
    tool_timeout: float = field(kw_only=True)
    agents: Mapping[str, AgentLimits] = field(default_factory=dict, kw_only=True)
    """Limits by source, for the episodes whose turns are requested over HTTP."""

    def __post_init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._playing: set[_Playing] = set()
        self._ended: deque[_Playing] = deque()
        self._next_overdue_check = 0.0
        self._waiting: defaultdict[str, deque[_Playing]] = defaultdict(deque)
        """Episodes by source, queued until the source's limit allows them to run."""
        self._running: Counter[str] = Counter()
        """Number of running episodes, by source."""

    @property
    def running(self) -> int:
        """Episodes that have not ended, queued ones included."""
        return len(self._playing)

    def start(self, job: Job, index: int, ended: Ended) -> None:
        """Start the episodes of one prompt of the job. Episodes above their source's limit are queued.

        `settle` calls `ended`, perhaps in a later step of the run.
        """
        source = job.prompts[index].source
        group: dict[int, Rollout] = {}
        for sibling in range(job.group_size):
            playing = _Playing(job=job, index=index, sibling=sibling, group=group, ended=ended)
            prompt, turn, limits = playing.prompt, partial(self._turn, playing), self.agents.get(source)
            if limits is None:
                playing.conversation = Conversation(prompt, self.codec, job.sampling.max_tokens, turn)
            else:
                playing.conversation = AgentConversation(prompt, self.codec, limits, turn)
            self._playing.add(playing)
            self._waiting[source].append(playing)
            self._begin_waiting(source)

    def _begin_waiting(self, source: str) -> None:
        """Begin queued episodes up to their source's limit."""
        most = self.agents[source].max_running if source in self.agents else sys.maxsize
        while self._waiting[source] and self._running[source] < most:
            self._running[source] += 1
            playing = self._waiting[source].popleft()
            # One loop for all batches: connections of user code are bound to the loop that opened them.
            playing.loop = self._loop = self._loop or start_loop("episodes")
            playing.deadline = time.monotonic() + self.tool_timeout
            playing.task = asyncio.run_coroutine_threadsafe(self._play(playing), playing.loop)
            playing.task.add_done_callback(partial(self._end, playing))

    def settle(self, *, idle: bool) -> None:
        """Call `ended` for prompts whose last episode has ended, and end overdue episodes from time to time.

        idle: no request is running.
        """
        while self._ended:
            if (playing := self._ended.popleft()) in self._playing:
                self._store(playing, playing.task.result())
        # Check while the engine decodes too: requests of other clients may keep the engine busy for ever.
        if idle or time.monotonic() >= self._next_overdue_check:
            self._give_up_overdue()
            self._next_overdue_check = time.monotonic() + OVERDUE_CHECK_SECONDS

    def _give_up_overdue(self) -> None:
        """End episodes past their deadline that block the event loop or suppress cancellation.

        A coroutine cannot be killed, so it is abandoned with its thread. Later episodes get a new thread.
        """
        now = time.monotonic()
        overdue = [one for one in self._playing if one.deadline is not None and now > one.deadline + GRACE_SECONDS]
        for playing in overdue:
            line = line_of_thread(getattr(playing.loop, "_thread_id", None))  # asyncio has no public name for it
            playing.abandoned = True
            playing.task.cancel()
            if playing.loop is self._loop:
                self._abandon_loop()
            error = f"{self._timeout_error(line)}; it blocks the event loop: run blocking code with asyncio.to_thread"
            self._store(playing, self._rollout(playing, Score(reward=None, error=error)))

    def cancel(self) -> None:
        """Abandon every episode."""
        for playing in self._playing:
            playing.abandoned = True
            if playing.loop is not None:
                playing.task.cancel()
        self._playing.clear()
        self._waiting.clear()
        self._running.clear()

    def close(self) -> None:
        self.cancel()
        self._abandon_loop()

    def _abandon_loop(self) -> None:
        """Abandon the loop, if there is one. Later episodes get a new loop."""
        if self._loop is not None:
            retire_loop(self._loop)
        self._loop = None

    def _end(self, playing: _Playing, _task: Future[Rollout]) -> None:
        self._ended.append(playing)
        self.inbox.wake()

    def _store(self, playing: _Playing, rollout: Rollout) -> None:
        self._playing.remove(playing)
        self._running[playing.prompt.source] -= 1
        self._begin_waiting(playing.prompt.source)
        group = playing.group
        group[playing.sibling] = rollout
        if len(group) == playing.job.group_size:
            playing.ended([group[sibling] for sibling in sorted(group)])

    def _timeout_error(self, line: Line | None) -> str:
        where = "" if line is None else f", in {line}"
        return f"no turn and no result within rollout.tool_timeout={self.tool_timeout:g} s{where}"

    def _rollout(self, playing: _Playing, score: Score) -> Rollout:
        sampling = playing.job.sampling
        return playing.conversation.rollout(score, sampling.temperature, plain=only_temperature(sampling))

    # The methods below run on the event loop.

    async def _play(self, playing: _Playing) -> Rollout:
        score = await self._score(playing)
        for turn in list(playing.sampling):
            # run() may return before a turn that it started has ended. The engine must not continue such a turn.
            turn.cancel()
        return self._rollout(playing, score)

    async def _score(self, playing: _Playing) -> Score:
        """Score of the episode. Any error of user code costs only this episode."""
        prompt = playing.prompt
        clock = playing.clock = asyncio.timeout(self.tool_timeout)
        try:
            async with clock:
                item = deepcopy(prompt.item)  # an episode may change its item, and siblings must not see the change
                with limited():
                    result = await self.episodes[prompt.source].run(item, playing.conversation)
                    return as_score(result, "run()")
        except ContextExhausted:
            return Score(reward=0.0)
        except AnswerError as error:
            return Score(reward=error.reward, error=one_line(error))
        except BaseException as error:
            if playing.abandoned:
                raise
            if clock.expired() and isinstance(error, TimeoutError):
                line = innermost(lines_of_error(error.__cause__ or error))  # which the cancellation has interrupted
                return Score(reward=None, error=self._timeout_error(line))
            return Score(reward=None, error=one_line(error))
        finally:
            playing.clock = None

    async def _turn(
        self, playing: _Playing, token_ids: list[int], max_tokens: int, stop: Sequence[str] = ()
    ) -> Completion:
        """Sample one turn of the policy. The timeout is paused meanwhile."""
        if playing.abandoned:
            raise asyncio.CancelledError
        playing.set_clock(None)
        job, number = playing.job, playing.requests
        playing.requests += 1
        request = Request(
            key=(job.name, playing.index, playing.sibling, number),
            token_ids=token_ids,
            seed=derive_seed(self.seed, job.name, playing.prompt.index, playing.sibling, number),
            sampling=replace(job.sampling, max_tokens=max_tokens, stop=(*job.sampling.stop, *stop)),
            routes=job.routes,
        )
        turn = self.inbox.put(request)
        with playing.lock:
            playing.sampling.add(turn)
            playing.deadline = None
        # `_sampled` runs on the thread that completes the turn, not on the event loop, which may be blocked.
        turn.add_done_callback(partial(self._sampled, playing))
        try:
            return await asyncio.wrap_future(turn)
        finally:
            if not playing.sampling:
                playing.set_clock(asyncio.get_running_loop().time() + self.tool_timeout)

    def _sampled(self, playing: _Playing, turn: Future[Completion]) -> None:
        with playing.lock:
            playing.sampling.discard(turn)
            if not playing.sampling:
                playing.deadline = time.monotonic() + self.tool_timeout
