"""A small Hugging Face Hub on this machine: what huggingface_hub needs to upload a folder, and to download one."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import socket
import struct
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import yaml

TOKEN = "hf_" + "t" * 20
COMMIT = "0123456789abcdef0123456789abcdef01234567"
Failure = Callable[[str], "int | None"]
"""From a path to the status with which the request fails; None: it succeeds."""


class FakeHub(ThreadingHTTPServer):
    """Keeps repositories as {name: {path: bytes}}. Requests need TOKEN."""

    daemon_threads = True

    def __init__(self) -> None:
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.private: dict[str, bool] = {}
        self.messages: list[str] = []
        self.large: dict[str, bytes] = {}
        self.failure: Failure = lambda path: None
        self.breaks: Callable[[str], bool] = lambda path: False
        """From the path of a file to whether its download breaks half-way."""
        self.block = threading.Event()
        """Uploads of large files wait for it."""
        self.block.set()
        super().__init__(("127.0.0.1", 0), _Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    @property
    def variables(self) -> dict[str, str]:
        """Variables with which a client finds this Hub, and stores large files by LFS."""
        return {"HF_ENDPOINT": self.url, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1"}


class _Handler(BaseHTTPRequestHandler):
    server: FakeHub

    def do_POST(self) -> None:
        body = self._body()
        if (status := self.server.failure(self.path)) is not None:
            return self._answer(status, {"error": "broken on purpose"})
        if self.headers["Authorization"] != f"Bearer {TOKEN}":
            return self._answer(401, {"error": "Invalid username or password."})
        if self.path == "/api/repos/create":
            return self._create(json.loads(body))
        if self.path == "/api/validate-yaml":
            return self._validate(json.loads(body)["content"])
        if found := re.fullmatch(r"/api/models/(.+)/preupload/main", self.path):
            return self._preupload(found[1], json.loads(body)["files"])
        if self.path.endswith(".git/info/lfs/objects/batch"):
            return self._batch(json.loads(body)["objects"])
        if self.path == "/verify":
            return self._answer(200, {})
        if found := re.fullmatch(r"/api/models/(.+)/commit/main", self.path):
            return self._commit(found[1], [json.loads(line) for line in body.splitlines()])
        return self._answer(404, {"error": self.path})

    def do_HEAD(self) -> None:
        if (content := self._stored_file()) is not None:
            self._send(200, content, {"X-Repo-Commit": COMMIT, "ETag": hashlib.sha256(content).hexdigest()}, body=False)
        else:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"})

    def do_GET(self) -> None:
        if re.fullmatch(r"/api/models/(.+)/revision/main", self.path):
            return self._answer(200, {"id": "me/sorts", "sha": COMMIT})
        if found := re.match(rf"/api/models/(.+)/tree/{COMMIT}", self.path):
            files = self.server.repositories[found[1]].items()
            sizes = [{"type": "file", "path": path, "size": len(raw), "oid": path} for path, raw in files]
            return self._send(200, json.dumps(sizes).encode())
        content = self._stored_file()
        if content is None:
            return self._answer(404, {"error": self.path})
        if not self.server.breaks(self.path):
            return self._send(200, content)
        self._send(200, content, body=False)
        self.wfile.write(content[: len(content) // 2])
        # Closed at once, with a reset: the client's next read fails.
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        return None

    def _stored_file(self) -> bytes | None:
        found = re.fullmatch(rf"/(.+)/resolve/(?:main|{COMMIT})/(.+)", self.path)
        return None if found is None else self.server.repositories.get(found[1], {}).get(found[2])

    def do_PUT(self) -> None:
        body = self._body()
        self.server.block.wait(300.0)
        if (status := self.server.failure(self.path)) is not None:
            return self._answer(status, {"error": "broken on purpose"})
        self.server.large[self.path.rpartition("/")[2]] = body
        return self._answer(200, {})

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers["Content-Length"]))

    def _create(self, wanted: dict[str, Any]) -> None:
        name = f"{wanted['organization'] or 'me'}/{wanted['name']}"
        known = name in self.server.repositories
        self.server.repositories.setdefault(name, {})
        self.server.private.setdefault(name, wanted.get("visibility") == "private")
        self._answer(409 if known else 200, {"url": f"{self.server.url}/{name}", "error": "exists"})

    def _validate(self, content: str) -> None:
        metadata = yaml.safe_load(content.split("---")[1])
        names = [metadata.get("base_model", "a/b"), *metadata.get("datasets", [])]
        wrong = [name for name in names if not re.fullmatch(r"([\w.-]+/)?[\w.-]+", name)]
        errors = [{"message": f"{name} is no name on the Hub"} for name in wrong]
        self._answer(400 if errors else 200, {"errors": errors, "warnings": []})

    def _preupload(self, name: str, files: list[dict[str, Any]]) -> None:
        if name not in self.server.repositories:
            return self._answer(404, {"error": "Repository not found"})
        modes = [("lfs" if file["path"].endswith(".safetensors") else "regular", file["path"]) for file in files]
        self._answer(200, {"files": [{"path": path, "uploadMode": m, "shouldIgnore": False} for m, path in modes]})

    def _batch(self, objects: list[dict[str, Any]]) -> None:
        for entry in objects:
            if entry["oid"] not in self.server.large:
                href = f"{self.server.url}/objects/{entry['oid']}"
                entry["actions"] = {"upload": {"href": href}, "verify": {"href": f"{self.server.url}/verify"}}
        self._answer(200, {"transfer": "basic", "objects": objects})

    def _commit(self, name: str, entries: list[dict[str, Any]]) -> None:
        files = self.server.repositories[name]
        for entry in entries:
            value = entry["value"]
            if entry["key"] == "header":
                self.server.messages.append(value["summary"])
            elif entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                files[value["path"]] = self.server.large[value["oid"]]
                assert hashlib.sha256(files[value["path"]]).hexdigest() == value["oid"]
        self._answer(200, {"commitUrl": f"{self.server.url}/{name}/commit/{COMMIT}", "commitOid": COMMIT})

    def _answer(self, status: int, content: dict[str, Any]) -> None:
        self._send(status, json.dumps(content).encode())

    def _send(self, status: int, raw: bytes, headers: Mapping[str, str] | None = None, *, body: bool = True) -> None:
        self.send_response(status)
        sent = {"Content-Type": "application/json", "Content-Length": str(len(raw)), **(headers or {})}
        for name, value in sent.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(raw)

    def log_message(self, format: str, *args: Any) -> None:
        """Keep the test's output free of request lines."""


@contextmanager
def fake_hub() -> Generator[FakeHub]:
    with FakeHub() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        yield server
        server.block.set()
        server.shutdown()
        thread.join()
