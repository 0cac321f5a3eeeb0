"""Forward and backward pass of a small micro-batch as one CUDA graph, and the update of the weights as two.

The host launches thousands of kernels for a training step. Small models finish a kernel before the next one is
launched, so the device waits for the host. A graph launches all kernels at once. It has a fixed shape: micro-batches
are padded with tokens that no loss and no real token sees.

Shapes: as in `batching.micro_batch`, and S completions.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, fields, is_dataclass, replace
from math import ceil
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from colocated_grpo.batching.micro_batch import MicroBatch, PackedTokens, PrefixKeys
from colocated_grpo.metrics import Stat, as_scalar
from colocated_grpo.policy.attention import with_own_keys
from colocated_grpo.policy.model import PackedLM

Result = tuple[Tensor, dict[str, Stat]]
Gradient = Callable[[MicroBatch, Tensor | float], Result]
"""(micro-batch, denominator of the loss) -> loss and statistics; adds to the gradients of the parameters."""
GROWTH = 1.5
"""Ratio of the numbers of tokens that graphs have. A smaller ratio pads less and needs more graphs."""
LEAST_KEYS = 4
"""Keys are padded to a power of two times the tokens, and at least to this many times: padding keys cost little, and so
long and short common prefixes need no different graphs."""
ALIGNMENT = 64
"""Padded numbers of tokens are multiples of this number."""
MODEL_TYPES = frozenset(("gemma3_text", "llama", "mistral", "qwen2", "qwen3"))
"""Steps of llama, qwen3 and gemma3 models were captured on a GPU; the other two have the same operations."""
LEAST_LONGEST = 256
"""A graph has room for runs of this length, even if its first micro-batch has shorter runs only."""
TOKENS_PER_COMPLETION = 12
"""A graph has room for one completion per this many tokens. FlashAttention 2's backward pass takes memory for 128
tokens of each run, also of an empty one."""
MAX_GRAPHS = 24
"""Micro-batches of further shapes run without a graph."""
HOST_SECONDS = 2e-3
"""Time in which the host launches the kernels of one block, forward and backward."""
DEVICE_FLOPS = 3e14
"""Floating-point operations per second of a training step on an H100."""


def pays_off(parameters: int, blocks: int, rows: int) -> bool:
    """Return True if the device would wait for the host in a micro-batch of `rows` tokens.

    An estimate, so that runs with equal settings make the same choice: padding changes rounding.
    """
    return 6 * parameters * rows / DEVICE_FLOPS < HOST_SECONDS * blocks


def has_static_shapes(model: PackedLM, device: torch.device, dtype: torch.dtype) -> bool:
    """Return True if a graph can hold the model's forward and backward pass.

    A capture fails where the host reads from the device: in attention in float32, and in rotary embeddings that depend
    on the longest position. Collectives of FSDP are not captured.
    """
    rotary = (str(getattr(module, "rope_type", "")) for module in model.modules())
    return (
        device.type == "cuda"
        and dtype.itemsize == 2
        and model.lm.config.model_type in MODEL_TYPES
        and not isinstance(model, FSDPModule)
        and not any(kind in name for name in rotary for kind in ("dynamic", "longrope"))
    )


class GraphShape(NamedTuple):
    """Sizes that a graph fixes."""

    rows: int
    """T."""
    keys: int
    """E."""
    runs: int
    scored: int
    """N."""
    completions: int
    """S."""
    longest: int
    """Tokens of the longest run, prefix included."""
    given: tuple[str, ...]
    """Inputs of the loss that are not None."""


def shape_for(micro_batch: MicroBatch) -> GraphShape:
    """Return the shape that a micro-batch with `prefix_keys` is padded to.

    For usual micro-batches it depends on the numbers of tokens and keys only. Spare runs and completions are empty and
    cost little time; another graph would cost more.
    """
    tokens, inputs, keys = micro_batch.tokens, micro_batch.loss_inputs, micro_batch.tokens.prefix_keys
    assert keys is not None
    longest = max(LEAST_LONGEST, _power_of_two(tokens.longest_sequence))
    rows = _level(tokens.num_tokens)
    # Each padding row needs a key of its own.
    least_keys = len(keys.rows_E) + rows - tokens.num_tokens
    all_keys = rows * max(LEAST_KEYS, _power_of_two(ceil(least_keys / rows)))
    completions = max(rows // TOKENS_PER_COMPLETION, _power_of_two(inputs.num_sequences))
    padding_runs = max(1, ceil((all_keys - len(keys.rows_E)) / longest))
    return GraphShape(
        rows=rows,
        keys=all_keys,
        runs=max(completions * 3 // 2, _power_of_two(len(tokens.cu_seqlens) - 1 + padding_runs)),
        scored=rows + completions,  # siblings may share the row that predicts their first token
        completions=completions,
        longest=longest,
        given=tuple(inputs.tensors()),
    )


def _power_of_two(size: int) -> int:
    """Return the smallest power of two that is at least `size` and 2: torch.compile specializes on sizes below two."""
    return 1 << max(1, (size - 1).bit_length())


def _level(size: int) -> int:
    level = ALIGNMENT
    while level < size:
        level = ceil(level * GROWTH / ALIGNMENT) * ALIGNMENT
    return level


def padded(micro_batch: MicroBatch, shape: GraphShape) -> MicroBatch:
    """Return the micro-batch in `shape`. The loss, its statistics and all gradients stay the same up to rounding."""
    tokens, inputs = micro_batch.tokens, micro_batch.loss_inputs
    scored = shape.scored - len(tokens.source_N)
    assert scored >= 0  # F.pad would cut
    given: dict[str, Any] = {name: F.pad(value, (0, scored)) for name, value in inputs.tensors().items()}
    return MicroBatch(
        tokens=replace(
            _padded_rows(tokens, shape),
            source_N=F.pad(tokens.source_N, (0, scored), value=shape.rows - 1),
            targets_N=F.pad(tokens.targets_N, (0, scored)),
            temperature_N=F.pad(tokens.temperature_N, (0, scored), value=1.0),
        ),
        loss_inputs=replace(inputs, num_sequences=shape.completions, **given),
    )


def _padded_rows(tokens: PackedTokens, shape: GraphShape) -> PackedTokens:
    """Append runs of padding tokens. Each run sees filler keys, which fill up E, and then its own tokens' keys."""
    keys = tokens.prefix_keys
    assert keys is not None
    rows, spare = shape.rows - tokens.num_tokens, shape.keys - len(keys.rows_E)
    runs = shape.runs - (len(tokens.cu_seqlens) - 1)
    own = _fill(rows, np.full(runs, shape.longest))
    fillers = _fill(spare - rows, shape.longest - own)
    ends = np.cumsum(own + fillers)
    # Keys are numbered within the padding; a run's own keys are its last ones.
    own_keys = np.concatenate([np.arange(end - count, end) for count, end in zip(own, ends, strict=True)])
    row_of_key = np.zeros(spare, np.int64)  # a filler copies the key of row 0
    row_of_key[own_keys] = tokens.num_tokens + np.arange(rows)
    positions = np.concatenate([np.arange(count) for count in own])
    # Nothing reads the gradients of fillers: keys_E ends with zeros, which are no row's.
    by_row = len(keys.rows_E) + own_keys
    starts = len(keys.rows_E) + np.arange(shape.keys + 1 - tokens.num_tokens).clip(max=spare)
    return replace(
        tokens,
        # Not one token for all: the gradient of an embedding is added token by token.
        input_ids_T=torch.from_numpy(np.resize(tokens.input_ids_T.numpy(), shape.rows)),
        position_ids_T=torch.cat([tokens.position_ids_T, torch.from_numpy(positions)]),
        cu_seqlens=_extended(tokens.cu_seqlens, own),
        max_seqlen=shape.longest,
        prefix_keys=PrefixKeys(
            rows_E=torch.cat([keys.rows_E, torch.from_numpy(row_of_key)]),
            keys_E=F.pad(torch.cat([keys.keys_E, torch.from_numpy(by_row)]), (0, spare - rows)),
            starts_E=torch.cat([keys.starts_E[: tokens.num_tokens], torch.from_numpy(starts)]),
            cu_seqlens=_extended(keys.cu_seqlens, own + fillers),
            max_seqlen=shape.longest,
        ),
    )


