"""Lessons of town for the warm start: legal replies of the scripted teacher to turns of every phase."""

from __future__ import annotations

from collections import Counter
from itertools import islice

import pytest

from colocated_grpo.environments import EnvironmentSetupError
from colocated_grpo.environments.registry import build_task
from colocated_grpo.tools.make_model import build_char_tokenizer
from colocated_grpo.tools.warm_start import encoded_prompts
from tests.support.scores import score_text

BRIEF = {"prompts": "brief", "memory": 4, "games": 2, "rules": {"tool_calls": 0}}


def lessons(count, *, seed=0, split="train"):
    return list(islice(build_task("town_lessons", BRIEF).prompts(seed, split), count))


def test_the_teachers_reply_is_always_legal_and_a_corrupted_one_is_not():
    task = build_task("town_lessons", BRIEF)
    for item in lessons(300):
        assert score_text(task, item, item["answer"]).reward == 1.0
        assert score_text(task, item, item["answer"] + "x").reward == 0.0
        assert score_text(task, item, "<think></think><fly/>").parts == {"parse_rate": 0.0}


def test_lessons_cover_every_phase_and_follow_the_seed():
    phases = Counter(item["turn"].phase for item in lessons(1500))
    assert len(phases) == 8
    assert [item["prompt"] for item in lessons(30)] == [item["prompt"] for item in lessons(30)]
    trained = {str(item["prompt"]) for seed in (0, 1, 2) for item in lessons(200, seed=seed)}
    assert not trained & {str(item["prompt"]) for item in lessons(50, split="held_out")}


def test_brief_lessons_fit_a_small_model():
    prompts = list(islice(encoded_prompts(build_task("town_lessons", BRIEF), build_char_tokenizer(), 0, "train"), 300))
    assert max(len(prompt.token_ids) for prompt in prompts) < 320
    assert max(len(prompt.item["answer"]) for prompt in prompts) < 72


def test_lessons_reject_settings_that_the_game_does_not_have():
    with pytest.raises(EnvironmentSetupError, match="unknown argument 'game'; did you mean 'games'"):
        build_task("town_lessons", {"game": 1})
