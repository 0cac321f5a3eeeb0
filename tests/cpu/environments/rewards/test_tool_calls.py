"""Tool calls in one message: parsing, comparison and partial credit."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colocated_grpo.environments.rewards.builtin import credit, expected_calls, is_exact, read_calls
from colocated_grpo.environments.rewards.functions import RewardScorer, build_rewards
from colocated_grpo.settings.sources import RewardConfig
from colocated_grpo.types import Completion, Prompt

WEATHER = {"name": "weather", "arguments": {"city": "Rome", "day": "Friday"}}
TIMER = {"name": "timer", "arguments": {"minutes": 5}}

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
calls = st.lists(
    st.fixed_dictionaries({"name": st.text(), "arguments": st.dictionaries(st.text(), json_values, max_size=3)}),
    min_size=1,
    max_size=3,
).filter(lambda made: not any(tag in json.dumps(made) for tag in ("tool_call>", "</think>")))


def render_calls(made):
    return "\n".join(f"<tool_call>{json.dumps(call)}</tool_call>" for call in made)


@given(calls)
def test_rendered_calls_are_read_back_unchanged(made):
    assert read_calls(render_calls(made)) == made
    assert credit(made, made) == 1.0
    assert expected_calls(made) == expected_calls(json.dumps(made)) == expected_calls(render_calls(made)) == made


@given(calls, calls)
def test_credit_is_one_for_exact_calls_and_at_most_a_half_for_others(one, other):
    share = credit(one, other)
    assert share == 1.0 if is_exact(one, other) else 0.0 <= share <= 0.5


@given(st.text())
def test_no_text_breaks_the_reader(text):
    for completion in (text, f"<tool_call>{text}", f"<tool_call>{text}</tool_call>"):
        calls = read_calls(completion)
        assert calls is None or all(set(call) == {"name", "arguments"} for call in calls)


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call></tool_call>",
        '<tool_call>{"name": "timer"',
        '<tool_call>{"name": "timer", "arguments": {"minutes": 5}}',
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "timer", "arguments": [5]}</tool_call>',
        '<tool_call>["timer"]</tool_call>',
        "<tool_call>" + "[" * 100_000 + "</tool_call>",
    ],
)
def test_a_malformed_block_invalidates_the_whole_completion(text):
    assert read_calls(text) is None
    assert read_calls(render_calls([TIMER]) + text) is None
    assert credit(None, [TIMER]) == 0.0


def test_calls_in_thoughts_are_ignored():
    assert read_calls(f"<think>{render_calls([WEATHER])}</think> ok {render_calls([TIMER])}") == [TIMER]


def test_arguments_are_compared_as_json_values():
    def timer(minutes):
        return [{"name": "timer", "arguments": {"minutes": minutes}}]

    assert is_exact(timer(2.0), timer(2))
    assert not is_exact(timer(True), timer(1))
    assert not is_exact(timer("2"), timer(2))
    assert is_exact(timer({"a": [1, 2.0], "b": None}), timer({"b": None, "a": [1.0, 2]}))
    assert not is_exact(timer([1, 2]), timer([2, 1]))


def test_partial_credit_counts_names_and_arguments_call_by_call():
    half_right = {"name": "weather", "arguments": {"city": "Rome", "day": "Monday"}}
    assert credit([half_right], [WEATHER]) == 0.5 * 2 / 3
    assert credit([{"name": "weather", "arguments": {}}], [WEATHER]) == 0.5 * 1 / 3
    assert credit([{**WEATHER, "arguments": {**WEATHER["arguments"], "unit": "C"}}], [WEATHER]) == 0.5 * 3 / 4
    assert credit([TIMER], [WEATHER]) == 0.0
    assert credit([WEATHER], [WEATHER, TIMER]) == 0.25
    assert credit([WEATHER, TIMER, TIMER], [WEATHER, TIMER]) == 0.5 * 2 / 3
    assert credit([TIMER, WEATHER], [WEATHER, TIMER]) == 0.0
    assert credit([], [TIMER]) == 0.0


def test_calls_in_the_form_of_openai_are_accepted():
    nested = [{"type": "function", "function": {"name": "timer", "arguments": '{"minutes": 5}'}}]
    assert expected_calls(nested) == [TIMER]
    assert expected_calls(TIMER) == [TIMER]
    for invalid in ("[]", [], "no json"):
        with pytest.raises(ValueError):
            expected_calls(invalid)


def scored(reward: str, column: object, text: str) -> tuple[float | None, str | None]:
    item = {"prompt": "set a timer for 5 minutes", "tool_calls": column}
    prompt = Prompt(index=0, token_ids=[1], text="", item=item, source="rows")
    completion = Completion(token_ids=[1], sampling_logprobs=[0.0], finish_reason="stop", policy_version=0)
    scorer = RewardScorer(build_rewards([RewardConfig(name=reward)], "rewards"), max_steps=1)
    scorer.check_item(item)
    [score] = scorer.score(prompt, [completion], [text])
    return score.reward, score.error


def test_reward_functions_score_rows_with_expected_calls():
    right, wrong = render_calls([TIMER]), render_calls([{"name": "timer", "arguments": {"minutes": 6}}])
    for column in ([TIMER], json.dumps([TIMER]), right):
        assert scored("tool_call", column, right) == (1.0, None)
        assert scored("tool_call", column, wrong) == (0.0, None)
        assert scored("tool_call_partial", column, wrong) == (0.25, None)
    reward, error = scored("tool_call", "[]", right)
    assert reward is None and error == "tool_call: ValueError: no expected call"
