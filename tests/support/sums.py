"""Sums of two numbers, which small pretrained models begin to answer, and a reward for them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

REWARD = """
import re

def right(completions, answer, **columns):
    texts = [text if isinstance(text, str) else text[0]["content"] for text in completions]
    return [
        float(re.findall(r"[0-9]+", text)[:1] == [number]) + 0.1 * len(set(text)) / (1 + len(text))
        for text, number in zip(texts, answer)
    ]
"""
"""A module of a user. The variety of characters makes the rewards of siblings differ before a model can add."""


def rows(count: int, chat: bool) -> list[dict[str, Any]]:
    """Return questions as chat messages, or as text that a base model continues with a number."""
    rng = random.Random(0)
    pairs = [(rng.randint(1, 99), rng.randint(1, 99)) for _ in range(count)]
    texts = [f"What is {a}+{b}? Give only the number." if chat else f"2+3=5\n40+20=60\n{a}+{b}=" for a, b in pairs]
    return [
        {"prompt": [{"role": "user", "content": text}] if chat else text, "answer": str(a + b)}
        for text, (a, b) in zip(texts, pairs, strict=True)
    ]


def entry(folder: Path, count: int, chat: bool) -> dict[str, Any]:
    """Write rows and reward into the folder and return the entry of `environments` that uses them."""
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(count, chat)))
    (folder / "my_rewards.py").write_text(REWARD)
    return {"type": "dataset", "name": str(folder / "sums.jsonl"), "rewards": [f"{folder / 'my_rewards.py'}:right"]}
