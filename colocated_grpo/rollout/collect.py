"""Turn prompts into scored groups: single completions, or episodes of several turns.

No collective happens between the first prompt and the last reward. Each engine takes prompts from one counter in the
shared store, so a slow rank simply takes fewer, and ranks whose completions or episodes differ in length or number
cannot hang each other. Finished groups are gathered once, at the end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from colocated_grpo.environments.base import Scorer
from colocated_grpo.rollout.engine import Request
from colocated_grpo.rollout.episodes import EpisodeRunner
from colocated_grpo.rollout.inbox import Driver
from colocated_grpo.rollout.prompt_queue import Job, Share, Sharing
from colocated_grpo.rollout.reward_calls import Judged, RewardCall, RewardCalls
from colocated_grpo.runtime.distributed import World, derive_seed
from colocated_grpo.types import Completion, Group, Prompt, Rollout, Score

LOOK_SECONDS = 0.5

Decode = Callable[[Sequence[int]], str]
"""Token ids of a completion to text, special tokens left out."""
Gather = Callable[[], list[Group]]
"""Collective: all groups of a job, as `Collector.collect` gives them."""


class Stopped(Exception):
    """A stop was requested while the batch was being generated; its unfinished groups are given up."""


class Collector:
    """Drives this rank's engine through jobs. Built once; `collect` is called in lockstep by all ranks."""

    def __init__(
        self,
        driver: Driver,
        episodes: EpisodeRunner,
        scorers: Mapping[str, Scorer],
        decode: Decode,
        world: World,
        sharing: Sharing,
        *,
        seed: int,
        reward_workers: int,
        reward_timeout: float,
        stop_asked: Callable[[], bool],
    ) -> None:
        self._driver = driver
        self._episodes = episodes
        self._scorers = scorers
        self._decode = decode
        self._world = world
        self._sharing = sharing
        self._seed = seed
        self._reward_timeout = reward_timeout
        self._stop_asked = stop_asked
        self._rewards = RewardCalls(self._score, workers=reward_workers, timeout=reward_timeout)

    def collect(self, job: Job) -> list[Group]:
        """All groups of the job, in prompt order, on every rank. Raises Stopped everywhere if any was asked to stop."""
        gather = self.sample(job)
        self._driver.drain()
        return gather()

    def sample(self, job: Job) -> Gather:
        """Decode this rank's share, waiting for no other rank. What the inbox brought may still be under way then."""
        done = self._decode_share(job, self._sharing.open(job))
        return lambda: self._gather(job, done())

    def _gather(self, job: Job, done: dict[int, Group] | None) -> list[Group]:
        gathered = self._world.gather_objects(done)
        if any(part is None for part in gathered):
            raise Stopped
        groups = {index: group for part in gathered for index, group in part.items()}
        return [groups[index] for index in range(len(job.prompts))]

    def _decode_share(self, job: Job, share: Share) -> Callable[[], dict[int, Group] | None]:
        """What waits for the rewards: this rank's groups by prompt, or None if it was asked to stop."""
        batch = _Batch(job, self._seed, self._driver, self._episodes)
        calls: dict[int, RewardCall] = {}
        while batch.admit(share) or batch.running:
            for index in batch.advance():
                if share.counts:
                    calls[index] = self._rewards.submit(job.prompts[index], batch.completions[index])
            if share.may_stop and self._stop_asked():
                self._episodes.cancel()
                self._driver.abort()
                return lambda: None
        ended = time.monotonic()
        return lambda: self._judged(job, calls, ended) | (_played(job, batch) if share.counts else {})

    def _judged(self, job: Job, calls: Mapping[int, RewardCall], ended: float) -> dict[int, Group]:
        self._rewards.wait(list(calls.values()), since=ended)
        return {index: self._group(job, call) for index, call in calls.items()}

    def _score(self, prompt: Prompt, completions: Sequence[Completion]) -> Judged:
        texts = self._texts(completions)
        return texts, self._scorers[prompt.source].score(prompt, completions, texts)

    def _texts(self, completions: Sequence[Completion]) -> list[str]:
        return [self._decode(completion.token_ids) for completion in completions]

    def _group(self, job: Job, call: RewardCall) -> Group:
        texts, scores = call.judged() or self._failed(call.completions)
        rollouts = [
            _rollout(call.prompt, completion, score, text, job.sampling.temperature)
            for completion, score, text in zip(call.completions, scores, texts, strict=True)
        ]
        return Group(prompt=call.prompt, rollouts=rollouts)

    def _failed(self, completions: Sequence[Completion]) -> Judged:
        error = f"no reward within rollout.reward_timeout={self._reward_timeout:g} s"
        return self._texts(completions), [Score(reward=None, error=error)] * len(completions)

    def close(self) -> None:
        self._episodes.close()
        self._rewards.close()


