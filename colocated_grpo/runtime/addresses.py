"""Addresses of this machine."""

from __future__ import annotations

import socket


def own_address(peer: str) -> str:
    """Return this machine's address on the route to `peer`.

    The address of the machine's own hostname is often 127.0.1.1, which other machines cannot reach.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(peer, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # UDP: selects the route and sends nothing
        return probe.getsockname()[0]
