"""Partial rollouts: a step ends when enough of its groups are complete, and the next step continues the others.

Each engine samples its part of a pool of pending groups, which is larger than a step. When as many groups as it trains
are complete, its other requests are interrupted. Their tokens are kept on the host, and the next step continues them
with its own weights. The groups of an engine stay with it, and each engine decides alone when its step ends. So no rank
waits for another while it samples, and a resumed run without conversations repeats the uninterrupted one.

A step finishes the messages of conversations that are being sampled. Later steps sample the messages after them; tools
run while the policy trains. Conversations are not part of a checkpoint: a resumed run plays them from the start.

Every drawn prompt is trained once: complete groups are trained in the order in which they were drawn, a step waits for
groups that have reached `max_age`, and the last steps draw fewer prompts. Prompts with long completions are thus
trained as often as others.
"""

import json
import time
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from typing import NamedTuple, cast

from colocated_grpo.environments.base import BatchResult, EnvironmentSetupError
from colocated_grpo.rollout.collect import Stopped
from colocated_grpo.rollout.engine import Finished, Request, Sampling
from colocated_grpo.rollout.inbox import Driver
from colocated_grpo.rollout.prompt_queue import EnginePlace, Job
from colocated_grpo.rollout.reward_calls import RewardCall
from colocated_grpo.rollout.supply import PENDING, Order, PromptSupply, Supply
from colocated_grpo.runtime.distributed import derive_seed
from colocated_grpo.settings.generation import PartialConfig
from colocated_grpo.types import Completion, Group, JsonObject, Prompt, Rollout, shallow

