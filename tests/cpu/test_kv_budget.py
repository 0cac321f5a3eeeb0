"""The KV cache is made for the sequences that decode together, not for all of them at full length."""

from __future__ import annotations

import pytest
import torch

from colocated_grpo.rollout.kv_budget import BLOCK, useful_bytes

from small_policy import SHAPE, config_of, make_small_model

BYTES_PER_TOKEN = 2 * SHAPE.layers * SHAPE.kv_heads * SHAPE.head_dim * 2


@pytest.mark.parametrize(("sequences", "full"), [(512, 256), (20, 10), (11, 8), (4, 4), (1, 1)])
def test_half_of_the_sequences_have_room_for_their_full_length_and_never_fewer_than_a_few(tmp_path, sequences, full):
    folder = make_small_model(tmp_path / "model", "qwen3")
    lengths = {"max_prompt_tokens": 40, "max_completion_tokens": 60}
    config = config_of(folder, rollout=lengths, engine={"max_num_seqs": sequences})
    assert useful_bytes(config, folder, torch.bfloat16) == BYTES_PER_TOKEN * full * (40 + 60 + BLOCK)
