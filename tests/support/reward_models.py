"""A small reward model with random weights, and its scores as transformers computes them alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertConfig, Qwen3Config

from colocated_grpo.tools.make_model import build_char_tokenizer, save_model
from colocated_grpo.types import JsonObject


def make_reward_model(folder: Path, *, labels: int = 1, template: bool = True, encoder: bool = False) -> Path:
    """Save a model that reads up to 256 tokens: a decoder, or an encoder, whose tokens also see those behind them."""
    tokenizer = build_char_tokenizer()
    begin = tokenizer.bos_token
    special = [(begin, tokenizer.bos_token_id)]
    # As in Gemma and Llama: a text begins with a token that a chat template has already written.
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"{begin} $A", special_tokens=special)
    if not template:
        tokenizer.chat_template = None
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    shape |= {"vocab_size": len(tokenizer), "max_position_embeddings": 256}
    kind = BertConfig if encoder else Qwen3Config
    config = kind(**shape, num_key_value_heads=2, head_dim=8, initializer_range=0.2, num_labels=labels)
    torch.manual_seed(0)
    save_model(AutoModelForSequenceClassification.from_config(config), tokenizer, folder)
    return folder


def scores_alone(folder: Path, pairs: Sequence[tuple[str | list[JsonObject], str]]) -> list[float]:
    """Return the scores of prompts with completions, each in a forward pass of its own."""
    tokenizer, model = (kind.from_pretrained(folder) for kind in (AutoTokenizer, AutoModelForSequenceClassification))
    model.config.pad_token_id = tokenizer.pad_token_id
    scores = []
    for prompt, text in pairs:
        if isinstance(prompt, str):
            whole = prompt + text
        else:
            whole = tokenizer.apply_chat_template([*prompt, {"role": "assistant", "content": text}], tokenize=False)
        ids = tokenizer(whole, add_special_tokens=False, return_tensors="pt").input_ids
        with torch.inference_mode():
            scores.append(model(ids).logits.item())
    return scores