UNFINISHED = "abort"
"""finish_reason of a completion that a later step continues."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pending:
    """A group that is not trained yet."""

    prompt: Prompt
    step: int
    """The step that drew the prompt."""
    completions: list[Completion]
    """In sibling order. Empty for conversations, which are not part of a checkpoint."""

    @property
    def is_sampled(self) -> bool:
        return bool(self.completions) and all(one.finish_reason != UNFINISHED for one in self.completions)


class _Sampled(NamedTuple):
    """Groups that one rank sampled in a step, and what it keeps."""

    groups: list[Group]
    kept: int = 0
    """Unfinished completions and conversations."""
    kept_tokens: int = 0
    """Tokens of these completions."""


@dataclass(eq=False)
class PartialSupply(Supply):
    """Supply whose steps leave unfinished groups to later steps."""

    prompts: PromptSupply
    config: PartialConfig
    sampled: Callable[[], Finished]
    """`LocalEngine.sampled`."""
    place: EnginePlace
    num_steps: int

    def __post_init__(self) -> None:
        self._pending: list[Pending] = []
        """Groups of this rank's engine that are not trained yet, as they were when the step began."""
        self._left: list[Pending] = []
        """`_pending` of the next step."""
        self._sizes = [0] * self.place.num_engines
        """Number of pending groups of each engine."""
        self._scored: dict[int, Group] = {}
        """Complete groups that are not trained yet, by prompt index."""
        self._begun: set[int] = set()
        """Prompt indices of the conversations that have begun and are not trained yet."""
        self._metrics: dict[str, float] = {}

    def order(self, step: int) -> Order:
        """Draw the prompts that fill the pool."""
        trained = self.place.parts(self.prompts.config.prompts_per_step)
        pools = [min(ceil(part * self.config.oversample), part * (self.num_steps - step)) for part in trained]
        missing = [max(0, pool - kept) for pool, kept in zip(pools, self._sizes, strict=True)]
        drawn = dealt(self.prompts.draw(sum(missing)), missing)[self.place.engine]
        size, episodes = self.prompts.config.group_size, self.prompts.collector.episodes.episodes
        new = [new_group(prompt, step, 0 if prompt.source in episodes else size) for prompt in drawn]
        groups = [*self._pending, *new]
        self._sizes = [kept + new - used for kept, new, used in zip(self._sizes, missing, trained, strict=True)]
        return lambda: self._gathered(self._sample(step, groups, trained[self.place.engine]))

    def _gathered(self, sampled: _Sampled | None) -> list[Group]:
        gathered = self.prompts.collector.world.gather_objects(sampled)
        parts = [part for part in gathered if part is not None]
        if len(parts) < len(gathered):
            raise Stopped
        self._metrics = {
            "partial/completions": float(sum(part.kept for part in parts)),
            "partial/tokens": float(sum(part.kept_tokens for part in parts)),
        }
        return sorted((group for part in parts for group in part.groups), key=lambda group: group.prompt.index)

    def _sample(self, step: int, groups: list[Pending], wanted: int) -> _Sampled | None:
        """Continue the groups until enough are complete, and return `wanted` of these. Returns None after a stop."""
        collector, sampling = self.prompts.collector, self.prompts.sampling
        begin = self._starter(step, groups)
        batch = PartialBatch(groups, collector.driver, sampling, collector.seed)
        batch.include(self._scored)
        calls = self._score(batch, batch.complete)  # of a resumed run, whose checkpoint has no scores
        while not batch.may_end(wanted, step, self.config.max_age):
            begin()
            calls |= self._score(batch, batch.advance())
            collector.episodes.settle(idle=not collector.driver.running)
            batch.include(self._scored)
            if self.place.may_stop and collector.stop_requested():
                collector.episodes.cancel()
                collector.driver.abort()
                return None
        batch.interrupt(self.sampled())
        collector.driver.drain()  # messages of conversations; the next ones wait for the next step
        if (scored := collector.groups(calls, sampling, time.monotonic())) is None:
            return None
        self._scored |= scored
        chosen, self._left = batch.split(wanted)
        if not self.place.counts:
            return _Sampled([])
        trained = [self._scored.pop(group.prompt.index) for group in chosen]
        self._begun -= {group.prompt.index for group in trained}
        unfinished = (one for group in self._left for one in group.completions if one.finish_reason == UNFINISHED)
        kept = [tokens for one in unfinished if (tokens := len(one.token_ids))]
        return _Sampled(trained, len(kept) + collector.episodes.running, sum(kept))

    def _starter(self, step: int, groups: Sequence[Pending]) -> Callable[[], None]:
        """Return a function that begins conversations, while fewer are unfinished than the engine decodes at once.

        All turns are queued in order of arrival, so if all began at once, all would end at about the same time.
        """
        collector, sampling = self.prompts.collector, self.prompts.sampling
        new = [group.prompt for group in groups if not group.completions and group.prompt.index not in self._begun]
        job = Job(name=f"train/{step}", prompts=new, group_size=self.prompts.config.group_size, sampling=sampling)
        queue = iter(enumerate(new))

        def begin() -> None:
            while collector.episodes.running < collector.driver.max_num_seqs and (first := next(queue, None)):
                place, prompt = first
                self._begun.add(prompt.index)
                collector.episodes.start(job, place, partial(self._store, prompt))

        return begin

    def _store(self, prompt: Prompt, rollouts: list[Rollout]) -> None:
        self._scored[prompt.index] = Group(prompt=prompt, rollouts=rollouts)

    def _score(self, batch: "PartialBatch", complete: Iterable[int]) -> dict[int, RewardCall]:
        """Start the rewards of complete groups. Returns the calls by prompt index."""
        rewards = self.prompts.collector.rewards
        return {
            group.prompt.index: rewards.submit(group.prompt, group.completions)
            for group in (batch.groups[index] for index in complete)
            if self.place.counts and group.prompt.index not in self._scored
        }

    def settle(self, groups: list[Group]) -> BatchResult:
        self._pending, self._left = self._left, []
        settled = self.prompts.settle(groups)
        return replace(settled, metrics=settled.metrics | self._metrics)

    def state_dict(self) -> JsonObject:
        """Position, and the pending groups of each engine. Collective."""
        own = [_as_json(group) for group in self._pending] if self.place.counts else None
        groups = [part for part in self.prompts.collector.world.gather_objects(own) if part is not None]
        return {**(self.prompts.state_dict() or {}), PENDING: groups}

    def load_state_dict(self, state: JsonObject) -> None:
        """Restore the position and the groups, which are dealt anew if the number of engines has changed."""
        engines = self.place.num_engines
        limit = self.prompts.sampling.max_tokens
        saved = [[_from_json(group, limit) for group in part] for part in state.get(PENDING, [])]
        if len(saved) != engines:
            groups = sorted((group for part in saved for group in part), key=lambda group: group.prompt.index)
            per_step = self.prompts.config.prompts_per_step
            # As a step's groups are dealt, or an engine could have more groups than its remaining steps train.
            saved = [[] for _ in range(engines)]
            for place, group in enumerate(groups):
                saved[place % per_step % engines].append(group)
        self._pending, self._sizes = saved[self.place.engine], [len(part) for part in saved]
        self.prompts.load_state_dict({**state, PENDING: []})


