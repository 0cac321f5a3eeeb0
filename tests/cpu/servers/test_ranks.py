"""An engine of two ranks: every call of its first rank runs on the other, in the same order."""

from __future__ import annotations

import pytest

from colocated_grpo.runtime.distributed import World
from colocated_grpo.servers.engine_control import MirroredEngine
from tests.support.fakes import FakeEngine
from tests.support.ranks import run_on_ranks
from tests.support.trainer_server import alone, completed, requests


def served_on_all_ranks(world: World) -> tuple[list[str], list[object], list[object]]:
    """Return this rank's calls, the keys that it has been given, and rank 0's results."""
    engine, results = FakeEngine(), []
    whole = MirroredEngine(engine, world)
    if world.is_main:
        results = use(whole)
        whole.close()
    else:
        whole.follow()
    return engine.events, [request.key for request in engine.submitted], results


def use(engine: MirroredEngine) -> list[object]:
    sent = requests(20)
    engine.weights_changed(3)
    engine.submit(iter(sent))
    engine.abort([sent[1].key])
    finished = completed(engine, 19)
    expected = alone(sent, policy_version=3)
    del expected[sent[1].key]
    assert dict(finished) == expected
    engine.submit(requests(1, stream=True, seed=5))
    assert engine.step() == []
    deltas = engine.deltas()
    engine.abort()
    return [*deltas, engine.top_logprobs([1, 2], 1)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_all_ranks_make_the_first_ranks_calls(ranks):
    outcomes = run_on_ranks(served_on_all_ranks, ranks)
    events, keys, results = outcomes[0]
    assert len(keys) == 21
    assert len(results) == 2
    assert events.pop() == "close"  # of its own process; the others end by themselves
    assert events[-2:] == ["abort", "top 1"]
    for other_events, other_keys, _ in outcomes[1:]:
        assert (other_events, other_keys) == (events, keys)


def rejected_on_all_ranks(world: World) -> tuple[str, list[str]]:
    engine = FakeEngine()
    done: list[str] = []

    def fail(reason: str) -> None:
        done.append(reason)
        raise ValueError(reason)

    whole = MirroredEngine(engine, world, {"fail": fail})
    if not world.is_main:
        whole.follow()
        return "", [*done, *engine.events]
    with pytest.raises(ValueError, match="unknown token"):
        whole.top_logprobs([99, 99], 1)
    with pytest.raises(ValueError, match="as asked") as error:
        whole.call("fail", "as asked")
    whole.weights_changed(4)  # the other rank still follows
    whole.close()
    return str(error.value), [*done, *engine.events]


def test_an_invalid_call_is_the_first_ranks_error_and_the_others_go_on():
    (error, calls), (_, followed) = run_on_ranks(rejected_on_all_ranks, 2)
    assert error == "rank 0 of the engine: as asked"
    assert calls.pop() == "close"
    assert followed == calls == ["as asked", "top 1", "weights changed 4"]
