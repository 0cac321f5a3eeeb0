"""Runs that train the text part of a vision-language model: all engines serve it alone, exports are text models."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel
from vllm import ModelRegistry

from benchmarks.workload import MAX_PROMPT_TOKENS, TASK
from colocated_grpo.rollout.vllm.vllm_arguments import register_class
from colocated_grpo.runtime.distributed import World
from colocated_grpo.runtime.program import library_environment
from colocated_grpo.settings.errors import ConfigError
from colocated_grpo.settings.schema import Config
from colocated_grpo.tools.shapes import TINY
from colocated_grpo.tracking import files
from colocated_grpo.tracking.hub import card
from docs.models_page import PAGE
from tests.support.composites import TEXT_PARTS, make_composite, whole_model
from tests.support.engines import PROBE, Pair, prefill_logprobs, reading_spec
from tests.support.families import HYBRIDS
from tests.support.ranks import run_on_ranks, start_module
from tests.support.serve_process import ServeProcess
from tests.support.served_runs import SERVER_FLAGS
from tests.support.training_runs import (
    LaunchedRun,
    Settings,
    TrainingRun,
    assert_resumes_exactly,
    settings,
    train,
)

STEPS = 3
RANK = 4
CLOSE = 2e-5
"""Float32 on both sides, with kernels that add up in different orders."""
IN_FLOAT32 = [kind for kind, (architecture, _, _) in TEXT_PARTS.items() if architecture not in HYBRIDS]
"""Those whose engine on CPUs computes in float32; tests/cpu/runs/test_hybrid_run.py has the others."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """Whole models by kind, with heads that vLLM's engine for CPUs supports."""
    parent = tmp_path_factory.mktemp("whole")
    made = {
        kind: make_composite(parent / kind.replace(" ", "-"), kind, shape=TINY, init_std=0.1) for kind in IN_FLOAT32
    }
    add_own_format(made["mistral3"])
    return made


def add_own_format(folder: Path) -> None:
    """Add files as Mistral stores its models once more beside those of transformers; vLLM would prefer them."""
    (folder / "params.json").write_text(json.dumps({"dim": 1}))
    save_file({"tok_embeddings.weight": torch.zeros(1)}, folder / "consolidated.safetensors")


@pytest.fixture(scope="module")
def gemma(folders) -> Path:
    return folders["gemma3"]


def work(folder: Path, **changes: Any) -> Settings:
    """Return the settings of a deterministic run in which every step moves the weights."""
    return settings(
        folder,
        deterministic=True,
        environments=[{"type": "task", "name": TASK}],
        rollout={"max_prompt_tokens": MAX_PROMPT_TOKENS},
        **{"training_steps": STEPS, "evaluation": {"every": 0}, "checkpoint": {"every": 1}, **changes},
    )


@torch.no_grad()
def logprobs_of(model: PreTrainedModel) -> list[float]:
    """Log-probabilities of PROBE that transformers computes."""
    tokens = torch.tensor([PROBE])
    logprobs = torch.log_softmax(model.eval()(tokens).logits[0, :-1].float(), dim=-1)
    return logprobs.gather(1, tokens[0, 1:, None])[:, 0].tolist()


def engine_scores(world: World, folder: Path) -> dict[str, Any]:
    """Return how an engine scores PROBE that reads the checkpoint, and whether one that is synced agrees."""
    os.environ.update(library_environment("INFO"))
    from colocated_grpo.rollout.vllm.vllm_engine import VLLMEngine

    reading = VLLMEngine(reading_spec(folder), world)
    scores = prefill_logprobs(reading, PROBE)
    built = sum(parameter.numel() for parameter in reading.model.parameters())
    reading.close()
    pair = Pair(world, folder)
    pair.write()
    pair.change_weights()
    moved = pair.disagreement()
    pair.write()
    path = "views" if pair.sync.plan is not None else "load_weights"
    facts = {"read": scores, "parameters": built, "moved": moved, "after": pair.disagreement(), "path": path}
    pair.engine.close()
    return facts