def _fill(total: int, room: np.ndarray) -> np.ndarray:
    """Return how `total` is distributed over places with this much room, first places first."""
    before = np.cumsum(room) - room
    taken = np.clip(total - before, 0, room)
    assert taken.sum() == total
    return taken


def _extended(cu_seqlens: Tensor, lengths: np.ndarray) -> Tensor:
    return torch.cat([cu_seqlens, cu_seqlens[-1] + torch.from_numpy(np.cumsum(lengths)).to(cu_seqlens.dtype)])


@dataclass(eq=False)
class GraphedGradient:
    """A `Gradient` that replays CUDA graphs.

    The first micro-batch of a shape is padded but runs without a graph, so that kernels and libraries make their
    lasting allocations. The second is captured. All graphs write into the same gradient tensors, which stay allocated.
    """

    gradient: Gradient
    parameters: Collection[nn.Parameter]
    to_device: Callable[[MicroBatch], MicroBatch]
    model_parameters: int
    blocks: int

    def __post_init__(self) -> None:
        self._graphs: dict[GraphShape, _Graph | None] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._kept: dict[nn.Parameter, Tensor] = {}
        self.replays = 0

    def __call__(self, micro_batch: MicroBatch, denominator: float) -> Result:
        """micro_batch: on the host."""
        self._restore_gradients()
        micro_batch = replace(micro_batch, tokens=with_own_keys(micro_batch.tokens))
        shape = shape_for(micro_batch)
        is_new = shape not in self._graphs
        if not pays_off(self.model_parameters, self.blocks, shape.rows) or (is_new and len(self._graphs) == MAX_GRAPHS):
            return self.gradient(micro_batch, denominator)
        micro_batch = padded(micro_batch, shape)
        if is_new:
            self._graphs[shape] = None
            result = self.gradient(micro_batch, denominator)
            self._kept |= {p: p.grad for p in self.parameters if p.grad is not None}
            return result
        if (graph := self._graphs[shape]) is None:
            graph = self._graphs[shape] = _Graph(self.gradient, self.to_device(micro_batch), self._pool)
        self.replays += 1
        return graph.replay(micro_batch, denominator)

    def keeps_gradients(self) -> bool:
        """Return True if all gradients are in the tensors that graphs write."""
        return all(parameter.grad is self._kept.get(parameter) for parameter in self.parameters)

    def _restore_gradients(self) -> None:
        """Set gradients that an optimizer step has dropped to the tensors that graphs write, filled with zeros."""
        dropped = [parameter for parameter in self._kept if parameter.grad is None]
        if dropped:
            torch._foreach_zero_([self._kept[parameter] for parameter in dropped])
        for parameter in dropped:
            parameter.grad = self._kept[parameter]


