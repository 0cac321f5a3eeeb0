"""The engine's HTTP application over a fake engine, in a process of its own: prints its port, ends with its input."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from colocated_grpo.servers.text import Limits
from colocated_grpo.settings.atropos import ServerConfig
from tests.support import engine_server
from tests.support.paths import ROOT


@contextmanager
def engine_server_process() -> Iterator[tuple[int, int]]:
    """Yield the id and the port of the process."""
    command = [sys.executable, "-m", "tests.support.engine_server_process"]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    try:
        yield process.pid, int(process.stdout.readline())
    finally:
        process.stdin.close()
        process.wait(30)


def main() -> None:
    engine_server.LIMITS = Limits(max_tokens=4096, longest_token=16, vocab_size=10, stop_token_ids=(9,), seed=0)
    server = engine_server.EngineServer(max_body_bytes=ServerConfig().max_body_bytes)
    print(server.server.ports[0], flush=True)
    sys.stdin.read()
    server.close()


if __name__ == "__main__":
    main()
