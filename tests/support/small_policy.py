"""Tiny policies and synthetic rollouts for tests of the training side."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from colocated_grpo.batching.micro_batch import MicroBatch, TrainSequence
from colocated_grpo.batching.pack import Batch, pack
from colocated_grpo.metrics import Metrics
from colocated_grpo.policy.model import read_model_config, reshard
from colocated_grpo.policy.policy import Policy
from colocated_grpo.runtime.distributed import World
from colocated_grpo.settings.config_json import text_part
from colocated_grpo.settings.schema import Config
from colocated_grpo.tools.shapes import TINY
from colocated_grpo.types import Group, JsonObject, Prompt, Rollout, Score
from tests.support.random_models import make_model

# Odd sizes: the rows of most parameters do not divide evenly over two ranks.
SHAPE = replace(TINY, hidden=36, heads=2, kv_heads=1, head_dim=18, intermediate=45, vocab=151, max_positions=64)
# Large enough that attention and logits differ between tokens, small enough that float32 results agree to 1e-5.
INIT_STD = 0.15


def make_small_model(
    folder: Path, architecture: str, *, tied: bool = True, edits: dict[str, Any] | None = None
) -> Path:
    """Write a model of two layers. edits: entries of its config.json."""
    shape = replace(SHAPE, tied=tied)
    return make_model(folder, architecture=architecture, shape=shape, init_std=INIT_STD, settings=edits)


def config_of(folder: Path, **sections: Any) -> Config:
    """Return a config for the model in `folder`. `sections` are top-level keys."""
    settings = {
        "model": {"name": str(folder)},
        "environments": [{"type": "task", "name": "sorting"}],
        "rollout": {"max_completion_tokens": 16},
        **sections,
        "batch": {"max_tokens_per_micro_batch": 1024, **sections.get("batch", {})},
    }
    return Config.model_validate(settings)


def policy_of(config: Config, world: World) -> Policy:
    """Build the policy of a config. Collective."""
    folder = Path(config.model.name)
    return Policy(config, read_model_config(config.model, folder), folder, world)


def rollout_of(
    prompt: Sequence[int],
    completion: Sequence[int],
    *,
    reward: float | None = 0.0,
    finish_reason: str = "stop",
    temperature: float = 1.0,
    observed: int = 0,
    logprob: float = -2.0,
) -> Rollout:
    """One turn. observed: number of tokens in the middle of the completion that come from an environment."""
    sampled = [True] * len(completion)
    middle = (len(completion) - observed) // 2
    sampled[middle : middle + observed] = [False] * observed
    mask = [False] * len(prompt) + sampled
    return Rollout(
        token_ids=[*prompt, *completion],
        loss_mask=mask,
        sampling_logprobs=[logprob if trained else 0.0 for trained in mask],
        prompt_length=len(prompt),
        text="",
        finish_reason=finish_reason,
        policy_version=0,
        temperature=temperature,
        score=Score(reward=reward),
    )


def group_of(index: int, rollouts: Sequence[Rollout]) -> Group:
    prompt = Prompt(index=index, token_ids=[], text="", item={}, source="sorting")
    return Group(prompt=prompt, rollouts=list(rollouts))


def random_groups(count: int, group_size: int, seed: int = 0) -> list[Group]:
    """Groups with prompts of 1-6 tokens, completions of 1-12, random rewards and one of two temperatures."""
    rng = random.Random(seed)
    tokens = lambda least, most: [rng.randrange(SHAPE.vocab) for _ in range(rng.randint(least, most))]  # noqa: E731
    groups = []
    for index in range(count):
        prompt, temperature = tokens(1, 6), rng.choice([0.7, 1.0])
        rollouts = [
            rollout_of(prompt, tokens(1, 12), reward=rng.random(), temperature=temperature, logprob=-rng.uniform(2, 6))
            for _ in range(group_size)
        ]
        groups.append(group_of(index, rollouts))
    return groups


def random_trees(count: int, seed: int) -> list[Group]:
    """Groups of agents whose prompts grow from turn to turn without what was sampled, or branch within it."""
    rng = random.Random(seed)
    tokens = lambda least, most: [rng.randrange(3) for _ in range(rng.randint(least, most))]  # noqa: E731
    groups = []
    for index in range(count):
        root, rollouts = tokens(3, 8), []
        for _ in range(3):
            history = list(root)
            for _ in range(rng.randint(1, 4)):
                completion = tokens(1, 6)
                prompts = [history, *rng.choice([[], [history], [history + completion[:3] + tokens(1, 2)]])]
                rollouts += [rollout_of(p, tokens(1, 6), logprob=-rng.randint(2, 6)) for p in prompts[1:]]
                rollouts.append(rollout_of(history, completion, logprob=-rng.randint(2, 6)))
                history = history + tokens(1, 5)
        rng.shuffle(rollouts)
        groups.append(group_of(index, rollouts))
    return groups


def with_own_advantages(groups: Sequence[Group], seed: int = 1) -> list[Group]:
    """Return the groups with a random advantage for each sampled token."""
    rng = random.Random(seed)
    drawn = lambda rollout: [rng.gauss(0, 1) for _ in range(sum(rollout.loss_mask))]  # noqa: E731
    return [replace(group, rollouts=[replace(r, advantages=drawn(r)) for r in group.rollouts]) for group in groups]


def pack_for(
    world: World, groups: Sequence[Group], config: Config, without_gradient: Sequence[bool] | None = None
) -> Batch:
    """Pack the groups, with random advantages per token, for this rank."""
    return pack(
        with_own_advantages(groups),
        [[0.0] * len(group.rollouts) for group in groups],
        without_gradient or [False] * len(groups),
        config.batch,
        rank=world.rank,
        world_size=world.size,
        context=world.context,
        shuffle_seed=0,
        share_prefixes="linear_attention" not in (text_part(config_json(config)).get("layer_types") or ()),
    )


def config_json(config: Config) -> JsonObject:
    """Return config.json of the config's model."""
    return json.loads((Path(config.model.name) / "config.json").read_text(encoding="utf-8"))