class _Batch:
    """One job on one engine: what is under way, completions and played episodes by prompt."""

    def __init__(self, job: Job, seed: int, driver: Driver, episodes: EpisodeRunner) -> None:
        self._job = job
        self._seed = seed
        self._driver = driver
        self._episodes = episodes
        self.running = 0
        """Completions and episodes."""
        self.completions: dict[int, list[Completion | None]] = {}
        self.played: dict[int, list[Rollout]] = {}
        self._playing = 0
        """Episodes among the running."""
        self._next_look = 0.0
        """When overdue episodes are looked for although the engine decodes."""
        self._missing: dict[int, int] = {}
        self._exhausted = False

    def admit(self, share: Share) -> bool:
        """Begin whole groups while there is room; False when nothing is left to take."""
        room = min(self._driver.max_num_seqs, share.most_running)
        while self.running < room and not self._exhausted:
            index = share.take()
            if index is None:
                # Asking again would cost a round trip to the store with every decode step of the tail.
                self._exhausted = True
            elif self._episodes.plays(self._job.prompts[index].source):
                self._episodes.start(self._job, index)
                self._playing += self._job.group_size
                self.running += self._job.group_size
            else:
                self._submit(index)
        return not self._exhausted

    def _submit(self, index: int) -> None:
        size = self._job.group_size
        self.completions[index] = [None] * size
        self._missing[index] = size
        self.running += size
        self._driver.submit([self._request(index, sibling) for sibling in range(size)])

    def _request(self, index: int, sibling: int) -> Request:
        prompt = self._job.prompts[index]
        return Request(
            key=(index, sibling),
            token_ids=prompt.token_ids,
            seed=derive_seed(self._seed, self._job.name, prompt.index, sibling),
            sampling=self._job.sampling,
            pattern=prompt.pattern,
        )

    def advance(self) -> Iterator[int]:
        """One decode step; yields prompts all of whose completions are now there."""
        for (index, sibling), completion in self._driver.step():
            self.completions[index][sibling] = completion
            self.running -= 1
            self._missing[index] -= 1
            if not self._missing[index]:
                yield index
        if self._playing:
            self._put_away(self._episodes.finished())
            # Requests from outside may keep the engine busy without end.
            if not self._driver.running or time.monotonic() >= self._next_look:
                self._put_away(self._episodes.give_up_overdue())
                self._next_look = time.monotonic() + LOOK_SECONDS

    def _put_away(self, finished: Iterable[tuple[int, list[Rollout]]]) -> None:
        for index, rollouts in finished:
            self.played[index] = rollouts
            self.running -= len(rollouts)
            self._playing -= len(rollouts)


def _played(job: Job, batch: _Batch) -> dict[int, Group]:
    return {index: Group(prompt=job.prompts[index], rollouts=rollouts) for index, rollouts in batch.played.items()}


def _rollout(prompt: Prompt, completion: Completion, score: Score, text: str, temperature: float) -> Rollout:
    before, sampled = len(prompt.token_ids), len(completion.token_ids)
    return Rollout(
        token_ids=[*prompt.token_ids, *completion.token_ids],
        loss_mask=[False] * before + [True] * sampled,
        sampling_logprobs=[0.0] * before + completion.sampling_logprobs,
        prompt_length=before,
        text=text,
        finish_reason=completion.finish_reason,
        policy_version=completion.policy_version,
        temperature=temperature,
        score=score,
    )
