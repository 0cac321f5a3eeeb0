"""Entries of config.json for vLLM: both sides rotate and scale keys alike."""

from __future__ import annotations

import pytest
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding import get_rope

from colocated_grpo.rollout.vllm.vllm_arguments import overrides

HEAD = 16
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 16.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
        ({"mscale": 0.7, "mscale_all_dim": 1.4}, None),
        ({"attention_factor": 1.5}, 1.5),
    ],
    ids=["as in Ministral 3", "different scales", "given"],
)
def test_yarn_scales_queries_and_keys_as_transformers_does(entries, expected):
    rope = YARN | entries
    config = LlamaConfig(head_dim=HEAD, rope_parameters=dict(rope))
    scale = ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")[1]
    if expected is not None:
        assert scale == expected
    given = overrides({"model_type": "llama", "rope_parameters": rope})["rope_parameters"]
    assert given["attention_factor"] == pytest.approx(scale)
    with set_current_vllm_config(VllmConfig()):
        assert get_rope(HEAD, 1024, rope_parameters=given).mscale == pytest.approx(scale)
    # The names of vLLM 0.26.
    assert given["attn_factor"] == pytest.approx(scale)
    assert given["apply_yarn_scaling"] is False


def test_yarn_without_a_scale_of_its_own_is_left_as_it_is():
    assert overrides({"model_type": "llama", "rope_parameters": YARN}) == {}


def test_the_scale_of_queries_of_ministral_3_gets_the_name_that_vllm_reads():
    rope = {"rope_type": "default", "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 64}
    expected = {"llama_4_scaling": {"beta": 0.1, "original_max_position_embeddings": 64}}
    assert overrides({"model_type": "ministral3", "rope_parameters": rope}) == expected
