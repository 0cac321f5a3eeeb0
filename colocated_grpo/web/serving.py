"""An ASGI application in a thread of this process, on as many ports as asked for."""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence

import uvicorn
from starlette.types import ASGIApp

from colocated_grpo.descriptors import allow_descriptors

BACKLOG = 2048
FAREWELL_SECONDS = 1
"""Open connections get so long to end when the server closes."""


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
            log_config=None,
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
