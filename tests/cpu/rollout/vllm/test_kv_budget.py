"""The KV cache is made for the sequences that decode together, not for all of them at full length."""

from __future__ import annotations

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from colocated_grpo.assembly.engines import engine_spec
from colocated_grpo.errors import ConfigError, RunError
from colocated_grpo.policy.checkpoint_files import CheckpointReader
from colocated_grpo.policy.model import build_empty, read_model_config
from colocated_grpo.rollout.vllm.kv_budget import (
    BLOCK,
    CPU_LIMIT,
    MIN_CACHE,
    check_cache,
    kv_cache_arguments,
    useful_bytes,
    weight_bytes,
)
from colocated_grpo.rollout.vllm.spec import EngineSpec
from colocated_grpo.settings.model_sizes import ENGINE_RESERVE
from tests.support.composites import make_composite
from tests.support.small_policy import SHAPE, config_of, make_small_model

BYTES_PER_TOKEN = 2 * SHAPE.layers * SHAPE.kv_heads * SHAPE.head_dim * 2


@pytest.mark.parametrize(("sequences", "full"), [(512, 256), (20, 10), (11, 8), (4, 4), (1, 1)])
def test_the_cache_holds_half_of_the_sequences_at_full_length_and_at_least_eight(tmp_path, sequences, full):
    folder = make_small_model(tmp_path / "model", "qwen3")
    spec = spec_of(folder, max_model_len=100, max_num_seqs=sequences)
    assert useful_bytes(spec) == BYTES_PER_TOKEN * (full * (100 + BLOCK) + BLOCK)


def test_a_single_sequence_of_full_length_fits_in_blocks_of_128_tokens_beside_the_block_that_vllm_keeps(tmp_path):
    """128 tokens is the block of vLLM's CPU backend. Chat asks for one sequence."""
    folder = make_small_model(tmp_path / "model", "qwen3")
    blocks = useful_bytes(spec_of(folder, max_model_len=8192, max_num_seqs=1)) // (128 * BYTES_PER_TOKEN)
    assert blocks - 1 >= 8192 / 128


@pytest.mark.parametrize(
    ("ranks", "changes", "seats"),
    [
        (1, {}, 256),
        (8, {}, 64),
        (3, {}, 96),
        (3, {"rollout": {"group_size": 7}}, 80),
        (8, {"engine": {"tensor_parallel_size": 4}}, 128),
        (8, {"rollout": {"generation": "replicated"}}, 256),
        (2, {"rollout": {"group_size": 64}}, 512),
        (8, {"engine": {"max_num_seqs": 300}}, 300),
        (8, {"environments": [{"type": "atropos"}]}, 256),
    ],
)
def test_max_num_seqs_covers_an_engines_part_of_a_step(world, tmp_path, ranks, changes, seats):
    """32 prompts of 8 completions."""
    spec = engine_spec(config_of(tmp_path, **changes), tmp_path, ranks, world.device)
    assert spec.max_num_seqs == seats


def test_layers_that_predict_further_tokens_are_neither_read_nor_counted(tmp_path):
    folder = make_small_model(tmp_path / "model", "qwen3")
    spec, file = spec_of(folder), folder / "model.safetensors"
    before, names = weight_bytes(spec), CheckpointReader(folder).shapes.keys()
    prediction = {f"model.layers.{SHAPE.layers}.eh_proj.weight": torch.ones(4, 4)}
    save_file(load_file(file) | prediction, file)
    assert weight_bytes(spec) == before
    assert CheckpointReader(folder).shapes.keys() == names


def sized(folder, device: str, longest: int, **engine) -> dict:
    """vLLM's arguments for 512 sequences of `longest` tokens."""
    return kv_cache_arguments(spec_of(folder, max_model_len=longest, **engine), torch.device(device))


def spec_of(folder, **changes) -> EngineSpec:
    return EngineSpec(
        **{"folder": folder, "dtype": torch.bfloat16, "max_model_len": 64, "max_num_seqs": 512, **changes}
    )


def useful(longest: int) -> int:
    return BYTES_PER_TOKEN * (256 * (longest + BLOCK) + BLOCK)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_small_model(tmp_path_factory.mktemp("kv") / "model", "qwen3")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kept_as", [torch.float32, torch.bfloat16])
def test_weight_bytes_are_counted_once_in_the_engines_type(tmp_path, folder, kept_as, dtype):
    tensors = {name: t.to(kept_as) for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}
    shutil.copy(folder / "config.json", tmp_path)
    save_file(tensors, tmp_path / "model.safetensors")
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    numbers = sum(tensor.numel() for tensor in tensors.values())
    assert weight_bytes(spec_of(tmp_path, dtype=dtype)) == numbers * dtype.itemsize
    assert weight_bytes(spec_of(tmp_path, dtype=dtype, tensor_parallel_size=2)) == (numbers * dtype.itemsize // 2)
    (tmp_path / "model.safetensors").unlink()
    assert weight_bytes(spec_of(tmp_path, dtype=dtype)) >= numbers * dtype.itemsize


def test_weights_that_a_folder_repeats_in_mistrals_own_format_count_once(tmp_path, folder):
    tensors = load_file(folder / "model.safetensors")
    shutil.copy(folder / "config.json", tmp_path)
    save_file(tensors, tmp_path / "model.safetensors")
    once, shapes = weight_bytes(spec_of(tmp_path)), CheckpointReader(tmp_path).shapes
    save_file({f"own.{name}": tensor for name, tensor in tensors.items()}, tmp_path / "consolidated.safetensors")
    assert weight_bytes(spec_of(tmp_path)) == once
    assert CheckpointReader(tmp_path).shapes == shapes


def test_weight_bytes_of_a_text_part_are_those_of_the_text_model(tmp_path):
    folder = make_composite(tmp_path / "whole", "gemma3")
    numbers = build_empty(read_model_config(config_of(folder).model, folder), 64, trust_remote_code=False).parameters()
    assert weight_bytes(spec_of(folder)) == 2 * sum(map(torch.numel, numbers))


@pytest.fixture
def gpu(monkeypatch, folder):
    """A device with so many bytes to spare, beside the engine's weights and reserve, in twice as much memory."""

    def with_spare(spare: int) -> int:
        free = weight_bytes(spec_of(folder)) + ENGINE_RESERVE + spare
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 2 * free))
        return free

    return with_spare


