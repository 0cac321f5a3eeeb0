"""Pretrained models, trained as a user trains them: settings name the model, the data, the reward and sizes.

All else is at its defaults. A run trains once, and several tests look at what it has left.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import bitsandbytes.functional as bnb
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from colocated_grpo import Trainer
from colocated_grpo.settings.inputs import ADAPTER_WEIGHTS
from colocated_grpo.tracking import files
from colocated_grpo.tracking.files import Row
from tests.support import sums
from tests.support.programs import without_launcher
from tests.support.ranks import Ranks
from tests.support.real_models import real_model
from tests.support.serve_process import ServeProcess
from tests.support.training_runs import TrainingRun, launch, train

pytestmark = pytest.mark.slow

STEPS = 3
ROWS = 20
SIZES = {"prompts_per_step": 2, "group_size": 4, "max_prompt_tokens": 96, "max_completion_tokens": 8}
TIMEOUT = 300.0
LARGEST, MEAN = 5e-4, 5e-5
"""Bounds of |sampler - trainer| log-probability in float32. Seen in healthy runs: 4e-5 and 1.4e-5."""

EPISODE = """
class Ask:
    def prompts(self, seed, split):
        for number in range(8):
            yield {"prompt": f"What follows {number}? Ask the tool.", "next": str(number + 1)}

    async def run(self, item, model):
        await model.generate(6)
        model.observe([{"role": "tool", "content": item["next"]}])
        said = (await model.generate(6)).text
        return {"reward": len(set(said)) / (1 + len(said))}
"""


def settings(model: str, environment: dict[str, Any], steps: int, **changes: Any) -> dict[str, Any]:
    return {
        "model": str(real_model(model)),
        "environments": [environment],
        "training_steps": steps,
        "rollout": SIZES,
        "run_name": "run",
        **changes,
    }


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """A folder that is deleted after the module."""
    with TemporaryDirectory(prefix="colocated-grpo-real-") as name:
        yield Path(name)


def without_checkpoints(run: TrainingRun) -> TrainingRun:
    """Delete the checkpoints, which no test reads: they have gigabytes."""
    shutil.rmtree(run.folder / "checkpoints")
    return run


@pytest.fixture(scope="module")
def smollm2(folder) -> TrainingRun:
    """A run that the launcher starts, on all cores, with prompts of chat messages."""
    output = folder / "full"
    output.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("OMP_NUM_THREADS", raising=False)
        config = settings("smollm2", sums.entry(output, ROWS, chat=True), STEPS)
        return without_checkpoints(launch(output, config, timeout=TIMEOUT))


@pytest.fixture(scope="module")
def adapter(folder) -> TrainingRun:
    """A run that trains an adapter in conversations with messages of a tool."""
    output = folder / "adapter"
    output.mkdir()
    (output / "ask.py").write_text(EPISODE)
    episode = {"type": "episode", "name": f"{output / 'ask.py'}:Ask"}
    sizes = {**SIZES, "max_completion_tokens": 48}
    config = settings("smollm2", episode, STEPS, policy={"lora": {}}, rollout=sizes, evaluation={"prompts": 2})
    return train(output, config)


@pytest.fixture(scope="module")
def in_4_bits(folder) -> TrainingRun:
    """A run that trains an adapter on a base in 4 bits, evaluates greedily, and exports the merged model."""
    output = folder / "4_bits"
    output.mkdir()
    config = settings(
        "smollm2",
        sums.entry(output, ROWS, chat=True),
        STEPS,
        policy={"lr": 1e-3, "lora": {"base_dtype": "nf4"}},
        evaluation={"prompts": 2, "every": STEPS, "temperature": 0.0},
        checkpoint={"export_merged": True},
    )
    return train(output, config)


@pytest.fixture(scope="module")
def gemma3(folder) -> TrainingRun:
    """A run of a base model without a chat template, whose prompts are text."""
    output = folder / "gemma"
    output.mkdir()
    return without_checkpoints(train(output, settings("gemma3", sums.entry(output, ROWS, chat=False), 1)))


def assert_trained(rows: list[Row], steps: int) -> None:
    assert [row["step"] for row in rows] == list(range(steps))
    for row in rows:
        assert row["grad_norm"] > 0
        assert row["mismatch/abs"] < MEAN
        assert row["mismatch/max"] < LARGEST


def assert_moved(trained: Path, model: str) -> None:
    """Assert that the exported weights are the model's after small updates of every tensor."""
    before, after = (load_file(path / "model.safetensors") for path in (real_model(model), trained))
    assert before.keys() == after.keys()
    for name, weight in after.items():
        change = (weight - before[name].float()).abs().max()
        assert 0 < change < 1e-5, f"{name} has changed by {change}"


