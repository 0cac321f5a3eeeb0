"""Runs that train an adapter: resume, agreement of sampler and trainer, exports, continuing, wrong settings."""

from __future__ import annotations

import json
import os
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.workload import MAX_PROMPT_TOKENS, TASK
from colocated_grpo.runtime.checksums import CHECKSUMS_FILE
from colocated_grpo.runtime.distributed import World
from colocated_grpo.runtime.program import library_environment
from colocated_grpo.settings.inputs import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from colocated_grpo.tools import compare_runs
from colocated_grpo.tracking import files
from tests.support.engines import PROBE, prefill_logprobs, reading_spec
from tests.support.ranks import run_on_ranks, start_module
from tests.support.training_runs import (
    ForkedRun,
    LaunchedRun,
    Settings,
    TrainingRun,
    assert_resumes_exactly,
    checkpoint_tensors,
    deterministic,
    settings,
    tiny_model,
    train,
)

STEPS = 4
RANK = 8
BFLOAT16_CLOSE, FLOAT32_CLOSE = 0.02, 1e-4
"""Bounds of the mean difference between log-probabilities of engine and policy."""


def adapted(**changes: Any) -> Settings:
    """Return the settings of a deterministic run whose adapter moves in every step."""
    policy = {"lr": 0.02, "lora": {"rank": RANK, "alpha": 2 * RANK}, **changes.pop("policy", {})}
    return deterministic(
        environments=[{"type": "task", "name": TASK}],  # rewards differ at once, so that every step moves the weights
        policy=policy,
        **{
            "training_steps": STEPS,
            "rollout": {"max_prompt_tokens": MAX_PROMPT_TOKENS},
            "evaluation": {"every": STEPS, "temperature": 0.0},
            "checkpoint": {"every": 1, "export_every": 1},
            **changes,
        },
    )


def everything(weights: str, dtype: str = "bfloat16") -> Settings:
    """Minibatches of several micro-batches, several updates of a batch, and a reference."""
    return adapted(
        weights=weights,
        policy={"compute_dtype": dtype},
        batch={"max_tokens_per_micro_batch": 256, "minibatches": 2, "epochs": 2},
        loss={"kl": {"coef": 0.01}},
    )


def adapter_of(run: TrainingRun, name: str = "final_adapter") -> dict[str, Tensor]:
    return load_file(run.folder / name / ADAPTER_WEIGHTS)


def exported(run: TrainingRun) -> dict[str, bytes]:
    """Return the contents of all exported adapters by folder."""
    return {path.parent.name: path.read_bytes() for path in run.folder.glob(f"*/{ADAPTER_WEIGHTS}")}


def assert_same_run(a: TrainingRun, b: TrainingRun) -> None:
    assert exported(a) == exported(b)
    assert compare_runs.main([str(a.folder), str(b.folder), "--assert-equal"]) == 0
    assert files.read_rollouts(a.folder) == files.read_rollouts(b.folder)
    mine, others = (checkpoint_tensors(run.folder) for run in (a, b))
    assert mine.keys() == others.keys()
    assert all(torch.equal(tensor, others[name]) for name, tensor in mine.items())
    assert {name for name in mine if name.startswith("model.")} == {f"model.{name}" for name in adapter_of(a)}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> dict[str, TrainingRun]:
    """Runs with copied weights, by dtype: in float32 on one rank, in bfloat16 on two."""
    return {
        dtype: train(tmp_path_factory.mktemp(dtype), everything("copied", dtype), ranks=ranks)
        for dtype, ranks in (("float32", 1), ("bfloat16", 2))
    }


@pytest.mark.parametrize(("weights", "ranks"), [("shared", 1), ("copied", 2)])
def test_a_killed_run_resumes_bit_for_bit_and_shared_weights_change_nothing(uninterrupted, tmp_path, weights, ranks):
    # Not in bfloat16: on CPUs a few of many equal runs then compute other last bits, from their first step on.
    config = everything(weights, "float32")
    whole = train(tmp_path / "whole", config, ranks=ranks)
    resumed = assert_resumes_exactly(whole, tmp_path, config, first_step=STEPS - 1, ranks=ranks)
    assert_same_run(resumed, uninterrupted["float32"] if ranks == 1 else whole)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_killed_run_whose_base_has_4_bits_resumes_bit_for_bit_and_its_engine_agrees(tmp_path, ranks):
    config = everything("copied", "float32")
    config["policy"]["lora"]["base_dtype"] = "nf4"
    whole = train(tmp_path / "whole", config, ranks=ranks)
    assert all(row["mismatch/plain"] < FLOAT32_CLOSE for row in whole.rows(files.TRAIN))
    assert_same_run(assert_resumes_exactly(whole, tmp_path, config, first_step=STEPS - 1, ranks=ranks), whole)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sampler_and_trainer_agree_in_every_step_while_the_adapter_moves(uninterrupted, dtype):
    run = uninterrupted[dtype]
    rows = run.rows(files.TRAIN)
    assert len(rows) == STEPS
    for row in rows:
        assert row["mismatch/plain"] < BFLOAT16_CLOSE
        assert row["mismatch/abs"] < BFLOAT16_CLOSE
        assert row["kl"] > 10 * BFLOAT16_CLOSE, "the policy is still close to the reference"
    states = [adapter_of(run, f"adapter_step_{step + 1}") for step in range(STEPS)]
    for before, after in pairwise(states):
        assert all((after[name] - before[name]).abs().max() > 1e-3 for name in after)


