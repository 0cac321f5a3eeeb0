"""Compiled blocks: one graph for all micro-batches, Inductor's options by family, one line where the compiler fails."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partialmethod
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from colocated_grpo.batching.micro_batch import build_micro_batch
from colocated_grpo.errors import RunError
from colocated_grpo.metrics import Metrics
from colocated_grpo.policy.activations import StepSettings, run_trial_step
from colocated_grpo.policy.blocks import Block, blocks_of
from colocated_grpo.policy.model import COMPILE_OPTIONS, COMPILE_OPTIONS_OF
from colocated_grpo.runtime.distributed import World
from tests.support.compiled_blocks import graph_counter
from tests.support.families import SETTINGS
from tests.support.ranks import run_on_ranks
from tests.support.small_policy import (
    config_of,
    gradients_of,
    make_small_model,
    pack_for,
    policy_of,
    random_groups,
    with_old_logprobs,
)


@pytest.mark.parametrize("family", ["qwen3", "gemma4", "deepseek_v3"])
def test_blocks_are_compiled_with_the_options_of_their_family(world, tmp_path, monkeypatch, family):
    seen = []
    monkeypatch.setattr(Block, "compile", lambda self, **options: seen.append(options))
    folder = make_small_model(tmp_path / "model", family, edits=SETTINGS[family])
    policy = policy_of(config_of(folder, policy={"compile": True}), world)
    expected = COMPILE_OPTIONS_OF.get(policy.model.lm.config.model_type, {})
    assert bool(expected) == (family != "qwen3")
    assert seen == [{"dynamic": True, "options": COMPILE_OPTIONS | expected}] * len(seen)
    assert seen


@pytest.mark.parametrize(("layers", "first"), [(None, True), ([0], True), ([1], False)])
def test_inputs_of_blocks_with_adapters_require_gradients_so_that_they_share_one_graph(
    world, tmp_path, monkeypatch, layers, first
):
    monkeypatch.setattr(Block, "compile", lambda self, **options: None)
    folder = make_small_model(tmp_path / "model", "qwen3")
    config = config_of(folder, policy={"compile": True, "lora": {"rank": 4, "layers": layers}})
    policy = policy_of(config, world)
    seen = []
    for block in blocks_of(policy.model):
        block.register_forward_pre_hook(lambda _, args: seen.append(args[0].requires_grad))
    minibatch = pack_for(world, random_groups(1, 2), config).map(with_old_logprobs).minibatches[0]
    policy.forward_backward(minibatch, Metrics(world.device))
    assert seen == [first, layers != [1]]
    seen.clear()
    policy.score(minibatch.micro_batches[0])
    assert seen == [False, False]


def cache_use(world: World, folder: Path) -> Counter[str]:
    config = config_of(folder, policy={"compile": True, "lora": {"rank": 4}})
    minibatch = pack_for(world, random_groups(1, 2), config).map(with_old_logprobs).minibatches[0]
    policy_of(config, world).forward_backward(minibatch, Metrics(world.device))
    return counters["aot_autograd"]


def test_the_next_start_need_not_trace_blocks_with_adapters_and_shared_prefixes_again(model_folder):
    [used] = run_on_ranks(cache_use, 1, model_folder("qwen3"))
    assert used["autograd_cache_bypass"] == 0 < used["autograd_cache_saved"] + used["autograd_cache_hit"]


@pytest.mark.parametrize("checkpointed", [False, True])
def test_micro_batches_with_and_without_common_prefixes_and_padding_share_one_graph(
    world, model_folder, monkeypatch, checkpointed
):
    """Trial steps, which have common prefixes, compile it before the first training step."""

    def gradients(*, compiled: bool) -> dict[str, Tensor]:
        config = config_of(
            model_folder("qwen3"),
            policy={"compile": compiled, "gradient_checkpointing": checkpointed},
            batch={"max_tokens_per_micro_batch": 64},
        )
        policy = policy_of(config, world)
        for tokens in StepSettings.of(config).trial_sizes():
            run_trial_step(policy, StepSettings.of(config), tokens)
        sizes = (3, 4), (7, 1), (1, 1)
        batches = [pack_for(world, random_groups(*size), config) for size in sizes]
        parts = [build_micro_batch([]), *(part for batch in batches for part in batch.minibatches[0].micro_batches)]
        minibatch = replace(batches[0].minibatches[0], micro_batches=[*map(with_old_logprobs, parts)])
        policy.forward_backward(minibatch, Metrics(world.device))
        return gradients_of(policy)

    num_graphs = graph_counter(monkeypatch)
    expected = gradients(compiled=False)
    assert num_graphs() == 0
    actual = gradients(compiled=True)
    assert num_graphs() == 1
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_the_options_are_known_to_torch():
    for options in (COMPILE_OPTIONS, *COMPILE_OPTIONS_OF.values()):
        assert set(options) <= set(torch._inductor.list_options())


def test_a_failure_of_the_compiler_is_one_line_that_names_the_setting(world, tmp_path, monkeypatch):
    def fail(graph, inputs, **_):
        raise AssertionError("sizes do not match\nSet TORCHDYNAMO_VERBOSE=1")

    monkeypatch.setattr(Block, "compile", partialmethod(Block.compile, backend=fail, options=None))
    config = config_of(make_small_model(tmp_path / "model", "qwen3"), policy={"compile": True})
    policy = policy_of(config, world)
    minibatch = pack_for(world, random_groups(1, 2), config).minibatches[0]
    with pytest.raises(
        RunError, match=r"^policy\.compile: torch \S+ cannot compile .*; set it to false .*sizes do not match"
    ):
        policy.forward_backward(minibatch, Metrics(world.device))
