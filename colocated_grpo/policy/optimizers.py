"""Optimizers over FSDP2 shards, and the learning-rate schedule."""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from colocated_grpo.runtime.distributed import local_part, shard_group, whole, with_rows
from colocated_grpo.settings.training import OptimizerConfig, PolicyConfig

DECAY_POWER = 0.8
EPS = 1e-30
UPDATE_CLIP = 1.0


class Adafactor(torch.optim.Optimizer):
    """Adafactor (Shazeer & Stern 2018, arXiv 1804.04235) over FSDP2 shards, with an external learning rate.

    Stores a matrix's second moment as row and column means: rows + columns floats instead of rows * columns. The
    versions in torch and transformers use norms and in-place means that DTensor does not support. Each row of a matrix
    is on one rank, so row means are local. Column means and update sizes take two all-reduces per step in total.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], *, lr: float, weight_decay: float, group: dist.ProcessGroup | None
    ) -> None:
        """group: the ranks of the shards; None if this rank has whole parameters."""
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay})
        self._group = group

    @torch.no_grad()
    # pyrefly: ignore[bad-override]  (torch's overloads also take a closure, unused here)
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            self._update_moments(parameters)
            self._apply(parameters, group["lr"], group["weight_decay"])

    def _update_moments(self, parameters: Sequence[nn.Parameter]) -> None:
        column_sums = []
        for p in parameters:
            state = self.state[p] or self._init_state(p)
            state["step"] += 1
            squared = _local_gradient(p).square().add_(EPS)
            if p.dim() == 2:
                local_part(state["row"]).lerp_(squared.mean(1), _newest_weight(state["step"]))
                column_sums.append(squared.sum(0))
            else:
                local_part(state["second_moment"]).lerp_(squared, _newest_weight(state["step"]))
        matrices = [p for p in parameters if p.dim() == 2]
        for p, total in zip(matrices, self._sum_together(column_sums), strict=True):
            self.state[p]["column"].lerp_(total / p.shape[0], _newest_weight(self.state[p]["step"]))

    def _apply(self, parameters: Sequence[nn.Parameter], lr: float, weight_decay: float) -> None:
        updates = [_local_gradient(p) * self._inverse_root(p) for p in parameters]
        squared_sizes = self._sum_together([update.square().sum()[None] for update in updates])
        for p, update, squared_size in zip(parameters, updates, squared_sizes, strict=True):
            rms = (squared_size / p.numel()).sqrt()
            own = local_part(p)
            own.mul_(1 - lr * weight_decay)
            own.add_((update / (rms / UPDATE_CLIP).clamp(min=1.0)).to(own.dtype), alpha=-lr)

    def _inverse_root(self, p: nn.Parameter) -> Tensor:
        state = self.state[p]
        if p.dim() != 2:
            return local_part(state["second_moment"]).rsqrt()
        # The mean over all rows equals the mean over all columns, and every rank has all columns.
        row = local_part(state["row"]) / state["column"].mean()
        return row.rsqrt()[:, None] * state["column"].rsqrt()

    def _init_state(self, p: nn.Parameter) -> dict[str, Tensor]:
        state = self.state[p]
        state["step"] = torch.zeros((), dtype=torch.float32)
        if p.dim() == 2:
            own = local_part(p)
            state["row"] = with_rows(p, torch.zeros(len(own), dtype=torch.float32, device=own.device))
            state["column"] = torch.zeros(p.shape[1], dtype=torch.float32, device=own.device)
        else:
            state["second_moment"] = torch.zeros_like(p, dtype=torch.float32)
        return state

    def _sum_together(self, parts: Sequence[Tensor]) -> list[Tensor]:
        if not parts:
            return []
        flat = torch.cat(list(parts))
        if self._group is not None and self._group.size() > 1:
            dist.all_reduce(flat, group=self._group)
        return list(flat.split([len(part) for part in parts]))


def _local_gradient(p: nn.Parameter) -> Tensor:
    """Return this rank's rows of the gradient in float32."""
    assert p.grad is not None
    return local_part(p.grad).float()


