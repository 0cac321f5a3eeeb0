"""The work that every step benchmark does: random prompts, random stops, a reward with nothing to learn.

With random weights every token is about equally likely. Declaring a share of the vocabulary as stop tokens then gives
completions a geometric length with mean 1 / share, cut at the longest one allowed: the long tail of real sampling
without a trained model.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

from colocated_grpo.environments.base import Split

STOP_SHARE = 300 / 151936
SHORTEST_PROMPT, LONGEST_PROMPT = 32, 128
CHAT_TEMPLATE_TOKENS = 32
"""Room for the chat template around a prompt."""
MAX_PROMPT_TOKENS = LONGEST_PROMPT + CHAT_TEMPLATE_TOKENS
CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789 "
TASK = "colocated_grpo.benchmarks.workload:RandomWork"


class RandomWork:
    """Prompts of random letters; a reward of 0 or 1 that depends on nothing but the completion's text."""

    def prompts(self, seed: int, split: Split) -> Iterator[dict[str, Any]]:
        rng = random.Random(f"{seed}/{split}")
        while True:
            yield {"prompt": "".join(rng.choices(CHARACTERS, k=rng.randint(SHORTEST_PROMPT, LONGEST_PROMPT)))}

    def score(self, item: dict[str, Any], completion: str) -> float:
        return float(blake2b(completion.encode(), digest_size=1).digest()[0] & 1)


def stop_tokens(vocabulary: int, share: float = STOP_SHARE, seed: int = 0) -> list[int]:
    """Random tokens that end a completion: `share` of the vocabulary, at least one."""
    # The lower half holds the characters of the prompts, which must not stop anything.
    return sorted(random.Random(seed).sample(range(vocabulary // 2, vocabulary), max(1, round(share * vocabulary))))


def vocabulary_of(model_folder: Path) -> int:
    return json.loads((model_folder / "config.json").read_text())["vocab_size"]


def add_stop_tokens(model_folder: Path) -> None:
    """Declare random tokens of the model in `model_folder` as stop tokens, in its generation settings."""
    settings = model_folder / "generation_config.json"
    content = json.loads(settings.read_text()) if settings.exists() else {}
    content["eos_token_id"] = stop_tokens(vocabulary_of(model_folder))
    settings.write_text(json.dumps(content))
