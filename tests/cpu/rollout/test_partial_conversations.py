"""Conversations under partial rollouts: a step does not wait for their tools, and finishes the message it began."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from colocated_grpo.environments.chat import Conversation
from colocated_grpo.rollout.collect import Stopped
from colocated_grpo.rollout.engine import Sampling
from colocated_grpo.rollout.prompt_queue import Job
from colocated_grpo.settings.generation import PartialConfig
from colocated_grpo.summaries import rollout_metrics
from colocated_grpo.types import Group, Prompt, Rollout
from tests.support.partial_supply import GROUP, Prompts, Run
from tests.support.ranks import single_rank_world

WANTED = 2


class Talk:
    """Three messages with an answer between them. The answers to slow prompts wait until the test opens the gate."""

    def __init__(self, slow: set[int]) -> None:
        self.slow = slow
        self.played: list[int] = []
        self.gate: asyncio.Event | None = None
        self.is_open = False
        self.waiting = 0

    def prompts(self, seed: int, split: str) -> Iterator[dict[str, Any]]:
        return iter(())

    async def run(self, item: dict[str, Any], model: Conversation) -> float:
        self.played.append(item["number"])
        for turn in range(3):
            if turn:
                if item["number"] in self.slow and not self.is_open:
                    self.waiting += 1
                    self.gate = self.gate or asyncio.Event()
                    await self.gate.wait()
                model.observe("go")
            await model.generate(8)
        return 1.0

    def open(self, run: Run) -> None:
        """Let the slow prompts go on."""
        assert self.gate is not None
        self.is_open = True
        loop = run.collector.episodes._loop
        assert loop is not None
        loop.call_soon_threadsafe(self.gate.set)


def run_of(talk: Talk, steps: int = 3, sources: tuple[str, ...] = ("talk",), **partial: Any) -> Run:
    config = PartialConfig(**{"oversample": 1.5, "max_age": 1, **partial})
    prompts = Prompts(sources=sources)
    return Run(single_rank_world(), config, prompts, steps=steps, wanted=WANTED, episodes={"talk": talk})


def indices(groups: list[Group]) -> list[int]:
    return [group.prompt.index for group in groups]


def versions(rollout: Rollout) -> list[int]:
    return [rollout.policy_version, *(version for _, version in rollout.newer_versions)]


def message_starts(rollout: Rollout) -> list[int]:
    mask = [False, *rollout.loss_mask]
    return [place for place, (before, sampled) in enumerate(pairwise(mask)) if sampled and not before]


def test_a_conversation_that_waits_for_its_tool_is_continued_with_the_next_weights():
    talk = Talk(slow={0})
    run = run_of(talk)
    assert indices(run.step(0)) == [1, 2], "the step does not wait for prompt 0"
    assert run.metrics["partial/completions"] == GROUP

    talk.open(run)
    groups = run.step(1)
    assert indices(groups)[0] == 0
    for rollout in groups[0].rollouts:
        assert versions(rollout) == [0, 1]
        assert [start for start, _ in rollout.newer_versions] == message_starts(rollout)[1:2]
        assert rollout.score.reward == 1.0
    assert talk.played.count(0) == GROUP, "its first message was not sampled again"
    assert 0 < rollout_metrics(groups[:1], 1)["staleness/tokens"] < 1
    run.collector.close()


def test_completions_are_interrupted_and_messages_are_not():
    talk = Talk(slow={3})
    run = run_of(talk, steps=12, sources=("own", "own", "own", "talk"), oversample=2, max_age=3)

    def wait_for_the_tool() -> None:
        """Let completions make no progress until the slow conversations have reached their tool."""
        if talk.waiting < GROUP:
            held = {key: (steps + 1, one) for key, (steps, one) in run.engine.running.items() if len(key) == 2}
            run.engine.running |= held

    run.engine._on_step = wait_for_the_tool
    steps = [run.step(0)]
    talk.open(run)
    steps += [run.step(step) for step in range(1, 12)]

    assert [len(groups) for groups in steps] == [WANTED] * 12
    assert sorted(index for groups in steps for index in indices(groups)) == list(range(24))
    parts = {"own": 0, "talk": 0}
    for group in (group for groups in steps for group in groups):
        for rollout in group.rollouts:
            starts = {start for start, _ in rollout.newer_versions}
            parts[group.prompt.source] += len(starts)
            if group.prompt.source == "talk":
                assert starts <= set(message_starts(rollout))
                assert versions(rollout) == sorted(set(versions(rollout)))
    assert parts["own"] and parts["talk"], "both are continued"
    aborted = [event for event in run.engine.events if event.startswith("abort ")]
    assert aborted and not any("train/" in event for event in aborted)
    run.collector.close()


def test_a_step_ends_early_with_more_conversations_than_the_engine_decodes_at_once():
    talk = Talk(slow=set())
    run = run_of(talk, steps=4, oversample=4, max_age=3)
    run.engine.max_num_seqs = 2
    steps = [run.step(0)]
    assert len(talk.played) < 4 * WANTED * GROUP, "the others begin in later steps"
    steps += [run.step(step) for step in range(1, 4)]
    assert sorted(index for groups in steps for index in indices(groups)) == list(range(4 * WANTED))
    assert versions(steps[-1][-1].rollouts[0])[0] > 0
    run.collector.close()


def test_a_resumed_run_plays_unfinished_conversations_again():
    talk = Talk(slow={0})
    first = run_of(talk)
    done = indices(first.step(0))
    state = json.loads(json.dumps(first.supply.state_dict()))
    first.collector.close()
    assert [[group["completions"] for group in part] for part in state["pending"]] == [[[]]]

    again = Talk(slow=set())
    resumed = run_of(again)
    resumed.supply.load_state_dict(state)
    rest = [resumed.step(1), resumed.step(2)]
    assert sorted(done + [index for groups in rest for index in indices(groups)]) == list(range(3 * WANTED))
    assert again.played.count(0) == GROUP
    assert all(versions(rollout)[0] >= 1 for groups in rest for group in groups for rollout in group.rollouts)
    resumed.collector.close()


def test_an_evaluation_between_steps_leaves_the_conversations_of_training_alone():
    talk = Talk(slow={0})
    run = run_of(talk)
    run.step(0)
    held_out = [Prompt(index=i, token_ids=[3, i], text="", item={"number": 90 + i}, source="talk") for i in range(4)]
    job = Job(name="held_out/1", prompts=held_out, group_size=1, sampling=Sampling(temperature=1.0, max_tokens=60))
    talk.open(run)
    assert indices(run.collector.collect(job)) == [0, 1, 2, 3]
    groups = run.step(1)
    assert groups[0].prompt.item["number"] == 0
    assert all(rollout.score.reward == 1.0 for rollout in groups[0].rollouts)
    run.collector.close()


def test_a_stop_ends_a_step_that_waits_for_a_tool():
    talk = Talk(slow={0, 1, 2})
    run = run_of(talk)
    run.collector.stop_requested = lambda: talk.waiting == 3 * GROUP
    with pytest.raises(Stopped):
        run.step(0)
    assert run.collector.episodes.running == 0
    run.collector.close()
