"""The engine's HTTP applications over a fake engine, in a process of its own that ends with its input."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from colocated_grpo.environments.agents.programs import Access
from colocated_grpo.servers.text import Limits
from colocated_grpo.settings.atropos import ServerConfig
from tests.support import engine_server
from tests.support.agents import AgentRun, says
from tests.support.paths import ROOT

EPISODES = 2
SAID = "42"
"""Every completion of an agent."""
EPISODE_SECONDS = 86400.0


@contextmanager
def engine_server_process(log: Path = Path(os.devnull)) -> Generator[tuple[int, int]]:
    """Yield the id and the port of a process that serves the engine to environments. log: file of its stderr."""
    with _process("engine", 1, log) as (pid, [port]):
        yield pid, int(port)


@contextmanager
def agent_server_process(log: Path = Path(os.devnull)) -> Generator[tuple[int, list[Access]]]:
    """Yield the id of a process that serves the engine to agents, and the access to each open episode."""
    with _process("agents", EPISODES, log) as (pid, lines):
        yield pid, [Access(base_url=url, api_key=key) for url, key in map(str.split, lines)]


@contextmanager
def _process(name: str, num_lines: int, log: Path) -> Generator[tuple[int, list[str]]]:
    command = [sys.executable, "-m", "tests.support.engine_server_process", name]
    with log.open("a") as stderr:
        process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True
        )
    assert process.stdin is not None and process.stdout is not None
    try:
        yield process.pid, [process.stdout.readline() for _ in range(num_lines)]
    finally:
        process.stdin.close()
        process.wait(engine_server.TIMEOUT)


def serve_engine() -> None:
    engine_server.LIMITS = Limits(max_tokens=4096, longest_token=16, vocab_size=10, stop_token_ids=(9,), seed=0)
    server = engine_server.EngineServer(max_body_bytes=ServerConfig().max_body_bytes)
    print(server.server.ports[0], flush=True)
    sys.stdin.read()
    server.close()


def serve_agents() -> None:
    """Play episodes that end with the input."""

    async def play(_item: object, access: Access) -> float:
        print(access.base_url, access.api_key, flush=True)
        await asyncio.to_thread(sys.stdin.read)
        return 0.0

    with AgentRun(play, says(SAID), tool_timeout=EPISODE_SECONDS, max_requests=1 << 40) as run:
        run.collect(EPISODES)


if __name__ == "__main__":
    {"engine": serve_engine, "agents": serve_agents}[sys.argv[1]]()
