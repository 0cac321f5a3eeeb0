"""Adafactor over FSDP2 shards (Shazeer & Stern 2018, arXiv 1804.04235), with an external learning rate.

The versions in torch and transformers use norms and in-place means that DTensor does not support. Each row of a matrix
is on one rank, so row means are local. Column means and update sizes take two all-reduces per step, for all parameters
together.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from colocated_grpo.runtime.distributed import local_part

DECAY_POWER = 0.8
EPS = 1e-30
UPDATE_CLIP = 1.0


class Adafactor(torch.optim.Optimizer):
    """Stores a matrix's second moment as row and column means: rows + columns floats instead of rows * columns.

    all_reduce: sums a tensor in place over the ranks of the shards.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        *,
        lr: float,
        weight_decay: float,
        all_reduce: Callable[[Tensor], None],
    ) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay})
        self._all_reduce = all_reduce

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
            state["row"] = _rows_of(p)
            state["column"] = torch.zeros(p.shape[1], dtype=torch.float32, device=local_part(p).device)
        else:
            state["second_moment"] = torch.zeros_like(p, dtype=torch.float32)
        return state

    def _sum_together(self, parts: Sequence[Tensor]) -> list[Tensor]:
        if not parts:
            return []
        flat = torch.cat(list(parts))
        self._all_reduce(flat)
        return list(flat.split([len(part) for part in parts]))


def _local_gradient(p: nn.Parameter) -> Tensor:
    """Return this rank's rows of the gradient in float32."""
    assert p.grad is not None
    return local_part(p.grad).float()


def _newest_weight(step: Tensor) -> float:
    """Return the weight of the newest value in a moment: 1 - beta2 = step ** -0.8."""
    return float(step) ** -DECAY_POWER


def _rows_of(p: Tensor) -> Tensor:
    """Return one zero per row, sharded like the rows of `p`."""
    own = local_part(p)
    local = torch.zeros(len(own), dtype=torch.float32, device=own.device)
    if not isinstance(p, DTensor):
        return local
    shape = torch.Size((p.shape[0],))
    return DTensor.from_local(local, p.device_mesh, p.placements, run_check=False, shape=shape, stride=(1,))