@torch.no_grad()
def greedy(model: Path, token_ids: list[int], count: int) -> tuple[list[int], list[float]]:
    """Return the likeliest next tokens and their log-probabilities, as transformers computes them."""
    lm, tokens, logprobs = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), [], []
    for _ in range(count):
        every = torch.log_softmax(lm(torch.tensor([token_ids + tokens])).logits[0, -1], dim=-1)
        tokens.append(int(every.argmax()))
        logprobs.append(float(every.max()))
    return tokens, logprobs


def test_smollm2_trains_at_the_defaults_and_every_tensor_moves(smollm2):
    assert_trained(smollm2.rows(files.TRAIN), STEPS)
    assert_moved(smollm2.folder / "final_model", "smollm2")


def test_prompts_are_rendered_by_the_template_of_the_model(smollm2):
    tokenizer = AutoTokenizer.from_pretrained(real_model("smollm2"))
    asked = {
        tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=False)
        for row in sums.rows(ROWS, chat=True)
    }
    assert {row["prompt"] for row in files.read_rollouts(smollm2.folder)} < asked


def test_a_token_that_ends_messages_and_pads_is_sampled_and_trained_as_the_end(smollm2):
    """SmolLM2 has a token for each digit, so that an answer of digits shows how many tokens it had."""
    answers = [row for row in files.read_rollouts(smollm2.folder) if row["completion"].isdecimal()]
    stopped = [row for row in answers if row["finish_reason"] == "stop"]
    assert stopped
    assert all(row["completion_tokens"] == len(row["completion"]) + 1 for row in stopped)


def test_the_exported_smollm2_is_served_as_transformers_computes_it(smollm2):
    exported = smollm2.folder / "final_model"
    tokenizer = AutoTokenizer.from_pretrained(exported)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    tokens, logprobs = greedy(exported, prompt, 6)
    with ServeProcess(exported) as server:
        server.wait_until_ready()
        request = {"messages": messages, "max_tokens": 6, "temperature": 0, "logprobs": True}
        [choice] = server.done("/v1/chat/completions", request)["choices"]
    assert choice["message"]["content"] == tokenizer.decode(tokens)
    assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == pytest.approx(logprobs, abs=1e-3)


def assert_loads_in_peft(adapter: Path, model: str, blocks: int) -> None:
    """Assert that PEFT loads an adapter of all linear layers, and that every layer's has been trained."""
    base = AutoModelForCausalLM.from_pretrained(real_model(model), dtype=torch.float32)
    peft = PeftModel.from_pretrained(base, adapter)
    factors = {name: weight for name, weight in peft.named_parameters() if "lora_B" in name}
    assert len(factors) == blocks * 7
    assert all(weight.abs().max() > 0 for weight in factors.values())


def test_an_adapter_of_smollm2_trains_at_the_defaults_and_loads_in_peft(adapter):
    assert_trained(adapter.rows(files.TRAIN), STEPS)
    assert_loads_in_peft(adapter.folder / "final_adapter", "smollm2", blocks=30)


def test_the_engine_agrees_with_a_policy_whose_base_has_4_bits(in_4_bits):
    assert_trained(in_4_bits.rows(files.TRAIN), STEPS)
    assert_loads_in_peft(in_4_bits.folder / "final_adapter", "smollm2", blocks=30)


def test_a_merged_model_is_the_rounded_base_plus_the_adapter_and_computes_what_the_engine_sampled(in_4_bits):
    model, adapter = in_4_bits.folder / "final_model", load_file(in_4_bits.folder / "final_adapter" / ADAPTER_WEIGHTS)
    before, after = (load_file(path / "model.safetensors") for path in (real_model("smollm2"), model))
    assert before.keys() == after.keys()
    for name, weight in after.items():
        expected = before[name].float()
        if name.endswith("_proj.weight"):
            base = bnb.dequantize_4bit(*bnb.quantize_4bit(expected, blocksize=64, quant_type="nf4"))
            layer = f"base_model.model.{name.removesuffix('.weight')}"
            expected = base + adapter[f"{layer}.lora_B.weight"] @ adapter[f"{layer}.lora_A.weight"]
        torch.testing.assert_close(weight, expected, rtol=0, atol=1e-6)
    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = [row for row in files.read_rollouts(in_4_bits.folder) if row["kind"] == files.EVALUATION]
    last = [row for row in rows if row["step"] == STEPS]
    assert len(last) == 2
    for row in last:
        prompt = tokenizer(row["prompt"], add_special_tokens=False)["input_ids"]
        tokens, _ = greedy(model, prompt, row["completion_tokens"])
        assert tokenizer.decode(tokens, skip_special_tokens=True) == row["completion"]