@pytest.fixture(scope="module")
def merged(tmp_path_factory) -> TrainingRun:
    """A run in float32, in which merging does not round, that also exports the merged weights."""
    return train(tmp_path_factory.mktemp("merged"), adapted(checkpoint={"every": 0, "export_merged": True}))


def test_only_adapters_are_exported_unless_the_merged_model_is_wanted(uninterrupted, merged):
    run = uninterrupted["float32"].folder
    folders = {"final_adapter", *(f"adapter_step_{step + 1}" for step in range(STEPS))}
    assert {path.parent.relative_to(run).as_posix() for path in run.rglob("*.safetensors")} == folders
    adapters = exported(uninterrupted["float32"])
    assert adapters["final_adapter"] == adapters[f"adapter_step_{STEPS}"]
    assert all((run / folder / "adapter_config.json").is_file() for folder in folders)
    assert {path.parent.name for path in merged.folder.rglob("*.safetensors")} == {"final_adapter", "final_model"}


@torch.no_grad()
def logprobs_of(model: PreTrainedModel | PeftModel) -> list[float]:
    tokens = torch.tensor([PROBE])
    logprobs = torch.log_softmax(model.eval()(tokens).logits[0, :-1].float(), dim=-1)
    return logprobs.gather(1, tokens[0, 1:, None])[:, 0].tolist()


@pytest.fixture(scope="module")
def pefts(merged) -> list[float]:
    """Log-probabilities of PROBE that PEFT computes with the exported adapter beside the base."""
    base = AutoModelForCausalLM.from_pretrained(tiny_model(), dtype=torch.float32)
    without = logprobs_of(base)
    logprobs = logprobs_of(PeftModel.from_pretrained(base, merged.folder / "final_adapter"))
    assert max(abs(a - b) for a, b in zip(logprobs, without, strict=True)) > 0.1
    return logprobs


def test_the_merged_model_computes_what_peft_computes_with_the_adapter(merged, pefts):
    model = AutoModelForCausalLM.from_pretrained(merged.folder / "final_model")
    assert model.dtype == torch.float32
    assert logprobs_of(model) == pytest.approx(pefts, abs=1e-4)


def scores_with_vllms_own_adapter(world: World, folder: Path, adapter: Path) -> dict[str, list[float]]:
    """Return vLLM's log-probabilities of PROBE without and with the adapter, which it computes beside the base."""
    os.environ.update(library_environment("INFO"))
    from colocated_grpo.rollout.vllm.vllm_engine import VLLMEngine

    engine = VLLMEngine(reading_spec(folder, enable_lora=True, max_lora_rank=RANK), world)
    scores = {"base": prefill_logprobs(engine, PROBE)}
    engine.weights_changed(1)
    engine.adapters.load("trained", str(adapter))
    scores["adapter"] = prefill_logprobs(engine, PROBE)
    engine.close()
    return scores


def test_vllm_loads_the_exported_adapter_and_computes_what_peft_computes(merged, pefts):
    [scores] = run_on_ranks(scores_with_vllms_own_adapter, 1, tiny_model(), merged.folder / "final_adapter")
    base = AutoModelForCausalLM.from_pretrained(tiny_model(), dtype=torch.float32)
    assert scores["base"] == pytest.approx(logprobs_of(base), abs=1e-4)
    assert scores["adapter"] == pytest.approx(pefts, abs=1e-4)


def held_out(run: TrainingRun, step: int) -> list[tuple[str, float]]:
    rows = [row for row in files.read_rollouts(run.folder) if row["kind"] == files.EVALUATION and row["step"] == step]
    return [(row["completion"], row["reward"]) for row in rows]


def test_the_tool_evaluates_an_adapters_folder_as_the_run_did(merged, tmp_path):
    out, err, results = tmp_path / "out", tmp_path / "err", tmp_path / "results.json"
    adapter = shutil.copytree(merged.folder / "final_adapter", tmp_path / "moved")
    saved = json.loads((adapter / ADAPTER_CONFIG).read_text())
    (adapter / ADAPTER_CONFIG).write_text(json.dumps(saved | {"base_model_name_or_path": "no/longer/here"}))
    (adapter / CHECKSUMS_FILE).unlink()
    arguments = [str(adapter), "--config", str(merged.config_file), "--output", str(results)]
    arguments += ["--model.name", str(tiny_model())]  # where the base is now
    with start_module("colocated_grpo.tools.evaluate", arguments, 1, out, err) as rank:
        assert rank.exit_codes(180) == [0], err.read_text()
    measured = json.loads(results.read_text())["evaluations"]["held_out"]
    assert measured["metrics"]["held_out/reward"] == merged.rows(files.EVALUATION)[-1]["held_out/reward"]
    assert [(row["completion"], row["reward"]) for row in measured["completions"]] == held_out(merged, STEPS)


