"""`numerics: exact` on CPUs: the policy computes the engine's log-probabilities to the last bit, or the run stops."""

from __future__ import annotations

import pytest

from benchmarks.workload import MAX_PROMPT_TOKENS, TASK
from tests.support.faulty_runs import failed, faulty
from tests.support.training_runs import ForkedRun, Settings, settings, tiny_model, train

ONE_ULP = """
from itertools import count
import torch
from vllm.model_executor.layers.activation import SiluAndMul
exactly = SiluAndMul.forward_native
SiluAndMul.forward_native = staticmethod(lambda x: torch.nextafter(exactly(x), torch.tensor(torch.inf)))
judge = count().__next__
"""


def exact(**changes: object) -> Settings:
    """Return settings with sequences of up to 220 tokens: fast attention splits 128 keys or more between threads."""
    rollout = {"group_size": 6, "max_prompt_tokens": MAX_PROMPT_TOKENS, "max_completion_tokens": 60, "temperature": 0.7}
    return {"numerics": "exact", "training_steps": 3, "rollout": rollout, **changes}


@pytest.mark.parametrize("lora", [None, {"rank": 4}, {"rank": 4, "base_dtype": "nf4"}], ids=["full", "lora", "nf4"])
def test_engine_and_policy_agree_to_the_last_bit_in_every_step(tmp_path, lora):
    own = {"policy": {"lora": lora}, "checkpoint": {"every": 0}, "evaluation": {"every": 0}}
    config = exact(environments=[{"type": "task", "name": TASK}], **own)
    rows = train(tmp_path, settings(tiny_model("llama", head_dim=64), **config), ranks=2).rows("train")
    assert [row["mismatch/max"] for row in rows] == [0.0] * 3
    assert all(row["grad_norm"] > 0 for row in rows)


def test_one_operator_with_another_last_bit_ends_the_run_before_the_update_and_names_the_token(tmp_path):
    run = failed(ForkedRun(tmp_path, faulty(tmp_path, ONE_ULP, tiny_model("llama", head_dim=64), **exact())))
    [line] = run.stderr.splitlines()
    assert line.startswith("error: mismatch/plain=") and "an operator differs" in line
    assert "; first: token " in line and "this optimizer step was not taken" in line
    assert run.rows("train") == []