def test_messages_of_a_tool_are_rendered_by_the_template_after_the_end_of_the_models_own(adapter):
    rollouts = [row for row in files.read_rollouts(adapter.folder) if row["kind"] == files.TRAIN]
    assert len(rollouts) >= STEPS
    for row in rollouts:
        asked = re.fullmatch(r"(?s).*<\|im_start\|>user\nWhat follows (\d)\? .*", row["prompt"])
        observed = f"<|im_end|>\n<|im_start|>tool\n{int(asked[1]) + 1}<|im_end|>\n<|im_start|>assistant\n"
        assert row["completion"].count(observed) == row["completion"].count("<|im_start|>") / 2 == 1


def program(model: str, output: Path, steps: int, chat: bool, settings: dict[str, Any]) -> dict[str, Any]:
    """Train in this process with functions and rows as objects; then lose the last step, and resume."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    namespace: dict[str, Any] = {}
    exec(sums.REWARD, namespace)
    arguments = {
        "train_dataset": sums.rows(ROWS, chat=chat),
        "training_steps": steps,
        "rollout": SIZES,
        "deterministic": True,
        "checkpoint": {"every": steps - 1},
        "evaluation": {"every": 0},
        "output_dir": str(output),
        "run_name": "run",
        **settings,
    }
    with without_launcher():
        results = []
        for resume in (None, output / "run"):
            result = Trainer(str(real_model(model)), namespace["close"], **arguments).train(resume=resume)
            assert result.model is not None
            [weights] = result.model.glob("*model.safetensors")
            metrics = {key: value for key, value in result.metrics.items() if key.startswith(("reward", "mismatch"))}
            digest = hashlib.sha256(weights.read_bytes()).hexdigest()
            results.append((result.outcome, result.steps, digest, metrics))
            if resume is None:  # as after a kill in the last step: its checkpoint and export are missing
                shutil.rmtree(result.folder / f"checkpoints/step_{steps:06d}")
                shutil.rmtree(result.model)
    rows = files.read_metrics(output / "run")
    starts = [start["first_step"] for start in files.read_environment(output / "run")]
    return {"results": results, "rows": [row for row in rows if row["kind"] == files.TRAIN], "starts": starts}


def assert_resumes_bit_for_bit(model: str, output: Path, steps: int, chat: bool, **settings: Any) -> None:
    with Ranks(program, 1, model, output, steps, chat, settings) as process:
        seen = process.results(TIMEOUT)[0]
    assert_trained(seen["rows"], steps)
    assert seen["starts"] == [0, steps - 1]
    whole, resumed = seen["results"]
    assert whole == resumed
    assert whole[:2] == ("finished", steps)


def test_smollm2_trains_in_a_python_program_and_resumes_bit_for_bit(tmp_path):
    assert_resumes_bit_for_bit("smollm2", tmp_path, STEPS, chat=True)


def test_an_adapter_of_gemma3_trains_resumes_bit_for_bit_and_loads_in_peft(tmp_path):
    assert_resumes_bit_for_bit("gemma3", tmp_path, 2, chat=False, policy={"lora": {}})
    assert_loads_in_peft(tmp_path / "run/final_adapter", "gemma3", blocks=18)


def test_gemma3_trains_a_step_at_the_defaults_and_every_tensor_moves(gemma3):
    assert_trained(gemma3.rows(files.TRAIN), 1)
    assert_moved(gemma3.folder / "final_model", "gemma3")


def test_the_exported_gemma3_is_served_as_transformers_computes_it(gemma3):
    exported = gemma3.folder / "final_model"
    tokenizer = AutoTokenizer.from_pretrained(exported)
    prompt = "The capital of France is"
    tokens, logprobs = greedy(exported, tokenizer.encode(prompt), 4)
    with ServeProcess(exported) as server:
        server.wait_until_ready()
        request = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "logprobs": 0}
        [choice] = server.done("/v1/completions", request)["choices"]
    assert choice["text"] == tokenizer.decode(tokens)
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(logprobs, abs=1e-3)
