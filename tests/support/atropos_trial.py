"""A source of batches and an API server that tests post groups to."""

from __future__ import annotations

import json
import threading
from typing import Any
from urllib.request import Request, urlopen

from colocated_grpo.atropos.client import AtroposClient, Trainer
from colocated_grpo.atropos.rows import Reader
from colocated_grpo.atropos.source import AtroposSource
from colocated_grpo.serving.origins import Origins

BATCH = 4
TRAINER = Trainer(
    batch_size=BATCH,
    max_token_len=64,
    checkpoint_dir="runs/a",
    save_checkpoint_interval=3,
    num_steps=20,
    wandb_group="",
    wandb_project="p",
)


class Trial:
    """A source and what it had to say."""

    def __init__(self, url: str, **settings: Any) -> None:
        self.notes: list[str] = []
        self.kept: list[Any] = []
        self.origins = Origins(10)
        reader = Reader(
            source="atropos",
            vocab_size=100,
            max_tokens=64,
            recompute_logprobs=False,
            origins=self.origins,
            decode=lambda tokens: "",
        )
        self.client = AtroposClient(url, TRAINER, may_reset=settings.get("reset", False), timeout=5.0)
        self.source = AtroposSource(
            self.client,
            reader,
            connect_timeout=settings.get("connect_timeout", 5.0),
            note=self.notes.append,
            keep=self.kept.append,
        )
        self.stop = threading.Event()

    def start(self, step: int = 0) -> None:
        self.source.connect()
        self.source.begin(step)

    def marks(self) -> list[int] | None:
        """First tokens of the next batch's groups, which are then trained."""
        groups = self.source.wait_for_groups(0, 3, self.stop)
        if groups is not None:
            self.source.settle()
        return groups and [group.rollouts[0].token_ids[0] for group in groups]


def ask(url: str, path: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    with urlopen(Request(url + path, data, {"Content-Type": "application/json"}), timeout=10) as answer:
        raw = answer.read()
    return json.loads(raw) if path != "/reset_data" else raw


def send(url: str, mark: int, size: int = BATCH, **changes: Any) -> None:
    group = {
        "tokens": [[mark, 7, 9]] * size,
        "masks": [[-100, 7, 9]] * size,
        "scores": [float(row) for row in range(size)],
        "inference_logprobs": [[1.0, -0.5, -0.25]] * size,
    }
    ask(url, "/scored_data", group | changes)
