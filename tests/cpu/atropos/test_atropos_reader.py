"""Received groups become rollouts or are dropped: never trained wrongly, never fatal."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colocated_grpo.atropos.reader import GroupReader, Origin, Origins

VOCAB, MAX_TOKENS = 100, 12
VERSION = 7


def reader(origins: Origins | None = None, *, recompute: bool = False) -> GroupReader:
    return GroupReader(
        source="atropos",
        vocab_size=VOCAB,
        max_tokens=MAX_TOKENS,
        recompute_logprobs=recompute,
        origins=origins or Origins(100),
        decode=lambda tokens: " ".join(map(str, tokens)),
    )


def item(**changes: Any) -> dict[str, Any]:
    """Return two sequences of two prompt and three sampled tokens, as a managed server returns them."""
    base = {
        "tokens": [[5, 6, 10, 11, 12], [5, 6, 20, 21, 22]],
        "masks": [[-100, -100, 10, 11, 12], [-100, -100, 20, 21, 22]],
        "scores": [0.0, 1.0],
        "inference_logprobs": [[1.0, 1.0, -0.1, -0.2, -0.3], [1.0, 1.0, -0.4, -0.5, -0.6]],
    }
    return base | changes


def rollouts(**changes: Any) -> list[Any]:
    (group,) = reader().read([item(**changes)], 0, VERSION).groups
    return group.rollouts


def dropped(**changes: Any) -> dict[str, int]:
    return dict(reader().read([item(**changes)], 0, VERSION).dropped)


def test_a_group_is_converted_to_rollouts():
    batch = reader().read([item(env_id=3)], 40, VERSION)
    (group,) = batch.groups
    assert (group.prompt.index, group.prompt.token_ids, group.prompt.item["env_id"]) == (40, [5, 6], 3)
    first, second = group.rollouts
    assert first.token_ids == [5, 6, 10, 11, 12]
    assert first.loss_mask == [False, False, True, True, True]
    assert first.sampling_logprobs == pytest.approx([0, 0, -0.1, -0.2, -0.3])
    assert first.prompt_length == 2
    assert first.text == "10 11 12"
    assert (first.score.reward, second.score.reward) == (0.0, 1.0)
    assert (first.temperature, first.policy_version) == (1.0, VERSION)
    assert first.advantages is None
    assert first.ref_logprobs is None
    assert (batch.num_unknown, batch.dropped) == (2, {})


@pytest.mark.parametrize("empty", [None, []])
def test_null_and_an_empty_list_mean_absent(empty):
    names = ["advantages", "ref_logprobs", "overrides", "images", "messages"]
    (first, _) = rollouts(
        **dict.fromkeys(names, empty), group_overrides=None if empty is None else {}, generation_params=None
    )
    assert (first.advantages, first.ref_logprobs, first.temperature) == (None, None, 1.0)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [1.0, 1.0]),
        ({"group_overrides": {"temperature": 0.5}}, [0.5, 0.5]),
        ({"group_overrides": {"temperature": 0.5}, "generation_params": {"temperature": 0.7}}, [0.7, 0.7]),
        ({"overrides": [{"temperature": 0.9}], "generation_params": {"temperature": 0.7}}, [0.9, 0.7]),
        ({"overrides": [{}, {"temperature": None}], "generation_params": {"temperature": 0.7}}, [0.7, 0.7]),
        ({"overrides": [{"temperature": 0}, {"temperature": -1}]}, [1.0, 1.0]),
    ],
)
def test_the_most_specific_temperature_takes_precedence(changes, expected):
    assert [rollout.temperature for rollout in rollouts(**changes)] == expected


def test_served_completions_keep_their_origin():
    origins = Origins(10)
    origins.remember([5, 6], [10, 11, 12], Origin(0.8, 4, "length"))
    batch = reader(origins).read([item()], 0, VERSION)
    first, second = batch.groups[0].rollouts
    assert (first.temperature, first.policy_version, first.finish_reason) == (0.8, 4, "length")
    assert (second.temperature, second.policy_version) == (1.0, VERSION)
    assert batch.num_unknown == 1


def test_the_origin_is_found_by_the_completion_when_the_prompt_was_retokenized():
    origins = Origins(10)
    origins.remember([9, 9, 9], [10, 11, 12], Origin(0.8, 4, "stop"))
    assert reader(origins).read([item()], 0, VERSION).groups[0].rollouts[0].policy_version == 4


def test_the_origin_of_the_same_prompt_takes_precedence():
    origins = Origins(10)
    origins.remember([5, 6], [10, 11, 12], Origin(0.8, 4, "stop"))
    origins.remember([7, 7], [10, 11, 12], Origin(0.3, 6, "stop"))
    assert reader(origins).read([item()], 0, VERSION).groups[0].rollouts[0].policy_version == 4


def test_a_conversation_has_the_policy_version_of_its_oldest_turn():
    origins = Origins(10)
    origins.remember([5], [6, 7], Origin(0.8, 2, "stop"))
    origins.remember([5, 6, 7, 8], [9], Origin(0.8, 5, "length"))
    turns = {
        "tokens": [[5, 6, 7, 8, 9]],
        "masks": [[-100, 6, 7, -100, 9]],
        "scores": [1.0],
        "inference_logprobs": [[1.0, -1.0, -1.0, 1.0, -2.0]],
    }
    (group,) = reader(origins).read([turns], 0, VERSION).groups
    (rollout,) = group.rollouts
    assert (rollout.policy_version, rollout.finish_reason, rollout.prompt_length) == (2, "length", 1)
    assert rollout.loss_mask == [False, True, True, False, True]
    assert rollout.sampling_logprobs == [0.0, -1.0, -1.0, 0.0, -2.0]


def test_the_oldest_origins_are_evicted():
    origins = Origins(2)
    for token in range(3):
        origins.remember([1], [token], Origin(1.0, token, "stop"))
    assert origins.find([1], [0]) is None
    assert [origins.find([1], [token]).policy_version for token in (1, 2)] == [1, 2]


def test_restored_origins_are_older_than_new_ones():
    before = Origins(3)
    for token in range(4):
        before.remember([1], [token], Origin(0.5 + token % 2, token // 2, "stop"))
    after = Origins(3)
    after.remember([1], [9], Origin(1.0, 7, "stop"))
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    found = [after.find([1], [token]) for token in range(4)]
    assert found == [None, None, Origin(0.5, 1, "stop"), Origin(1.5, 1, "stop")]
    assert after.find([2], [9]) == Origin(1.0, 7, "stop")


def test_advantages_of_the_environment_are_those_of_the_sampled_tokens():
    first, second = rollouts(advantages=[[9, 9, 0.1, 0.2, 0.3], [0, 0, -1, -1, -1]])
    assert first.advantages == [0.1, 0.2, 0.3]
    assert second.advantages == [-1, -1, -1]


def test_set_advantage_to_zero_overrides_the_advantages():
    first, second = rollouts(overrides=[{"set_advantage_to_zero": True}, {}], advantages=[[1.0] * 5] * 2)
    assert first.advantages == [0.0, 0.0, 0.0]
    assert second.advantages == [1.0, 1.0, 1.0]


def test_the_advantage_of_a_sequence_without_siblings_is_its_score():
    alone = {name: value[:1] for name, value in item(scores=[0.5, 0.0]).items()}
    (group,) = reader().read([alone], 0, VERSION).groups
    assert group.rollouts[0].advantages == [0.5, 0.5, 0.5]


def test_a_sequence_whose_siblings_were_dropped_has_no_such_advantage():
    (left,) = rollouts(scores=[1.0, 1e7])
    assert left.advantages is None


def test_reference_logprobs_are_kept():
    first, _ = rollouts(ref_logprobs=[[1, 1, -1, -2, -3], [1, 1, -4, -5, -6]])
    assert first.ref_logprobs == [0, 0, -1, -2, -3]


def test_the_first_token_is_never_trained():
    (first,) = rollouts(masks=[[5, -100, 10, 11, 12], []])
    assert first.loss_mask == [False, False, True, True, True]


INVALID = [
    ("tokens", {"tokens": [[5, 6, 10, 11, VOCAB], [5, 6, 20, 21, 22]]}),
    ("tokens", {"tokens": [[5, 6, 10, 11, -1], [5, 6, 20, 21, 22]]}),
    ("length", {"tokens": [[], [5, 6, 20, 21, 22]]}),
    ("length", {"tokens": [[5] * (MAX_TOKENS + 1), [5, 6, 20, 21, 22]]}),
    ("length", {"tokens": [[5], [5, 6, 20, 21, 22]]}),
    ("masks", {"masks": [[-100, -100, 10, 11], [-100, -100, 20, 21, 22]]}),
    ("masks", {"masks": [[0, 0, 1, 1, 1], [-100, -100, 20, 21, 22]]}),
    ("nothing_trained", {"masks": [[-100] * 5, [-100, -100, 20, 21, 22]]}),
    ("nothing_trained", {"masks": [[5, -100, -100, -100, -100], [-100, -100, 20, 21, 22]]}),
    ("scores", {"scores": [math.nan, 1.0]}),
    ("scores", {"scores": [1e25, 1.0]}),
    ("scores", {"scores": [-1e7, 1.0]}),
    ("inference_logprobs", {"inference_logprobs": [[1, 1, -0.1, -9999, -1], [1, 1, -0.4, -0.5, -0.6]]}),
    ("inference_logprobs", {"inference_logprobs": [[1, 1, -0.1, -88, -1], [1, 1, -0.4, -0.5, -0.6]]}),
    ("advantages", {"advantages": [[0, 0, 1e30, 1, 1], [0, 0, 1, 1, 1]]}),
    ("advantages", {"advantages": [[0, 0, -1e7, 1, 1], [0, 0, 1, 1, 1]]}),
    ("ref_logprobs", {"ref_logprobs": [[1, 1, -9999, -1, -1], [0, 0, -1, -1, -1]]}),
    ("ref_logprobs", {"ref_logprobs": [[1, 1, 200, -1, -1], [0, 0, -1, -1, -1]]}),
    ("inference_logprobs", {"inference_logprobs": [[1, 1, -0.1, -0.2], [1, 1, -0.4, -0.5, -0.6]]}),
    ("inference_logprobs", {"inference_logprobs": [[1, 1, -0.1, 0.5, -0.3], [1, 1, -0.4, -0.5, -0.6]]}),
    ("inference_logprobs", {"inference_logprobs": [[1, 1, -0.1, math.nan, -1], [1, 1, -0.4, -0.5, -0.6]]}),
    ("inference_logprobs", {"inference_logprobs": [[1, 1, -0.1, -math.inf, -1], [1, 1, -0.4, -0.5, -0.6]]}),
    ("advantages", {"advantages": [[1.0], [0, 0, 1, 1, 1]]}),
    ("advantages", {"advantages": [[0, 0, math.inf, 1, 1], [0, 0, 1, 1, 1]]}),
    ("ref_logprobs", {"ref_logprobs": [[1.0], [0, 0, -1, -1, -1]]}),
    ("temperature", {"overrides": [{"temperature": math.nan}]}),
    ("temperature", {"overrides": [{"temperature": 1e-30}]}),
]


@pytest.mark.parametrize(("reason", "changes"), INVALID)
def test_an_invalid_sequence_is_dropped_and_its_sibling_kept(reason, changes):
    assert dropped(**changes) == {reason: 1}
    (left,) = rollouts(**changes)
    assert left.token_ids == [5, 6, 20, 21, 22]


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens": [[5, 6, 10, 11, 12.5], [5, 6, 20, 21, 22]]},
        {"tokens": [[5, 6, 10, 11, 10**30], [5, 6, 20, 21, 22]]},
        {"tokens": [[5, 6, [10], 11, 12], [5, 6, 20, 21, 22]]},
        {"tokens": [None, [5, 6, 20, 21, 22]]},
        {"masks": [None, [-100, -100, 20, 21, 22]]},
        {"scores": [True, 1.0]},
        {"scores": [10**400, 1.0]},
        {"scores": [None, 1.0]},
        {"inference_logprobs": [None, [1, 1, -0.4, -0.5, -0.6]]},
        {"overrides": [{"temperature": "hot"}]},
    ],
)
def test_a_group_of_other_types_is_dropped_as_a_whole_and_the_others_kept(changes):
    """No server sends one: both check types."""
    batch = reader().read([item(**changes), item()], 0, VERSION)
    assert (len(batch.groups), batch.dropped) == (1, {"malformed": 1})


def test_a_log_probability_just_above_zero_becomes_zero():
    (first, _) = rollouts(inference_logprobs=[[1, 1, 1e-6, -0.2, -0.3], [1, 1, -0.4, -0.5, -0.6]])
    assert first.sampling_logprobs == [0, 0, 0, -0.2, -0.3]


@pytest.mark.parametrize("filler", [1.0, 0.0, -100, -9999, 1e30])
def test_untrained_tokens_may_have_any_filler(filler):
    (first, _) = rollouts(inference_logprobs=[[filler, filler, -86, -0.2, 0], [filler, filler, -0.4, -0.5, -0.6]])
    assert first.sampling_logprobs == [0, 0, -86, -0.2, 0]


def test_groups_with_images_are_dropped():
    assert dropped(images=[None, "aGVsbG8="]) == {"images": 2}
    assert dropped(images="aGVsbG8=") == {"images": 2}
    assert dropped(images=[None, None]) == {}


def test_placeholder_tokens_of_openai_endpoints_are_dropped():
    length = 10
    dummy = {
        "tokens": [list(range(length))] * 2,
        "masks": [[-100, *range(1, length)]] * 2,
        "scores": [0.0, 1.0],
        "inference_logprobs": [[-0.5] * length] * 2,
    }
    assert reader().read([dummy], 0, VERSION).dropped == {"dummy_server": 2}


@pytest.mark.parametrize("missing", [None, []])
def test_a_group_without_logprobs_is_dropped_and_its_sender_named(missing):
    good, bad = item(env_id=3), item(inference_logprobs=missing, env_id=4)
    batch = reader().read([good] * 4 + [bad] + [good] * 3, 0, VERSION)
    assert len(batch.groups) == 7
    assert (batch.dropped, batch.senders) == ({"missing_logprobs": 2}, {"environment 4": 2})


def test_missing_logprobs_can_be_recomputed_by_the_trainer():
    (group,) = reader(recompute=True).read([item(inference_logprobs=None)], 0, VERSION).groups
    assert [rollout.sampling_logprobs for rollout in group.rollouts] == [None, None]


@pytest.mark.parametrize("nonsense", [None, 7, "text", [], {}, {"tokens": None}, {"tokens": 3}])
def test_items_that_are_not_groups_are_dropped(nonsense):
    batch = reader().read([nonsense, item()], 0, VERSION)
    assert batch.dropped == {"malformed": 1}
    assert len(batch.groups) == 1


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.sampled_from(["temperature", "x"]), inner),
    max_leaves=10,
)
KEYS = [*item(), "advantages", "ref_logprobs", "overrides", "group_overrides", "generation_params", "images", "env_id"]
ROW = st.lists(st.integers(-101, VOCAB + 1) | st.floats(), max_size=MAX_TOKENS + 1)


@given(changes=st.dictionaries(st.sampled_from(KEYS), JSON | st.lists(ROW | JSON, max_size=3)))
@settings(max_examples=1000)
def test_every_sequence_that_is_kept_is_valid(changes):
    sent = json.loads(json.dumps(item(**changes)))
    batch = reader(recompute=True).read([sent], 0, VERSION)
    for rollout in (rollout for group in batch.groups for rollout in group.rollouts):
        trained = sum(rollout.loss_mask)
        assert 2 <= len(rollout.token_ids) <= MAX_TOKENS
        assert all(type(token) is int and 0 <= token < VOCAB for token in rollout.token_ids)
        assert len(rollout.loss_mask) == len(rollout.token_ids)
        assert trained
        assert not rollout.loss_mask[0]
        assert rollout.loss_mask[rollout.prompt_length]
        assert not any(rollout.loss_mask[: rollout.prompt_length])
        assert 0.01 <= rollout.temperature <= 100
        assert math.isfinite(rollout.score.reward)
        assert rollout.advantages is None or len(rollout.advantages) == trained
        for values in (rollout.sampling_logprobs, rollout.ref_logprobs):
            assert values is None or len(values) == len(rollout.token_ids)
        for values in (rollout.sampling_logprobs, rollout.ref_logprobs, rollout.advantages):
            assert values is None or all(map(math.isfinite, values))
        assert all(value <= 0 for value in rollout.sampling_logprobs or [])
