"""Addresses of this machine, and key-value stores.

The stores listen on a single address; a plain torch TCPStore would listen on all addresses of the machine.
"""

import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

RETRY_SECONDS = 0.2
CONNECT_SECONDS = 10.0
"""Limit of one attempt to connect to another machine."""
SLICE = timedelta(seconds=1)
"""Waiting in a store blocks signal handlers, so long waits are split into slices of this length."""


def serve_store(host: str, port: int, timeout: float) -> tuple[dist.TCPStore, int]:
    """Return a store that listens on `host`, and its port. port: 0 selects any free port.

    timeout: seconds to wait for a key. Raises OSError if the address cannot be bound.
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
    """Connect to another process's store. Raises RuntimeError if no store answers within `timeout` seconds."""
    return dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout))


def wait_for_keys(store: dist.Store, keys: Sequence[str], deadline: float) -> list[str]:
    """Wait until all keys are set. Return the keys that are missing at the deadline. deadline: a time of
    `time.monotonic`."""
    while True:
        with suppress(dist.DistStoreError):  # some keys are not set yet
            store.wait(list(keys), SLICE)
            return []
        if time.monotonic() > deadline:
            return [key for key in keys if not store.check([key])]


def own_address(peer: str) -> str:
    """Return this machine's address on the route to `peer`.

    The address of the machine's own hostname is often 127.0.1.1, which other machines cannot reach.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(peer, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # UDP: selects the route without sending anything
        return probe.getsockname()[0]


def wait_for_listener(host: str, port: int, seconds: float) -> None:
    """Wait until a process listens at this address. Raises the last OSError after `seconds`.

    torch's store would also wait, but it prints a C++ stack on timeout and delays stop signals.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((host, port), timeout=min(seconds, CONNECT_SECONDS)).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
        time.sleep(RETRY_SECONDS)
