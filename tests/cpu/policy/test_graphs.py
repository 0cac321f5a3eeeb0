"""Micro-batches that are padded to the fixed shape of a CUDA graph give the same loss, statistics and gradients."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from colocated_grpo.batching.pack import Minibatch
from colocated_grpo.metrics import Metrics, reduce
from colocated_grpo.policy import graphs
from colocated_grpo.policy.attention import with_own_keys
from colocated_grpo.policy.graphs import Replayed, padded, pays_off, shape_for
from tests.support.small_policy import (
    assert_same,
    config_of,
    gradients_of,
    make_small_model,
    pack_for,
    policy_of,
    random_groups,
    rounding,
    with_ref_logprobs,
)

LOSSES = {
    "token sum": {"type": "dapo"},
    "completion mean": {"type": "grpo"},
    "ratio of a whole completion": {"type": "gspo"},
    "penalty": {"type": "dapo", "kl": {"coef": 0.1}},
}


def with_keys(micro_batch):
    return replace(micro_batch, tokens=with_own_keys(micro_batch.tokens))


def results(policy, minibatch):
    metrics = Metrics(policy.device)
    policy.forward_backward(minibatch, metrics)
    found = gradients_of(policy)
    for parameter in policy.parameters().values():
        parameter.grad = None
    nothing = lambda _: None  # noqa: E731
    return found, reduce(metrics, nothing, nothing)


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("shares", [True, False], ids=["common prefixes", "no common prefixes"])
def test_padding_changes_neither_gradients_nor_statistics(tmp_path, world, loss, shares):
    config = config_of(
        make_small_model(tmp_path / "model", "gemma3"),  # windows of attention
        loss=loss,
        batch={"max_tokens_per_micro_batch": 60},
        rollout={"max_prompt_tokens": 16, "max_completion_tokens": 16},
    )
    policy = policy_of(config, world)
    [minibatch] = pack_for(world, random_groups(6, 4 if shares else 1), config).minibatches
    plain = [with_ref_logprobs(with_keys(each)) for each in minibatch.micro_batches]
    fixed = [padded(each, shape_for(each)) for each in plain]
    assert all(each.tokens.num_tokens == shape_for(each).rows for each in fixed)
    (expected, wanted), (found, metrics) = (
        results(policy, Minibatch(micro_batches=parts, counts=minibatch.counts)) for parts in (plain, fixed)
    )
    assert_same(found, expected, rtol=0, atol=rounding(expected))
    assert metrics == pytest.approx(wanted, rel=1e-5, abs=1e-6)


def test_a_padded_micro_batch_has_at_most_half_as_many_tokens_again_and_a_few_shapes_serve_all_sizes(world, tmp_path):
    config = config_of(
        make_small_model(tmp_path / "model", "qwen3"), rollout={"max_prompt_tokens": 16, "max_completion_tokens": 16}
    )
    shapes = set()
    for groups in range(8, 40):
        [minibatch] = pack_for(world, random_groups(groups, 4, seed=groups), config).minibatches
        for micro_batch in map(with_keys, minibatch.micro_batches):
            shapes.add(shape := shape_for(micro_batch))
            assert shape.rows <= max(64, 1.5 * micro_batch.tokens.num_tokens + 64)
            assert shape_for(padded(micro_batch, shape))[:2] == shape[:2]
    assert len(shapes) <= 12


def test_graphs_serve_small_models_and_small_micro_batches():
    assert pays_off(134_515_008, 30, 8_192)
    assert not pays_off(134_515_008, 30, 65_536)
    assert not pays_off(596_049_920, 28, 24_576)


class Recorder:
    """Stands for CUDA graphs, which need a GPU: writes down what happens."""

    def __init__(self, monkeypatch):
        self.events = []
        self.fails = False
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: self)
        monkeypatch.setattr(graphs, "_capture", self.capture)

    @contextmanager
    def capture(self, _graph):
        self.events.append("capture")
        yield
        if self.fails:
            raise RuntimeError("capture failed")

    def replay(self):
        self.events.append("replay")

    def since(self):
        events, self.events[:] = self.events[:], []
        return events


def test_work_is_captured_when_its_tensors_have_stayed_and_again_after_they_have_moved(monkeypatch):
    recorder, tensors, may_replay = Recorder(monkeypatch), [torch.ones(2)], True
    work = Replayed(lambda: recorder.events.append("work"), lambda: tensors, lambda: may_replay)
    captured = ["capture", "work", "replay"]
    assert [work() or recorder.since() for _ in range(3)] == [["work"], captured, ["replay"]]
    tensors[0] = torch.ones(2)
    assert [work() or recorder.since() for _ in range(3)] == [["work"], captured, ["replay"]]
    may_replay = False
    assert [work() or recorder.since() for _ in range(2)] == [["work"], ["work"]]
    may_replay = True
    assert [work() or recorder.since() for _ in range(2)] == [["work"], captured]
    assert work.replays == 5


def test_a_failed_capture_leaves_no_graph(monkeypatch):
    recorder = Recorder(monkeypatch)
    work = Replayed(lambda: None, list, lambda: True)
    work()
    assert not recorder.since()  # the first call needs no tensors to be plain
    recorder.fails = True
    for _ in range(2):
        with pytest.raises(RuntimeError, match="capture failed"):
            work()
    assert recorder.since() == ["capture", "capture"]
