"""Measurements over time, and the line through them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Return the slope of the least-squares line through (x, y) points; 0 for fewer than two."""
    if len(points) < 2:
        return 0.0
    x, y = np.array(points, dtype=np.float64).T
    return float(np.polyfit(x - x[0], y, 1)[0])
