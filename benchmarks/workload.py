"""The workload of the step benchmarks: random prompts, random stops, and a reward that cannot be learned.

With random weights every token is about equally likely. Declaring a fraction p of the vocabulary as stop tokens then
gives completions a geometric length with mean 1 / p, cut at the longest one allowed: the long tail of real sampling
without a trained model.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path

from colocated_grpo.environments.base import Split
from colocated_grpo.settings.config_json import config_json_in
from colocated_grpo.types import JsonObject

STOP_PROBABILITY = 300 / 151936
"""Stop probability of each sampled token: completions have a mean length of 506 before truncation."""
SHORTEST_PROMPT, LONGEST_PROMPT = 32, 128
CHAT_TEMPLATE_TOKENS = 32
"""Room for the chat template around a prompt."""
MAX_PROMPT_TOKENS = LONGEST_PROMPT + CHAT_TEMPLATE_TOKENS
CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789 "
TASK = "benchmarks.workload:RandomWork"


class RandomWork:
    """Prompts of random letters; a reward of 0 or 1 from a hash of the completion's text."""

    def prompts(self, seed: int, split: Split) -> Iterator[JsonObject]:
        rng = random.Random(f"{seed}/{split}")
        while True:
            yield {"prompt": "".join(rng.choices(CHARACTERS, k=rng.randint(SHORTEST_PROMPT, LONGEST_PROMPT)))}

    def score(self, item: JsonObject, completion: str) -> float:
        return float(blake2b(completion.encode(), digest_size=1).digest()[0] & 1)


class UnevenWork(RandomWork):
    """Prompts for a pretrained model: one of four asks for a story, the others for a few numbers."""

    def prompts(self, seed: int, split: Split) -> Iterator[JsonObject]:
        rng = random.Random(f"{seed}/{split}")
        while True:
            count = f"Count from 1 to {rng.randint(5, 50)}. Write only the numbers."
            yield {"prompt": rng.choice([f"Write a story about {rng.randint(2, 99)} birds.", count, count, count])}


def stop_tokens(vocabulary: int, probability: float = STOP_PROBABILITY, seed: int = 0) -> list[int]:
    """Return random stop tokens: the fraction `probability` of the vocabulary, at least one."""
    # Only from the upper half: the lower half holds the characters of the prompts.
    return sorted(
        random.Random(seed).sample(range(vocabulary // 2, vocabulary), max(1, round(probability * vocabulary)))
    )


def vocabulary_of(model_folder: Path) -> int:
    return config_json_in(model_folder)["vocab_size"]


def add_stop_tokens(model_folder: Path, probability: float = STOP_PROBABILITY) -> None:
    """Write `stop_tokens` into the model's generation_config.json."""
    settings = model_folder / "generation_config.json"
    content = json.loads(settings.read_text()) if settings.exists() else {}
    content["eos_token_id"] = stop_tokens(vocabulary_of(model_folder), probability)
    settings.write_text(json.dumps(content))
