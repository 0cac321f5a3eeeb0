"""Addresses of this machine."""

from __future__ import annotations

import socket
import time

RETRY_SECONDS = 0.2
CONNECT_SECONDS = 10.0
"""Limit of one attempt to connect to another machine."""


def own_address(peer: str) -> str:
    """Return this machine's address on the route to `peer`.

    The address of the machine's own hostname is often 127.0.1.1, which other machines cannot reach.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(peer, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # UDP: selects the route and sends nothing
        return probe.getsockname()[0]


def wait_for_listener(host: str, port: int, seconds: float) -> None:
    """Return when a process listens at this address. Raises the last OSError after `seconds`.

    torch's store would wait as well, but prints its C++ stack when the time is over, and delays stop signals.
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
