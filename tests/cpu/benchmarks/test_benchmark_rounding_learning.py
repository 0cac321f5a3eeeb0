"""The comparison of learning curves: the replaced roundings, the figures by hand, and one small study."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from colocated_grpo.benchmarks import rounding_learning, rounding_trainer
from colocated_grpo.metrics import Metrics
from colocated_grpo.policy.lora import merge
from colocated_grpo.policy.masters import UnshardedWeights
from colocated_grpo.policy.policy import Policy
from tests.support.paths import ROOT
from tests.support.small_policy import config_of, policy_of
from tests.support.training_runs import tiny_model

LAYER = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture(autouse=True)
def restored(monkeypatch):
    """Undo what the entry point replaces for the rest of its process."""
    for target, name in ((merge, "dithered"), (UnshardedWeights, "publish"), (Policy, "optimizer_step")):
        monkeypatch.setattr(target, name, getattr(target, name))


def policy_with(world, folder: Path, **policy) -> Policy:
    return policy_of(config_of(folder, weights="shared", policy={"compute_dtype": "bfloat16", **policy}), world)


def full_training(world, folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Return one weight and its master, which is a quarter of a step of bfloat16 above 1 everywhere."""
    policy = policy_with(world, folder)
    master = policy.parameters()[LAYER]
    master.data.fill_(1 + 2**-9)
    policy.weights.publish()
    return policy.model.hf_parameters()[LAYER].data, master.data


def test_full_training_rounds_to_nearest_unless_its_publish_is_replaced(world, model_folder):
    rounding_trainer.use_rounding("nearest", seed=0)
    weight, _ = full_training(world, model_folder())
    assert (weight == 1).all()

    rounding_trainer.use_rounding("dither", seed=0)
    weight, master = full_training(world, model_folder())
    assert weight.unique().tolist() == [1, 1 + 2**-7]
    assert weight.float().mean().item() == pytest.approx(master.mean().item(), abs=2**-7 * 0.05)

    rounding_trainer.use_rounding("dither", seed=1)
    assert not torch.equal(full_training(world, model_folder())[0], weight)


@pytest.mark.parametrize("rounding", rounding_trainer.ROUNDINGS)
def test_an_adapter_is_lost_by_rounding_to_nearest_and_kept_by_the_dither(world, model_folder, tmp_path, rounding):
    file = tmp_path / "weights.jsonl"
    rounding_trainer.use_rounding(rounding, seed=0)
    rounding_trainer.record_weights(file, [1])
    policy = policy_with(world, model_folder(), lr=1e-6, lora={"rank": 2})
    for master in policy.parameters().values():
        master.grad = torch.ones_like(master)
    policy.optimizer_step(Metrics(world.device))

    [row] = map(json.loads, file.read_text().splitlines())
    assert row["step"] == 1
    assert row["moved"] > 0.5
    assert row["kept"] == pytest.approx(1, abs=0.3) if rounding == "dither" else row["kept"] < 0.1


def test_shares_are_those_of_the_changes_since_the_start():
    start = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([4.0, 8.0])}
    rounded = {"a": torch.tensor([1.0, 2.5]), "b": torch.tensor([4.0, 8.0])}
    exact = {"a": torch.tensor([1.25, 2.25]), "b": torch.tensor([4.0, 8.5])}

    found = rounding_trainer.compare(start, start, rounded, exact)

    assert (found["moved"], found["changed"], found["mean_change"]) == (0.75, 0.25, 0.25)
    assert found["kept"] == pytest.approx(0.125 / 0.375)
    size = sum(value**2 for value in (1.25, 2.25, 4.0, 8.5))
    assert found["error"] == pytest.approx(((0.25**2 + 0.25**2 + 0.5**2) / size) ** 0.5)


def run(rounding: str, seed: int, held_out: list[float], kept: float) -> dict:
    return {
        "trained": "full",
        "lr": 1e-5,
        "rounding": rounding,
        "seed": seed,
        "weights": [{"step": 3, "changed": 0.5, "kept": kept, "error": 0.1}],
        "held_out": {str(step): reward for step, reward in zip((0, 2, 4), held_out, strict=True)},
    }


def test_gains_are_differences_of_equal_seeds():
    runs = [
        run("dither", 1, [0.4, 0.5, 0.8], 1.0),
        run("nearest", 0, [0.4, 0.4, 0.5], 0.0),
        run("nearest", 1, [0.4, 0.5, 0.6], 0.5),
        run("dither", 0, [0.4, 0.6, 0.6], 1.0),
    ]
    dither, nearest = rounding_learning.summarize(runs)
    assert (dither["rounding"], nearest["rounding"]) == ("dither", "nearest")
    assert (nearest["kept_3"], nearest["held_out_4"]) == (0.25, pytest.approx(0.55))
    assert dither["over_nearest"] == pytest.approx(0.15)
    assert dither["over_nearest_error"] == pytest.approx(0.05)
    assert dither["over_nearest_curve"] == pytest.approx(0.125)


@pytest.mark.slow
def test_a_small_study_trains_each_rounding_from_the_same_bfloat16_model(tmp_path):
    file = tmp_path / "result.json"
    sizes = ["--steps", "2", "--every", "2", "--prompts", "4", "--samples", "1", "--seeds", "3", "--rank", "2"]
    sources = ["--model", str(tiny_model()), "--config", str(ROOT / "training_configs/quickstart.yaml")]

    arguments = [*sizes, *sources, "--full-lr", "1e-6", "--adapter-lr", "--json", str(file)]
    assert rounding_learning.main(arguments) == 0

    result = json.loads(file.read_text())
    nearest, dither = result["runs"]
    assert [run["rounding"] for run in result["runs"]] == ["nearest", "dither"]
    assert nearest["held_out"]["0"] == dither["held_out"]["0"]
    assert [row["step"] for row in nearest["weights"]] == [1, 2]
    assert nearest["weights"][0]["kept"] < 0.5 < dither["weights"][0]["kept"]
