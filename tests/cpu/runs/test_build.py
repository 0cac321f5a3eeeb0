"""Builds that fail: before weights are read where that is possible."""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from colocated_grpo.errors import RunError
from colocated_grpo.runtime.checksums import write_checksums
from colocated_grpo.runtime.distributed import World
from colocated_grpo.runtime.supervision import StopRequest
from colocated_grpo.settings.errors import ConfigError
from colocated_grpo.settings.schema import Config
from colocated_grpo.tracking.ending import RunOutput
from tests.support.ranks import run_on_ranks
from tests.support.training_runs import settings, tiny_model

MODEL_PHASE = "reading the model's settings and tokenizer"
DATA_PHASE = "reading data, rewards and environments"
FROZEN = {"type": "turns", "name": "town", "args": {"players": ["policy", "frozen"]}}


def failure(world: World, config: dict[str, Any], folder: Path, missing: str | None) -> tuple[str | None, str]:
    """Return the phase in which a build fails, and the line. missing: what this vLLM lacks."""
    from colocated_grpo.assembly.assemble import build_run
    from colocated_grpo.rollout.vllm.patches import PATCHES

    if missing is not None:
        PATCHES[0].target = missing
    output = RunOutput()
    with pytest.raises((ConfigError, RunError)) as caught:
        build_run(Config.model_validate(config), folder, world, StopRequest(world.store), output, ExitStack())
    return output.phase_name, str(caught.value)


def fails(folder: Path, config: dict[str, Any], missing: str | None = None) -> tuple[str | None, str]:
    return run_on_ranks(failure, 1, config, folder / "run", missing)[0]


def test_a_model_that_the_engine_cannot_run_is_refused_before_weights_are_read(tmp_path):
    phase, line = fails(tmp_path, settings(tiny_model(head_dim=16)))
    assert (phase, "heads of 16, but vLLM's engine for CPUs" in line) == (MODEL_PHASE, True)


def test_a_vllm_that_cannot_be_patched_is_refused_before_weights_are_read(tmp_path):
    phase, line = fails(tmp_path, settings(tiny_model()), "vllm.distributed.parallel_state:misspelt")
    assert (phase, "parallel_state:misspelt is missing" in line) == (MODEL_PHASE, True)


def test_the_opponents_files_are_looked_at_before_weights_are_read(tmp_path):
    other = shutil.copytree(tiny_model(), tmp_path / "other")
    write_checksums(other)
    (other / "model.safetensors").write_bytes(b"damaged")
    entry = FROZEN | {"opponent": {"name": str(other)}}
    config = settings(tiny_model(), environments=[entry], rollout={"max_prompt_tokens": 1800})
    phase, line = fails(tmp_path, config)
    assert phase == MODEL_PHASE
    assert line.startswith(f"environments: opponent.name={str(other)!r}: ") and "\n" not in line


def test_a_reference_with_another_vocabulary_is_refused_before_weights_are_read(tmp_path):
    other = tiny_model(vocab=120)
    phase, line = fails(tmp_path, settings(tiny_model(), loss={"type": "dapo", "kl": {"coef": 1, "model": str(other)}}))
    assert phase == MODEL_PHASE
    assert line.startswith(
        f"loss.kl.model={str(other)!r}: its vocabulary differs from the policy's in 16 entries, such"
    )


def test_a_function_for_answers_is_imported_before_weights_are_read(tmp_path):
    broken = tmp_path / "broken.py"
    broken.write_text("def answer(text): return text\n\nraise ValueError('when imported')\n")
    evaluated = {"name": "own", "source": {"type": "task", "name": "sorting"}, "answer": f"{broken}:answer"}
    phase, line = fails(tmp_path, settings(tiny_model(), evaluation={"sets": [evaluated]}))
    assert phase == DATA_PHASE
    assert line.startswith(f"evaluation set 'own': answer: cannot import {str(broken)!r}")


def test_prompts_that_are_all_too_long_are_found_before_weights_are_read(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "sort 3 1 2 9 8 7 6 5 4 3 2 1 0"}\n' * 4)
    source = {"type": "dataset", "name": str(rows), "rewards": ["format_think"], "held_out": 0}
    environments = [{"type": "task", "name": "sorting", "args": {"min_digits": 2, "max_digits": 3}}, source]
    phase, line = fails(tmp_path, settings(tiny_model(), environments=environments, evaluation={"every": 0}))
    assert phase == DATA_PHASE
    assert line.startswith("environments 'rows.jsonl': 4 consecutive prompts are empty or longer than rollout.max_pr")
