"""An ASGI application in a thread of this process, on as many ports as asked for."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Sequence

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from colocated_grpo.runtime.descriptors import allow_descriptors, most_connections

BACKLOG = 2048
FAREWELL_SECONDS = 1
"""Open connections get so long to end when the server closes."""
SILENCE_SECONDS = 60.0
"""For the head of a request. Whoever only connects would hold the connection for ever."""


class Connection(H11Protocol):
    """A connection that strangers cannot starve the process with: not by their number, by silence or by endless heads.

    h11 refuses heads above 16 KiB, where uvicorn's faster parser, if that is installed, collects them without end.
    """

    _clock: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        if len(self.connections) > most_connections():
            transport.abort()
        else:
            self._look_again(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._clock is not None:
            self._clock.cancel()
        super().connection_lost(exc)

    def _look_again(self, last: object) -> None:
        self._clock = self.loop.call_later(SILENCE_SECONDS, self._look, last)

    def _look(self, last: object) -> None:
        """last: what had been answered at the last look, None if nothing; this connection if it owed an answer."""
        if self.cycle is last:
            self.transport.abort()
        else:
            self._look_again(self.cycle if self.cycle.response_complete else self)


class ServerThread:
    """Listens from the moment it is made. Raises OSError where an address cannot be had."""

    def __init__(self, app: ASGIApp, host: str, ports: Sequence[int]) -> None:
        """ports: 0 is any free one."""
        allow_descriptors()
        self._sockets: list[socket.socket] = []
        try:
            for port in ports:
                self._sockets.append(_listen(host, port))
        except OSError:
            self._close_sockets()
            raise
        self.ports = [listener.getsockname()[1] for listener in self._sockets]
        config = uvicorn.Config(
            app,
            http=Connection,
            ws="none",
            log_config=None,
            log_level="error",  # not a line for each request of a stranger that is none
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_graceful_shutdown=FAREWELL_SECONDS,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": self._sockets}, name="http", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join()
        self._close_sockets()

    def _close_sockets(self) -> None:
        for listener in self._sockets:
            listener.close()


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise OSError(error.errno, f"{host}:{port}: {error.strerror}") from None
    return listener
