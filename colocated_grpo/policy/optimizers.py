"""Optimizers over FSDP2 shards, and the learning-rate schedule."""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from colocated_grpo.policy.adafactor import Adafactor
from colocated_grpo.runtime.distributed import local_part, shard_group
from colocated_grpo.settings.training import OptimizerConfig, PolicyConfig


def build_optimizer(parameters: Iterable[nn.Parameter], config: OptimizerConfig, lr: float) -> torch.optim.Optimizer:
    """Build the optimizer named by `config.type`, over sharded or plain parameters."""
    return BUILDERS[config.type](list(parameters), config, lr)


def _adamw(parameters: Sequence[nn.Parameter], config: OptimizerConfig, lr: float) -> torch.optim.Optimizer:
    betas = (config.beta1, config.beta2)
    return torch.optim.AdamW(
        parameters, lr=lr, betas=betas, eps=config.eps, weight_decay=config.weight_decay, fused=True
    )


def _adafactor(parameters: Sequence[nn.Parameter], config: OptimizerConfig, lr: float) -> torch.optim.Optimizer:
    group = shard_group(parameters)
    all_reduce = _no_reduction if group is None else partial(_sum_over_shards, group)
    return Adafactor(parameters, lr=lr, weight_decay=config.weight_decay, all_reduce=all_reduce)


def _sum_over_shards(group: dist.ProcessGroup, tensor: Tensor) -> None:
    if group.size() > 1:
        dist.all_reduce(tensor, group=group)


def _no_reduction(_tensor: Tensor) -> None:
    """Leave the tensor as it is: every rank has whole parameters."""


def _adamw_8bit(parameters: Sequence[nn.Parameter], config: OptimizerConfig, lr: float) -> torch.optim.Optimizer:
    import bitsandbytes  # optional; `settings/inputs.py` has checked that it is installed

    return LocalShardOptimizer(
        parameters,
        lambda shards: bitsandbytes.optim.AdamW8bit(
            shards, lr=lr, betas=(config.beta1, config.beta2), eps=config.eps, weight_decay=config.weight_decay
        ),
    )


BUILDERS = {"adamw": _adamw, "adamw_8bit": _adamw_8bit, "adafactor": _adafactor}


class LocalShardOptimizer(torch.optim.Optimizer):
    """Runs an optimizer without DTensor support on each rank's rows; correct for element-wise updates.

    `shards` are the keys of `state`, in the order of the parameters. Quantised state differs from rank to rank:
    checkpoints that contain it resume only on the same number of shards.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        build: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    ) -> None:
        self._parameters = parameters
        self.shards = [nn.Parameter(local_part(p).detach()) for p in parameters]
        self.inner = build(self.shards)
        super().__init__(parameters, {})
        # The inner optimizer must see the learning rates that the schedule writes here.
        self.param_groups = self.inner.param_groups
        self.state = self.inner.state

    # pyrefly: ignore[bad-override]  (torch's overloads also take a closure, unused here)
    def step(self, closure: None = None) -> None:
        for parameter, own in zip(self._parameters, self.shards, strict=True):
            own.grad = None if parameter.grad is None else local_part(parameter.grad)
        self.inner.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none=set_to_none)
        for parameter in self._parameters:
            parameter.grad = None


def learning_rate(config: PolicyConfig, step: int, total_steps: int) -> float:
    """Return the learning rate of optimizer step `step` (from 0) of `total_steps`."""
    warmup = config.warmup_steps if config.warmup_steps >= 1 else math.ceil(config.warmup_steps * total_steps)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    progress = (step - warmup) / max(1, total_steps - warmup)
    return config.min_lr + (config.lr - config.min_lr) * _SHAPES[config.schedule](min(1.0, progress))


_SHAPES = {
    "constant": lambda progress: 1.0,
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
}


class OptimizerOffload:
    """Moves optimizer state to host memory and back; the tensor objects stay the same.

    Device storage is freed by resizing it to zero. Host buffers are pinned and allocated once.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._host: dict[Tensor, Tensor] = {}

    def to_host(self) -> None:
        for state in self._device_tensors():
            if state not in self._host:
                self._host[state] = torch.empty_like(state, device="cpu", pin_memory=True)
            self._host[state].copy_(state, non_blocking=True)
        torch.cuda.current_stream().synchronize()
        for state in self._host:
            state.untyped_storage().resize_(0)

    def to_device(self) -> None:
        for state, host in self._host.items():
            state.untyped_storage().resize_(host.untyped_storage().nbytes())
            state.copy_(host, non_blocking=True)

    @torch.no_grad()
    def _device_tensors(self) -> list[Tensor]:
        # With gradients enabled, local_part() returns a new view each time, which would not be found as a key again.
        values = (value for state in self._optimizer.state.values() for value in state.values())
        tensors = (local_part(value) for value in values if isinstance(value, Tensor))
        return [tensor for tensor in tensors if tensor.is_cuda and tensor.numel() > 1]
