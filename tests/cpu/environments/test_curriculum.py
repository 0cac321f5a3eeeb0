"""Rows from easy to hard, and prompts that rest; both continue exactly after a resume."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from colocated_grpo.environments import EnvironmentSetupError
from colocated_grpo.environments.build import build_environments
from colocated_grpo.environments.rows.curriculum import stage_sizes
from colocated_grpo.environments.rows.row_filter import difficulties
from colocated_grpo.settings import Config
from colocated_grpo.settings.rows import ColumnCurriculumConfig
from colocated_grpo.settings.rules import check
from colocated_grpo.tools.char_tokenizer import build_char_tokenizer
from tests.cpu.environments.test_solved import group_of
from tests.support.config_text import config_error

LEVELS = [3, 1, 2, 1, 3, 2, 1, 1, 2, 3, 1, 2]
NAMES = {1: "easy", 2: "medium", 3: "hard"}
BY_LEVEL = {"type": "column", "column": "level", "stages": 3, "steps": 4}
BY_PASS_RATE = {"type": "pass_rate", "rest": 2}


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    rows = tmp_path_factory.mktemp("data") / "rows.jsonl"
    lines = [
        {"prompt": f"prompt {row}", "level": level, "name": NAMES[level], "solve_rate": 1 - level / 4}
        for row, level in enumerate(LEVELS)
    ]
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def open_source(curriculum, **changes):
        entry = {"type": "dataset", "name": str(rows), "rewards": ["format_think"], "held_out": 0}
        sections = {"rollout": changes.pop("rollout", {})}
        config = Config(
            model={"name": "none"}, environments=[{**entry, "curriculum": curriculum, **changes}], **sections
        )
        return build_environments(config, build_char_tokenizer()).open_source()

    return open_source


def step(source, count, rate=None):
    """Draw prompts and record groups of four completions, of which `rate(prompt)` have reward 1."""
    prompts = source.next(count)
    passed = [0 if rate is None else rate(prompt) for prompt in prompts]
    groups = [group_of(prompt, [1.0] * ones + [0.0] * (4 - ones)) for prompt, ones in zip(prompts, passed, strict=True)]
    metrics = source.record(groups).metrics
    return prompts, {name.rpartition("/")[2]: value for name, value in metrics.items()}


def levels(prompts):
    return [prompt.item["level"] for prompt in prompts]


def test_each_stage_draws_from_the_easiest_rows_and_the_last_one_from_all(opened):
    source = opened(BY_LEVEL)
    seen = [step(source, 12) for _ in range(6)]
    assert [(metrics["stage"], metrics["rows"]) for _, metrics in seen] == [
        (1, 5), (1, 5), (2, 9), (2, 9), (3, 12), (3, 12),
    ]  # fmt: skip
    drawn = [set(levels(prompts)) for prompts, _ in seen]
    assert drawn == [{1}, {1}, {1, 2}, {1, 2}, {1, 2, 3}, {1, 2, 3}]
    assert Counter(prompt.item["prompt"] for prompt in seen[4][0]).most_common(1)[0][1] == 1, "passes over all rows"


def test_a_stage_does_not_begin_within_a_step_and_begins_with_a_new_pass(opened):
    source = opened({**BY_LEVEL, "steps": 2})
    first = source.next(4) + source.next(40)
    assert set(levels(first)) == {1}
    source.record([])
    second = [prompt.item["prompt"] for prompt in source.next(9)]
    assert len(set(second)) == 9, "every row of the stage once"


@pytest.mark.parametrize(
    ("column", "order"),
    [("level", "ascending"), ("solve_rate", "descending"), ("name", ["easy", "medium", "hard"]), ("level", [1, 2, 3])],
)
def test_difficulty_is_a_number_or_a_place_in_a_list(opened, column, order):
    expected, other = opened(BY_LEVEL), opened({**BY_LEVEL, "column": column, "order": order})
    for _ in range(5):
        assert step(expected, 5) == step(other, 5)


def test_without_shuffling_rows_are_read_from_easy_to_hard(opened):
    prompts, _ = step(opened({**BY_LEVEL, "stages": 2, "steps": 1}, shuffle=False), 9)
    assert levels(prompts) == [1] * 5 + [2] * 4
    assert [prompt.item["prompt"] for prompt in prompts[:5]] == [f"prompt {row}" for row in (1, 3, 6, 7, 10)]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=30), st.integers(2, 8))
def test_stages_grow_to_all_rows_and_never_part_equal_difficulties(found, stages):
    found = sorted(map(float, found))
    sizes = stage_sizes(found, stages)
    assert len(sizes) == stages
    assert sizes == sorted(sizes)
    assert sizes[-1] == len(found)
    for number, size in enumerate(sizes, 1):
        assert size * stages >= len(found) * number
        assert size == len(found) or found[size - 1] < found[size]


def test_the_pass_rate_of_the_last_prompts_decides_when_the_next_stage_begins(opened):
    pace = {"steps": None, "high": 0.7, "low": 0.3, "window": 6}
    source = opened({**BY_LEVEL, **pace})
    stages = []
    for passed in (4, 4, 2, 2, 4, 4, 4, 0, 0, 0):  # of four completions, in steps of three prompts
        _, metrics = step(source, 3, lambda _prompt, passed=passed: passed)
        stages.append(metrics["stage"])
    # Two steps fill the window; a stage begins with an empty one. 4, 4 -> up; 2, 2 -> stays; 2, 4 -> up; 4, 0 -> stays.
    assert stages == [1, 1, 2, 2, 2, 3, 3, 3, 3, 2]


def test_prompts_outside_the_bounds_rest_and_are_visited_again(opened):
    source = opened(BY_PASS_RATE, shuffle=False)
    rates = {1: 4, 2: 2, 3: 0}  # level 1 is too easy, level 3 too hard
    rate = lambda prompt: rates[prompt.item["level"]]  # noqa: E731
    _, metrics = step(source, 12, rate)
    assert (metrics["passed_over"], metrics["resting"]) == (0, 8)
    for _ in range(2):
        prompts, metrics = step(source, 4, rate)
        assert levels(prompts) == [2] * 4
    assert metrics["passed_over"] == 8
    prompts, metrics = step(source, 12, rate)
    assert sorted(levels(prompts)) == sorted(LEVELS), "their rest is over"


def test_bounds_are_included_and_prompts_without_a_reward_do_not_rest(opened):
    source = opened({**BY_PASS_RATE, "low": 0.25, "high": 0.75})
    for passed, resting in ((0, 12), (1, 0), (3, 0), (4, 12)):
        _, metrics = step(source, 12, lambda _prompt, passed=passed: passed)
        assert metrics["resting"] == resting
    prompts = source.next(12)
    metrics = source.record([group_of(prompt, [None, None]) for prompt in prompts]).metrics
    assert next(value for name, value in metrics.items() if name.endswith("resting")) == 0


def test_if_every_prompt_rests_the_next_one_is_drawn_all_the_same(opened):
    source = opened({**BY_PASS_RATE, "rest": 1000})
    step(source, 12)
    prompts, metrics = step(source, 3)
    assert len(prompts) == 3
    assert metrics["passed_over"] > 0


CURRICULA = {
    "steps": BY_LEVEL,
    "pass rate of stages": {**BY_LEVEL, "steps": None, "high": 0.6, "low": 0.4, "window": 5},
    "resting": BY_PASS_RATE,
}


@pytest.mark.parametrize("curriculum", CURRICULA.values(), ids=CURRICULA)
@settings(max_examples=15, deadline=None)
@example(before=[8, 3], after=[2, 1])  # the window holds prompts of both parts
@given(before=st.lists(st.integers(1, 9), max_size=6), after=st.lists(st.integers(1, 9), max_size=6))
def test_a_resumed_source_continues_exactly_as_an_uninterrupted_one(opened, curriculum, before, after):
    rate = lambda prompt: prompt.index // 4 % 2 * 4  # noqa: E731
    both = {"rollout": {"skip_solved": {"after": 3}}}
    whole, resumed = opened(curriculum, **both), opened(curriculum, **both)
    for count in before:
        step(whole, count, rate)
    state = json.loads(json.dumps(whole.state_dict()))
    step(resumed, 5, rate)  # is forgotten
    resumed.load_state_dict(state)
    for count in after:
        assert step(whole, count, rate) == step(resumed, count, rate)
    assert whole.state_dict() == resumed.state_dict()


def test_a_curriculum_may_be_added_changed_and_removed_at_a_resume(opened):
    without, with_it = opened(None), opened(BY_LEVEL)
    for _ in range(5):
        step(without, 4)
        step(with_it, 4)
    added = opened(BY_LEVEL)
    added.load_state_dict(without.state_dict())
    assert step(added, 3)[1]["stage"] == 1, "it begins with its first stage"
    state = json.loads(json.dumps(with_it.state_dict()))
    for change, stage in (
        ({"stages": 2}, 1),
        ({"column": "solve_rate"}, 1),
        ({"order": [1, 2, 3]}, 1),
        ({"steps": 5}, 3),  # the pace alone: the stages are the same
    ):
        changed = opened({**BY_LEVEL, **change})
        changed.load_state_dict(state)
        assert step(changed, 3)[1]["stage"] == stage, change
    removed = opened(None)
    removed.load_state_dict(with_it.state_dict())
    assert len(removed.next(5)) == 5


@pytest.mark.parametrize(
    ("values", "order", "message"),
    [
        ([1, "x"], "ascending", "column 'level' has 'x', which is not a number; leave such rows out by `where`"),
        ([1, None], "ascending", "column 'level' has null, which is not a number"),
        ([1, float("nan")], "ascending", "column 'level' has nan, which is not a number"),
        (["a", "b"], ["a", "c"], "column 'level' has 'b', which `order` does not list"),
    ],
)
def test_a_row_without_a_difficulty_raises_one_line(values, order, message):
    config = ColumnCurriculumConfig(type="column", column="level", order=order, steps=3)
    with pytest.raises(ValueError, match="column 'level'") as error:
        difficulties(values, config)
    assert message in str(error.value)


def test_a_missing_column_is_named(opened):
    with pytest.raises(EnvironmentSetupError, match="curriculum: no column 'hardness'; the data has: prompt, level"):
        opened({**BY_LEVEL, "column": "hardness"})
    with pytest.raises(EnvironmentSetupError, match="list the values in `order`, easiest first: 'easy', 'hard', 'medi"):
        opened({**BY_LEVEL, "column": "name"})


def test_held_out_rows_need_no_column_of_the_difficulty(opened, tmp_path):
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text('{"prompt": "held out"}\n')
    source = opened(BY_LEVEL, eval_split=str(held_out), held_out=None)
    assert set(levels(step(source, 5)[0])) == {1}


def test_settings_that_contradict_each_other_are_rejected():
    text = "environments: [{type: dataset, name: a.jsonl, rewards: [exact_match], curriculum: {%s}}]\nmodel: {name: x}"
    for wrong, message in (
        ("type: column, column: level", "needs either steps or high"),
        ("type: column, column: level, steps: 3, high: 0.5", "needs either steps or high"),
        ("type: column, column: level, steps: 3, low: 0.5", "low=0.5 needs high"),
        ("type: column, column: level, high: 0.2, low: 0.5", "low=0.5 is above high=0.2"),
        ("type: pass_rate, high: 0.2, low: 0.5", "low=0.5 is above high=0.2"),
        ("type: column, column: level, steps: 100", "curriculum.steps=100: must be below training_steps=100, or the"),
        ("by: level", "environments.0.curriculum={'by': 'level'}: needs 'type'"),
    ):
        assert message in config_error(text % wrong, alone=True)
    source = {"type": "dataset", "name": "a.jsonl", "rewards": ["exact_match"], "curriculum": BY_LEVEL}
    config = Config(
        model={"name": "x"},
        environments=[{"type": "task", "name": "sorting"}],
        evaluation={"sets": [{"name": "own", "source": source}]},
    )
    with pytest.raises(ValueError, match=r"evaluation\.sets\.0\.source\.curriculum=.*: has no meaning here"):
        check(config)
