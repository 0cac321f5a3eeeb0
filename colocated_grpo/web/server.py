"""Runs an ASGI application on a thread of this process, on one or more ports."""

import asyncio
import socket
import threading
from collections.abc import Sequence
from contextlib import ExitStack

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from colocated_grpo.runtime.program import max_client_connections, raise_descriptor_limit

BACKLOG = 2048
SHUTDOWN_SECONDS = 1
"""Time for open connections to finish when the server closes."""
IDLE_SECONDS = 60.0
"""A connection is closed after this time without a complete request head, without a next request, without a byte read
of a response that waits, or without a sign of life from a machine that is gone."""


class Connection(H11Protocol):
    """A connection with limits on count, idle time and head size, so that clients cannot exhaust the process.

    The 16 KiB head limit is h11's own. uvicorn's faster parser, httptools, has no limit.
    """

    _timer: asyncio.TimerHandle | None = None
    _unread: int | None = None
    """Bytes that the client had to read at the previous check; None if it has read them since."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        if len(self.connections) > max_client_connections():
            transport.abort()
            return
        if (number := getattr(socket, "TCP_USER_TIMEOUT", None)) is not None:  # Linux; else 15 minutes
            transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, number, int(IDLE_SECONDS * 1000))
        self._check_later(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        self._unread = None
        super().pause_writing()

    def _check_later(self, last: object) -> None:
        self._timer = self.loop.call_later(IDLE_SECONDS, self._check_idle, last)

    def _check_idle(self, last: object) -> None:
        """Close the connection unless a request was received, answered or read from since the previous check.

        last: the request cycle that was complete at the previous check; None before the first request; this connection
        itself if a response was pending. A pending response is cut off only if the client does not read it.
        """
        before, self._unread = self._unread, self.transport.get_write_buffer_size() if self.flow.write_paused else None
        if self.cycle is last or (before is not None and before == self._unread):
            self.transport.abort()
        else:
            self._check_later(self.cycle if self.cycle.response_complete else self)


class ServerThread:
    """A server that accepts requests as soon as it is constructed. Raises OSError if the address cannot be bound."""

    def __init__(self, app: ASGIApp, host: str, ports: Sequence[int]) -> None:
        """ports: 0 selects any free port; `self.ports` has the actual ports."""
        raise_descriptor_limit()
        with ExitStack() as opened:
            sockets = [opened.enter_context(_listen(host, port)) for port in ports]
            self._close_sockets = opened.pop_all().close
        self.ports: list[int] = [listener.getsockname()[1] for listener in sockets]
        config = uvicorn.Config(
            app,
            http=Connection,
            ws="none",
            log_config=None,
            log_level="error",  # uvicorn warns about every malformed request
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_graceful_shutdown=SHUTDOWN_SECONDS,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=(sockets,), name="http", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop accepting, allow open requests SHUTDOWN_SECONDS to finish, and join the thread."""
        self._server.should_exit = True
        self._thread.join()
        self._close_sockets()


def _listen(host: str, port: int) -> socket.socket:
    # Not `socket.create_server`, whose server at "::" rejects IPv4.
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise OSError(error.errno, f"{host}:{port}: {error.strerror}") from None
    return listener
