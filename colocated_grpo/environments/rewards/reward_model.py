"""The reward of a reward model: a sequence classification model's score of a prompt with its completion."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import isnan
from typing import Any
from weakref import WeakValueDictionary

import torch
from pydantic import PrivateAttr
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from colocated_grpo.environments.base import EnvironmentSetupError
from colocated_grpo.environments.rewards.scoring import NOT_RUN, NoReward
from colocated_grpo.environments.user_code.loading import errors_named
from colocated_grpo.settings.base import Section
from colocated_grpo.settings.config_json import MAX_SIZE, longest_sequence
from colocated_grpo.types import JsonObject

MAX_TOKENS = 4096
"""Tokens of a forward pass with several texts, padding included. Its activations fit into the engine's reserve:
by arithmetic, they take 0.6 GiB in a model of 8 billion parameters."""


class RewardModel(Section):
    """Reward: the score of a classifier with one label. One call scores all completions of a prompt."""

    name: str
    revision: str | None = None
    """Branch, tag or commit on the Hub. Default: the main branch."""
    trust_remote_code: bool = False
    """Run Python code that comes with the checkpoint. Only for repositories you trust."""

    _tokenizer: Any = PrivateAttr()
    _classifier: "Classifier | None" = PrivateAttr(None)

    def model_post_init(self, _context: object) -> None:
        tokenizer: Any = AutoTokenizer.from_pretrained(self.name, **self.model_dump(exclude={"name"}))
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token  # as in TRL
        # If its files are missing, transformers (5.19) returns a tokenizer without a vocabulary.
        if tokenizer.pad_token_id is None or not tokenizer.encode("a", add_special_tokens=False):
            raise ValueError("no usable tokenizer; copy the tokenizer's files to the model's folder")
        self._tokenizer = tokenizer

    def load(self, device: torch.device) -> None:
        """Load the weights, unless another dataset has loaded them. Raises EnvironmentSetupError."""
        key = self.model_dump_json()
        self._classifier = _loaded.get(key) or _loaded.setdefault(key, Classifier(self, self._tokenizer, device))

    def __call__(
        self, prompts: Sequence[str | list[JsonObject]], completions: Sequence[str | list[JsonObject]]
    ) -> Sequence[float | NoReward]:
        texts = [self._text(*pair) for pair in zip(prompts, completions, strict=True)]
        return [NoReward(NOT_RUN)] * len(texts) if self._classifier is None else self._classifier.scores(texts)

    def _text(self, prompt: str | list[JsonObject], completion: str | list[JsonObject]) -> str:
        if isinstance(prompt, str):
            return f"{prompt}{completion}"
        return self._tokenizer.apply_chat_template([*prompt, *completion], tokenize=False)


class Classifier:
    """The weights of a reward model on this rank: bfloat16 on a GPU, float32 on the CPU."""

    def __init__(self, settings: RewardModel, tokenizer: Any, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        disable_progress_bar()
        with errors_named(f"rewards={settings.name!r}: cannot be loaded"):
            self._model, report = AutoModelForSequenceClassification.from_pretrained(
                settings.name,
                **settings.model_dump(exclude={"name"}),
                num_labels=1,
                dtype=torch.bfloat16 if on_gpu else torch.float32,
                device_map={"": device},  # without it, every rank would first hold the weights in host memory
                output_loading_info=True,
            )
        if missing := sorted(report["missing_keys"]):
            raise EnvironmentSetupError(f"rewards={settings.name!r}: the checkpoint lacks {missing[0]}")
        config = self._model.config.get_text_config()
        config.pad_token_id, config.use_cache = tokenizer.pad_token_id, False
        self._tokenizer = tokenizer
        # RoBERTa numbers positions from 2, so it reads less than its configuration says.
        self._longest = min(longest_sequence(config.to_dict()) or MAX_SIZE, tokenizer.model_max_length)
        # One thread: tokenizers are not safe in several, and each thread would have a cuBLAS workspace.
        prepare = (lambda: torch.cuda.set_device(device)) if on_gpu else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="reward model", initializer=prepare)

    def scores(self, texts: Sequence[str]) -> list[float | NoReward]:
        """Return the scores. Batches depend on these texts alone, so that a repeated run repeats its rewards."""
        return self._thread.submit(self._scores, texts).result()

    def _scores(self, texts: Sequence[str]) -> list[float | NoReward]:
        token_ids = self._tokenizer([*texts], add_special_tokens=False)["input_ids"]
        scores: list[float | NoReward] = [
            NoReward(f"prompt and completion have {len(ids)} tokens; the model reads 1 to {self._longest}")
            for ids in token_ids
        ]
        for rows in batches({row: len(ids) for row, ids in enumerate(token_ids) if 1 <= len(ids) <= self._longest}):
            for row, score in zip(rows, self._forward([token_ids[row] for row in rows]), strict=True):
                scores[row] = NoReward("the score is NaN") if isnan(score) else score
        return scores

    @torch.inference_mode()
    def _forward(self, token_ids: Sequence[Sequence[int]]) -> list[float]:
        rows, device = [torch.tensor(ids) for ids in token_ids], self._model.device
        padded = pad_sequence(rows, batch_first=True, padding_value=self._tokenizer.pad_token_id)
        mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
        return self._model(padded.to(device), attention_mask=mask.to(device)).logits[:, 0].tolist()


_loaded: WeakValueDictionary[str, Classifier] = WeakValueDictionary()
"""Classifiers by their settings. Datasets and evaluation sets of a run may name the same one."""


def batches(lengths: dict[int, int]) -> Iterator[list[int]]:
    """Yield the keys, shortest first, in batches of at most MAX_TOKENS with padding, or of one key."""
    batch: list[int] = []
    for row in sorted(lengths, key=lengths.__getitem__):
        if batch and (len(batch) + 1) * lengths[row] > MAX_TOKENS:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch
