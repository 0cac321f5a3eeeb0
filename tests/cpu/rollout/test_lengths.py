"""Prompts expected to run longest start first, by what was seen of them, and a resumed run orders as it would have."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from colocated_grpo.environments.base import BatchResult
from colocated_grpo.environments.build import build_environments
from colocated_grpo.rollout import lengths
from colocated_grpo.rollout.lengths import ExpectedLengths, LongestFirst
from colocated_grpo.settings.schema import Config
from colocated_grpo.tools.make_model import build_char_tokenizer
from colocated_grpo.types import Group, Prompt
from tests.support.small_policy import rollout_of


def prompt_of(row: int, source: str = "math", index: int = 0) -> Prompt:
    return Prompt(index=index, token_ids=[row, 7], text="", item={}, source=source)


def group_of(prompt: Prompt, *completions: int) -> Group:
    return Group(prompt=prompt, rollouts=[rollout_of(prompt.token_ids, [1] * length) for length in completions])


class Rows:
    """An endless source that gives rows in order and over again."""

    def __init__(self, sources: Sequence[str]) -> None:
        self._sources = sources
        self._taken = 0

    def next(self, n: int) -> list[Prompt]:
        start, self._taken = self._taken, self._taken + n
        size = len(self._sources)
        return [prompt_of(i % size, self._sources[i % size], index=i) for i in range(start, self._taken)]

    def record(self, groups: Sequence[Group]) -> BatchResult:
        return BatchResult(trained_now=[len(groups)])

    def state_dict(self) -> dict:
        return {"taken": self._taken}

    def load_state_dict(self, state: dict) -> None:
        self._taken = state["taken"]


def rows_of(prompts: Sequence[Prompt]) -> list[int]:
    return [prompt.token_ids[0] for prompt in prompts]


def length_of(prompt: Prompt, epoch: int) -> int:
    return 1 + (prompt.token_ids[0] * 5 + epoch * 3) % 11


def play(source: LongestFirst, steps: range, n: int) -> list[list[int]]:
    """The order of each step's prompts, with completions sampled and recorded in between."""
    orders = []
    for step in steps:
        prompts = source.next(n)
        orders.append([prompt.index for prompt in prompts])
        source.record([group_of(p, length_of(p, step), length_of(p, step) + 1) for p in prompts])
    return orders


def test_prompts_with_the_longest_last_completions_come_first():
    source = LongestFirst(Rows(["math"] * 4))
    prompts = source.next(4)
    assert rows_of(prompts) == [0, 1, 2, 3], "nothing is known yet"
    sampled = [(2, 2), (9, 1), (3, 30), (1, 1)]
    source.record([group_of(prompt, *both) for prompt, both in zip(prompts, sampled, strict=True)])
    prompts = source.next(4)
    assert rows_of(prompts) == [2, 1, 0, 3]
    assert [prompt.index for prompt in prompts] == [6, 5, 4, 7]
    source.record([group_of(prompt_of(3), 100)])
    assert rows_of(source.next(4)) == [3, 2, 1, 0], "the last length counts, not the mean of all"


def test_the_source_decides_which_groups_are_trained():
    assert LongestFirst(Rows(["math"])).record([group_of(prompt_of(0), 1)]) == BatchResult(trained_now=[1])


def test_a_new_prompt_has_the_mean_length_of_its_source_and_a_new_source_that_of_all():
    expected = ExpectedLengths()
    assert expected(prompt_of(0)) == 0
    expected.record([group_of(prompt_of(1, "math"), 10, 20), group_of(prompt_of(2, "math"), 25)])
    expected.record([group_of(prompt_of(3, "code"), 50)])
    assert expected(prompt_of(1, "math")) == 15
    assert expected(prompt_of(9, "math")) == 20
    assert expected(prompt_of(9, "code")) == 50
    assert expected(prompt_of(9, "new")) == 30


