"""A frozen opponent: its own weights in the engine for its turns, the policy's again behind them, and one line where it
cannot be."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from colocated_grpo.runtime.distributed import World
from colocated_grpo.settings import config_json, rules
from colocated_grpo.settings.config_json import read_config_json
from colocated_grpo.settings.errors import ConfigError
from colocated_grpo.settings.inputs import check_inputs
from colocated_grpo.settings.schema import Config
from tests.support.engines import Pair, request_of
from tests.support.ranks import run_on_ranks
from tests.support.training_runs import settings, tiny_model

CLOSE = 2e-5
"""Float32 on both sides, with kernels that add up in different orders."""
REFRESH_EVERY = 3


def entry(players=("policy", "frozen"), **opponent) -> dict[str, Any]:
    return {"type": "turns", "name": "town", "args": {"players": list(players)}, "opponent": opponent}


def played(world: World, folder: Path, weights: str) -> dict[str, Any]:
    """The policy moves three times; what the engine scores before, as the opponent, and after."""
    pair = Pair(world, folder, weights=weights, environments=[entry(refresh_every=REFRESH_EVERY)])
    pair.write()
    facts: dict[str, Any] = {"initial": pair.engine_logprobs(), "opponent": [], "versions": [], "policy": []}
    for step in range(2 * REFRESH_EVERY):
        pair.write()
        facts["policy"].append((pair.engine_logprobs(), pair.disagreement()))
        pair.opponent.refresh(step)
        with pair.opponent.plays():
            facts["opponent"].append(pair.engine_logprobs())
            [completion] = pair.generate([request_of(step, 3)])
            facts["versions"].append(completion.policy_version)
        facts["policy"].append((pair.engine_logprobs(), pair.disagreement()))
        [completion] = pair.generate([request_of(step, 3)])
        facts["versions"].append(completion.policy_version)
        pair.change_weights()
    pair.engine.close()
    return facts


@pytest.mark.parametrize(("weights", "ranks"), [("copied", 2), ("shared", 1)])
def test_the_opponent_samples_with_its_own_weights_and_the_policys_are_restored(weights, ranks):
    for facts in run_on_ranks(played, ranks, tiny_model(), weights, timeout=300.0):
        before, after = facts["opponent"][:REFRESH_EVERY], facts["opponent"][REFRESH_EVERY:]
        policy_before, policy_behind = facts["policy"][::2], facts["policy"][1::2]
        assert policy_before == policy_behind
        assert max(disagreement for _, disagreement in policy_before) < CLOSE
        at_the_refresh, _ = policy_before[REFRESH_EVERY]
        assert at_the_refresh != facts["initial"]
        assert all(scores == facts["initial"] for scores in before)
        assert all(scores == at_the_refresh for scores in after)
        assert facts["versions"] == [-1, 0] * 2 * REFRESH_EVERY


def check(*environments) -> None:
    rules.check(Config.model_validate(settings(Path("model"), environments=list(environments))))


def test_a_run_has_one_frozen_model():
    check(entry(name="runs/a/final_model"), entry(name="runs/a/final_model"))
    with pytest.raises(ConfigError, match=r"environments.1.opponent: must equal the opponent of the other entries"):
        check(entry(name="runs/a/final_model"), entry())


def test_frozen_seats_need_an_opponent_model():
    with pytest.raises(ConfigError) as caught:
        check({**entry(), "opponent": None})
    assert str(caught.value) == (
        "environments.0.args.players: 'frozen' needs a model; set environments.0.opponent: {name: initial}"
    )


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"hidden_size": 128}, "hidden_size is 128, but "),
        ({"vocab_size": 7}, "vocab_size is 7, but "),
        (None, "no such folder"),
    ],
)
def test_a_model_of_another_shape_is_refused_before_anything_starts(tmp_path, change, line):
    other = tmp_path / "other"
    if change is not None:
        other.mkdir()
        (other / "config.json").write_text(json.dumps(json.loads((tiny_model() / "config.json").read_text()) | change))
        (other / "model.safetensors").touch()
    config = Config.model_validate(settings(tiny_model(), environments=[entry(name=str(other))]))
    with pytest.raises(ConfigError) as caught:
        check_inputs(config)
    assert str(caught.value).startswith(f"environments: opponent.name={str(other)!r}: {line}")
    assert "\n" not in str(caught.value)


def test_another_model_of_the_same_shape_is_accepted(tmp_path):
    other = tmp_path / "other"
    shutil.copytree(tiny_model(), other)
    config = Config.model_validate(settings(tiny_model(), environments=[entry(name=str(other))]))
    assert check_inputs(config) == (config, [])
    assert config.opponent_model.name == str(other)


@pytest.mark.parametrize("name", ["initial", "itself"])
def test_the_runs_own_model_is_read_once_for_both(name, monkeypatch):
    read = []
    monkeypatch.setattr(config_json, "read_config_json", lambda *of: read.append(of) or read_config_json(*of))
    name = str(tiny_model()) if name == "itself" else name
    config = Config.model_validate(settings(tiny_model(), environments=[entry(name=name)]))
    assert check_inputs(config) == (config, [])
    assert config.opponent_model == config.model
    assert read == [(config.model,)]
