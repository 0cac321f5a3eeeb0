"""The KV cache is made for the sequences that decode together, not for all of them at full length."""

from __future__ import annotations

import pytest
import torch

from colocated_grpo.rollout.kv_budget import BLOCK, useful_bytes, with_seats

from small_policy import SHAPE, config_of, make_small_model

BYTES_PER_TOKEN = 2 * SHAPE.layers * SHAPE.kv_heads * SHAPE.head_dim * 2


@pytest.mark.parametrize(("sequences", "full"), [(512, 256), (20, 10), (11, 8), (4, 4), (1, 1)])
def test_half_of_the_sequences_have_room_for_their_full_length_and_never_fewer_than_a_few(tmp_path, sequences, full):
    folder = make_small_model(tmp_path / "model", "qwen3")
    lengths = {"max_prompt_tokens": 40, "max_completion_tokens": 60}
    config = config_of(folder, rollout=lengths, engine={"max_num_seqs": sequences})
    assert useful_bytes(config, folder, torch.bfloat16) == BYTES_PER_TOKEN * full * (40 + 60 + BLOCK)


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
def test_an_engine_has_a_seat_for_each_sequence_of_its_share_of_a_step(tmp_path, ranks, changes, seats):
    """32 prompts of 8 completions."""
    assert with_seats(config_of(tmp_path, **changes), ranks).engine.max_num_seqs == seats