@pytest.mark.parametrize("longest", [400, 4000])
def test_on_a_gpu_the_cache_is_bounded_by_use_and_by_free_memory(folder, gpu, longest):
    spare = useful(2000)
    gpu(spare)
    expected = min(spare, max(MIN_CACHE, useful(longest)))
    assert sized(folder, "cuda", longest) == {"kv_cache_memory_bytes": expected, "gpu_memory_utilization": 0.0625}


def test_a_gpu_without_room_for_the_smallest_cache_is_refused_in_one_line(folder, gpu):
    gpu(MIN_CACHE)
    assert sized(folder, "cuda", 4000)["kv_cache_memory_bytes"] == MIN_CACHE
    gpu(MIN_CACHE - 1)
    with pytest.raises(RunError, match=r"^engine: 6\.1 GiB are free beside the trainer: too little"):
        sized(folder, "cuda", 4000)


def test_a_cache_size_or_utilization_from_the_config_is_used(folder, gpu):
    gpu(useful(2000))
    assert sized(folder, "cuda", 4000, gpu_memory_utilization=0.3) == {"gpu_memory_utilization": 0.3}
    both = {"kv_cache_memory_bytes": 123 << 20, "gpu_memory_utilization": 0.3}
    assert sized(folder, "cuda", 4000, **both)["kv_cache_memory_bytes"] == 123 << 20
    assert sized(folder, "cpu", 4000, **both) == {"kv_cache_memory_bytes": 123 << 20}


def test_a_cache_size_from_the_config_may_use_the_reserve_of_the_automatic_size(folder, gpu):
    free = gpu(MIN_CACHE - ENGINE_RESERVE)
    sized_by_hand = sized(folder, "cuda", 400, kv_cache_memory_bytes=MIN_CACHE)
    assert sized_by_hand == {"kv_cache_memory_bytes": MIN_CACHE, "gpu_memory_utilization": 0.0625}
    with pytest.raises(RunError, match=rf"^engine: {free / (1 << 30):.1f} GiB are free beside the trainer"):
        sized(folder, "cuda", 400)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_cache_size_from_the_config_is_taken_as_it_is(folder, gpu, device):
    gpu(useful(2000))
    assert sized(folder, device, 400, kv_cache_memory_bytes=1000)["kv_cache_memory_bytes"] == 1000


def test_a_cache_size_from_the_config_must_hold_one_sequence(folder):
    needed = BYTES_PER_TOKEN * 400
    check_cache(spec_of(folder, max_model_len=400, kv_cache_memory_bytes=needed))
    with pytest.raises(ConfigError) as raised:
        check_cache(spec_of(folder, max_model_len=400, kv_cache_memory_bytes=needed - 1))
    assert str(raised.value).startswith(
        f"engine.kv_cache_memory_bytes={needed - 1}: one sequence of 400 tokens needs {needed} bytes; raise it, or"
    )
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(("dtype", "cache", "size"), [(torch.bfloat16, "fp8", 1), (torch.float32, "bfloat16", 2)])
def test_a_cache_of_another_type_than_the_weights_is_counted_in_its_own(folder, dtype, cache, size):
    own = {"dtype": dtype, "max_model_len": 400, "args": {"kv_cache_dtype": cache}}
    needed = BYTES_PER_TOKEN // 2 * size * 400
    check_cache(spec_of(folder, kv_cache_memory_bytes=needed, **own))
    with pytest.raises(ConfigError, match=f"needs {needed} bytes"):
        check_cache(spec_of(folder, kv_cache_memory_bytes=needed - 1, **own))


def test_a_cache_whose_use_only_vllm_knows_is_not_refused(tmp_path, folder):
    small = {"max_model_len": 400, "kv_cache_memory_bytes": 1000}
    with pytest.raises(ConfigError):
        check_cache(spec_of(folder, **small))
    check_cache(spec_of(make_small_model(tmp_path / "windows", "gemma3"), **small))
    check_cache(spec_of(folder, **small, args={"kv_cache_dtype": "nvfp4"}))


@pytest.mark.parametrize(
    ("longest", "expected"),
    [(100, MIN_CACHE), (4000, useful(4000)), (400_000, CPU_LIMIT), (10_000_000, BYTES_PER_TOKEN * 10_000_000)],
)
def test_on_a_cpu_the_cache_has_bounds_and_holds_one_sequence(folder, longest, expected):
    size = sized(folder, "cpu", longest)["kv_cache_memory_bytes"]
    assert expected <= size <= expected + 2 * BLOCK * BYTES_PER_TOKEN
