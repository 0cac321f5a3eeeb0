"""The rounding study: the dither by its properties, the simulated adapters by hand, and one small run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from colocated_grpo.benchmarks import rounding

CPU = torch.device("cpu")
BASE = (torch.randn(64, 48, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
ZERO = torch.zeros(64, 4), torch.ones(4, 48)


def small_adapter() -> tuple[torch.Tensor, torch.Tensor]:
    """Factors whose product is far below half a step of bfloat16 of most entries of BASE."""
    generator = torch.Generator().manual_seed(1)
    return torch.full((64, 4), 1e-6), torch.rand(4, 48, generator=generator)


def test_a_dithered_merge_is_exact_for_what_bfloat16_represents_and_repeats_itself():
    left, right = small_adapter()

    assert torch.equal(rounding.merged(BASE, *ZERO, 1.0, key=3), BASE)
    once, again, other = (rounding.merged(BASE, left, right, 1.0, key) for key in (3, 3, 4))
    assert torch.equal(once, again)
    assert not torch.equal(once, other)


def test_the_mean_of_dithered_merges_is_the_exact_sum_and_each_is_a_neighbour_of_it():
    left, right = small_adapter()
    exact = BASE.float() + 2 * left @ right
    merges = torch.stack([rounding.merged(BASE, left, right, 2.0, key) for key in range(400)]).float()

    step = exact.abs() * 2**-7  # at least the distance of two neighbours in bfloat16
    assert ((merges - exact).abs() <= step).all()
    deviation = (merges.mean(0) - exact) / step
    assert deviation.abs().max() < 0.15  # 6 standard deviations of a mean of 400
    assert abs(deviation.mean().item()) < 0.003
    assert (rounding.nearest(BASE, left, right, 2.0) != BASE).float().mean() < 0.2


def test_the_first_step_of_adam_moves_each_entry_of_b_by_the_learning_rate_and_leaves_a():
    options = rounding.parser().parse_args(["--rows", "64", "--columns", "48", "--rank", "4", "--steps", "1", "3"])

    first, third = ((step, left.clone(), right.clone()) for step, left, right in rounding.trained(options, 1e-3, CPU))

    assert (first[0], third[0]) == (1, 3)
    torch.testing.assert_close(first[1].abs(), torch.full((64, 4), 1e-3))
    bound = 48**-0.5 * 1.01  # of PEFT's initial A
    assert 0.9 * bound < first[2].abs().max() < bound
    assert third[1].abs().mean() > 1.5e-3  # the constant part of the gradients outweighs their noise


def test_the_share_kept_and_the_distances_are_relative_to_the_exact_sum():
    change = torch.full((64, 48), 2.0**-4)
    base = torch.ones(64, 48).bfloat16()
    half = (base.float() + change / 2).bfloat16()

    found = rounding.compare(base, change, half, torch.ones(8, 48))

    assert found["kept"] == pytest.approx(0.5)
    assert found["merged_distance"] == pytest.approx(2**-5 / (1 + 2**-4))
    assert found["adapter_distance"] == pytest.approx(2**-4 / (1 + 2**-4))
    assert found["activation_distance"] == 0  # 51 is a bfloat16


def test_rounding_to_nearest_loses_what_the_dither_keeps(tmp_path: Path):
    file = tmp_path / "rounding.json"
    sizes = ["--rows", "256", "--columns", "256", "--rank", "8", "--alpha", "8", "--tokens", "16"]

    assert rounding.main([*sizes, "--lr", "1e-5", "--steps", "1", "10", "--json", str(file)]) == 0

    rows = json.loads(file.read_text())["rows"]
    assert [(row["steps"], row["rounding"]) for row in rows] == [
        (steps, name) for steps in (1, 10) for name in ("nearest", "dither")
    ]
    for nearest, dither in (rows[:2], rows[2:]):
        assert nearest["kept"] < 0.3
        assert dither["kept"] == pytest.approx(1, abs=0.1)
        assert 1e-3 < dither["activation_distance"] < 2e-3
