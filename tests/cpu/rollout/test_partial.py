"""Partial rollouts: every prompt is trained once, none waits too long, and a resumed run repeats the uninterrupted."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from datetime import date

import pytest

from colocated_grpo.assembly.assemble import load_state
from colocated_grpo.environments.base import EnvironmentSetupError
from colocated_grpo.evaluation.evaluator import Best
from colocated_grpo.rollout.collect import Stopped
from colocated_grpo.runtime.distributed import World
from colocated_grpo.settings.config_file import read_config
from colocated_grpo.settings.errors import ConfigError
from colocated_grpo.settings.generation import PartialConfig
from colocated_grpo.summaries import rollout_metrics
from colocated_grpo.types import Group
from tests.support.partial_supply import GROUP, LIMIT, STEPS, WANTED, Prompts, Run, partial_run
from tests.support.ranks import run_on_ranks, single_rank_world


def lengths(steps: Sequence[list[Group]]) -> list[int]:
    return [rollout.completion_tokens for groups in steps for group in groups for rollout in group.rollouts]


def test_every_prompt_is_trained_once_and_every_step_trains_a_full_batch():
    steps = list(partial_run().steps())
    assert [len(groups) for groups in steps] == [WANTED] * STEPS
    trained = [group.prompt.index for groups in steps for group in groups]
    assert sorted(trained) == list(range(WANTED * STEPS))
    assert trained != sorted(trained), "groups overtake each other"


def test_no_group_is_trained_later_than_max_age():
    for max_age in (1, 2):
        run = partial_run(oversample=1 + max_age, max_age=max_age)
        drawn: dict[int, int] = {}
        for step, groups in enumerate(run.steps()):
            drawn |= {index: step for index in range(run.supply.prompts.source.given) if index not in drawn}
            ages = [step - drawn[group.prompt.index] for group in groups]
            assert max(ages) <= max_age
            assert step < max_age or max(ages) == max_age


def test_a_completion_records_which_weights_sampled_which_token():
    run = partial_run(oversample=2)
    sampled: Counter[int] = Counter()
    for step, groups in enumerate(run.steps()):
        for rollout in (rollout for group in groups for rollout in group.rollouts):
            assert rollout.sampling_logprobs is not None
            tokens, logprobs = rollout.token_ids[2:], rollout.sampling_logprobs[2:]
            assert logprobs == [-token / 8 for token in tokens]
            starts = [start for start, _ in rollout.newer_versions]
            versions = [rollout.policy_version, *(version for _, version in rollout.newer_versions)]
            assert versions == sorted(set(versions))
            assert versions[-1] <= step
            assert all(2 < start < len(rollout.token_ids) for start in starts)
            sampled[len(versions)] += 1
    assert set(sampled) >= {1, 2}


def test_a_continuation_has_the_sampled_tokens_as_its_prompt_and_the_rest_of_the_limit():
    run = partial_run(oversample=2)
    first = run.step(0)
    done = {group.prompt.index for group in first}
    before = len(run.engine.submitted)
    run.step(1)
    again = [request for request in run.engine.submitted[before:] if len(request.token_ids) > 2]
    assert again
    for request in again:
        assert request.token_ids[0] == 3
        assert request.token_ids[1] not in done
        assert request.sampling.max_tokens == LIMIT - (len(request.token_ids) - 2)
    assert len({request.seed for request in run.engine.submitted}) == len(run.engine.submitted)


def test_metrics_tell_how_old_the_trained_tokens_are_and_what_is_kept():
    run = partial_run(oversample=2)
    rows = [rollout_metrics(groups, step) | run.metrics for step, groups in enumerate(run.steps())]
    assert rows[0]["staleness"] == rows[0]["staleness/max"] == rows[0]["staleness/tokens"] == 0
    assert rows[0]["partial/completions"] > 0
    assert rows[0]["partial/tokens"] > rows[0]["partial/completions"]
    assert any(0 < row["staleness/tokens"] < 1 for row in rows)
    assert all(row["staleness"] <= row["staleness/max"] <= 3 for row in rows)
    assert rows[-1]["partial/completions"] == 0, "the last step finishes every group"


def test_lengths_are_distributed_as_without_partial_rollouts():
    """Two-sample Kolmogorov-Smirnov test at 5 %, over 200 steps."""
    steps = 200
    whole = sorted(lengths(list(Run(single_rank_world(), None).steps(0, steps))))
    parts = sorted(lengths(list(Run(single_rank_world(), PartialConfig(oversample=2), steps=steps).steps(0, steps))))
    assert len(whole) == len(parts) == steps * WANTED * GROUP
    counts = [[sum(length <= limit for length in sample) for limit in range(LIMIT + 1)] for sample in (whole, parts)]
    distance = max(abs(a - b) for a, b in zip(*counts, strict=True)) / len(whole)
    assert distance < 1.36 * (2 / len(whole)) ** 0.5


def test_a_step_decodes_less_than_one_that_waits_for_its_longest_completion():
    whole, parts = Run(single_rank_world(), None), partial_run(oversample=2)
    assert lengths(list(whole.steps())) and lengths(list(parts.steps()))
    assert parts.decode_steps < 0.7 * whole.decode_steps


@pytest.mark.parametrize("saved_at", [1, 5, STEPS - 1])
def test_a_resumed_run_repeats_the_uninterrupted_one(saved_at):
    expected = list(partial_run(oversample=2).steps())
    run = partial_run(oversample=2)
    done = list(run.steps(0, saved_at))
    state = json.loads(json.dumps(run.supply.state_dict()))
    resumed = partial_run(oversample=2)
    resumed.supply.load_state_dict(state)
    assert done + list(resumed.steps(saved_at)) == expected


def test_a_stop_keeps_the_groups_as_they_were_when_the_step_began():
    run = partial_run(oversample=2)
    list(run.steps(0, 3))
    before = json.dumps(run.supply.state_dict())
    run.stop_at = run.decode_steps + 2
    with pytest.raises(Stopped):
        run.step(3)
    assert json.dumps(run.supply.state_dict()) == before


def on_two_ranks(world: World, ranks_per_engine: int) -> tuple[list[list[Group]], str]:
    run = Run(world, PartialConfig(oversample=1.5), ranks_per_engine=ranks_per_engine)
    steps = list(run.steps(0, 4))
    return steps, json.dumps(run.supply.state_dict())


def test_two_ranks_keep_their_own_groups_and_one_rank_can_continue_them():
    (steps, state), (same, _) = run_on_ranks(on_two_ranks, 2, 1)
    assert steps == same
    assert [len(groups) for groups in steps] == [WANTED] * 4
    assert list(map(len, json.loads(state)["pending"])) == [2, 2]
    run = partial_run(oversample=1.5)
    run.supply.load_state_dict(json.loads(state))
    rest = list(run.steps(4))
    trained = sorted(group.prompt.index for groups in [*steps, *rest] for group in groups)
    assert trained == list(range(WANTED * STEPS))


UNEVEN = 3
"""Groups of a step, which two engines cannot share equally."""


def uneven(world: World) -> list[list[Group]]:
    config = PartialConfig(oversample=2, max_age=1)
    return list(Run(world, config, steps=STEPS, wanted=UNEVEN).steps())


def test_engines_with_unequal_shares_train_every_prompt_once():
    steps, same = run_on_ranks(uneven, 2)
    assert steps == same
    assert [len(groups) for groups in steps] == [UNEVEN] * STEPS
    assert sorted(group.prompt.index for groups in steps for group in groups) == list(range(UNEVEN * STEPS))


def resumed_on_two_ranks(world: World, state: str, first_step: int, wanted: int) -> list[list[Group]]:
    run = Run(world, PartialConfig(oversample=3), wanted=wanted)
    run.supply.load_state_dict(json.loads(state))
    return list(run.steps(first_step))


def test_groups_that_are_dealt_anew_in_the_last_steps_are_all_trained():
    first, wanted = STEPS - 2, 5
    run = Run(single_rank_world(), PartialConfig(oversample=3), wanted=wanted)
    steps = list(run.steps(0, first))
    state = json.dumps(run.supply.state_dict())
    assert len(json.loads(state)["pending"][0]) == 2 * wanted, "all that the last two steps train"
    steps += run_on_ranks(resumed_on_two_ranks, 2, state, first, wanted)[0]
    assert sorted(group.prompt.index for groups in steps for group in groups) == list(range(wanted * STEPS))


@pytest.mark.parametrize("changed", [{"oversample": 1.5, "max_age": 1}, {"oversample": 1, "max_age": 3}])
def test_a_run_resumed_with_other_settings_trains_the_groups_that_it_has(changed):
    run = partial_run(oversample=4, max_age=3)
    list(run.steps(0, 2))
    resumed = partial_run(**changed)
    resumed.supply.load_state_dict(json.loads(json.dumps(run.supply.state_dict())))
    indices = [group.prompt.index for groups in resumed.steps(2) for group in groups]
    assert len(set(indices)) == len(indices) == WANTED * (STEPS - 2)
    assert resumed.metrics["partial/completions"] == 0


def test_after_max_age_steps_at_oversample_1_no_group_waits():
    """Complete groups wait too, and `partial/completions` does not count them."""
    run = partial_run(oversample=4, max_age=3)
    list(run.steps(0, 2))
    resumed = partial_run(oversample=1, max_age=3)
    resumed.supply.load_state_dict(json.loads(json.dumps(run.supply.state_dict())))
    kept = []
    for step in range(2, 2 + 3):
        resumed.step(step)
        kept.append((len(resumed.supply.state_dict()["pending"][0]), resumed.metrics["partial/completions"]))
    assert kept[-1] == (0, 0)
    assert any(groups and not completions for groups, completions in kept)


def test_a_lower_limit_in_a_resumed_run_ends_completions_that_are_longer():
    run = partial_run(oversample=2)
    list(run.steps(0, 2))
    [kept] = run.supply.state_dict()["pending"]
    longest = max(len(one["token_ids"]) for group in kept for one in group["completions"])
    resumed = Run(single_rank_world(), PartialConfig(oversample=2), limit=longest)
    resumed.supply.load_state_dict(json.loads(json.dumps(run.supply.state_dict())))
    ended = {rollout.finish_reason for groups in resumed.steps(2) for group in groups for rollout in group.rollouts}
    assert ended == {"stop", "length"}


def test_a_group_is_scored_once():
    run = Run(single_rank_world(), PartialConfig(oversample=2), limit=3)  # siblings end together at the limit
    trained = [group.prompt.index for groups in run.steps() for group in groups]
    assert run.scored == Counter(trained)


def test_two_ranks_of_one_engine_sample_the_same_and_count_once():
    (steps, state), (same, same_state) = run_on_ranks(on_two_ranks, 2, 2)
    assert steps == same
    assert state.partition('"pending"')[2] == same_state.partition('"pending"')[2]
    alone = partial_run(oversample=1.5)
    assert steps == list(alone.steps(0, 4))


def test_unfinished_groups_are_not_dropped_when_the_setting_is_removed(tmp_path):
    run = partial_run(oversample=2)
    run.step(0)
    state = run.supply.state_dict()
    # Not as a checkpoint that cannot be read, with the advice to move it away.
    with pytest.raises(EnvironmentSetupError, match=r"^rollout\.partial=null: the checkpoint has 6 unfinished groups"):
        load_state({"source": state}, 1, Run(single_rank_world(), None).supply, Best(None, None), tmp_path)
    at_one = partial_run(oversample=1)
    at_one.supply.load_state_dict(state)
    at_one.step(1)
    Run(single_rank_world(), None).supply.load_state_dict(at_one.supply.state_dict())


@pytest.mark.parametrize("item", [{"day": date(2026, 1, 1)}, {"table": {1: "a"}}, {"pair": (1, 2)}])
def test_items_that_a_checkpoint_cannot_contain_are_rejected_in_one_line(item):
    run = Run(single_rank_world(), PartialConfig(), Prompts(item))
    with pytest.raises(EnvironmentSetupError, match=r"rollout\.partial: an item of 'own' cannot be stored"):
        run.step(0)


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["--engine.placement", "server"], "rollout.partial: not possible with engine.placement: server"),
        (["--sync_frequency", "2"], "rollout.partial: not possible with sync_frequency above 1"),
        (["--loss.correction.mode", "off"], "rollout.partial: not possible with loss.correction.mode: off"),
        (["--environments", "[{type: atropos}]"], "rollout.partial: not possible with games and atropos environments"),
        (
            ["--environments", "[{type: episode, name: tool_use}]", "--deterministic", "true"],
            "rollout.partial: not possible with deterministic: true and conversations",
        ),
        (
            ["--rollout.partial", "{oversample: 3, max_age: 1}"],
            "rollout.partial.oversample=3: must be at most 1 + ",
        ),
        (["--rollout.resample", "{}"], "rollout.resample: not possible with rollout.partial"),
        (["--rollout.stop", "[end]"], "rollout.stop: must be empty with rollout.partial"),
        (["--rollout.generation", "replicated"], "rollout.generation=replicated: must be sharded with rollout.partial"),
    ],
)
def test_what_partial_rollouts_exclude_is_one_line(tmp_path, overrides, line):
    file = tmp_path / "run.yaml"
    file.write_text(
        "model: {name: m}\nenvironments: [{type: task, name: sorting}]\nrollout: {partial: {}, prompts_per_step: 8}\n"
    )
    read_config(str(file), [])
    with pytest.raises(ConfigError) as error:
        read_config(str(file), overrides)
    assert str(error.value).startswith(line)
    assert "\n" not in str(error.value)
