"""The trained model on this rank: forward, backward, optimizer step, and its weights under checkpoint names."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig

from colocated_grpo.batching import Batch, MicroBatch, Minibatch
from colocated_grpo.config.schema import Config
from colocated_grpo.distributed import World
from colocated_grpo.losses import make_denominator
from colocated_grpo.metrics import Metrics, Stat
from colocated_grpo.policy.model import PackedLM, build_empty, load_shards, shard
from colocated_grpo.policy.objective import make_objective, packed_tokens
from colocated_grpo.policy.optimizers import LocalShardOptimizer, OptimizerOffload, build_optimizer, learning_rate

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}


def compute_dtype(config: Config, device: torch.device) -> torch.dtype:
    name = config.policy.compute_dtype
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return DTYPES[name]


def build_model(config: Config, hf_config: PretrainedConfig, folder: Path, world: World) -> PackedLM:
    """A sharded copy of the checkpoint in `folder`: the policy, or the frozen reference."""
    compiled = {"on": True, "off": False, "auto": world.device.type == "cuda"}[config.policy.compile]
    model = build_empty(
        hf_config,
        config.policy.logprob_chunk_tokens,
        trust_remote_code=config.model.trust_remote_code,
    )
    shard(model, config.policy, world.mesh, compute_dtype(config, world.device), compiled=compiled)
    load_shards(model, folder, world.device, offloaded=config.policy.cpu_offload)
    return model


@torch.no_grad()
def score(model: PackedLM, micro_batch: MicroBatch, device: torch.device) -> Tensor:
    """Log-probabilities [N] of a micro-batch's scored tokens, without gradient. Collective."""
    logprobs_N, _ = model(packed_tokens(_to(micro_batch, device)))
    # FSDP keeps the root's gathered parameters for a backward pass that never comes: the next forward would use them
    # although the optimizer has moved the shards.
    model.reshard()
    return logprobs_N


def known_or(known_N: Tensor | None, scored_N: Tensor) -> Tensor:
    """`known_N`, and `scored_N` where it is None or NaN; on the device of the scores."""
    if known_N is None:
        return scored_N
    known_N = known_N.to(scored_N.device)
    return torch.where(known_N.isnan(), scored_N, known_N)


class Policy:
    """Owns the sharded model, its optimizer and the learning-rate schedule.

    Every method that touches the model is collective: all ranks call it with as many micro-batches.
    """

    def __init__(self, config: Config, hf_config: PretrainedConfig, folder: Path, world: World) -> None:
        self.model = build_model(config, hf_config, folder, world)
        self.device = world.device
        self.dtype = compute_dtype(config, world.device)
        self.optimizer = build_optimizer(self.model.parameters(), config.policy.optimizer, config.policy.lr)
        self.version = 0
        """Completed optimizer steps."""
        self._config = config.policy
        self._world_size = world.size
        self._total_steps = config.training_steps * config.batch.minibatches * config.batch.epochs
        self._objective = make_objective(config.loss)
        self._denominator = make_denominator(config.loss, config.rollout.max_completion_tokens)
        self.offload = OptimizerOffload(self.optimizer) if config.policy.offload_optimizer else None

    def parameters(self) -> dict[str, nn.Parameter]:
        """Sharded fp32 master weights by checkpoint name, in the same order on every rank."""
        return self.model.hf_parameters()

    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters().values())

    @property
    def optimizer_state_is_local(self) -> bool:
        """Whether plain tensors in the optimizer's state belong to this rank alone."""
        return isinstance(self.optimizer, LocalShardOptimizer)

    def optimizer_states(self) -> dict[str, dict[str, Any]]:
        """The optimizer's state by parameter name; its values may be replaced."""
        keys = self.optimizer.shards if self.optimizer_state_is_local else self.model.parameters()
        return {name: self.optimizer.state[key] for name, key in zip(self.parameters(), keys, strict=True)}

    def with_old_logprobs(self, batch: Batch) -> Batch:
        """The batch with `old_logprobs_N` from the current weights: the ratio's denominator once weights have moved."""
        return batch.map(lambda micro_batch: replace(micro_batch, old_logprobs_N=self.score(micro_batch)))

    def with_sampling_logprobs(self, batch: Batch) -> Batch:
        """The batch with the current policy's log-probabilities where the sampler's are not known."""

        def fill(micro_batch: MicroBatch) -> MicroBatch:
            scored_N = self.score(micro_batch)
            return replace(micro_batch, sampling_logprobs_N=known_or(micro_batch.sampling_logprobs_N, scored_N))

        return batch.map(fill)

    def score(self, micro_batch: MicroBatch) -> Tensor:
        return score(self.model, micro_batch, self.device)

    def forward_backward(self, minibatch: Minibatch, metrics: Metrics) -> None:
        """Accumulate the minibatch's gradient, adding this rank's statistics to `metrics`."""
        denominator = self._denominator(minibatch.counts)
        parts = len(minibatch.micro_batches)
        for index, micro_batch in enumerate(minibatch.micro_batches):
            # Gradients add up unreduced and are reduced once: communication does not grow with micro-batches.
            self.model.set_requires_gradient_sync(index == parts - 1)
            loss, stats = self._objective(self.model, _to(micro_batch, self.device), denominator)
            loss.backward()
            # All ranks hold equally many parts: these weights add up to one for each minibatch.
            metrics.add({**stats, "loss": Stat.mean(loss.detach(), 1 / (parts * self._world_size))})

    def optimizer_step(self, metrics: Metrics) -> None:
        """Clip, check, update. Raises FloatingPointError before the update on a non-finite gradient norm."""
        norm = nn.utils.get_total_norm([p.grad for p in self.model.parameters() if p.grad is not None])
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        grad_norm = norm.item()
        if not math.isfinite(grad_norm):
            raise FloatingPointError(
                f"optimizer step {self.version}: the gradient norm is {grad_norm}; weights are left as they were"
            )
        nn.utils.clip_grads_with_norm_(self.model.parameters(), self._config.grad_clip, norm)
        lr = learning_rate(self._config, self.version, self._total_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.version += 1
        metrics.add({"grad_norm": Stat.mean(grad_norm, 1.0), "lr": Stat.mean(lr, 1.0)})

    def init_optimizer_state(self) -> None:
        """Allocate the optimizer's state unless it is there: memory measured afterwards is what a training step leaves.

        A step with zero gradients and learning rate zero leaves weights and moments as they are; only step counters
        move, and those are put back.
        """
        if self.optimizer.state:
            return
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        for group in self.optimizer.param_groups:
            group["lr"] = 0.0
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        for state in self.optimizer.state.values():
            state["step"] = torch.zeros_like(state["step"]) if isinstance(state["step"], Tensor) else 0


def _to(micro_batch: MicroBatch, device: torch.device) -> MicroBatch:
    tensors = {f.name: getattr(micro_batch, f.name) for f in fields(micro_batch)}
    moved = {name: t.to(device, non_blocking=True) for name, t in tensors.items() if isinstance(t, Tensor)}
    return replace(micro_batch, **moved)
