"""Agents in a complete run with the real engine: the guide's program in processes, and a function."""

from __future__ import annotations

import json
import math
import re

import pytest

from colocated_grpo.environments.registry import check_names
from colocated_grpo.tracking import files
from tests.support.config_text import load
from tests.support.paths import ROOT
from tests.support.training_runs import TrainingRun, settings, tiny_model, train

STEPS = 2
GUIDE = (ROOT / "docs/guides/agents.md").read_text()
SAID = "said.jsonl"
HELD_OUT = 4
SET = {
    "name": "all",
    "prompts": 3,
    "samples": 2,
    "source": {"type": "agent", "name": "hard.jsonl", "program": "answer.py:play"},
}

DIGITS = """
import json
from pathlib import Path

from openai import AsyncOpenAI

async def play(item, base_url, api_key):
    '''Three turns; the reward is the share of digits. Saves what the policy said.'''
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        messages, said = [{"role": "user", "content": item["prompt"]}], []
        for turn in range(3):
            reply = await client.chat.completions.create(
                model="policy", messages=messages, max_tokens=5, logprobs=True, stop=["q", "x", "z"]
            )
            choice = reply.choices[0]
            said.append([entry.token for entry in choice.logprobs.content])
            messages += [choice.message, {"role": "user", "content": f"turn {turn}"}]
    with Path(__file__).with_name("said.jsonl").open("a") as file:
        file.write(json.dumps(said) + "\\n")
    text = "".join(map("".join, said))
    return {"reward": sum(map(str.isdigit, text)) / 15, "turns": len(said)}
"""


def examples(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", GUIDE, re.DOTALL)


def stored_of(run: TrainingRun, name: str) -> list[files.Row]:
    """Return the stored rollouts of the rows in a file."""
    return [row for row in files.read_rollouts(run.folder) if row["source"].endswith(name)]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> TrainingRun:
    folder = tmp_path_factory.mktemp("agents")
    (folder / "digits.py").write_text(DIGITS)
    (folder / "calculator.py").write_text(examples("python")[0])
    (folder / "answer.py").write_text(examples("python")[2])
    (folder / "tasks.jsonl").write_text(examples("json")[0])
    (folder / "hard.jsonl").write_text("".join(f'{{"prompt": "hard {n}", "answer": "{n}"}}\n' for n in range(5)))
    (folder / "numbers.jsonl").write_text("".join(json.dumps({"prompt": f"say {n}"}) + "\n" for n in range(40)))
    config = settings(
        tiny_model(),
        environments=[
            {"type": "agent", "name": "numbers.jsonl", "program": "digits.py:play", "weight": 3},
            {"type": "agent", "name": "tasks.jsonl", "program": "calculator.py", "held_out": 0},
            {"type": "agent", "name": "tasks.jsonl", "program": "answer.py:play", "held_out": 0},
        ],
        training_steps=STEPS,
        rollout={"prompts_per_step": 5, "group_size": 2, "max_prompt_tokens": 256, "max_completion_tokens": 256},
        batch={"max_tokens_per_micro_batch": 1024},
        evaluation={"every": STEPS, "prompts": HELD_OUT, "sets": [SET]},
        tracking={"rollouts_per_step": 32},
    )
    return train(folder, config)


def test_a_run_of_agents_trains(run):
    rows = run.rows(files.TRAIN)
    assert [row["step"] for row in rows] == list(range(STEPS))
    for row in rows:
        assert all(value is not None and math.isfinite(value) for key, value in row.items() if key != "kind")
        assert row["reward_errors"] == 0
        assert row["staleness"] == 0
        assert row["grad_norm"] > 0
        assert row["reward/turns"] == 3


def test_the_trained_tokens_are_those_that_the_engine_sampled(run):
    for row in run.rows(files.TRAIN):
        assert row["mismatch/max"] < 1e-4
    stored = stored_of(run, "numbers.jsonl")
    trained = ["".join(turn["text"] for turn in row["turns"] if turn["sampled"]) for row in stored]
    said = [json.loads(line) for line in (run.folder.parent / SAID).read_text().splitlines()]
    assert len(trained) > STEPS * 3 * 2
    assert sorted(trained) == sorted("".join(map("".join, turns)) for turns in said)


def test_a_stop_string_of_a_request_ends_its_completion(run):
    turns = [turn["text"] for row in stored_of(run, "numbers.jsonl") for turn in row["turns"] if turn["sampled"]]
    ends = [turn for turn in turns if set(turn) & set("qxz")]
    assert ends and all(turn[-1] in "qxz" and not set(turn[:-1]) & set("qxz") for turn in ends)


def test_episodes_whose_prompts_do_not_extend_each_other_are_counted(run):
    """The random model samples tokens of the template, which its messages then lack."""
    assert any(row["sequences"] > 1 for row in run.rows(files.TRAIN))


def test_the_program_of_the_guide_runs_unchanged(run):
    played = stored_of(run, "tasks.jsonl")
    assert len(played) == STEPS * 2
    for row in played:
        assert row["error"] is None
        assert row["parts"].keys() == {"numbers"}
        assert "Find " in row["prompt"]


def test_the_function_of_the_guide_runs_unchanged(run):
    played = stored_of(run, "tasks.jsonl#2")
    assert len(played) == STEPS * 2
    assert [row["error"] for row in played] == [None] * len(played)


def test_held_out_rows_are_played_too(run):
    rows = [row for row in run.rows(files.EVALUATION) if "held_out/reward" in row]
    assert [row["step"] for row in rows] == [0, STEPS]
    assert all(row["held_out/reward/turns"] == 3 for row in rows)


def test_the_rows_of_an_evaluation_set_are_played_in_order(run):
    rows = [row for row in run.rows(files.EVALUATION) if "eval/all/mean" in row]
    assert [(row["step"], row["eval/all/errors"]) for row in rows] == [(0, 0), (STEPS, 0)]
    assert all(row["eval/all/length"] > 0 and "eval/all/pass@2" in row for row in rows)
    played = [row for row in stored_of(run, "eval/all") if row["step"] == 0]
    assert {row["prompt"].split("<|end|>")[0] for row in played} == {f"<|user|>hard {n}" for n in range(3)}


@pytest.mark.parametrize("text", examples("yaml"))
def test_the_configs_of_the_guide_load(text):
    config = load(text, alone=True)
    check_names(config.environments, config.evaluation.sets)
    assert config.environments[0].type == "agent"
