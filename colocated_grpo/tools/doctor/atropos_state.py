"""The state of Atropos' API server: registration, queue, and the latest group of an environment."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field, replace

from colocated_grpo.atropos.exchange import Registration
from colocated_grpo.atropos.origins import Origins
from colocated_grpo.atropos.reader import GroupReader
from colocated_grpo.atropos.source import AtroposClient
from colocated_grpo.environments.base import EnvironmentSetupError
from colocated_grpo.settings.atropos import AtroposSourceConfig
from colocated_grpo.web.client import RequestRejected, Unavailable

SECONDS = 5.0
UNLIMITED = 1 << 31
DUMMY = "dummy_server"
"""Reason for which placeholder sequences of OpenAI endpoints are dropped."""


@dataclass(frozen=True, kw_only=True)
class AtroposState:
    error: str = ""
    """Why the server cannot be used; empty if it responds."""
    conflict: str = ""
    """The registration of another run."""
    waiting: int = 0
    """Groups in the queue."""
    group_size: int = 0
    """Sequences of the latest group; 0 if no environment has posted a group."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Sequences of the latest group that a run would drop, by reason."""


def read_state(
    atropos: AtroposSourceConfig, trainer: Registration, max_tokens: int, vocab_size: int | None
) -> AtroposState:
    """trainer: the run's registration. max_tokens: longest sequence. vocab_size: None if unknown."""
    variable = atropos.api_key_variable
    key = os.environ.get(variable) if variable else None
    client = AtroposClient(atropos.url, trainer, may_reset=atropos.reset, timeout=SECONDS, api_key=key)
    try:
        status = client.status()
        latest = client.latest_group()
    except (Unavailable, RequestRejected) as error:
        return AtroposState(error=str(error))
    waiting, conflict = int(status["queue_size"]), ""
    try:
        client.is_registered()
    except EnvironmentSetupError as error:
        conflict = str(error)
    tokens = latest.get("tokens")
    if not isinstance(tokens, list) or not tokens:
        return AtroposState(conflict=conflict, waiting=waiting)
    dropped = _dropped(latest, _reader(atropos, max_tokens), vocab_size)
    return AtroposState(conflict=conflict, waiting=waiting, group_size=len(tokens), dropped=dropped)


def _dropped(group: object, reader: GroupReader, vocab_size: int | None) -> Counter[str]:
    """Read a group as a run does. Returns the number of dropped sequences by reason."""
    # Placeholder tokens have a fixed length, which may exceed the run's limits: look for them without limits.
    unlimited = replace(reader, max_tokens=UNLIMITED)
    limited = replace(reader, vocab_size=vocab_size or UNLIMITED)
    dropped = unlimited.read([group], 0, 0).dropped
    return dropped if dropped[DUMMY] else limited.read([group], 0, 0).dropped


def _reader(atropos: AtroposSourceConfig, max_tokens: int) -> GroupReader:
    return GroupReader(
        source=atropos.name,
        vocab_size=UNLIMITED,
        max_tokens=max_tokens,
        recompute_logprobs=atropos.missing_logprobs == "recompute",
        origins=Origins(1),
        decode=lambda tokens: "",
    )
