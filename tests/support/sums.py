"""Sums of two numbers, which small pretrained models begin to answer, and a reward for them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

REWARD = """
import re

def close(completions, answer, **columns):
    texts = [text if isinstance(text, str) else text[0]["content"] for text in completions]
    numbers = [re.search(r"[0-9]{1,6}", text) for text in texts]
    return [1 / (1 + abs(int(n[0]) - int(right))) if n else 0.0 for n, right in zip(numbers, answer)]
"""
"""A module of a user. The reward is 1 for the right number, less for numbers further away, 0 for no number."""
EXAMPLES = {"12+30=": "42", "2+5=": "7"}


def rows(count: int, chat: bool) -> list[dict[str, Any]]:
    """Return sums after two examples: as chat messages, or as text that a base model continues."""
    rng = random.Random(0)
    pairs = [(rng.randint(1, 99), rng.randint(1, 99)) for _ in range(count)]
    return [{"prompt": (_chat if chat else _text)(f"{a}+{b}="), "answer": str(a + b)} for a, b in pairs]


def _text(question: str) -> str:
    return "".join(f"{asked}{answer}\n" for asked, answer in EXAMPLES.items()) + question


def _chat(question: str) -> list[dict[str, str]]:
    asked = [{"role": "user", "content": text} for text in (*EXAMPLES, question)]
    answers = [{"role": "assistant", "content": text} for text in EXAMPLES.values()]
    return [asked[0], answers[0], asked[1], answers[1], asked[2]]


def entry(folder: Path, count: int, chat: bool) -> dict[str, Any]:
    """Write rows and reward into the folder and return the entry of `environments` that uses them."""
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(count, chat)))
    (folder / "my_rewards.py").write_text(REWARD)
    return {"type": "dataset", "name": str(folder / "sums.jsonl"), "rewards": [f"{folder / 'my_rewards.py'}:close"]}