@pytest.mark.parametrize("kind", IN_FLOAT32)
def test_engines_read_the_whole_checkpoint_and_follow_the_policy(folders, kind):
    [facts] = run_on_ranks(engine_scores, 1, folders[kind], timeout=300.0)
    whole = whole_model(folders[kind])
    assert facts["read"] == pytest.approx(logprobs_of(whole), abs=CLOSE)
    assert facts["parameters"] < whole.num_parameters()
    assert facts["moved"] > 100 * CLOSE
    assert facts["after"] < CLOSE
    assert facts["path"] == ("load_weights" if kind == "gemma4" else "views")


@pytest.mark.parametrize("alone", [False, True])
def test_a_vllm_without_the_class_of_a_text_part_is_named_in_one_line(gemma, monkeypatch, alone):
    monkeypatch.setattr(ModelRegistry, "get_supported_archs", lambda: {"Gemma3ForConditionalGeneration"})
    config_json = json.loads((gemma / "config.json").read_text(encoding="utf-8"))
    with pytest.raises(ConfigError, match=r"^model.name='.*': vLLM \S+ has no Gemma3ForCausalLM; install a later ver"):
        register_class(gemma, config_json["text_config"] if alone else config_json)


@pytest.fixture(scope="module")
def alone(gemma, tmp_path_factory) -> TrainingRun:
    return train(tmp_path_factory.mktemp("alone"), work(gemma))


def test_engine_and_policy_agree_while_the_weights_move(alone):
    rows = alone.rows(files.TRAIN)
    assert len(rows) == STEPS
    assert max(row["mismatch/plain"] for row in rows) < CLOSE
    assert min(row["grad_norm"] for row in rows) > 0


def test_the_final_model_is_a_text_model(alone, gemma):
    final = alone.folder / "final_model"
    model = AutoModelForCausalLM.from_pretrained(final)
    assert type(model).__name__ == "Gemma3ForCausalLM"
    whole = load_file(gemma / "model.safetensors")
    trained = load_file(final / "model.safetensors")
    assert {f"language_model.{name}" for name in trained} < set(whole)
    assert not any("vision" in name for name in trained)


def test_a_resumed_run_repeats_the_uninterrupted_one_bit_for_bit(alone, gemma, tmp_path):
    assert_resumes_exactly(alone, tmp_path, work(gemma), first_step=STEPS - 1)


def test_a_run_continues_from_the_final_model(alone, tmp_path):
    continued = train(tmp_path, work(alone.folder / "final_model", training_steps=1))
    assert max(row["mismatch/plain"] for row in continued.rows(files.TRAIN)) < CLOSE


@pytest.fixture(scope="module")
def server(gemma) -> Iterator[ServeProcess]:
    with ServeProcess(gemma, "--enable-lora", *SERVER_FLAGS) as server:
        server.wait_until_ready()
        yield server


def served(server: ServeProcess, bridge: str) -> dict[str, Any]:
    return {"placement": "server", "urls": [server.url], "bridge": bridge}


def adapter_work(folder: Path, **changes: Any) -> Settings:
    policy, checkpoint = {"lr": 0.02, "lora": {"rank": RANK}}, {"every": 1, "export_merged": True}
    return work(folder, policy=policy, checkpoint=checkpoint, **changes)


@pytest.fixture(scope="module")
def adapted(server, gemma, tmp_path_factory) -> TrainingRun:
    """A run that trains an adapter, which the server loads beside its text model."""
    return train(tmp_path_factory.mktemp("adapted"), adapter_work(gemma, engine=served(server, "adapter")))


def test_a_server_loads_the_adapter_of_each_step(adapted):
    rows = adapted.rows(files.TRAIN)
    assert max(row["mismatch/plain"] for row in rows) < CLOSE
    assert min(row["grad_norm"] for row in rows) > 0


