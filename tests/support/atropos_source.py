"""An AtroposSource for tests, and calls of the API server that it reads from."""

from __future__ import annotations

import json
import threading
from typing import Any
from urllib.request import Request, urlopen

from colocated_grpo.atropos.reader import GroupReader, Origins, Registration
from colocated_grpo.atropos.source import AtroposClient, AtroposSource

BATCH_SIZE = 4
TRAINER = Registration(
    batch_size=BATCH_SIZE,
    max_token_len=64,
    checkpoint_dir="runs/a",
    save_checkpoint_interval=3,
    num_steps=20,
    wandb_group="",
    wandb_project="p",
)


class SourceHarness:
    """A source with its client, its log lines and the batches that it passed to `keep`."""

    def __init__(self, url: str, **settings: Any) -> None:
        self.notes: list[str] = []
        self.kept: list[Any] = []
        self.origins = Origins(10)
        reader = GroupReader(
            source="atropos",
            vocab_size=100,
            max_tokens=64,
            recompute_logprobs=False,
            origins=self.origins,
            decode=lambda tokens: "",
        )
        self.client = AtroposClient(url, TRAINER, may_reset=settings.get("reset", False), timeout=60.0)
        self.source = AtroposSource(
            self.client,
            reader,
            connect_timeout=settings.get("connect_timeout", 60.0),
            unusable_timeout=settings.get("unusable_timeout", 60.0),
            note=self.notes.append,
            keep=self.kept.append,
        )
        self.stop = threading.Event()

    def start(self, step: int = 0) -> None:
        self.source.connect()
        self.source.fetch(step)

    def train_batch(self) -> list[int] | None:
        """Take the next batch, mark it as trained and return the first token of each group; None after a stop."""
        groups = self.source.wait_for_groups(0, 3, self.stop)
        if groups is None:
            return None
        self.source.settle()
        return [group.rollouts[0].token_ids[0] for group in groups]


def call_api(url: str, path: str, body: Any = None) -> Any:
    """GET, or POST of a body. Returns the parsed response."""
    data = None if body is None else json.dumps(body).encode()
    with urlopen(Request(url + path, data, {"Content-Type": "application/json"}), timeout=60) as response:
        raw = response.read()
    return json.loads(raw) if path != "/reset_data" else raw


def post_group(url: str, mark: int, size: int = BATCH_SIZE, **changes: Any) -> None:
    """Post a group whose sequences begin with the token `mark`."""
    group = {
        "tokens": [[mark, 7, 9]] * size,
        "masks": [[-100, 7, 9]] * size,
        "scores": [float(row) for row in range(size)],
        "inference_logprobs": [[1.0, -0.5, -0.25]] * size,
    }
    call_api(url, "/scored_data", group | changes)
