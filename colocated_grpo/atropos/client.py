"""The trainer's side of Atropos' API server: registering so that it sticks, and asking for batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from colocated_grpo.environments.base import EnvironmentSetupError
from colocated_grpo.web.client import JsonClient, Refused, Unavailable

UNSET = -1
STATUS = ("current_step", "queue_size")
BATCH_SECONDS = 300.0
"""For GET /batch: the server takes a batch off its queue before it writes and packs it, which takes its time for
millions of tokens, and a batch that nobody waits for any longer is lost."""
HANDSHAKES = 3
"""Resets in a row before giving up: each can be spoiled by an environment that posts at that moment."""


class NotRegistered(Exception):
    """The server knows no trainer: it was restarted or reset."""


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """What the API and through it every environment is told: the keys of POST /register but starting_step."""

    batch_size: int
    max_token_len: int
    checkpoint_dir: str
    save_checkpoint_interval: int
    num_steps: int
    wandb_group: str
    wandb_project: str

    @property
    def expected(self) -> dict[str, int]:
        return {"batch_size": self.batch_size, "max_token_len": self.max_token_len}


class AtroposClient:
    """Every method raises Unavailable while there is no usable answer."""

    def __init__(self, url: str, trainer: Trainer, *, may_reset: bool, timeout: float = 30.0) -> None:
        self.url = url
        self._trainer = trainer
        self._may_reset = may_reset
        self._http = JsonClient(url, timeout=timeout)
        self._batches = JsonClient(url, timeout=BATCH_SECONDS)

    @property
    def batch_size(self) -> int:
        return self._trainer.batch_size

    def check(self) -> None:
        """Raises EnvironmentSetupError where the server belongs to a trainer with other wishes."""
        self._refuse_conflict(self._info())

    def register(self, step: int, note: Callable[[str], None]) -> dict[str, Any] | None:
        """Become the server's trainer and let environments in; the batch that this asks for, if one was waiting.

        A server keeps the first registration it gets, and silently none at all once an environment has posted before
        it, so what it says afterwards is compared. Nothing that could still be trained is reset without leave.
        """
        for _ in range(HANDSHAKES):
            self._http.post("/register", {**asdict(self._trainer), "starting_step": step})
            held = self._info()
            if held == self._trainer.expected:
                return self.batch()
            self._refuse_conflict(held)
            note(f"atropos: {self.url} holds a registration that it cannot serve; resetting it with GET /reset_data")
            self._http.get("/reset_data")
        raise Unavailable("it does not keep a registration")

    def _info(self) -> dict[str, int]:
        info = self._http.get("/info")
        if not isinstance(info, dict):
            raise Unavailable("GET /info does not answer as Atropos' API does")
        return {name: info.get(name, UNSET) for name in self._trainer.expected}

    def _refuse_conflict(self, held: dict[str, int]) -> None:
        if held == self._trainer.expected or held["batch_size"] == UNSET or self._may_reset:
            return
        theirs, ours = (
            " and ".join(f"{name}={value}" for name, value in side.items()) for side in (held, self._trainer.expected)
        )
        raise EnvironmentSetupError(
            f"environments: {self.url} is registered with {theirs} and this run needs {ours}; restart the API server, "
            "or set reset: true in the atropos entry to empty it (its queue and its environments are lost)"
        )

    def batch(self) -> list[Any] | None:
        """The next batch as the server sends it; None while it has none."""
        try:
            answer = self._batches.get("/batch")
        except Refused as error:
            raise Unavailable(str(error)) from None
        if not isinstance(answer, dict) or "batch" not in answer:
            raise Unavailable("GET /batch does not answer as Atropos' API does")
        if answer.get("status") == "error":
            raise NotRegistered
        batch = answer["batch"]
        if batch is not None and not isinstance(batch, list):
            raise Unavailable("GET /batch gave no list")
        return batch or None

    def status(self) -> dict[str, float]:
        """current_step counts batches formed, not trained; queue_size counts groups."""
        answer = self._http.get("/status")
        numbers = [answer.get(name) for name in STATUS] if isinstance(answer, dict) else [None]
        if not all(type(number) in (int, float) and 0 <= number < 2**53 for number in numbers):
            raise Unavailable("GET /status does not answer as Atropos' API does")
        return dict(zip(STATUS, map(float, numbers), strict=True))
