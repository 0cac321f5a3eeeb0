"""The calculator of the guide in a complete run with the real engine, and as an evaluation set."""

from __future__ import annotations

import json
import math
import re

import pytest
import yaml

from colocated_grpo.environments.rewards.tool_calls import read_calls
from colocated_grpo.tracking import files
from tests.support.calling_model import calling_model
from tests.support.paths import ROOT
from tests.support.templates import TEMPLATE
from tests.support.training_runs import TrainingRun, settings, train

STEPS = 2
MEAN = "eval/sums/mean"
GUIDE = (ROOT / "docs/guides/adapters.md").read_text()
TASKSET = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)[-1]
CONFIG = next(text for text in re.findall(r"```yaml\n(.*?)```", GUIDE, re.DOTALL) if "my-calculator" in text)
CALLS = [
    f'<tool_call>{{"name": "{name}", "arguments": {{"expression": "{one}{operator}{two}"}}}}</tool_call>'
    for name in ("calculate", "compute")
    for one in range(8)
    for two in range(4)
    for operator in "*+-"
]
"""Half of them call a tool that does not exist."""
REWARD = """
import json
from pathlib import Path

async def busy(task, trace):
    '''The share of calls among 20. Saves the results that the policy read.'''
    with Path(__file__).with_name("results.jsonl").open("a") as file:
        file.write(json.dumps([message.content for message in trace.tool_messages]) + "\\n")
    return len(trace.tool_messages) / 20
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> TrainingRun:
    pytest.importorskip("verifiers.v1", reason="make test installs it")
    folder = tmp_path_factory.mktemp("tools")
    (folder / "my_calculator.py").write_text(TASKSET)
    (folder / "busy.py").write_text(REWARD)
    entry = yaml.safe_load(CONFIG)["environments"][0]
    entry["args"] |= {"max_turn_tokens": 3, "config": {"task": {"rewards": {"busy": {"fn": f"{folder}/busy.py:busy"}}}}}
    config = settings(
        calling_model(folder / "model", CALLS),
        environments=[entry],
        training_steps=STEPS,
        rollout={"prompts_per_step": 2, "group_size": 3, "max_prompt_tokens": 128, "max_completion_tokens": 1100},
        batch={"max_tokens_per_micro_batch": 2048},
        evaluation={"every": STEPS, "prompts": 2, "sets": [{"name": "sums", "prompts": 3, "source": entry}]},
        tracking={"rollouts_per_step": 32},
    )
    config["model"]["chat_template"] = TEMPLATE
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)  # the ranks import from their working directory
        return train(folder, config)


def test_a_run_with_tools_trains(run):
    rows = run.rows(files.TRAIN)
    assert [row["step"] for row in rows] == list(range(STEPS))
    for row in rows:
        assert all(value is not None and math.isfinite(value) for key, value in row.items() if key != "kind")
        assert row["reward_errors"] == row["staleness"] == 0
        assert row["grad_norm"] > 0
        assert row["reward/busy"] > 0
        assert row["reward/calls"] == pytest.approx(20 * row["reward/busy"])


def test_the_trained_tokens_are_those_that_the_engine_sampled(run):
    assert all(row["mismatch/max"] < 1e-4 for row in run.rows(files.TRAIN))
    stored = [row for row in files.read_rollouts(run.folder) if row["step"] is not None]
    assert max(len([turn for turn in row["turns"] if turn["sampled"]]) for row in stored) > 3
    for row in stored:
        sampled = [turn["text"] for turn in row["turns"] if turn["sampled"]]
        calls = [len(read_calls(text) or ()) for text in sampled]
        assert sum(calls[:-1]) <= row["parts"]["calls"] <= sum(calls)


def test_the_results_of_the_tools_are_what_the_policy_read(run):
    lines = (run.folder.parent / "results.jsonl").read_text().splitlines()
    results = {result for line in lines for result in json.loads(line)}
    assert "error: unknown tool 'compute'" in results
    assert len(results & set(map(str, range(-3, 25)))) > 3


def test_held_out_tasks_and_evaluation_sets_are_played_with_their_tools(run):
    held_out, sums = ([row for row in run.rows(files.EVALUATION) if name in row] for name in ("held_out/reward", MEAN))
    assert [row["step"] for row in held_out] == [row["step"] for row in sums] == [0, STEPS]
    assert all(row["held_out/reward/calls"] > 0 for row in held_out)
    assert all(row[MEAN] > 0 and row["eval/sums/errors"] == 0 for row in sums)