def test_prompt_tokens_do_not_count_as_length():
    expected = ExpectedLengths()
    prompt = Prompt(index=0, token_ids=[1] * 500, text="", item={}, source="math")
    expected.record([group_of(prompt, 4)])
    assert expected(prompt) == 4


def test_the_mean_of_a_source_follows_completions_that_grow():
    expected = ExpectedLengths()
    for length in (10, 100):
        expected.record(group_of(prompt_of(row), length) for row in range(4 * lengths.RECENT))
    assert expected(prompt_of(-1)) > 95


def test_a_resumed_source_gives_the_prompts_and_the_order_of_an_uninterrupted_one():
    sources = ["math", "code", "math", "games", "code", "math", "games"]
    uninterrupted = play(LongestFirst(Rows(sources)), range(9), 5)
    assert any(order != sorted(order) for order in uninterrupted)
    first = LongestFirst(Rows(sources))
    before = play(first, range(4), 5)
    state = json.loads(json.dumps(first.state_dict()))
    play(first, range(4, 6), 5)
    resumed = LongestFirst(Rows(sources))
    resumed.load_state_dict(state)
    assert before + play(resumed, range(4, 9), 5) == uninterrupted


def test_a_saved_state_does_not_change_with_the_run():
    source = LongestFirst(Rows(["math"] * 3))
    play(source, range(2), 3)
    state = source.state_dict()
    before = json.dumps(state)
    play(source, range(2, 4), 3)
    assert json.dumps(state) == before


def test_least_recently_sampled_prompts_are_forgotten_first(monkeypatch):
    monkeypatch.setattr(lengths, "REMEMBERED", 3)
    expected = ExpectedLengths()
    for row in (0, 1, 2, 0, 3):
        expected.record([group_of(prompt_of(row), 10 + row)])
    assert len(expected.state_dict()["prompts"]) == 3
    mean = expected(prompt_of(99))
    assert [expected(prompt_of(row)) for row in (0, 1, 2, 3)] == [10, mean, 12, 13]


@pytest.mark.parametrize("between", [True, False])
def test_a_forgotten_order_is_the_same_after_a_resume(monkeypatch, between):
    """The oldest lengths are forgotten first: the state keeps that order through JSON."""
    monkeypatch.setattr(lengths, "REMEMBERED", 4)
    expected = ExpectedLengths()
    expected.record([group_of(prompt_of(row), 10 + row) for row in (3, 1, 0, 2, 3)])
    if between:
        state = json.loads(json.dumps(expected.state_dict()))
        expected = ExpectedLengths()
        expected.load_state_dict(state)
    expected.record([group_of(prompt_of(row), 10 + row) for row in (8, 9)])
    mean = expected(prompt_of(99))
    assert [expected(prompt_of(row)) for row in (0, 1, 2, 3)] == [mean, mean, 12, 13]


def test_a_full_memory_fits_into_a_few_megabytes_of_json():
    expected = ExpectedLengths()
    expected.record(group_of(prompt_of(row), 1, 2, 5) for row in range(lengths.REMEMBERED + 100))
    assert len(json.dumps(expected.state_dict())) < 3 << 20


def test_batches_of_real_environments_hold_the_same_prompts_as_without_ordering():
    config = Config(
        model={"name": "none"},
        environments=[{"type": "task", "name": "sorting"}, {"type": "task", "name": "arithmetic"}],
    )
    made = build_environments(config, build_char_tokenizer())
    plain, source = made.open_source(), LongestFirst(made.open_source())
    for step in range(3):
        expected, prompts = plain.next(6), source.next(6)
        assert sorted(prompts, key=lambda prompt: prompt.index) == expected
        source.record([group_of(p, len(p.token_ids) + step) for p in prompts])
    by_source = [prompt.source for prompt in prompts]
    assert by_source == sorted(by_source, reverse=by_source[0] == "sorting"), "one source runs longer than the other"
