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
CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789 "


class RandomWork:
    """Prompts of random letters; a reward of 0 or 1 that depends on nothing but the completion's text."""

    def prompts(self, seed: int, split: Split) -> Iterator[dict[str, Any]]:
        rng = random.Random(f"{seed}/{split}")
        while True:
            yield {"prompt": "".join(rng.choices(CHARACTERS, k=rng.randint(SHORTEST_PROMPT, LONGEST_PROMPT)))}

    def score(self, item: dict[str, Any], completion: str) -> float:
        return float(blake2b(completion.encode(), digest_size=1).digest()[0] & 1)


def add_stop_tokens(model_folder: Path, seed: int = 0) -> None:
    """Declare random tokens of the model in `model_folder` as stop tokens, in its generation settings."""
    vocabulary = json.loads((model_folder / "config.json").read_text())["vocab_size"]
    # The lower half holds the characters of the prompts, which must not stop anything.
    stops = random.Random(seed).sample(range(vocabulary // 2, vocabulary), max(1, round(STOP_SHARE * vocabulary)))
    settings = model_folder / "generation_config.json"
    content = json.loads(settings.read_text()) if settings.exists() else {}
    settings.write_text(json.dumps({**content, "eos_token_id": sorted(stops)}))