def continuing(adapter: Path, **lora: Any) -> Settings:
    config = adapted(training_steps=1, loss={"kl": {"coef": 0.01}}, checkpoint={"every": 0, "export_every": 0})
    config["policy"]["lora"] = {"init": str(adapter), **lora}
    return config


def test_a_run_continues_from_the_adapter_of_an_earlier_run(merged, tmp_path):
    run = train(tmp_path, continuing(merged.folder / "final_adapter"))
    assert files.read_config(run.folder)["policy"]["lora"]["rank"] == RANK
    assert len(held_out(run, 0)) > 1
    assert held_out(run, 0) == held_out(merged, STEPS)
    assert held_out(merged, STEPS) != held_out(merged, 0)
    first, last = run.rows(files.EVALUATION)[0], merged.rows(files.EVALUATION)[-1]
    assert first["held_out/reward"] == last["held_out/reward"]
    [row] = run.rows(files.TRAIN)
    assert row["mismatch/plain"] < FLOAT32_CLOSE
    assert row["kl"] < FLOAT32_CLOSE, "the reference is the policy before the first step"
    before, after = adapter_of(merged), adapter_of(run)
    assert all((after[name] - before[name]).abs().max() > 1e-3 for name in before)


def refused(folder: Path, config: Settings, *flags: str) -> str:
    """Return the line with which the launcher rejects a run before any rank starts."""
    with LaunchedRun(folder, config, *flags) as run:
        assert run.wait() == 2, run.tail()
        assert run.stdout == ""
        [line] = run.stderr.splitlines()
    return line.removeprefix("error: ")


@pytest.mark.parametrize(
    ("lora", "line"),
    [
        ({"rank": 0}, "policy.lora.rank=0: must be "),
        ({"layers": "1-2"}, "policy.lora.layers=1-2: the model's blocks are 0-1, so there is no block 2 in "),
        ({"dropout": 0.05}, "policy.lora.dropout=0.05: must be 0: the engine samples without dropout"),
        ({"init": "nowhere"}, "policy.lora.init='nowhere': no such folder"),
    ],
)
def test_wrong_settings_are_rejected_in_one_line_before_any_rank_starts(tmp_path, lora, line):
    assert refused(tmp_path, settings(tiny_model(), policy={"lora": lora})).startswith(line)
    assert not (tmp_path / "run").exists()


def test_an_adapter_of_another_base_is_rejected_in_one_line(merged, tmp_path):
    adapter = merged.folder / "final_adapter"
    other = {**continuing(adapter), "model": {"name": str(tiny_model("qwen2"))}}
    line = refused(tmp_path, other)
    assert line.startswith(f"policy.lora.init='{adapter}': the adapter was trained on {tiny_model()}, not on model.na")


@pytest.mark.parametrize(
    ("policy", "setting", "saved"),
    [
        ({"lora": {"rank": 4, "alpha": 8}}, "policy.lora.rank=4", f"{RANK}"),
        ({"lora": {"rank": RANK, "alpha": RANK}}, f"policy.lora.alpha={RANK:.1f}", f"{2 * RANK:.1f}"),
        ({"lora": None}, "policy.lora=null", "an adapter"),
        ({"lora": None, "train_layers": "1"}, "policy.train_layers=1", "null"),
    ],
)
def test_resuming_with_other_trained_weights_is_rejected_in_one_line(merged, tmp_path, policy, setting, saved):
    refusal = refused(tmp_path, adapted(policy=policy), "--resume", str(merged.folder))
    assert refusal.startswith(f"{setting}: the checkpoint {merged.folder}")
    assert refusal.endswith(f" has {saved}; resume with the value that the run began with")


def refused_by_the_checkpoint(folder: Path, config: Settings, trained: TrainingRun) -> str:
    """Return the line with which a run ends that cannot restore the checkpoint of `trained`."""
    copy = shutil.copytree(trained.folder, folder / "run")
    with ForkedRun(folder, config, "--resume", str(copy)) as run:
        assert run.wait() == 1, run.tail()
        [line] = run.stderr.splitlines()
    return line.removeprefix(f"error: checkpoint {copy}/checkpoints/step_{STEPS:06d}: ")


@pytest.mark.parametrize(
    ("targets", "start", "end"),
    [
        (["q_proj"], "has 'model.", "resume with the policy.lora and policy.train_layers that the run began with"),
    ],
)
def test_resuming_with_adapters_on_other_layers_ends_in_one_line(merged, tmp_path, targets, start, end):
    lora = {"rank": RANK, "alpha": 2 * RANK, "target_modules": targets}
    line = refused_by_the_checkpoint(tmp_path, adapted(policy={"lora": lora}), merged)
    assert line.startswith(start)
    assert line.endswith(end)
