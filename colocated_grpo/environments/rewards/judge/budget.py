"""Limits on what a judge may cost, and what has been spent."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Budget:
    """Requests and tokens of one judge in one process."""

    max_requests: int | None
    max_tokens: int | None
    requests: int = 0
    tokens: int = 0

    def take(self) -> bool:
        """Count a request that is about to be sent. Returns False if the budget is spent."""
        if self.max_requests is not None and self.requests >= self.max_requests:
            return False
        if self.max_tokens is not None and self.tokens >= self.max_tokens:
            return False
        self.requests += 1
        return True