class Replayed:
    """Work on tensors that stay where they are. Its second call captures a CUDA graph, which further calls replay.

    After a tensor has moved, a call runs without a graph, and the next one captures again.
    """

    def __init__(
        self, work: Callable[[], None], tensors: Callable[[], Iterable[Tensor]], may_replay: Callable[[], bool]
    ) -> None:
        """work: must not synchronize with the device. tensors: all that it uses and that may move.

        may_replay: False where tensors are allocated anew for each call, perhaps at the same address by chance.
        """
        self._work = work
        self._tensors = tensors
        self._may_replay = may_replay
        self._addresses: list[int] | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self.replays = 0

    def __call__(self) -> None:
        addresses = [tensor.data_ptr() for tensor in self._tensors()] if self._may_replay() else None
        if addresses is None or addresses != self._addresses:
            self._addresses, self._graph = addresses, None
            self._work()
            return
        if self._graph is None:
            graph = torch.cuda.CUDAGraph()
            with _capture(graph):
                self._work()
            self._graph = graph
        self._graph.replay()
        self.replays += 1


def _capture(graph: torch.cuda.CUDAGraph, pool: Any = None) -> torch.cuda.graph:
    # Other threads of the process, such as NCCL's, may call the driver during the capture.
    return torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local")


class _Graph:
    """One captured forward and backward pass."""

    def __init__(self, gradient: Gradient, example: MicroBatch, pool: Any) -> None:
        self._denominator = torch.ones((), device=example.tokens.input_ids_T.device)
        self._inputs = _tensors(example)
        self._graph = torch.cuda.CUDAGraph()
        with _capture(self._graph, pool):
            loss, self._stats = gradient(example, self._denominator)
            parts = [loss, *(part for stat in self._stats.values() for part in stat.parts)]
            self._packed = torch.stack([as_scalar(part, loss.device) for part in parts])

    def replay(self, micro_batch: MicroBatch, denominator: float) -> Result:
        for static, new in zip(self._inputs, _tensors(micro_batch), strict=True):
            static.copy_(new if new.is_cuda else new.pin_memory(), non_blocking=True)
        self._denominator.fill_(denominator)
        self._graph.replay()
        loss, *parts = self._packed.clone().unbind()
        values = iter(parts)
        return loss, {
            name: Stat(stat.kind, tuple(next(values) for _ in stat.parts)) for name, stat in self._stats.items()
        }


def _tensors(value: object) -> list[Tensor]:
    """Return all tensors in nested dataclasses and tuples, in a fixed order."""
    if isinstance(value, Tensor):
        return [value]
    if is_dataclass(value):
        return [tensor for field in fields(value) for tensor in _tensors(getattr(value, field.name))]
    return [tensor for part in value for tensor in _tensors(part)] if isinstance(value, tuple) else []
