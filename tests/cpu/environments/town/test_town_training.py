"""Town in the whole training loop, real engine, two ranks: delayed rewards, game records, and an exact resume."""

from __future__ import annotations

import json
import math

import pytest
import torch
import torch.distributed.checkpoint as dcp

from colocated_grpo.tools import show_rollouts
from colocated_grpo.tracking import files
from colocated_grpo.tracking.files import EVENTS_FILE, read_games
from tests.support.training_runs import ForkedRun, settings, tiny_model, train, weights_of, without_wall_clock

STEPS = 12
TOWN = {
    "type": "turns",
    "name": "town",
    "commit": "random",
    "max_wait": 5,
    "args": {
        "prompts": "brief",
        "memory": 4,
        "games": 1,
        "credit": "mix",
        "players": ["policy", "sensible", "sensible", "frozen"],
        "rules": {"tool_calls": 0, "max_days": 2},
    },
    "opponent": {"name": "initial", "refresh_every": 3},
}


def town_run(**changes):
    base = {
        "environments": [TOWN],
        "deterministic": True,
        "training_steps": STEPS,
        "rollout": {"prompts_per_step": 4, "max_prompt_tokens": 320, "max_completion_tokens": 12},
        "batch": {"max_tokens_per_micro_batch": 1024},
        "evaluation": {"every": 6, "prompts": 4},
        "checkpoint": {"every": 3},
    }
    return settings(tiny_model(), **{**base, **changes})


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return train(tmp_path_factory.mktemp("town"), town_run(), ranks=2)


def test_every_step_has_a_row_even_while_all_turns_wait_for_the_end_of_their_game(run):
    rows = run.rows(files.TRAIN)
    assert [row["step"] for row in rows] == list(range(STEPS))
    waiting = [row["town/turns_waiting"] for row in rows]
    assert waiting[0] == 4, "the first step has nothing to train"
    assert "reward" not in rows[0]
    assert "loss" not in rows[0]
    trained = [row for row in rows if "loss" in row]
    assert trained
    for row in trained:
        assert math.isfinite(row["grad_norm"])
        assert 0 <= row["staleness"] <= 5
    assert any(row["staleness"] > 0 for row in trained)


def test_trained_turns_include_the_return_of_their_game(run):
    rows = [row for row in run.rows(files.TRAIN) if "reward/return" in row]
    assert rows
    assert any(row["town/opponent_turns"] > 0 for row in run.rows(files.TRAIN))
    assert {"town/parse_rate", "town/legal_rate", "town/turns_overdue", "town/games"} <= rows[0].keys()


def test_a_run_reports_parse_rates_win_rates_and_rewards_by_phase(run):
    shown = set().union(*run.rows(files.TRAIN))
    assert {"town/parse_rate", "town/legal_rate", "town/win_rate/policy"} <= shown
    assert {"town", "mafia", "neutral", "draw"} & {name.removeprefix("town/win_rate/") for name in shown}
    assert {"town/reward/discussion", "town/reward/nomination"} <= shown


def test_a_run_writes_its_games_as_events_transcript_and_report(run, capsys):
    games = read_games(run.folder)
    assert games
    events = [json.loads(line) for line in (run.folder / EVENTS_FILE).read_text().splitlines()]
    assert {row["game"] for row in events} == {game["game"] for game in games}
    assert "Games (latest" in (run.folder / "report.html").read_text()
    assert show_rollouts.main([str(run.folder), "--game"]) == 0
    assert "The game is over" in capsys.readouterr().out


def tensors_of(run, step, prefix):
    folder = run.folder / "checkpoints" / f"step_{step:06d}"
    metadata = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    tensors = {name: torch.empty(entry.size) for name, entry in metadata.items() if name.startswith(prefix)}
    dcp.load(tensors, checkpoint_id=folder, no_dist=True)
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}


def test_a_checkpoint_contains_the_opponent_as_of_its_latest_refresh(run):
    opponent, policy = tensors_of(run, 12, "opponent."), tensors_of(run, 9, "model.")
    assert opponent.keys() == policy.keys()
    assert all(torch.equal(opponent[name], policy[name]) for name in policy)


def test_a_killed_run_resumes_exactly(run, tmp_path):
    with ForkedRun(tmp_path, town_run(), ranks=2) as killed:
        killed.wait_for_step(7)
        killed.kill()
    resumed = train(tmp_path, town_run(), "--resume", "auto", ranks=2)
    for kind in (files.TRAIN, files.EVALUATION):
        assert without_wall_clock(resumed.rows(kind)) == without_wall_clock(run.rows(kind))
    assert weights_of(resumed) == weights_of(run)
    assert read_games(resumed.folder) == read_games(run.folder)


def test_structured_output_reaches_the_parse_rate_that_ends_the_run(tmp_path):
    rules = {"tool_calls": 0, "max_speech": 20}
    args = {**TOWN["args"], "credit": "immediate", "players": ["policy"], "rules": rules}
    entry = {**TOWN, "opponent": None, "args": args, "structured": True, "stop_at_parse_rate": 0.3, "stop_after": 2}
    rollout = {"prompts_per_step": 4, "max_prompt_tokens": 320, "max_completion_tokens": 480}
    config = town_run(environments=[entry], rollout=rollout, evaluation={"every": 0}, training_steps=4)
    run = train(tmp_path, config)
    rows = run.rows(files.TRAIN)
    assert [row["step"] for row in rows] == [0, 1]
    assert all(row["town/parse_rate"] == row["town/legal_rate"] >= 0.3 for row in rows)
    assert "is the last one: the environment's goal is reached" in run.stdout
    assert files.read_summary(run.folder)["state"] == "finished"
    final = weights_of(run)
    again = train(tmp_path, config, "--resume", "auto")
    assert [row["step"] for row in again.rows(files.TRAIN)] == [0, 1], "the goal stays reached"
    assert weights_of(again) == final
