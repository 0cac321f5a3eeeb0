"""TCP connections from rank 0 to the ranks of other nodes. They carry no data: a closed connection means a lost rank.

The kernel answers keepalive probes, even for a process that computes, is stopped or holds Python's interpreter lock. So
a connection ends when the remote process exits, or when its machine or the network is lost, but not when a rank is
slow.
"""

import hmac
import os
import secrets
import socket
import time
from contextlib import suppress
from typing import NamedTuple
from weakref import WeakSet

from colocated_grpo.runtime.stores import CONNECT_SECONDS

PROBE_SECONDS = 5
"""Seconds without traffic before a probe, and between probes."""
PROBES = 3
"""Unanswered probes after which the other machine counts as lost."""
HELLO_SECONDS = 1.0
TOKEN_BYTES = 16


class LinkAddress(NamedTuple):
    """Address where a rank waits for the connection from rank 0."""

    host: str
    port: int
    token: str
    """Secret that rank 0 sends first, because other programs may connect to the port."""


class Lost(NamedTuple):
    """A rank whose connection has ended."""

    rank: int
    host: str
    silent: bool
    """True: the machine no longer responds. False: the machine closed the connection, because the process has ended."""


class NodeLinks:
    """This rank's connections to ranks of other nodes. Call `lost` from one thread only."""

    def __init__(self) -> None:
        self._links: dict[int, socket.socket] = {}
        self._hosts: dict[int, str] = {}
        self._listener: socket.socket | None = None
        self._token = ""
        _all_links.add(self)

    def listen(self, host: str) -> LinkAddress:
        """Listen for the connection from rank 0; `lost` accepts it. host: an address of this machine."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._token = secrets.token_hex(TOKEN_BYTES)
        listener = socket.create_server((host, 0), family=family)
        listener.setblocking(False)
        self._listener = listener
        return LinkAddress(host, listener.getsockname()[1], self._token)

    def connect(self, rank: int, address: LinkAddress) -> None:
        """Connect to a rank of another node. Raises OSError on failure."""
        link = socket.create_connection((address.host, address.port), timeout=CONNECT_SECONDS)
        link.sendall(address.token.encode())
        self._add(rank, link, address.host)

    def lost(self) -> list[Lost]:
        if self._listener is not None:
            self._accept(self._listener)
        found = ((rank, _silent(link)) for rank, link in list(self._links.items()))
        return [Lost(rank, self._hosts[rank], silent) for rank, silent in found if silent is not None]

    def close(self) -> None:
        for each in (self._listener, *self._links.values()):
            if each is not None:
                each.close()
        self._listener, self._links = None, {}

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):
            link, (host, *_) = listener.accept()
            with suppress(OSError):
                if hmac.compare_digest(_hello(link), self._token.encode()):
                    self._add(0, link, host)
                    listener.close()
                    self._listener = None
                    return
            link.close()

    def _add(self, rank: int, link: socket.socket, host: str) -> None:
        link.setblocking(False)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (("KEEPIDLE", PROBE_SECONDS), ("KEEPINTVL", PROBE_SECONDS), ("KEEPCNT", PROBES)):
            if hasattr(socket, f"TCP_{name}"):  # not available on all platforms
                link.setsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_{name}"), value)
        self._hosts[rank] = host
        self._links[rank] = link


def _hello(link: socket.socket) -> bytes:
    """Read the token that rank 0 sends first, possibly in several parts. Raises OSError after HELLO_SECONDS."""
    received = b""
    deadline = time.monotonic() + HELLO_SECONDS
    while len(received) < 2 * TOKEN_BYTES:
        link.settimeout(max(deadline - time.monotonic(), 0.001))
        if not (part := link.recv(2 * TOKEN_BYTES - len(received))):
            break
        received += part
    return received


def _silent(link: socket.socket) -> bool | None:
    """Return None for an open connection, else the value of `Lost.silent`."""
    try:
        return None if link.recv(1) else False
    except BlockingIOError:
        return None
    except (ConnectionResetError, BrokenPipeError):
        return False
    except OSError:
        return True


_all_links: WeakSet[NodeLinks] = WeakSet()


def _close_in_child() -> None:
    """Close the connections in a forked child, such as a reward worker, which may outlive its rank."""
    for links in _all_links:
        links.close()


os.register_at_fork(after_in_child=_close_in_child)
