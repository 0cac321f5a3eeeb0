"""Partial rollouts in whole runs on two ranks: what is trained, an exact resume, and conversations that wait."""

from __future__ import annotations

import json
from collections import Counter

from colocated_grpo.tracking import files
from tests.support.served_runs import PARTIAL, work, write_task
from tests.support.training_runs import assert_resumes_exactly, settings, tiny_model, train

STEPS = 8
WAITING = '''
import asyncio
from pathlib import Path

from openai import AsyncOpenAI

async def wait_for_the_first_step():
    while not any('"train"' in file.read_text() for file in Path(__file__).parent.glob("*/metrics.jsonl")):
        await asyncio.sleep(0.05)

class Waiting:
    """Two turns. In training, the tool of every second prompt answers when the run has finished its first step."""

    def prompts(self, seed, split):
        for number in range(10**6):
            yield {"prompt": f"say {number}", "waits": split == "train" and number % 2 == 0}

    async def run(self, item, model):
        await model.generate(6)
        if item["waits"]:
            await wait_for_the_first_step()
        model.observe("go on")
        return {"reward": float(len((await model.generate(6)).text)), "turns": float(model.turns)}

async def play(item, base_url, api_key):
    """An agent that sends its whole history."""
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        messages, said = [{"role": "user", "content": item["prompt"]}], ""
        for turn in range(2):
            reply = await client.chat.completions.create(model="policy", messages=messages, max_tokens=6)
            said += reply.choices[0].message.content
            messages += [reply.choices[0].message, {"role": "user", "content": f"turn {turn}"}]
            await wait_for_the_first_step()
    return {"reward": float(len(said)), "turns": 2.0}
'''


def test_a_run_with_partial_rollouts_resumes_bit_for_bit(tmp_path):
    config = work(write_task(tmp_path), rollout=PARTIAL, training_steps=STEPS, checkpoint={"every": 3, "keep_last": 10})
    whole = train(tmp_path / "whole", config, ranks=2)
    rows = whole.rows(files.TRAIN)
    assert any(0 < row["staleness/tokens"] < 1 for row in rows), "completions were continued with newer weights"
    assert max(row["staleness/max"] for row in rows) <= PARTIAL["partial"]["max_age"]
    assert rows[-1]["partial/completions"] == 0
    assert all(row["grad_norm"] > 0 for row in rows)
    assert max(row["mismatch/plain"] for row in rows if not row["staleness/tokens"]) < 1e-4
    kept = json.loads((whole.folder / "checkpoints/step_000003/trainer.json").read_text())["state"]["source"]["pending"]
    surplus = (PARTIAL["partial"]["oversample"] - 1) * config["rollout"]["prompts_per_step"]
    assert [len(groups) for groups in kept] == [surplus / 2] * 2
    assert_resumes_exactly(whole, tmp_path / "resumed", config, first_step=3, ranks=2)


def test_a_step_does_not_wait_for_the_tools_of_conversations(tmp_path):
    (tmp_path / "waiting.py").write_text(WAITING)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"count {i}"}) + "\n" for i in range(64)))
    play = {"type": "agent", "name": str(tmp_path / "rows.jsonl"), "program": f"{tmp_path / 'waiting.py'}:play"}
    config = settings(
        tiny_model(),
        environments=[
            {"type": "episode", "name": f"{tmp_path / 'waiting.py'}:Waiting", "weight": 3},
            {**play, "held_out": 0},
            {"type": "task", "name": "sorting", "weight": 2, "args": {"max_digits": 5}},
        ],
        training_steps=STEPS,
        rollout={
            "prompts_per_step": 6,
            "group_size": 2,
            "max_prompt_tokens": 96,
            "max_completion_tokens": 64,
            "partial": {"oversample": 2, "max_age": 2},
        },
        evaluation={"every": 2, "prompts": 4},
        tracking={"rollouts_per_step": 100},
    )
    run = train(tmp_path, config, ranks=2)

    rows = run.rows(files.TRAIN)
    assert [row["step"] for row in rows] == list(range(STEPS))
    assert rows[0]["staleness/max"] == 0
    assert rows[0]["partial/completions"] > 0
    assert any(0 < row["staleness/tokens"] < 1 for row in rows)
    assert max(row["staleness/max"] for row in rows) <= 2
    assert rows[-1]["partial/completions"] == 0
    assert all(row["reward_errors"] == 0 for row in rows)
    assert max(row["mismatch/plain"] for row in rows if not row["staleness/tokens"]) < 1e-4
    stored = [row for row in files.read_rollouts(run.folder) if row["kind"] == "train" and "turns" in row["parts"]]
    conversations = Counter(row["prompt"] for row in stored)
    assert len(conversations) == STEPS * 4
    assert set(conversations.values()) == {2}, "each conversation was trained once"
