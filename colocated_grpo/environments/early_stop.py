"""When a policy has learned the form of its replies."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class EarlyStop:
    """Says stop once the parse rate has stood at the threshold for a number of windows in a row."""

    threshold: float
    consecutive: int
    reached: int = 0

    def due(self, parse_rate: float | None) -> bool:
        """Counts one window. None, a window without turns, neither helps nor hurts."""
        if parse_rate is not None:
            self.reached = self.reached + 1 if parse_rate >= self.threshold else 0
        return self.reached >= self.consecutive
