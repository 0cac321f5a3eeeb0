"""One copy of the weights: policy and engine compute with the same memory, and a run is the same as with two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.workload import MAX_PROMPT_TOKENS
from colocated_grpo.runtime.distributed import World
from colocated_grpo.settings import errors, rules
from colocated_grpo.settings.schema import Config
from colocated_grpo.tools import compare_runs
from colocated_grpo.tracking import files
from tests.support.engines import PROBE, Pair, request_of
from tests.support.ranks import run_on_ranks
from tests.support.training_runs import (
    ForkedRun,
    Settings,
    TrainingRun,
    deterministic,
    settings,
    tiny_model,
    train,
    weights_of,
)

TIMEOUT = 300.0
CLOSE = 2e-5
"""Float32 on both sides, with kernels that add up in different orders."""


def shared_facts(world: World, folder: Path) -> dict[str, Any]:
    pair = Pair(world, folder, weights="shared")
    engine = [(p.data_ptr(), p.data_ptr() + p.nbytes) for p in pair.engine.model.parameters()]
    addresses = [parameter.data_ptr() for parameter in pair.policy.model.parameters()]
    facts: dict[str, Any] = {
        "outside": [address for address in addresses if not any(start <= address < end for start, end in engine)],
        "addresses": len(set(addresses)),
        "parameters": len(addresses),
    }
    embedding = pair.engine.model.get_parameter("model.embed_tokens.weight").data
    padding = embedding[pair.policy.parameters()["model.embed_tokens.weight"].shape[0] :]
    facts |= {"padding rows": len(padding), "padding": padding.abs().sum().item()}
    disagreements, scores = [], []
    for version in range(3):
        pair.write()
        disagreements.append(pair.disagreement())
        scores.append(pair.engine_logprobs())
        [completion] = pair.generate([request_of(version, 3)])
        disagreements.append(pair.sampling_error(PROBE, completion, 0.7))
        pair.engine.sleep()
        pair.change_weights()
        pair.engine.wake("weights")
        pair.engine.wake("kv_cache")
    pair.engine.close()
    return {**facts, "disagreements": disagreements, "scores": scores}


@pytest.mark.parametrize("architecture", ["qwen3", "gemma3"])
def test_what_the_optimizer_writes_is_what_the_engine_computes_with(architecture):
    [facts] = run_on_ranks(shared_facts, 1, tiny_model(architecture), timeout=TIMEOUT)
    assert facts["outside"] == []
    assert facts["addresses"] == facts["parameters"]
    assert max(facts["disagreements"]) < CLOSE
    first, second, third = facts["scores"]
    moved = [max(abs(a - b) for a, b in zip(*pair, strict=True)) for pair in [(first, second), (second, third)]]
    assert min(moved) > 100 * CLOSE, "the weights moved too little for the test to see old ones"
    assert facts["padding rows"] > 0
    assert facts["padding"] == 0


def test_an_engine_with_another_weight_layout_is_rejected_in_one_line(tmp_path):
    with ForkedRun(tmp_path, settings(tiny_model("gpt2"), weights="shared")) as run:
        assert run.wait() != 0
        assert "weights=shared: the engine stores this model's weights in another layout" in run.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"sync_frequency": 3}, "sync_frequency=3: must be 1 with weights: shared"),
        ({"policy": {"cpu_offload": True}}, "policy.cpu_offload=true: must be false with weights: shared"),
        (
            {"engine": {"args": {"quantization": "fp8"}}},
            "engine.args.quantization=fp8: not supported with weights: shared",
        ),
        (
            {"engine": {"dtype": "float16"}},
            "engine.dtype=float16: must be auto with weights: shared",
        ),
    ],
)
def test_settings_that_exclude_shared_weights_are_named(changes, line):
    rules.check(Config.model_validate(settings(Path("model"), **changes)))
    with pytest.raises(errors.ConfigError) as caught:
        rules.check(Config.model_validate(settings(Path("model"), weights="shared", **changes)))
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)


def test_shared_weights_need_one_rank_and_one_type():
    same = {"engine": {"dtype": "bfloat16"}, "policy": {"compute_dtype": "bfloat16"}}
    config = Config.model_validate(settings(Path("model"), weights="shared", **same))
    rules.check(config)
    rules.check_world(config, 1)
    with pytest.raises(errors.ConfigError, match="weights=shared: needs one rank, not 2"):
        rules.check_world(config, 2)


def everything(weights: str, **hold: int) -> Settings:
    """16 bits beside fp32 masters, minibatches of several micro-batches, steps that later ones see, a reference."""
    return deterministic(
        weights=weights,
        # Its rewards differ at once, so that every step moves the weights.
        environments=[{"type": "task", "name": "tests.support.held_tasks:HeldWork", "args": hold}],
        rollout={"max_prompt_tokens": MAX_PROMPT_TOKENS},
        training_steps=4,
        policy={"compute_dtype": "bfloat16"},
        batch={"max_tokens_per_micro_batch": 256, "minibatches": 2, "epochs": 2},
        loss={"kl": {"coef": 0.01}},
        checkpoint={"every": 1},
    )


def assert_same_run(a: TrainingRun, b: TrainingRun) -> None:
    assert weights_of(a) == weights_of(b)
    assert compare_runs.main([str(a.folder), str(b.folder), "--assert-equal"]) == 0
    assert files.read_rollouts(a.folder) == files.read_rollouts(b.folder)


@pytest.fixture(scope="module")
def copied(tmp_path_factory) -> TrainingRun:
    return train(tmp_path_factory.mktemp("copied"), everything("copied"))


def test_a_run_with_shared_weights_equals_a_run_with_copied_weights(copied, tmp_path):
    shared = train(tmp_path, everything("shared"))
    assert [files.read_config(run.folder)["weights"] for run in (copied, shared)] == ["copied", "shared"]
    assert all(row["grad_norm"] > 0 for row in shared.rows(files.TRAIN))
    assert_same_run(shared, copied)


def test_a_killed_run_with_shared_weights_resumes_exactly(copied, tmp_path):
    with ForkedRun(tmp_path, everything("shared", hold_before=3)) as run:
        run.wait_for_step(2)
        run.kill()
    resumed = train(tmp_path, everything("shared"), "--resume", "auto")
    first, second = (start["first_step"] for start in files.read_environment(resumed.folder))
    assert first == 0 < second < 4
    assert_same_run(resumed, copied)
