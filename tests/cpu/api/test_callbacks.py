"""Callbacks: what they see, what they may ask for, and what an exception in one costs."""

from __future__ import annotations

import pytest

from colocated_grpo.callbacks import Callbacks, check_callbacks
from colocated_grpo.settings.errors import ConfigError
from tests.support.ranks import single_rank_world


def callbacks_of(folder, *callbacks, learning_rate=None):
    """Return the callbacks of a run of 5 steps, and the list that its notes go to."""
    notes = []
    return Callbacks(callbacks, 5, folder, single_rank_world(), notes.append, learning_rate), notes


def test_a_callback_that_raises_costs_one_line_and_the_run_goes_on(tmp_path):
    class Broken:
        def on_step_end(self, state):
            raise SystemExit("enough")

    class Whole:
        def on_step_end(self, state):
            state.log({"distance": 2})

    calls, notes = callbacks_of(tmp_path, Broken(), Whole())
    rows = [calls.step_ended(step, {"reward": 0.5}) for step in range(2)]
    assert rows == [{"distance": 2.0, "callback_errors": 1.0}] * 2
    [line] = notes
    assert line.startswith("callback Broken.on_step_end: SystemExit: enough (test_callbacks.py, line ")
    assert line.endswith("; the run goes on")


def test_a_callback_cannot_replace_a_metric_of_the_run(tmp_path):
    class Liar:
        def on_evaluate(self, state):
            state.log({"mine": 1})
            state.log({"mine": 2})  # its own metric may change
            state.log({"held_out/reward": 1})

    calls, notes = callbacks_of(tmp_path, Liar())
    assert calls.evaluated(0, {"held_out/reward": 0.1}) == {"mine": 2.0}
    assert "ValueError: 'held_out/reward' is a metric of the run; choose another name" in notes[0]


@pytest.mark.parametrize("rate", [0.0, -1e-6, float("nan"), float("inf")])
def test_an_impossible_learning_rate_is_not_applied(tmp_path, rate):
    class Eager:
        def on_step_end(self, state):
            state.set_learning_rate(rate)

    calls, notes = callbacks_of(tmp_path, Eager(), learning_rate=2e-6)
    calls.step_ended(0, {})
    assert calls.requests().learning_rate == 2e-6
    assert "must be a number above 0" in notes[0]


def test_a_method_of_another_trainer_is_reported_before_the_run():
    class Theirs:
        def on_step_end(self, args, state, control, **others): ...

    class Misspelled:
        def on_evaluation(self, state): ...

    class Awaited:
        async def on_step_end(self, state): ...

    with pytest.raises(ConfigError, match=r"callbacks.0: Theirs: on_step_end must take one argument"):
        check_callbacks([Theirs()])
    with pytest.raises(ConfigError, match=r"callbacks.0: Awaited: on_step_end must not be async"):
        check_callbacks([Awaited()])
    with pytest.raises(
        ConfigError, match=r"callbacks.0: Misspelled: has none of the methods .* did you mean on_evalua"
    ):
        check_callbacks([Misspelled()])
