"""On CUDA devices, an engine takes the shortcuts that docs/models.md names for its family, and no others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from colocated_grpo.config.families import FAMILIES
from colocated_grpo.runtime.distributed import World
from colocated_grpo.tools.models_page import shortcuts
from tests.gpu.test_families_gpu import FAMILIES as SETTINGS
from tests.support.engines import Pair, request_of
from tests.support.ranks import run_on_ranks
from tests.support.training_runs import tiny_model

TIMEOUT = 300.0
SEQUENCES = 64
"""Enough for the decode kernel, which leaves few sequences to vLLM."""
HEAD = 64
PARTS = 4
"""Processes that build the engines of several families each, because imports take longer than an engine."""
SHORTCUTS = {
    "steady decode": "Scheduler.schedule",
    "decode kernel": "flash_attn_varlen_func",
    "QKV kernel": "Attention.forward",
}
"""Shortcut -> how the targets of its patches end."""


def taken(world: World, folders: Mapping[str, Path]) -> dict[str, set[str]]:
    """Return by family the shortcuts that its engine takes while it samples."""
    return {name: shortcuts_of(world, folder) for name, folder in folders.items()}


def shortcuts_of(world: World, folder: Path) -> set[str]:
    pair = Pair(world, folder, engine={"enforce_eager": False, "max_num_seqs": SEQUENCES})
    from colocated_grpo.rollout.vllm import patches  # imports vLLM, which the ranks alone need

    before = hits(patches.report())
    pair.engine.wake("weights")
    pair.write()
    pair.engine.wake("kv_cache")
    pair.generate([request_of(number, number, max_tokens=16) for number in range(SEQUENCES)])
    pair.engine.close()
    return set(hits(patches.report()) - before)


def hits(report: list[dict[str, str | int]]) -> Counter[str]:
    return Counter(
        {
            name: sum(int(row["hits"]) for row in report if str(row["target"]).endswith(end))
            for name, end in SHORTCUTS.items()
        }
    )


@pytest.mark.gpu
@pytest.mark.parametrize("part", range(PARTS))
def test_engines_take_the_shortcuts_of_the_table(part: int):
    families = {family.architecture: family for family in FAMILIES[part::PARTS]}
    folders = {name: tiny_model(name, head_dim=HEAD, edits=SETTINGS[name]) for name in families}
    [found] = run_on_ranks(taken, 1, folders, timeout=TIMEOUT)
    # Head sizes of the small models, not of released ones.
    assert found == {name: set(shortcuts(replace(family, heads=(HEAD,)))) for name, family in families.items()}
