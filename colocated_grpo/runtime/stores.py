"""Key-value stores over TCP that listen on one address only; torch's own listen on every interface."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

SLICE = timedelta(seconds=1)
"""A wait in a store blocks signal handlers, so long waits consist of short ones."""


def serve_store(host: str, port: int, timeout: float) -> tuple[dist.TCPStore, int]:
    """Return a store that listens on `host`, and its port. port: 0 stands for any free one.

    timeout: seconds to wait for a key. Raises OSError for an address that cannot be bound.
    """
    listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    port = listener.getsockname()[1]
    store = dist.TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
        timeout=timedelta(seconds=timeout),
    )
    return store, port


def connect_store(host: str, port: int, timeout: float) -> dist.TCPStore:
    """Return the store that another process serves. Raises RuntimeError without one for `timeout` seconds."""
    return dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout))


def wait_for_keys(store: dist.Store, keys: Sequence[str], deadline: float) -> list[str]:
    """Return the keys that are missing at the deadline, which is of `time.monotonic`; none as soon as all are set."""
    while True:
        with suppress(dist.DistStoreError):  # not there yet
            store.wait(list(keys), SLICE)
            return []
        if time.monotonic() > deadline:
            return [key for key in keys if not store.check([key])]