def test_peft_loads_the_adapter_beside_the_text_part_as_the_page_shows(adapted, gemma):
    [code] = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    adapter, variables = adapted.folder / "final_adapter", {}
    for name, folder in (("google/gemma-3-4b-it", gemma), ("runs/my-run/final_adapter", adapter)):
        code = code.replace(name, str(folder))
    exec(code, variables)
    merged = AutoModelForCausalLM.from_pretrained(adapted.folder / "final_model")
    assert logprobs_of(variables["model"]) == pytest.approx(logprobs_of(merged), abs=1e-4)
    assert logprobs_of(merged) != pytest.approx(logprobs_of(whole_model(gemma)), abs=0.01)
    names = load_file(adapter / "adapter_model.safetensors")
    [example] = re.findall(r"`(base_model\.\S+)`", PAGE.read_text())
    assert example in names


def test_the_card_of_a_pushed_adapter_names_the_page_and_no_command_for_the_whole_model(adapted, gemma):
    adapter_config, whole_config = (
        Config.model_validate(make(gemma)).model_dump(mode="json") for make in (adapter_work, work)
    )
    text = card("me/adapter", adapter_config, adapted.rows(files.TRAIN), STEPS, text_part=True)
    assert "docs/models.md" in text
    assert "vllm serve" not in text
    assert "vllm serve me/model" in card("me/model", whole_config, [], STEPS, text_part=True)


def test_a_run_continues_from_the_adapter(adapted, gemma, tmp_path):
    lora = {"init": str(adapted.folder / "final_adapter")}
    continued = train(tmp_path, work(gemma, policy={"lr": 0.02, "lora": lora}, training_steps=1))
    [row] = continued.rows(files.TRAIN)
    assert row["mismatch/plain"] < CLOSE
    assert row["grad_norm"] > 0


def test_a_server_gives_the_result_of_a_colocated_run(server, alone, gemma, adapted, tmp_path):
    """After the adapter's run: a server whose base model was changed takes no adapters."""
    run = train(tmp_path, work(gemma, engine=served(server, "broadcast")))
    assert max(row["mismatch/plain"] for row in run.rows(files.TRAIN)) < CLOSE
    ours, theirs = (load_file(each.folder / "final_model/model.safetensors") for each in (run, alone))
    assert max((ours[name] - theirs[name]).abs().max().item() for name in theirs) < 2e-4


def test_a_server_is_restarted_with_the_text_model(server, alone, gemma, adapted, tmp_path):
    run = train(tmp_path, work(gemma, engine=served(server, "restart"), training_steps=2))
    rows, expected = run.rows(files.TRAIN), alone.rows(files.TRAIN)
    assert max(row["mismatch/plain"] for row in rows) < CLOSE
    assert [row["reward"] for row in rows] == [row["reward"] for row in expected[:2]], "sampled with the same weights"


def test_one_copy_of_the_weights_is_trained_in_the_engine_server(gemma, tmp_path):
    engine = {"placement": "server", "bridge": "shared"}
    with LaunchedRun(tmp_path, work(gemma, engine=engine)) as run:
        run.finish()
    assert max(row["mismatch/plain"] for row in run.rows(files.TRAIN)) < CLOSE


def test_the_tool_evaluates_the_whole_folder_and_the_adapter(gemma, adapted, tmp_path):
    for name in (str(gemma), str(adapted.folder / "final_adapter")):
        out, err, results = tmp_path / "out", tmp_path / "err", tmp_path / "results.json"
        arguments = [name, "--config", str(adapted.config_file), "--output", str(results)]
        arguments += ["--evaluation.every", "1"]
        with start_module("colocated_grpo.tools.evaluate", arguments, 1, out, err) as rank:
            assert rank.exit_codes(180) == [0], err.read_text()
        assert "held_out" in json.loads(results.read_text())["evaluations"]
