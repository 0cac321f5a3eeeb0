"""Routing replay: tokens are computed by the experts on record, weighted by the policy's own router."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from colocated_grpo.batching.micro_batch import MicroBatch, PackedRoutes, TrainSequence, build_micro_batch
from colocated_grpo.policy import routing
from colocated_grpo.policy.blocks import blocks_of
from colocated_grpo.policy.model import PackedLM, read_model_config, reshard
from colocated_grpo.policy.model_loader import ModelLoader
from colocated_grpo.policy.routing import WEIGHTS
from colocated_grpo.runtime.distributed import World
from colocated_grpo.settings.families import FAMILIES
from colocated_grpo.settings.model_support import TRAINED_EXPERT_TYPES
from tests.support.families import HYBRIDS, SETTINGS
from tests.support.small_policy import config_of, pack_for, random_groups, whole

ROUTERS = ("mlp.gate.weight", "mlp.router.weight")
ARCHITECTURES = [family.architecture for family in FAMILIES if family.experts]


def model_of(world: World, folder: Path, **policy: Any) -> PackedLM:
    # One rank uses FSDP2 only with cpu_offload.
    config = config_of(folder, policy={"routing_replay": True, "cpu_offload": True, **policy})
    return ModelLoader(config, read_model_config(config.model, folder), folder, world).weights().model


def batch_of(world: World, folder: Path) -> MicroBatch:
    (micro_batch,) = pack_for(world, random_groups(3, 3), config_of(folder)).minibatches[0].micro_batches
    # Siblings compute their common prompt once, except in hybrid models.
    assert (micro_batch.tokens.prefix_keys is None) == any(name in folder.name for name in HYBRIDS)
    return micro_batch


def routers_of(model: PackedLM) -> list[torch.nn.Module]:
    return routing.routers_of(blocks_of(model))


def computed(model: PackedLM, micro_batch: MicroBatch, experts: Tensor | None = None, recorded: Any = None) -> Any:
    """Return log-probabilities and gradients with these experts [L, T, K] on record; None: without a record."""
    routes = None
    if experts is not None:
        everywhere = torch.ones(experts.shape[1], dtype=torch.bool)
        routes = PackedRoutes(experts, everywhere if recorded is None else recorded)
    logprobs, _ = model(replace(micro_batch.tokens, routes=routes))
    logprobs.square().sum().backward()
    reshard(model)
    gradients = {name: whole(p.grad) for name, p in model.hf_parameters().items()}
    model.zero_grad()
    return logprobs.detach(), gradients


@contextmanager
def chosen_by(model: PackedLM, seen: list[Tensor]):
    """Append the experts that the routers return."""
    hooks = [
        router.register_forward_hook(lambda _m, _i, output: seen.append(output[2])) for router in routers_of(model)
    ]
    yield
    for hook in hooks:
        hook.remove()


def own_choice(model: PackedLM, micro_batch: MicroBatch) -> Tensor:
    seen: list[Tensor] = []
    with chosen_by(model, seen), torch.no_grad():
        model(micro_batch.tokens)
    reshard(model)
    return torch.stack(seen)


def replaced(model: PackedLM) -> tuple[float, float]:
    """Return replaced and recorded tokens, summed over the layers."""
    assert model.replay is not None
    count, total = model.replay.take_mismatch().parts
    return float(count), float(total)


def assert_equal(one: Any, other: Any) -> None:
    assert torch.equal(one[0], other[0])
    assert all(torch.equal(one[1][name], other[1][name]) for name in one[1])


@contextmanager
def routers_that_return(model: PackedLM, experts_LTK: Tensor):
    """Give the routers in transformers' code logits that prefer these experts by far, for choosing only."""

    def prefer(original: Any, experts_TK: Tensor) -> Any:
        def topk(values: Tensor, k: int, **options: Any) -> Any:
            if values.shape[-1] != 4 or k != 2:  # GLM-4.5 chooses a group of experts first
                return original(values, k, **options)
            return torch.return_types.topk((values.gather(1, experts_TK), experts_TK))

        return topk

    original, hooks = torch.topk, []
    for router, experts_TK in zip(routers_of(model), experts_LTK, strict=True):
        before = lambda *_, e=experts_TK: setattr(torch, "topk", prefer(original, e))  # noqa: E731
        hooks += [router.register_forward_pre_hook(before)]
        hooks += [router.register_forward_hook(lambda *_: setattr(torch, "topk", original))]
    yield
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_recorded_experts_are_weighted_as_the_family_weights_its_own(world, model_folder, architecture):
    folder = model_folder(architecture, edits=SETTINGS[architecture])
    model, micro_batch = model_of(world, folder), batch_of(world, folder)
    plain = computed(model, micro_batch)
    own = own_choice(model, micro_batch)
    assert_equal(computed(model, micro_batch, own.flip(-1).to(torch.uint8)), plain)  # the same bits, in any order

    layers, tokens, _ = own.shape
    assert replaced(model) == (0, layers * tokens)

    others = (own + 1) % 4
    replayed = computed(model, micro_batch, others.to(torch.uint8))
    count, total = replaced(model)
    # Only the first layer is sure to choose as before: later ones see what the other experts have computed.
    assert tokens <= count <= total
    assert total == layers * tokens
    with routers_that_return(model, others):
        forced = computed(model, micro_batch)
    torch.testing.assert_close(replayed[0], forced[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(replayed[1], forced[1], rtol=1e-4, atol=1e-5)
    assert (replayed[0] - plain[0]).abs().max() > 0.01, "a wrong record must be seen"
    assert all(gradient.abs().max() > 0 for name, gradient in replayed[1].items() if name.endswith(ROUTERS))

    nowhere = torch.zeros(others.shape[1], dtype=torch.bool)
    assert_equal(computed(model, micro_batch, others.to(torch.uint8), nowhere), plain)


def test_checkpointed_blocks_are_recomputed_with_the_same_experts(world, model_folder):
    folder = model_folder("qwen3_moe", edits=SETTINGS["qwen3_moe"])
    micro_batch = batch_of(world, folder)
    kept, recomputed = (model_of(world, folder, gradient_checkpointing=value) for value in (False, True))
    others = ((own_choice(kept, micro_batch) + 1) % 4).to(torch.uint8)
    assert_equal(computed(recomputed, micro_batch, others), computed(kept, micro_batch, others))
    assert replaced(recomputed) == replaced(kept), "a block that is computed twice counts once"


def test_every_trained_mixture_of_experts_has_its_weights():
    assert set(WEIGHTS) == TRAINED_EXPERT_TYPES


def sequence(tokens: int, prefix: int, recorded: int | None, layer_values: int) -> TrainSequence:
    """A sequence whose record, of the first tokens, has one value in layer 0 and the next in layer 1."""
    values = np.array([[layer_values], [layer_values + 1]], np.uint8)
    return TrainSequence(
        token_ids=np.arange(tokens),
        scored=np.arange(prefix, tokens),
        sampling_logprobs=np.zeros(tokens - prefix, np.float32),
        advantages=np.zeros(tokens - prefix, np.float32),
        temperature=1.0,
        trained=True,
        prefix_length=prefix,
        routes=None if recorded is None else np.broadcast_to(values, (recorded, 2, 1)),
    )


def test_packing_puts_each_record_beside_its_token():
    siblings = [sequence(5, 2, 4, 10), sequence(4, 2, None, 0), sequence(6, 2, 5, 20)]
    routes = build_micro_batch(siblings).tokens.routes
    assert routes is not None
    # The first sequence, then what follows the common prefix in the others. The last token of each has no record.
    assert routes.experts_LTK[:, :, 0].tolist() == [
        [20, 20, 10, 10, 0, 0, 0, 20, 20, 20, 0],
        [21, 21, 11, 11, 0, 0, 0, 21, 21, 21, 0],
    ]
    assert routes.recorded_T.tolist() == [True] * 4 + [False] * 3 + [True] * 3 + [False]
    assert build_micro_batch([sequence(4, 2, None, 0)]).tokens.routes is None
