"""A run whose micro-batches are split over two ranks trains like one with whole micro-batches."""

from __future__ import annotations

import pytest

from colocated_grpo.tracking import files
from tests.support.training_runs import ForkedRun, deterministic, train, uninterrupted, without_wall_clock

DEPENDS_ON_MICRO_BATCHES = ("imbalance", "padding", "prefix_reuse")


@pytest.mark.parametrize("engine_ranks", [1, 2])
def test_a_run_with_split_micro_batches_trains_like_one_without(tmp_path, engine_ranks):
    policy, engine = {"context_parallel": 2}, {"tensor_parallel_size": engine_ranks}
    run = train(tmp_path, deterministic(training_steps=5, policy=policy, engine=engine), ranks=2)
    rows = without_wall_clock(run.rows(files.TRAIN))
    assert len(rows) == 5 and max(row["grad_norm"] for row in rows) > 0
    for row, expected in zip(rows, without_wall_clock(uninterrupted(2).rows(files.TRAIN)), strict=False):
        assert row.pop("kind") == expected.pop("kind")
        for name in DEPENDS_ON_MICRO_BATCHES:
            row.pop(name), expected.pop(name)
        assert row == pytest.approx(expected, rel=1e-3, abs=1e-5)


def test_a_number_that_does_not_divide_the_ranks_is_one_line_before_a_model_is_read(tmp_path):
    with ForkedRun(tmp_path, deterministic(policy={"context_parallel": 3}), ranks=2) as run:
        assert run.wait() == 2
    assert run.stderr == "error: policy.context_parallel=3: must divide the number of ranks, 2\n"
