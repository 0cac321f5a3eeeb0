"""Skips tests that need more CUDA devices than this machine has."""

from __future__ import annotations

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    devices = torch.cuda.device_count()
    for item in items:  # all tests of the session, including CPU tests
        needed = max((devices_needed(mark) for mark in item.iter_markers()), default=0)
        if devices < needed:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} CUDA devices, {devices} here"))


def devices_needed(mark: pytest.Mark) -> int:
    return {"gpu": 1, "multigpu": mark.args[0] if mark.args else 0}.get(mark.name, 0)