class PartialBatch:
    """The groups of one step on one engine."""

    def __init__(self, groups: Sequence[Pending], driver: Driver, sampling: Sampling, seed: int) -> None:
        """Submit the unfinished completions, those of the oldest groups first."""
        self.groups = [replace(group, completions=list(group.completions)) for group in groups]
        self.complete = {place for place, group in enumerate(groups) if group.is_sampled}
        self._playing = {place for place, group in enumerate(groups) if not group.completions}
        self._changed = True
        """True if groups were completed since the last `may_end`."""
        self._driver = driver
        driver.submit(
            [
                _request(self.groups[place].prompt, sibling, completion, (place, sibling), sampling, seed)
                for (place, sibling), completion in self._unfinished().items()
            ]
        )

    def _unfinished(self) -> dict[tuple[int, int], Completion]:
        """Return the unfinished completions by the key of their request: place of the group, sibling."""
        return {
            (place, sibling): completion
            for place, group in enumerate(self.groups)
            for sibling, completion in enumerate(group.completions)
            if completion.finish_reason == UNFINISHED
        }

    def advance(self) -> Iterator[int]:
        """Run one step of the engine. Yields the groups that it completed."""
        for place in dict.fromkeys(self.add(self._driver.step())):  # siblings may end in the same step
            if self.groups[place].is_sampled:
                self.complete.add(place)
                self._changed = True
                yield place

    def include(self, scored: Container[int]) -> None:
        """Mark the groups of conversations that have ended as complete. scored: prompt indices."""
        ended = {place for place in self._playing if self.groups[place].prompt.index in scored}
        self._playing -= ended
        self.complete |= ended
        self._changed |= bool(ended)

    def interrupt(self, sampled: Finished) -> None:
        """End the requests of this batch, and keep what they have sampled."""
        unfinished = self._unfinished().keys()
        self.add((key, completion) for key, completion in sampled if key in unfinished)
        self._driver.withdraw(unfinished)

    def split(self, wanted: int) -> tuple[list[Pending], list[Pending]]:
        """Return the `wanted` oldest complete groups, and all others."""
        chosen = dict.fromkeys(sorted(self.complete)[:wanted])  # in order, and searched for each group
        left = [group for index, group in enumerate(self.groups) if index not in chosen]
        return [self.groups[index] for index in chosen], left

    def may_end(self, wanted: int, step: int, max_age: int) -> bool:
        """True if `wanted` groups are complete, and no other would exceed `max_age` if each step trains `wanted`.

        Always true if all groups are complete: a resumed run may have another `max_age`, or more groups than before.
        """
        if len(self.complete) == len(self.groups):
            return True
        if len(self.complete) < wanted or not self._changed:
            return False
        self._changed = False
        last_steps = [group.step + max_age for group in self.split(wanted)[1]]
        return all(sum(last <= step + later for last in last_steps) <= later * wanted for later in range(max_age))

    def add(self, sampled: Iterable[tuple[Hashable, Completion]]) -> list[int]:
        """Append what was sampled to the groups, and return the changed groups."""
        changed = []
        for key, rest in sampled:
            place, sibling = cast(tuple[int, int], key)
            completions = self.groups[place].completions
            completions[sibling] = continued(completions[sibling], rest)
            changed.append(place)
        return changed


def _request(
    prompt: Prompt, sibling: int, sampled: Completion, key: tuple[int, int], sampling: Sampling, seed: int
) -> Request:
    """Return the request for the tokens after those already sampled."""
    before = len(sampled.token_ids)
    return Request(
        key=key,
        token_ids=prompt.token_ids + sampled.token_ids,
        seed=derive_seed(seed, "partial", prompt.index, sibling, before),
        sampling=replace(sampling, max_tokens=sampling.max_tokens - before),
    )


def continued(first: Completion, rest: Completion) -> Completion:
    """Return a completion with the tokens of both. `rest` was sampled later, perhaps with newer weights."""
    if not (start := len(first.token_ids)):
        return rest
    if not rest.token_ids:
        return replace(first, finish_reason=rest.finish_reason)
    versions = [(0, first.policy_version), *first.newer_versions]
    newer = [] if rest.policy_version == versions[-1][1] else [(start, rest.policy_version)]
    return replace(
        first,
        token_ids=first.token_ids + rest.token_ids,
        sampling_logprobs=first.sampling_logprobs + rest.sampling_logprobs,
        finish_reason=rest.finish_reason,
        newer_versions=first.newer_versions + newer,
    )


def new_group(prompt: Prompt, step: int, group_size: int) -> Pending:
    """Return a group without tokens. Raises EnvironmentSetupError if a checkpoint cannot contain the prompt's item."""
    try:
        problem = None if json.loads(json.dumps(prompt.item)) == prompt.item else "tuples, or keys that are not text"
    except (TypeError, ValueError) as error:
        problem = str(error)
    if problem is not None:
        what = f"an item of {prompt.source!r} cannot be stored in a checkpoint"
        raise EnvironmentSetupError(f"rollout.partial: {what}: {problem}; make it JSON")
    empty = Completion(token_ids=[], sampling_logprobs=[], finish_reason=UNFINISHED, policy_version=0)
    return Pending(prompt=prompt, step=step, completions=[empty] * group_size)


def dealt(prompts: Sequence[Prompt], counts: Sequence[int]) -> list[list[Prompt]]:
    """Deal the prompts in turn, `counts` to each engine."""
    hands: list[list[Prompt]] = [[] for _ in counts]
    deck = iter(prompts)
    for _ in range(max(counts)):
        for hand, count in zip(hands, counts, strict=True):
            if len(hand) < count:
                hand.append(next(deck))
    return hands


def _as_json(group: Pending) -> JsonObject:
    return {**shallow(group), "prompt": shallow(group.prompt), "completions": list(map(shallow, group.completions))}


def _from_json(group: JsonObject, limit: int) -> Pending:
    """Return the group. limit: length at which a completion ends, which a resumed run may have lowered."""
    completions = []
    for saved in group["completions"]:
        newer = [(start, version) for start, version in saved["newer_versions"]]
        reason = "length" if len(saved["token_ids"]) >= limit else saved["finish_reason"]
        completions.append(Completion(**saved | {"newer_versions": newer, "finish_reason": reason}))
    return Pending(prompt=Prompt(**group["prompt"]), step=group["step"], completions=completions)
