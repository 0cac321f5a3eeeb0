"""Dynamic sampling: which groups are trained, in how many rounds, and that late prompts are not disadvantaged."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import pytest

from colocated_grpo.environments.base import BatchResult
from colocated_grpo.rollout.collect import Collector, Stopped
from colocated_grpo.rollout.engine import Sampling
from colocated_grpo.rollout.episodes import EpisodeRunner
from colocated_grpo.rollout.inbox import Driver, Inbox
from colocated_grpo.rollout.prompt_queue import dynamic_dispatch, static_dispatch
from colocated_grpo.rollout.resample import Resampling, chosen_places, round_size
from colocated_grpo.rollout.supply import AheadSupply, PromptSupply
from colocated_grpo.runtime.distributed import World
from colocated_grpo.settings.generation import RolloutConfig
from colocated_grpo.summaries import is_informative
from colocated_grpo.types import Completion, Group, Prompt, Score
from tests.support.fakes import FakeEngine, text_of
from tests.support.ranks import run_on_ranks, single_rank_world

SAMPLING = Sampling(temperature=1.0, max_tokens=6)
WANTED, GROUP = 8, 2


class Prompts:
    """A source of prompts that returns each batch in reverse, as a sort by length may."""

    def __init__(self) -> None:
        self.given = 0
        self.recorded: list[int] = []

    def next(self, n: int) -> list[Prompt]:
        first, self.given = self.given, self.given + n
        made = [Prompt(index=first + i, token_ids=[3, first + i], text="", item={}, source="own") for i in range(n)]
        return made[::-1]

    def record(self, groups: Sequence[Group]) -> BatchResult:
        self.recorded.append(len(groups))
        return BatchResult(trained_now=list(range(len(groups))), metrics={"own": 1.0})

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.given = state["given"]


def varies(index: int) -> bool:
    """Return whether the group of a prompt has reward variance: about one in three."""
    return Random(index).random() < 0.35


class OneInThree:
    """Scores so that the groups of some prompts have variance."""

    def score(self, prompt: Prompt, completions: Sequence[Completion], texts: Sequence[str]) -> list[Score]:
        return [Score(reward=float(place and varies(prompt.index))) for place in range(len(completions))]


def supply_of(
    world: World, prompts: Prompts, *, rounds: int, static: bool = True, slow: Any = None, lines: Any = None
) -> PromptSupply:
    inbox = Inbox()
    dispatch = static_dispatch(world.rank, world.size) if static else dynamic_dispatch(world.store, world.size)
    collector = Collector(
        Driver(FakeEngine(decode_steps=slow), inbox),
        EpisodeRunner({}, None, inbox, seed=0, tool_timeout=1.0),
        {"own": OneInThree()},
        text_of,
        world,
        dispatch,
        seed=0,
        reward_workers=2,
        reward_timeout=30.0,
        stop_requested=lambda: False,
    )
    config = RolloutConfig(prompts_per_step=WANTED, group_size=GROUP)
    resampling = Resampling(rounds, WANTED, [].append if lines is None else lines.append)
    source: Any = prompts if world.is_main else None
    return PromptSupply(source, collector, config, SAMPLING, resampling=resampling)


def step_of(supply: Any, step: int) -> tuple[list[Group], BatchResult]:
    groups = supply.order(step)()
    return groups, supply.settle(groups)


def trained(groups: Sequence[Group], settled: BatchResult) -> list[int]:
    return sorted(groups[place].prompt.index for place in settled.trained_now)


def first_informative(count: int) -> list[int]:
    return [index for index in range(1000) if varies(index)][:count]


def test_constant_groups_are_replaced_until_the_batch_is_full():
    prompts = Prompts()
    groups, settled = step_of(supply_of(single_rank_world(), prompts, rounds=20), 0)
    assert trained(groups, settled) == first_informative(WANTED)
    assert prompts.recorded == [len(groups)] == [prompts.given], "every sampled group is recorded"
    dropped = [group for place, group in enumerate(groups) if place not in settled.trained_now]
    tokens = sum(len(rollout.token_ids) - 2 for group in dropped for rollout in group.rollouts)
    assert settled.metrics["own"] == 1
    assert settled.metrics["resample/tokens"] == tokens > 0
    assert settled.metrics["resample/prompts"] == len(groups)
    assert settled.metrics["resample/missing"] == 0
    informative = sum(map(is_informative, groups)) / len(groups)
    assert settled.metrics["resample/informative"] == informative
    assert settled.metrics["resample/reward"] == pytest.approx(informative / GROUP)


def test_prompts_that_finish_late_are_trained_like_all_others():
    late_first = supply_of(single_rank_world(), Prompts(), rounds=20, slow=lambda request: 90 - request.token_ids[1])
    late_last = supply_of(single_rank_world(), Prompts(), rounds=20, slow=lambda request: 1 + request.token_ids[1])
    first, last = step_of(late_first, 0), step_of(late_last, 0)
    assert trained(*first) == trained(*last) == first_informative(WANTED)


def test_when_the_rounds_are_up_the_batch_is_filled_and_the_log_says_so_once():
    lines: list[str] = []
    supply = supply_of(single_rank_world(), Prompts(), rounds=1, lines=lines)
    groups, settled = step_of(supply, 0)
    found = [group.prompt.index for group in groups if is_informative(group)]
    assert 0 < len(found) < WANTED
    assert set(found) < set(trained(groups, settled))
    assert len(settled.trained_now) == WANTED
    assert settled.metrics["resample/missing"] == WANTED - len(found)
    assert settled.metrics["resample/rounds"] == 1
    step_of(supply, 1)
    [line] = lines
    assert line.startswith(
        f"train/0: {len(found)} of 8 groups have reward variance, after 1 more rounds and 16 prompts"
    )


def test_a_round_draws_what_is_missing_at_the_rate_so_far_and_never_more_than_a_batch():
    groups, _ = step_of(supply_of(single_rank_world(), Prompts(), rounds=20), 0)
    informative = [group for group in groups if is_informative(group)]
    constant = [group for group in groups if not is_informative(group)]
    assert round_size(2, informative[:2] + constant[:4], 100) == 6
    assert round_size(2, informative[:2] + constant[:4], 5) == 5
    assert round_size(2, constant[:4], 100) == 100


def test_surplus_groups_are_dropped_in_the_order_in_which_prompts_were_drawn():
    groups, _ = step_of(supply_of(single_rank_world(), Prompts(), rounds=20), 0)
    late_first = sorted(groups, key=lambda group: -group.prompt.index)
    places = chosen_places(late_first, 3)
    assert sorted(late_first[place].prompt.index for place in places) == first_informative(3)
    assert places == sorted(places)


def test_a_resumed_step_samples_the_same_rounds():
    whole = supply_of(single_rank_world(), Prompts(), rounds=20)
    step_of(whole, 0)
    before = whole.state_dict()
    order = whole.order(1)
    groups = order()
    assert whole.state_dict() == before, "nothing is settled yet"
    settled = whole.settle(groups)
    resumed = supply_of(single_rank_world(), Prompts(), rounds=20)
    resumed.load_state_dict(before)
    again, settled_again = step_of(resumed, 1)
    assert again == groups
    assert settled_again == settled
    assert resumed.state_dict() == whole.state_dict()


def test_a_step_that_is_sampled_ahead_is_completed_too():
    supply = AheadSupply(supply_of(single_rank_world(), Prompts(), rounds=20), num_steps=2)
    plain = supply_of(single_rank_world(), Prompts(), rounds=20)
    for step in range(2):
        ahead = step_of(supply, step)
        assert trained(*ahead) == trained(*step_of(plain, step))
        assert len(ahead[1].trained_now) == WANTED


def test_a_stop_between_rounds_ends_the_step():
    supply = supply_of(single_rank_world(), Prompts(), rounds=20)
    order = supply.order(0)
    supply.collector.stop_requested = lambda: True
    with pytest.raises(Stopped):
        order()
    assert supply.state_dict() == {"given": 0}


def _on_rank(world: World, static: bool) -> tuple[list[int], list[int], dict[str, float]]:
    slow = lambda request: 1 + (7 * request.token_ids[1] + 5 * world.rank) % 40  # noqa: E731
    supply = supply_of(world, Prompts(), rounds=20, static=static, slow=slow)
    first, second = step_of(supply, 0), step_of(supply, 1)
    return trained(*first), trained(*second), second[1].metrics


@pytest.mark.parametrize("static", [True, False], ids=["static", "dynamic"])
def test_any_number_of_ranks_trains_the_same_groups(static):
    alone = _on_rank(single_rank_world(), True)
    for ranks in run_on_ranks(_on_rank, 3, static):
        assert ranks == alone
