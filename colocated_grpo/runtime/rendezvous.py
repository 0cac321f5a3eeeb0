"""Key-value stores of the ranks, and TCP connections from rank 0 to the ranks of other nodes.

On one node, the stores listen on a single address; a plain torch TCPStore would listen on all of the machine's.

The connections carry no data: a closed connection means a lost rank. The kernel answers keepalive probes, even for a
process that computes, is stopped or holds Python's interpreter lock. So a connection ends when the remote process
exits, or when its machine or the network is lost, but not when a rank is slow.
"""

import hmac
import os
import secrets
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import NamedTuple
from weakref import WeakSet

import torch.distributed as dist

from colocated_grpo.runtime.program import LOOPBACK

ALL_INTERFACES = ("0.0.0.0", "::")
RETRY_SECONDS = 0.2
CONNECT_SECONDS = 10.0
"""Limit of one attempt to connect to another machine."""
SLICE = timedelta(seconds=1)
"""Waiting in a store blocks signal handlers, so long waits are split into slices of this length."""


def serve_store(bound: socket.socket, timeout: float) -> dist.TCPStore:
    """Return a store that listens on a socket of `bind_store`. timeout: seconds to wait for a key."""
    host, port = bound.getsockname()[:2]
    host = LOOPBACK if host in ALL_INTERFACES else host
    limit = timedelta(seconds=timeout)
    return dist.TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=bound.detach(), timeout=limit
    )


def connect_store(host: str, port: int, timeout: float) -> dist.TCPStore:
    """Connect to another process's store. Raises RuntimeError if no store answers within `timeout` seconds."""
    return dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout))


def wait_for_keys(store: dist.Store, keys: Sequence[str], deadline: float) -> list[str]:
    """Wait until all keys are set. Return the keys missing at the deadline, a time of `time.monotonic`."""
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
        self._links: dict[int, tuple[socket.socket, str]] = {}
        """Connection and host, by rank."""
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
        links = list(self._links.items())
        return [Lost(rank, host, silent) for rank, (link, host) in links if (silent := _silent(link)) is not None]

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
        for link, _ in self._links.values():
            link.close()
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
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, PROBE_SECONDS)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_SECONDS)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES)
        self._links[rank] = link, host


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
