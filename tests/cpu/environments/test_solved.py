"""Prompts that are solved again and again are skipped; the counts survive a resume."""

from __future__ import annotations

import json

import pytest

from colocated_grpo.environments.build import build_environments
from colocated_grpo.settings.schema import Config
from colocated_grpo.tools.make_model import build_char_tokenizer
from colocated_grpo.types import Group, Prompt, Rollout, Score

ROWS = 6
EASY = {"prompt 0", "prompt 3"}


@pytest.fixture
def opened(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"prompt {row}"}) + "\n" for row in range(ROWS)))

    def open_source(skip_solved):
        source = {"type": "dataset", "name": str(rows), "rewards": ["format_think"], "held_out": 0, "shuffle": False}
        config = Config(model={"name": "none"}, environments=[source], rollout={"skip_solved": skip_solved})
        return build_environments(config, build_char_tokenizer()).open_source()

    return open_source


def group_of(prompt: Prompt, rewards: list[float | None]) -> Group:
    rollouts = [
        Rollout(
            token_ids=[1, 2],
            loss_mask=[False, True],
            sampling_logprobs=[0.0, -1.0],
            prompt_length=1,
            text="",
            finish_reason="stop",
            policy_version=0,
            temperature=1.0,
            score=Score(reward=reward),
        )
        for reward in rewards
    ]
    return Group(prompt=prompt, rollouts=rollouts)


def play(source, count: int, solved=EASY, high=1.0) -> tuple[list[str], dict[str, float]]:
    """Draw prompts and record their groups. Returns the prompts and the metrics."""
    prompts = source.next(count)
    texts = [prompt.item["prompt"] for prompt in prompts]
    groups = [group_of(prompt, [high, high if prompt.item["prompt"] in solved else 0.0]) for prompt in prompts]
    return texts, source.record(groups).metrics


def skipped(metrics: dict[str, float]) -> float:
    [value] = [value for name, value in metrics.items() if name.startswith("prompts_skipped/")]
    return value


def test_a_prompt_is_skipped_after_the_last_visits_solved_it(opened):
    source = opened({"after": 2})
    for _ in range(2):
        texts, metrics = play(source, ROWS)
        assert len(set(texts)) == ROWS and skipped(metrics) == 0
    texts, metrics = play(source, ROWS - len(EASY))
    assert EASY.isdisjoint(texts)
    assert skipped(metrics) == len(EASY)


def test_a_visit_that_does_not_solve_starts_the_count_again(opened):
    source = opened({"after": 2})
    for solved in (EASY, set(), EASY):
        play(source, ROWS, solved)
    texts, _ = play(source, ROWS)
    assert set(texts) >= EASY


@pytest.mark.parametrize(("high", "reward", "counts"), [(0.0, 1.0, False), (0.5, 1.0, False), (0.5, 0.5, True)])
def test_equal_rewards_solve_a_prompt_only_from_the_given_reward_on(opened, high, reward, counts):
    source = opened({"after": 1, "reward": reward})
    play(source, ROWS, high=high)
    texts, _ = play(source, ROWS - len(EASY), high=high)
    assert EASY.isdisjoint(texts) == counts


def test_a_resumed_source_skips_what_the_uninterrupted_one_skips(opened):
    whole, resumed = opened({"after": 1}), opened({"after": 1})
    play(whole, ROWS + 2)
    resumed.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    for _ in range(3):
        assert play(whole, 3) == play(resumed, 3)
    assert whole.state_dict() == resumed.state_dict()


def test_the_setting_may_change_at_a_resume(opened):
    with_it, without = opened({"after": 1}), opened(None)
    play(with_it, ROWS)
    without.load_state_dict(with_it.state_dict())
    assert set(play(without, ROWS)[0]) >= EASY
    with_it.load_state_dict(without.state_dict())
    assert set(play(with_it, ROWS)[0]) >= EASY, "the counts begin anew"


def test_when_every_prompt_is_solved_all_are_visited_again(opened):
    source = opened({"after": 1})
    everything = {f"prompt {row}" for row in range(ROWS)}
    play(source, ROWS, everything)
    texts, metrics = play(source, ROWS, everything)
    assert set(texts) == everything
    assert skipped(metrics) == ROWS
