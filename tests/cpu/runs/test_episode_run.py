"""Multi-turn episodes mixed with single-turn tasks in a complete run: real engine, two ranks."""

from __future__ import annotations

import math

import pytest
import yaml

from colocated_grpo.settings.schema import Config
from colocated_grpo.tools import show_rollouts
from colocated_grpo.tracking import files
from tests.support.paths import ROOT
from tests.support.training_runs import TrainingRun, settings, tiny_model, train

STEPS = 3

EPISODES = """
import asyncio

class Digits:
    '''Two to four turns; the reward is the number of digits in the policy's turns, over 24.'''

    def prompts(self, seed, split):
        number = seed if split == "train" else 10**6
        while True:
            number += 1
            yield {"prompt": f"say {number % 100}", "turns": 2 + number % 3}

    async def run(self, item, model):
        text = ""
        for turn in range(item["turns"]):
            if turn:
                await asyncio.sleep(0.01)
                model.observe(f"turn {turn}")
            text += (await model.generate(6)).text
        return {"reward": sum(character.isdigit() for character in text) / 24, "turns": float(model.turns)}
"""


GUIDE = (ROOT / "docs/guides/episodes.md").read_text()


def example(language: str) -> str:
    """Return the first code block of a language in the guide."""
    return GUIDE.split(f"```{language}\n", 1)[1].split("```", 1)[0]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> TrainingRun:
    folder = tmp_path_factory.mktemp("episodes")
    (folder / "digits.py").write_text(EPISODES)
    (folder / "guess.py").write_text(example("python"))
    config = settings(
        tiny_model(),
        environments=[
            {"type": "episode", "name": f"{folder / 'digits.py'}:Digits", "weight": 3},
            {"type": "episode", "name": f"{folder / 'guess.py'}:Guess", "args": {"guesses": 2}, "weight": 2},
            {"type": "task", "name": "sorting", "args": {"min_digits": 2, "max_digits": 3}},
        ],
        training_steps=STEPS,
        rollout={"prompts_per_step": 6, "max_prompt_tokens": 96, "max_completion_tokens": 72},
        evaluation={"every": STEPS, "prompts": 8},
        tracking={"rollouts_per_step": 32},
    )
    return train(folder, config, ranks=2)


def test_a_run_of_episodes_and_tasks_trains_and_reports_finite_numbers(run):
    rows = run.rows(files.TRAIN)
    assert [row["step"] for row in rows] == list(range(STEPS))
    for row in rows:
        assert all(value is not None and math.isfinite(value) for key, value in row.items() if key != "kind")
        assert row["reward_errors"] == 0
        assert row["staleness"] == 0
        assert row["grad_norm"] > 0
        assert 2 < row["reward/turns"] < 4


def test_engine_and_trainer_logprobs_agree_at_every_sampled_position(run):
    for row in run.rows(files.TRAIN):
        assert row["mismatch/max"] < 1e-4


def test_stored_rollouts_show_whole_conversations(run, capsys):
    rollouts = files.read_rollouts(run.folder)
    assert {row["source"].rpartition(":")[2] for row in rollouts} == {"sorting", "Digits", "Guess"}
    for row in (row for row in rollouts if row["source"].endswith("Digits")):
        turns = int(row["parts"]["turns"])
        for turn in range(1, turns):
            assert f"<|user|>turn {turn}<|end|><|assistant|>" in row["completion"]
        assert f"turn {turns}" not in row["completion"]
    assert show_rollouts.main([str(run.folder)]) == 0
    shown = capsys.readouterr().out
    assert "<|user|>turn 1<|end|>" in shown
    assert "turn 1" in (run.folder / "report.html").read_text()


def test_held_out_prompts_are_episodes_too(run):
    rows = run.rows(files.EVALUATION)
    assert [row["step"] for row in rows] == [0, STEPS]
    assert all(2 <= row["held_out/reward/turns"] <= 4 for row in rows)


def test_the_example_of_the_guide_runs_unchanged(run):
    games = [row for row in files.read_rollouts(run.folder) if row["source"].endswith("Guess")]
    assert games
    assert any("<|user|>That is not a number.<|end|>" in row["completion"] for row in games)
    config = Config.model_validate(yaml.safe_load(example("yaml")))
    assert config.environments[0].name == "guess.py:Guess"
