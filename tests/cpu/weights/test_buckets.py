"""Parameters in buckets: what ranks with rows of different number contribute is whole again at the other end."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from colocated_grpo.runtime.distributed import Computed, World, own_rows
from colocated_grpo.weights import buckets
from colocated_grpo.weights.buckets import Bucket, full_tensors, gather, make_buckets, shard_slices, values_of
from colocated_grpo.weights.fingerprints import fingerprint, rows_of
from colocated_grpo.weights.plan import Target, in_8_bits, quantized
from colocated_grpo.weights.transport import ShardFingerprints
from tests.support.ranks import run_on_ranks

SHAPES = {"even": (6, 4), "uneven": (7, 3), "fewer rows than ranks": (1, 5), "vector": (5,), "cube": (4, 2, 3)}
SMALL = 4 * 30
"""Bytes of a bucket: two or three of these parameters."""


def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def gathered(world: World) -> list[tuple[Bucket, Tensor]]:
    torch.use_deterministic_algorithms(True)  # fills uninitialized memory, here the padding, with NaN
    mesh = init_device_mesh("cpu", (world.size,))
    shards = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in tensors().items()}
    buckets.BUCKET_BYTES = SMALL
    shapes = {name: tensor.shape for name, tensor in shards.items()}
    made = make_buckets(shapes, world.size, torch.float32)
    return [(bucket, gather(bucket, shards, world.device)) for bucket in made]


@pytest.fixture(scope="module", params=[1, 2, 3])
def received(request) -> list[tuple[Bucket, Tensor]]:
    """The buckets of a trainer with this many ranks, and what all its ranks have gathered."""
    every = run_on_ranks(gathered, request.param)
    for other in every[1:]:
        assert all(torch.equal(bits(a), bits(b)) for (_, a), (_, b) in zip(every[0], other, strict=True))
    return every[0]


def bits(values: Tensor) -> Tensor:
    """Return the values as integers: NaN in the padding equals itself."""
    return values.view(torch.int32)


def test_parameters_are_whole_again(received):
    assert len(received) > 1
    whole = {name: tensor for bucket, values in received for name, tensor in full_tensors(bucket, values)}
    assert list(whole) == list(SHAPES)
    for name, expected in tensors().items():
        assert torch.equal(whole[name], expected), name


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_tensor_parallel_rank_gets_its_rows_or_columns(received, dim, rank):
    expected = {name: tensor for name, tensor in tensors().items() if tensor.dim() > dim}
    parts = {}
    for name, tensor in expected.items():
        size = tensor.shape[dim]
        start, end = (0, size // 2) if rank == 0 else (size // 2, size)
        parts[name] = (start, tensor.narrow(dim, start, end - start))
    targets = {
        name: Target(view=torch.full_like(part, torch.nan), dim=dim, start=start)
        for name, (start, part) in parts.items()
    }
    others = {
        name: Target(view=torch.empty_like(t), dim=0, start=0) for name, t in tensors().items() if name not in targets
    }
    plan = SimpleNamespace(targets={**others, **targets})
    for bucket, values in received:
        for part in shard_slices(bucket, plan):  # pyrefly: ignore[bad-argument-type]
            part.destination.copy_(part.source(values))
    for name, (_, part) in parts.items():
        assert torch.equal(targets[name].view, part), name


def test_no_parameters_need_no_bucket():
    assert make_buckets({}, 1, torch.bfloat16) == []


def test_a_bucket_holds_at_least_one_parameter_and_at_most_its_bytes(monkeypatch):
    monkeypatch.setattr(buckets, "BUCKET_BYTES", SMALL)
    shapes = {"large": torch.Size([100, 4]), **{str(n): torch.Size([10]) for n in range(7)}}
    made = make_buckets(shapes, 2, torch.float32)
    assert [list(bucket.shapes) for bucket in made] == [["large"], ["0", "1", "2"], ["3", "4", "5"], ["6"]]
    assert [bucket.size for bucket in made] == [200, 15, 15, 5]


def test_a_sync_on_one_rank_computes_each_weight_of_a_4_bit_base_once_and_brings_it_to_the_engine(world, monkeypatch):
    monkeypatch.setattr(buckets, "BUCKET_BYTES", SMALL)
    computed: list[str] = []
    weights = Computed(
        {"norm": torch.ones(2)}, tensors(), lambda names: computed.extend(names) or [tensors()[name] for name in names]
    )
    made = make_buckets({name: tensor.shape for name, tensor in tensors().items()}, 1, torch.float32)
    targets = {name: Target(view=torch.empty_like(tensor), dim=0, start=0) for name, tensor in tensors().items()}
    plan = SimpleNamespace(targets=targets)
    assert len(made) > 1
    # The second as if the parameters were in host memory, and the engine on a GPU.
    for device in (world.device, torch.device("meta")):
        computed.clear()
        for bucket in made:
            slices = shard_slices(bucket, plan)  # pyrefly: ignore[bad-argument-type]
            values = values_of(slices, bucket, weights, device)
            assert [value.shape for value in values] == list(bucket.shapes.values())
            assert {value.device for value in values} == {device}
        assert computed == list(SHAPES)


def test_weights_in_8_bits_have_the_parameters_order_on_all_ranks(world):
    weights = {f"layers.{number}.weight": torch.ones(2, 4) for number in range(30)}
    stored = in_8_bits({"norm": torch.ones(4), **weights}, frozenset(weights), torch.float32, world.device)
    assert list(stored) == ["norm", *weights, *(f"{name}_scale" for name in weights)]


def test_weights_in_8_bits_are_rounded_together_and_as_each_alone(world, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 4), (3, 8), (5, 4), (1, 8)]
    weights = {f"{n}.weight": torch.randn(shape, generator=generator) for n, shape in enumerate(shapes)}
    stored = in_8_bits({"norm": torch.ones(4), **weights}, frozenset(weights), torch.bfloat16, world.device)
    check = ShardFingerprints(stored, torch.bfloat16, world)
    columns: list[int] = []
    monkeypatch.setattr("colocated_grpo.weights.plan.quantized", lambda w: columns.append(w.shape[1]) or quantized(w))
    names = [*weights, "norm", *(f"{name}_scale" for name in weights)]
    values, scales = zip(*(quantized(weight.bfloat16()) for weight in weights.values()), strict=True)
    expected = [*values, torch.ones(4), *scales]
    for found, one in zip(own_rows(stored, names), expected, strict=True):
        assert torch.equal(found, one)
    assert columns == [4, 8]
    columns.clear()
    sums = [int(fingerprint(rows_of(one, 0), torch.bfloat16)) for one in (torch.ones(4), *values, *scales)]
    assert check.compute().tolist() == sums
    assert columns == [4, 8]


def test_a_bucket_in_8_bits_has_space_for_its_weights_in_16():
    shapes = {str(n): torch.Size([1 << 10, 1 << 16]) for n in range(5)}
    assert [len(bucket.shapes) for bucket in make_buckets(shapes, 1, torch.int8)] == [4, 1]


def test_rows_in_8_bits_reach_the_largest_number_and_a_row_of_zeros_stays_zero():
    weight = torch.tensor([[1.0, -2.0], [0.0, 0.0], [0.3, 0.21]])
    numbers, scales = quantized(weight)
    values = numbers.view(torch.float8_e4m3fn).float() * scales.view(torch.float32)
    assert numbers.view(torch.float8_e4m3fn).float().abs().amax(1).tolist() == [448.0, 0.0, 448.0]
    torch.testing.assert_close(values, weight, rtol=0.0625, atol=0.0)
