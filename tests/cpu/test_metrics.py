"""Statistics over micro-batches and ranks."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from colocated_grpo.metrics import Metrics, Stat, reduce


def one_rank(tensor: Tensor) -> None:
    """All-reduce over one rank."""


def reduce_over_ranks(ranks: list[Metrics]) -> list[dict[str, float]]:
    """Return each rank's result of `reduce`. A first call records what every rank sends, a second one reduces it."""
    sent: dict[str, list[Tensor]] = {"sum": [], "max": []}
    for rank in ranks:
        reduce(rank, lambda t: sent["sum"].append(t.clone()), lambda t: sent["max"].append(t.clone()))
    total, largest = torch.stack(sent["sum"]).sum(0), torch.stack(sent["max"]).amax(0)
    return [reduce(rank, lambda t: t.copy_(total), lambda t: t.copy_(largest)) for rank in ranks]


def metrics_of(*batches: dict[str, Stat]) -> Metrics:
    metrics = Metrics("cpu")
    for stats in batches:
        metrics.add(stats)
    return metrics


def test_a_mean_is_weighted_by_counts_instead_of_a_mean_of_means():
    metrics = metrics_of(
        {"kl": Stat.mean(torch.tensor(9.0), torch.tensor(1.0))}, {"kl": Stat.mean(torch.tensor(3.0), torch.tensor(3.0))}
    )
    assert reduce(metrics, one_rank, one_rank) == {"kl": 3.0}


def test_every_kind_is_reduced_over_micro_batches_and_ranks():
    weights = [torch.tensor([1.0, 3.0]), torch.tensor([2.0]), torch.tensor([0.5, 0.5])]

    def stats(w: Tensor) -> dict[str, Stat]:
        count = torch.tensor(float(len(w)))
        return {
            "z/ess": Stat.ess(w.sum(), w.square().sum(), count),
            "max": Stat.max(-w.amin()),
            "mean": Stat.mean(w.sum(), count),
        }

    results = reduce_over_ranks([metrics_of(stats(weights[0]), stats(weights[1])), metrics_of(stats(weights[2]))])
    expected = {"max": -0.5, "mean": 7 / 5, "z/ess": 7**2 / (5 * (1 + 9 + 4 + 0.25 + 0.25))}
    assert results == [pytest.approx(expected)] * 2


def test_a_name_without_data_on_any_rank_is_left_out():
    zero = torch.tensor(0.0)
    stats = {"mean": Stat.mean(zero, zero), "max": Stat.max(-math.inf), "ess": Stat.ess(zero, zero, zero)}
    metrics = metrics_of(stats)
    assert reduce(metrics, one_rank, one_rank) == {}
    assert reduce(Metrics("cpu"), one_rank, one_rank) == {}


def test_nan_is_reported_and_not_left_out():
    metrics = metrics_of({"kl": Stat.mean(math.nan, 2.0), "max": Stat.max(torch.tensor(math.nan))})
    assert all(math.isnan(value) for value in reduce(metrics, one_rank, one_rank).values())


def test_one_name_with_two_kinds_is_rejected():
    with pytest.raises(ValueError, match="metric 'kl' is both a mean and a max"):
        metrics_of({"kl": Stat.mean(1.0, 1.0)}, {"kl": Stat.max(1.0)})


def test_counts_beyond_float32_stay_exact():
    metrics = metrics_of({"tokens": Stat.mean(2.0**24, 1.0)}, {"tokens": Stat.mean(1.0, 0.0)})
    assert reduce(metrics, one_rank, one_rank) == {"tokens": 2.0**24 + 1}


def test_the_device_is_read_exactly_once(monkeypatch: pytest.MonkeyPatch):
    reads: list[str] = []

    def counted(name: str) -> Callable:
        original = getattr(Tensor, name)
        return lambda self, *args: reads.append(name) or original(self, *args)

    for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__"):
        monkeypatch.setattr(Tensor, name, counted(name))
    one = torch.tensor(1.0)
    metrics = metrics_of(*[{"a": Stat.mean(one, one), "b": Stat.max(one), "c": Stat.ess(one, one, one)}] * 3)
    assert reads == []
    reduce(metrics, one_rank, one_rank)
    assert reads == ["tolist"]


@given(st.lists(st.lists(st.floats(-10, 10, width=32), min_size=1, max_size=5), min_size=1, max_size=5))
def test_statistics_do_not_depend_on_the_split_into_micro_batches(parts: list[list[float]]):
    metrics = metrics_of(
        *({"mean": Stat.mean(sum(part), len(part)), "max": Stat.max(torch.tensor(max(part)))} for part in parts)
    )
    whole = [value for part in parts for value in part]
    values = reduce(metrics, one_rank, one_rank)
    assert values["mean"] == pytest.approx(math.fsum(whole) / len(whole), abs=1e-9)
    assert values["max"] == max(whole)
