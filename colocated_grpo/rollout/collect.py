"""Turn prompts into scored groups: single completions, or episodes of several turns.

No collective over all ranks runs between the first prompt and the last reward. Each engine takes prompts from a queue,
so a slow rank takes fewer prompts, and ranks whose completions or episodes differ in length or number cannot block each
other. Finished groups are gathered once, at the end.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import cast

from colocated_grpo.environments.base import Scorer
from colocated_grpo.rollout.engine import Request, Sampling, only_temperature
from colocated_grpo.rollout.episodes import EpisodeRunner
from colocated_grpo.rollout.inbox import Driver
from colocated_grpo.rollout.prompt_queue import Dispatch, Job, PromptQueue
from colocated_grpo.rollout.reward_calls import Judged, RewardCall, RewardCalls
from colocated_grpo.runtime.distributed import World, derive_seed
from colocated_grpo.types import Completion, Group, Prompt, Rollout, Score

Decode = Callable[[Sequence[int]], str]
"""Converts the token ids of a completion to text without special tokens."""
Gather = Callable[[], list[Group]]
"""Collective: return all groups of a job, as `Collector.collect` does."""


class Stopped(Exception):
    """A stop was requested while the batch was being generated. The groups of this batch are discarded."""


@dataclass(eq=False)
class Collector:
    """Runs jobs on this rank's engine. Built once; all ranks call `collect` in lockstep."""

    driver: Driver
    episodes: EpisodeRunner
    scorers: Mapping[str, Scorer]
    decode: Decode
    world: World
    dispatch: Dispatch
    _: KW_ONLY
    seed: int
    reward_workers: int
    reward_timeout: float
    stop_requested: Callable[[], bool]

    def __post_init__(self) -> None:
        workers, timeout = self.reward_workers, self.reward_timeout
        self.rewards = RewardCalls(self._judge, workers=workers, timeout=timeout, stop_requested=self.stop_requested)

    def collect(self, job: Job) -> list[Group]:
        """Return all groups of the job on every rank, in prompt order. Raises Stopped on all ranks if a rank stops."""
        gather = self.sample(job)
        self.driver.drain()
        return gather()

    def sample(self, job: Job) -> Gather:
        """Decode this rank's prompts without waiting for rewards, other ranks or inbox requests."""
        queue, batch = self.dispatch(job), _Batch(job, self.seed, self.driver, self.episodes)
        calls: dict[int, RewardCall] = {}
        while batch.admit(queue) or batch.running:
            for index, completions in batch.advance():
                if queue.counts:
                    calls[index] = self.rewards.submit(job.prompts[index], completions)
            if queue.may_stop and self.stop_requested():
                self.episodes.cancel()
                self.driver.abort()
                return lambda: self._gather(job, None)
        ended = time.monotonic()

        def gather() -> list[Group]:
            judged = self.groups(calls, job.sampling, ended)
            played = batch.played.items() if queue.counts else ()
            episodes = {index: Group(prompt=job.prompts[index], rollouts=rollouts) for index, rollouts in played}
            return self._gather(job, None if judged is None else judged | episodes)

        return gather

    def _gather(self, job: Job, done: dict[int, Group] | None) -> list[Group]:
        """done: this rank's groups by prompt; None after a stop."""
        gathered = self.world.gather_objects(done)
        finished = [part for part in gathered if part is not None]
        if len(finished) < len(gathered):
            raise Stopped
        groups = {index: group for part in finished for index, group in part.items()}
        return [groups[index] for index in range(len(job.prompts))]

    def groups(self, calls: Mapping[int, RewardCall], sampling: Sampling, since: float) -> dict[int, Group] | None:
        """Wait for the rewards, and return the group of each call. Returns None if they are late after a stop request.

        sampling: settings of all completions. since: earliest start of the reward timeout, in time.monotonic().
        """
        if not self.rewards.wait(list(calls.values()), since=since):
            return None
        return {index: self._group(call, sampling) for index, call in calls.items()}

    def _judge(self, prompt: Prompt, completions: Sequence[Completion]) -> Judged:
        texts = self._texts(completions)
        return texts, self.scorers[prompt.source].score(prompt, completions, texts)

    def _texts(self, completions: Sequence[Completion]) -> list[str]:
        return [self.decode(completion.token_ids) for completion in completions]

    def _group(self, call: RewardCall, sampling: Sampling) -> Group:
        if (judged := call.judged()) is None:
            late = Score(reward=None, error=f"{self.rewards.timeout_error}{call.place}")
            judged = self._texts(call.completions), [late] * len(call.completions)
        texts, scores = judged
        rollouts = [
            _rollout(call.prompt, completion, score, text, sampling)
            for completion, score, text in zip(call.completions, scores, texts, strict=True)
        ]
        return Group(prompt=call.prompt, rollouts=rollouts)

    def close(self) -> None:
        self.episodes.close()
        self.rewards.close()


