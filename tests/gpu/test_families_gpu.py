"""Each tested family on a CUDA device: compiled training in bfloat16, and an engine that agrees with the policy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.workload import MAX_PROMPT_TOKENS, TASK
from colocated_grpo.policy.routing import WEIGHTS
from colocated_grpo.tools.shapes import ARCHITECTURES, TINY
from colocated_grpo.tracking import files
from tests.support.composites import TEXT_PARTS, make_composite
from tests.support.families import HYBRIDS, MINISTRAL3, SETTINGS
from tests.support.training_runs import launch, settings, tiny_model

STEPS = 5
TIMEOUT = 400.0
"""Compiling FlexAttention (Gemma 2) or the parts of a hybrid model takes minutes on a busy machine."""
LATENT_HEADS = {"qk_nope_head_dim": 128, "v_head_dim": 128}
"""Sizes of released models: vLLM's prefill kernel supports no others."""
LONGER_TABLE = {"rope_parameters": MINISTRAL3["rope_parameters"] | {"original_max_position_embeddings": 64}}
"""vLLM's table of rotary angles then has 4 * 64 positions, enough for prompts and completions."""
RELEASED_STATES = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
"""Sizes of released models: FlashInfer's prefill kernel, which vLLM uses on Hopper GPUs, supports no others."""
LIMIT = 0.02
"""Mean |engine - policy| log-probability that rounding to bfloat16 explains."""
LIMIT_OF_MIXTURES = 0.1
"""Rounding also changes choices of experts. In these small models that moves single log-probabilities by up to 0.6
(docs/results/hybrids_1xh100.json)."""
HEAD = 64
"""A size that all of these kernels support."""
FAMILIES = (
    SETTINGS
    | {name: SETTINGS[name] | RELEASED_STATES for name in HYBRIDS}
    | {"deepseek_v3": SETTINGS["deepseek_v3"] | LATENT_HEADS, "ministral3": LONGER_TABLE}
)


@pytest.mark.gpu
@pytest.mark.parametrize("architecture", list(FAMILIES))
def test_a_family_trains_and_its_engine_agrees_with_the_policy(architecture, tmp_path):
    model = tiny_model(architecture, head_dim=HEAD, edits=FAMILIES[architecture])
    assert_trains_and_agrees(model, architecture, tmp_path)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", list(TEXT_PARTS))
def test_the_text_part_of_a_whole_model_trains_and_its_engine_agrees_with_the_policy(kind, tmp_path):
    architecture = TEXT_PARTS[kind][0]
    shape, edits = replace(TINY, head_dim=HEAD), FAMILIES.get(architecture)
    model = make_composite(tmp_path / "whole", kind, shape=shape, init_std=0.1, edits=edits)
    assert_trains_and_agrees(model, architecture, tmp_path)


def assert_trains_and_agrees(model: Path, architecture: str, folder: Path) -> None:
    """Train the model for a few steps in a new run in `folder`, and check each step's metrics."""
    config = settings(
        model,
        environments=[{"type": "task", "name": TASK}],  # rewards differ at once, so that every step moves the weights
        rollout={"max_prompt_tokens": MAX_PROMPT_TOKENS, "max_completion_tokens": 16},
        engine={"enforce_eager": False, "max_num_seqs": 32},
        policy={"compile": "on"},
        training_steps=STEPS,
        evaluation={"every": 0},
    )
    limit = LIMIT_OF_MIXTURES if ARCHITECTURES[architecture] in WEIGHTS else LIMIT
    rows = launch(folder, config, gpus=1, timeout=TIMEOUT).rows(files.TRAIN)
    assert len(rows) == STEPS
    for row in rows:
        assert row["grad_norm"] > 0
        assert row["mismatch/plain"] < limit
