"""A judge over HTTP whose answers the test decides, in a thread of the test's process."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = tuple[int, object]
"""Status, and a body: bytes as they are, anything else as JSON."""


class JudgeServer(ThreadingHTTPServer):
    """Keeps the bodies and headers of its requests."""

    request_queue_size = 512
    """Connections that wait to be accepted. The default of 5 delays the others by a second."""
    daemon_threads = True

    def __init__(self, answer: Callable[[dict[str, Any]], Answer]) -> None:
        self.answer = answer
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.keys: list[str | None] = []
        self.lock = threading.Lock()
        super().__init__(("127.0.0.1", 0), _Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: JudgeServer

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.bodies.append(body)
            self.server.paths.append(self.path)
            self.server.keys.append(self.headers.get("Authorization"))
        status, content = self.server.answer(body)
        raw = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, format: str, *args: Any) -> None:
        """Keep the test's output free of request lines."""


@contextmanager
def judge_server(answer: Callable[[dict[str, Any]], Answer]) -> Generator[JudgeServer]:
    with JudgeServer(answer) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def chat(text: str, tokens: int = 10) -> Answer:
    """Return a chat response with this text."""
    return 200, {"choices": [{"message": {"content": text}}], "usage": {"total_tokens": tokens}}