def train(policy: Policy, batch: Batch, steps: int = 1) -> Metrics:
    """Take one optimizer step per minibatch, `steps` times over."""
    metrics = Metrics(policy.device)
    for _ in range(steps):
        for minibatch in batch.minibatches:
            policy.forward_backward(minibatch, metrics)
            policy.optimizer_step(metrics)
    return metrics


def whole(tensor: Tensor) -> Tensor:
    """Return a copy of all rows. Collective for sharded tensors."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def weights_of(policy: Policy) -> dict[str, Tensor]:
    """Return copies of all parameters, unsharded. Collective."""
    return {name: whole(parameter) for name, parameter in policy.parameters().items()}


def gradients_of(policy: Policy) -> dict[str, Tensor]:
    reshard(policy.model)  # gradients are on the sharded parameters
    return {name: whole(parameter.grad) for name, parameter in policy.parameters().items()}


@torch.no_grad()
def move(policy: Policy, seed: int = 5, size: float = 0.1) -> None:
    """Give every factor of an adapter random values, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in policy.parameters().values():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * size)
    policy.weights.publish()


def merged_weights(policy: Policy) -> dict[str, Tensor]:
    """Return copies of what the engine gets, in the order of names. Collective."""
    return {name: whole(weight) for name, weight in sorted(policy.weights.published().items())}


def state_of_trained_adapter(world: World, config: Config) -> tuple[dict, dict, dict]:
    """Return gradients, factors and merged weights of training from an adapter that is not zero."""
    policy = policy_of(config, world)
    move(policy)
    batch = pack_for(world, random_groups(6, 4), config).map(with_old_logprobs)
    policy.forward_backward(batch.minibatches[0], Metrics(world.device))
    gradients = gradients_of(policy)
    policy.optimizer_step(Metrics(world.device))
    train(policy, batch)
    return gradients, weights_of(policy), merged_weights(policy)


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor], *, rtol: float, atol: float) -> None:
    """Assert equal names and close values; the message names the tensor that differs."""
    assert list(actual) == list(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, rtol=rtol, atol=atol, msg=lambda text, n=name: f"{n}: {text}")


def rounding(gradients: dict[str, Tensor]) -> float:
    """Return the difference between gradients that float32 rounding explains: it grows with the largest of them."""
    return 4e-6 * max(gradient.abs().max().item() for gradient in gradients.values())


def rows_of(micro_batch: MicroBatch) -> list[Tensor]:
    """Return the rows of each sequence's tokens, in order. Rows of a common prefix belong to several sequences."""
    tokens, keys = micro_batch.tokens, micro_batch.tokens.prefix_keys
    if keys is None:
        return [torch.arange(start, end) for start, end in pairwise(tokens.cu_seqlens.tolist())]
    runs = [keys.rows_E[start:end] for start, end in pairwise(keys.cu_seqlens.tolist())]
    return runs[: micro_batch.loss_inputs.num_sequences]


def with_old_logprobs(micro_batch: MicroBatch) -> MicroBatch:
    """Use the sampler's log-probabilities as old ones: ratios differ from 1, and the loss depends on the weights."""
    inputs = micro_batch.loss_inputs
    return replace(micro_batch, loss_inputs=replace(inputs, old_logprobs_N=inputs.sampling_logprobs_N))


def with_ref_logprobs(micro_batch: MicroBatch) -> MicroBatch:
    inputs = micro_batch.loss_inputs
    return replace(micro_batch, loss_inputs=replace(inputs, ref_logprobs_N=inputs.sampling_logprobs_N))


def logprobs_one_by_one(model: Callable[..., Any], micro_batch: MicroBatch) -> Tensor:
    """Return what transformers' model gives the scored tokens, one sequence at a time, without packing."""
    tokens, logprobs = micro_batch.tokens, []
    for index, rows in enumerate(rows_of(micro_batch)):
        own = micro_batch.loss_inputs.sequence_N == index
        logits = model(tokens.input_ids_T[None, rows]).logits[0, positions_of(rows, tokens.source_N[own])]
        log_probs = torch.log_softmax(logits.float() / tokens.temperature_N[own, None], dim=-1)
        logprobs.append(log_probs.gather(1, tokens.targets_N[own, None])[:, 0])
    return torch.cat(logprobs)


def positions_of(rows: Tensor, chosen: Tensor) -> Tensor:
    """Return the positions of the chosen rows in a sequence with these rows."""
    return torch.stack([(rows == row).nonzero()[0, 0] for row in chosen]) if len(chosen) else chosen


def sequence_of(length: int) -> TrainSequence:
    """Only its second token is scored."""
    return TrainSequence(
        token_ids=np.ones(length, np.int64),
        scored=np.array([1]),
        sampling_logprobs=np.zeros(1, np.float32),
        advantages=np.zeros(1, np.float32),
        temperature=1.0,
        trained=True,
    )
