"""A model of random weights that calls tools: many of its tokens are whole calls."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from colocated_grpo.tools.make_model import build_char_tokenizer
from tests.support.training_runs import tiny_model

TOKENIZER_FILE = "tokenizer.json"


def calling_model(folder: Path, calls: Sequence[str]) -> Path:
    """Write a tiny model to `folder`, with a token for each of these texts. Encoding them gives other tokens."""
    alphabet = len(build_char_tokenizer())
    shutil.copytree(tiny_model(vocab=alphabet + len(calls)), folder)
    file = folder / TOKENIZER_FILE
    tokenizer = json.loads(file.read_text())
    named = dict(zip((f"<|unused {alphabet + n}|>" for n in range(len(calls))), calls, strict=True))
    vocabulary = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {named.get(token, token): index for token, index in vocabulary.items()}
    file.write_text(json.dumps(tokenizer))
    return folder
