"""policy.context_parallel: one line for models and settings with which a micro-batch cannot be split."""

from __future__ import annotations

import pytest

from colocated_grpo.settings.errors import ConfigError
from colocated_grpo.settings.model_support import check_context
from colocated_grpo.settings.rules import check, check_world
from tests.support.small_policy import config_of

HEADS = {"model_type": "qwen3", "num_attention_heads": 12}


@pytest.mark.parametrize(
    ("model", "size", "line"),
    [
        (HEADS, 8, "does not divide the model's heads (12) evenly; use one of 1, 2, 3, 4, 6, 12"),
        (
            HEADS | {"num_key_value_heads": 6},
            4,
            "does not divide the model's heads (12, 6) evenly; use one of 1, 2, 3, 6, 12",
        ),
        (
            HEADS | {"num_key_value_heads": 4, "num_global_key_value_heads": 3},
            4,
            "does not divide the model's heads (12, 4, 3) evenly; use one of 1, 12",
        ),
        (
            HEADS | {"layer_types": ["linear_attention", "full_attention"]},
            2,
            "not supported with linear attention, whose recurrent state runs through the whole sequence; set it to 1",
        ),
    ],
)
def test_a_model_whose_sequences_cannot_be_split_is_one_line(model, size, line):
    with pytest.raises(ConfigError) as caught:
        check_context(model, size)
    assert str(caught.value) == f"policy.context_parallel={size}: {line}"
    check_context(model, 1)


@pytest.mark.parametrize(
    ("kv_heads", "accepted"), [(2, [1, 2, 4, 6, 12]), (3, [1, 3, 6, 12]), (12, [1, 2, 3, 4, 6, 12])]
)
def test_key_value_heads_may_be_fewer_than_the_ranks(kv_heads, accepted):
    model = HEADS | {"num_key_value_heads": kv_heads}
    assert [size for size in range(1, 25) if is_accepted(model, size)] == accepted


def is_accepted(model, size: int) -> bool:
    try:
        check_context(model, size)
    except ConfigError:
        return False
    return True


@pytest.mark.parametrize(
    ("sections", "ranks", "line"),
    [
        ({"policy": {"context_parallel": 3}}, 4, "policy.context_parallel=3: must divide the number of ranks, 4"),
        (
            {"policy": {"context_parallel": 2, "load_balancing": 0.1}},
            2,
            "policy.context_parallel=2: not supported with policy.load_balancing",
        ),
        (
            {
                "policy": {"context_parallel": 2},
                "rollout": {"max_prompt_tokens": 100, "max_completion_tokens": 101},
                "batch": {"max_tokens_per_micro_batch": 100},
            },
            2,
            "batch.max_tokens_per_micro_batch=100: must be at least 101: rollout.max_prompt_tokens + "
            "rollout.max_completion_tokens=201, the longest sequence, is split over policy.context_parallel=2 ranks",
        ),
    ],
)
def test_contradictions_are_one_line(tmp_path, sections, ranks, line):
    config = config_of(tmp_path, **sections)
    with pytest.raises(ConfigError) as caught:
        check(config)
        check_world(config, ranks)
    assert str(caught.value).startswith(line)
