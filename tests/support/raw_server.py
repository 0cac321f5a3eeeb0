"""A server that sends given bytes, valid HTTP or not."""

from __future__ import annotations

import socketserver
import threading
from collections.abc import Generator
from contextlib import contextmanager
from itertools import chain, repeat


@contextmanager
def raw_server(*responses: bytes, sent: list[bytes] | None = None) -> Generator[str]:
    """Yield the url of a server that sends one response per connection, the last one from then on.

    sent: receives the head of each request.
    """
    remaining = chain(responses, repeat(responses[-1]))

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            head = b""
            while (line := self.rfile.readline()).strip():
                head += line
            if sent is not None:
                sent.append(head)
            self.wfile.write(next(remaining))

    with socketserver.TCPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def response(body: bytes, *headers: str, status: str = "200 OK") -> bytes:
    """Return a complete HTTP response with a JSON body."""
    head = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", "Content-Type: application/json", *headers]
    return "\r\n".join([*head, "", ""]).encode() + body
