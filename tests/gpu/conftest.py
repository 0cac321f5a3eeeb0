"""Skips what this machine has no devices for."""

from __future__ import annotations

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    devices = torch.cuda.device_count()
    for item in items:
        needed = max([mark.args[0] for mark in item.iter_markers("multigpu")], default=1)
        if devices < needed:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} CUDA devices, {devices} here"))