def _newest_weight(step: Tensor) -> float:
    """Return the weight of the newest value in a moment: 1 - beta2 = step ** -0.8."""
    return float(step) ** -DECAY_POWER


def build_optimizer(parameters: Sequence[nn.Parameter], config: OptimizerConfig, lr: float) -> torch.optim.Optimizer:
    """Build the optimizer named by `config.type`, over sharded or plain parameters."""
    if config.type == "adafactor":
        return Adafactor(parameters, lr=lr, weight_decay=config.weight_decay, group=shard_group(parameters))
    betas = (config.beta1, config.beta2)
    build: Callable[..., torch.optim.Optimizer] = partial(torch.optim.AdamW, fused=True)
    if config.type == "adamw_8bit":
        import bitsandbytes  # optional; `settings/inputs.py` has checked that it is installed

        build = partial(LocalShardOptimizer, build=bitsandbytes.optim.AdamW8bit)
    return build(parameters, lr=lr, betas=betas, eps=config.eps, weight_decay=config.weight_decay)


class LocalShardOptimizer(torch.optim.Optimizer):
    """Runs an optimizer without DTensor support on each rank's rows; correct for element-wise updates.

    `shards` are the keys of `state`, in order. Checkpoints of quantised state resume only on the same number of shards.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], *, build: Callable[..., torch.optim.Optimizer], **settings: object
    ) -> None:
        """build: called with the shards and the settings."""
        self._parameters = parameters
        self.shards = [nn.Parameter(local_part(p).detach()) for p in parameters]
        self.inner = build(self.shards, **settings)
        super().__init__(parameters, {})
        # The inner optimizer must see the learning rates that the schedule writes here.
        self.param_groups = self.inner.param_groups
        self.state = self.inner.state

    # pyrefly: ignore[bad-override]  (torch's overloads also take a closure, unused here)
    def step(self, closure: None = None) -> None:
        for parameter, own in zip(self._parameters, self.shards, strict=True):
            has_rows = own.numel() > 0  # bitsandbytes ends the process for an empty tensor on a GPU
            own.grad = local_part(parameter.grad) if has_rows and parameter.grad is not None else None
        self.inner.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none=set_to_none)
        for parameter in self._parameters:
            parameter.grad = None


class Update:
    """An update of the weights from their gradients. Both parts can be captured as CUDA graphs."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[nn.Parameter],
        publish: Callable[[], None],
        grad_clip: float,
        device: torch.device,
    ) -> None:
        """publish: as of `Weights`."""
        self.optimizer = optimizer
        self._parameters = parameters
        self._publish = publish
        self._grad_clip = grad_clip
        self.norm = torch.zeros((), device=device)
        """Norm of the gradients of all parameters, on all ranks."""

    def measure_norm(self) -> None:
        self.norm.copy_(whole(nn.utils.get_total_norm(self.gradients())))

    def apply(self) -> None:
        """Clip the gradients by the measured norm, change the masters, and publish them."""
        nn.utils.clip_grads_with_norm_(self._parameters, self._grad_clip or math.inf, self.norm)
        self.optimizer.step()
        self._publish()

    def gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self._parameters if parameter.grad is not None]

    def moving_tensors(self) -> Iterator[Tensor]:
        """Yield the tensors of `apply` that may move between updates. Weights move only before the first update."""
        yield from self.gradients()
        for state in self.optimizer.state.values():
            yield from state.values()

    def set_lr(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr

    def init_state(self) -> None:
        """Allocate the optimizer's state unless it exists, so that memory measured afterwards includes it.

        A step with zero gradients and learning rate zero changes neither weights nor moments. Such a step does advance
        the step counters, so these are reset here.
        """
        if self.optimizer.state:
            return
        for parameter in self._parameters:
            parameter.grad = torch.zeros_like(parameter)
        self.set_lr(0.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        for state in self.optimizer.state.values():
            state["step"] = torch.zeros_like(state["step"]) if isinstance(state["step"], Tensor) else 0


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
