"""On CUDA devices, engines use the shortcuts that docs/models.md names for their family, and none of its others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from colocated_grpo.runtime.distributed import World
from colocated_grpo.settings.families import FAMILIES, Family
from docs.models_page import shortcuts
from tests.gpu.test_families_gpu import FAMILIES as SMALL_MODELS
from tests.support.engines import Pair, request_of
from tests.support.ranks import run_on_ranks
from tests.support.training_runs import tiny_model

SETTINGS = SMALL_MODELS | {"mistral": {"sliding_window": None}}
"""Mistral as in the table, without the window of its first models, which is transformers' default."""
TIMEOUT = 300.0
SEQUENCES = 64
"""Enough for the decode kernel, which leaves few sequences to vLLM."""
HEAD = 64
SHORTCUTS = {
    "steady decode": "Scheduler.schedule",
    "decode kernel": "flash_attn_varlen_func",
    "QKV kernel": "Attention.forward",
}
"""Shortcut -> how the targets of its patches end."""


def taken(world: World, folder: Path) -> set[str]:
    """Return the shortcuts that an engine uses: kernels in its CUDA graphs, or steps while it samples."""
    pair = Pair(world, folder, engine={"enforce_eager": False, "max_num_seqs": SEQUENCES})
    from colocated_grpo.rollout.vllm import patches  # imports vLLM, which the ranks alone need

    pair.engine.wake("weights")
    pair.write()
    pair.engine.wake("kv_cache")
    pair.generate([request_of(number, number, max_tokens=16) for number in range(SEQUENCES)])
    pair.engine.close()
    hit = [patch.target for patch in patches.PATCHES if patch.hits]
    return {name for name, end in SHORTCUTS.items() if any(target.endswith(end) for target in hit)}


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.architecture)
def test_an_engine_takes_the_shortcuts_of_the_table(family: Family):
    folder = tiny_model(family.architecture, head_dim=HEAD, edits=SETTINGS[family.architecture])
    [found] = run_on_ranks(taken, 1, folder, timeout=TIMEOUT)
    # Head size of the small model, not of released ones.
    assert found == set(shortcuts(replace(family, heads=(HEAD,))))