class _Batch:
    """One job on one engine: running requests, and finished completions and episodes by prompt."""

    def __init__(self, job: Job, seed: int, driver: Driver, episodes: EpisodeRunner) -> None:
        self._job = job
        self._seed = seed
        self._driver = driver
        self._episodes = episodes
        self.running = 0
        """Running completions and episodes."""
        self.played: dict[int, list[Rollout]] = {}
        self._completions: dict[int, dict[int, Completion]] = {}
        """[prompt][sibling]"""
        self._playing = 0
        """Running episodes."""
        self._exhausted = False

    def admit(self, queue: PromptQueue) -> bool:
        """Start whole groups while there is room. Returns False when the queue is empty."""
        room, size = min(self._driver.max_num_seqs, queue.max_running), self._job.group_size
        while self.running < room and not self._exhausted:
            if (index := queue.take()) is None:
                self._exhausted = True  # taking again would cost a store round trip per decode step
            elif self._job.prompts[index].source in self._episodes.episodes:
                self._episodes.start(self._job, index, partial(self._store, index))
                self._playing += size
                self.running += size
            else:
                self._completions[index] = {}
                self.running += size
                self._driver.submit([self._request(index, sibling) for sibling in range(size)])
        return not self._exhausted

    def _request(self, index: int, sibling: int) -> Request:
        prompt = self._job.prompts[index]
        return Request(
            key=(index, sibling),
            token_ids=prompt.token_ids,
            seed=derive_seed(self._seed, self._job.name, prompt.index, sibling),
            sampling=self._job.sampling,
            pattern=prompt.pattern,
            routes=self._job.routes,
        )

    def advance(self) -> Iterator[tuple[int, list[Completion]]]:
        """Run one step of the engine. Yields each prompt that it finished, with its completions in sibling order."""
        for key, completion in self._driver.step():
            index, sibling = cast(tuple[int, int], key)
            group = self._completions[index]
            group[sibling] = completion
            self.running -= 1
            if len(group) == self._job.group_size:
                yield index, [group[sibling] for sibling in range(self._job.group_size)]
        if self._playing:
            self._episodes.settle(idle=not self._driver.running)

    def _store(self, index: int, rollouts: list[Rollout]) -> None:
        self.played[index] = rollouts
        self.running -= len(rollouts)
        self._playing -= len(rollouts)


def _rollout(prompt: Prompt, completion: Completion, score: Score, text: str, sampling: Sampling) -> Rollout:
    before, sampled = len(prompt.token_ids), len(completion.token_ids)
    return Rollout(
        token_ids=[*prompt.token_ids, *completion.token_ids],
        loss_mask=[False] * before + [True] * sampled,
        sampling_logprobs=[0.0] * before + completion.sampling_logprobs,
        prompt_length=before,
        text=text,
        finish_reason=completion.finish_reason,
        policy_version=completion.policy_version,
        newer_versions=[(before + start, version) for start, version in completion.newer_versions],
        temperature=sampling.temperature,
        score=score,
        plain=only_temperature(sampling) and prompt.pattern is None,
        routes=completion.routes,
    )
