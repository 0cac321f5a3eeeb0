"""Environments of other libraries in the whole training loop, real engine, two ranks; and the configs of the guide."""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from colocated_grpo.environments.build import build_environments
from colocated_grpo.environments.registry import KINDS
from colocated_grpo.settings.schema import Config
from colocated_grpo.tools.make_model import build_char_tokenizer
from colocated_grpo.tracking import files
from tests.support.openenv_server import Server
from tests.support.paths import ROOT
from tests.support.training_runs import TrainingRun, settings, tiny_model, train

STEPS = 3
GUIDE = (ROOT / "docs/guides/libraries.md").read_text()
GAME, TOOLS = "textarena:TicTacToe-v0", "tool_use"


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> TrainingRun:
    # An untrained model makes hardly any legal move; its rewards differ by how far it gets.
    game = {"max_turns": 2, "max_turn_tokens": 1, "unfinished_reward": 0.0}
    config = settings(
        tiny_model(),
        environments=[
            {"type": "episode", "name": GAME, "args": game, "weight": 2},
            {"type": "episode", "name": TOOLS, "args": {"max_turn_tokens": 16}},
        ],
        training_steps=STEPS,
        rollout={"prompts_per_step": 6, "group_size": 6, "max_prompt_tokens": 1200, "max_completion_tokens": 480},
        batch={"max_tokens_per_micro_batch": 2048},
        evaluation={"every": STEPS, "prompts": 6},
        tracking={"rollouts_per_step": 99},
    )
    return train(tmp_path_factory.mktemp("adapters"), config, ranks=2)


def test_a_run_on_other_libraries_trains_and_reports_finite_numbers(run):
    rows = run.rows(files.TRAIN)
    assert [row["step"] for row in rows] == list(range(STEPS))
    for row in rows:
        assert all(value is not None and math.isfinite(value) for key, value in row.items() if key != "kind")
        assert row["reward_errors"] == 0
        assert row["mismatch/max"] < 1e-4
        assert 0 <= row["reward/finished"] <= 1
        assert {f"env/{name}/{metric}" for name in (GAME, TOOLS) for metric in ("reward", "unscorable")} <= row.keys()
        assert 0 < row["env/textarena:TicTacToe-v0/completion_tokens"] <= row["completion_tokens/max"]
    assert rows[-1]["grad_norm"] > 0
    assert f"held_out/env/{TOOLS}/reward" in run.rows(files.EVALUATION)[0]


def test_recorded_rollouts_contain_games(run):
    kept = files.read_rollouts(run.folder)
    games = [row for row in kept if row["source"] == GAME]
    assert len(games) == 2 * sum(row["source"] == TOOLS for row in kept) > 0
    assert any("attempted an invalid move" in row["completion"] for row in games)
    assert any("placed their symbol" in row["completion"] for row in games)
    assert len({row["reward"] for row in games}) > 1


def test_held_out_prompts_are_evaluated(run):
    assert [row["step"] for row in run.rows(files.EVALUATION)] == [0, STEPS]


def test_every_configuration_of_the_guide_builds_and_yields_prompts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "gymnasium", SimpleNamespace())  # an example imports it, and plays with it later
    [lake] = [code for code in re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL) if "class Lake" in code]
    Path("lake.py").write_text(lake)
    blocks = re.findall(r"```yaml\n(.*?)```", GUIDE, re.DOTALL)
    libraries = set()
    with Server() as server:
        for block in blocks:
            config = Config.model_validate(yaml.safe_load(block.replace("http://localhost:8000", server.url)))
            libraries |= {entry.name.partition(":")[0] for entry in config.environments}
            assert build_environments(config, build_char_tokenizer()).held_out(1)
    assert libraries - {"lake.py"} == set(KINDS["episode"].adapters)
