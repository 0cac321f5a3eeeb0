"""The trainer's side of Atropos' API server: registration, which it verifies, and batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from colocated_grpo.environments.base import EnvironmentSetupError
from colocated_grpo.settings.schema import Config
from colocated_grpo.web.client import JsonClient, RequestRejected, Unavailable

UNSET = -1
"""Reported by GET /info while no trainer is registered."""
STATUS_KEYS = ("current_step", "queue_size")
BATCH_SECONDS = 300.0
"""Timeout of GET /batch. The server takes a batch off its queue before compressing it, which is slow for millions of
tokens. A batch whose client times out meanwhile is lost."""
REGISTRATION_ATTEMPTS = 3
"""Consecutive resets before giving up. An environment that posts between reset and registration spoils the attempt."""


class NotRegistered(Exception):
    """The server has no registered trainer: it was restarted or reset."""


@dataclass(frozen=True, kw_only=True)
class TrainerSettings:
    """The body of POST /register without starting_step. The server passes these values on to every environment."""

    batch_size: int
    """In sequences."""
    max_token_len: int
    """Environments drop groups with a sequence of this length or longer."""
    checkpoint_dir: str
    save_checkpoint_interval: int
    num_steps: int
    wandb_group: str
    wandb_project: str

    @property
    def expected_info(self) -> dict[str, int]:
        """The response of GET /info once these settings are registered."""
        return {"batch_size": self.batch_size, "max_token_len": self.max_token_len}


def trainer_of(config: Config, folder: Path) -> TrainerSettings:
    """Return the registration of a run at the API server."""
    return TrainerSettings(
        batch_size=round(config.atropos_share) * config.rollout.group_size,
        # Environments drop sequences of this length or longer.
        max_token_len=config.max_sequence_tokens + 1,
        checkpoint_dir=str(folder),
        save_checkpoint_interval=config.checkpoint.every or config.training_steps,
        num_steps=config.training_steps,
        wandb_group=config.tracking.wandb_group or "",
        wandb_project=config.tracking.wandb_project,
    )


class AtroposClient:
    """HTTP calls of one trainer. Every method raises Unavailable without a usable response, RequestRejected on 4xx."""

    def __init__(
        self,
        url: str,
        trainer: TrainerSettings,
        *,
        may_reset: bool,
        timeout: float = 30.0,
        api_key: str | None = None,
    ) -> None:
        """may_reset: allow discarding another trainer's registration, with its queue and environments."""
        self.url = url
        self._trainer = trainer
        self._may_reset = may_reset
        self._http = JsonClient(url, timeout=timeout, api_key=api_key)
        self._http_for_batches = JsonClient(url, timeout=BATCH_SECONDS, api_key=api_key)

    @property
    def batch_size(self) -> int:
        return self._trainer.batch_size

    def check(self) -> None:
        """Raise EnvironmentSetupError when another trainer is registered with other settings."""
        self._reject_conflict(self._info())

    def register(self, step: int, note: Callable[[str], None]) -> list[object] | None:
        """Register as the server's trainer and return the batch that was waiting, if any.

        Environments cannot register before the trainer's first request for a batch. The server keeps the first
        registration that it gets, and atroposlib's silently keeps none if an environment has posted before. So the
        result is verified with GET /info. A conflicting registration is reset only with `may_reset`.
        """
        for _ in range(REGISTRATION_ATTEMPTS):
            self._http.post("/register", {**asdict(self._trainer), "starting_step": step})
            registered = self._info()
            if registered == self._trainer.expected_info:
                return self.batch()
            self._reject_conflict(registered)
            note(f"atropos: {self.url} did not keep this registration; resetting the server with GET /reset_data")
            self._http.get("/reset_data")
        raise Unavailable("it does not keep a registration")

    def _info(self) -> dict[str, object]:
        info = self._http.get("/info")
        if not isinstance(info, dict):
            raise Unavailable("the response of GET /info is not that of Atropos' API")
        return {name: info.get(name, UNSET) for name in self._trainer.expected_info}

    def _reject_conflict(self, registered: dict[str, object]) -> None:
        expected = self._trainer.expected_info
        if registered == expected or registered["batch_size"] == UNSET or self._may_reset:
            return
        theirs, ours = (
            " and ".join(f"{name}={value}" for name, value in settings.items()) for settings in (registered, expected)
        )
        raise EnvironmentSetupError(
            f"environments: {self.url} is registered with {theirs} and this run needs {ours}; restart the API server, "
            "or set reset: true in the atropos entry to empty it (its queue and its environments are lost)"
        )

    def batch(self) -> list[object] | None:
        """Return the groups of the next batch, unchecked; None while the server has none. Raises NotRegistered."""
        try:
            response = self._http_for_batches.get("/batch")
        except RequestRejected as error:
            raise Unavailable(str(error)) from None
        if not isinstance(response, dict) or "batch" not in response:
            raise Unavailable("the response of GET /batch is not that of Atropos' API")
        if response.get("status") == "error":
            raise NotRegistered
        batch = response["batch"]
        if batch is not None and not isinstance(batch, list):
            raise Unavailable("the batch of GET /batch is not a list")
        return batch or None

    def latest_size(self) -> int:
        """Return the number of sequences of the group that was posted last; 0 if there is none."""
        response = self._http.get("/latest_example")
        tokens = response.get("tokens") if isinstance(response, dict) else None
        return len(tokens) if isinstance(tokens, list) else 0

    def status(self) -> dict[str, float]:
        """Return current_step, which counts batches formed (not trained), and queue_size, the waiting groups."""
        response = self._http.get("/status")
        status: dict[str, float] = {}
        for name in STATUS_KEYS:
            number = response.get(name) if isinstance(response, dict) else None
            # bool is an int. The bound excludes infinity and integers beyond the range of float.
            if not isinstance(number, int | float) or isinstance(number, bool) or not 0 <= number < 2**53:
                raise Unavailable("the response of GET /status is not that of Atropos' API")
            status[name] = float(number)
        return status
