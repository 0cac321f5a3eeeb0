"""Contexts that live as long as an event loop of user code."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from colocated_grpo.environments.user_code.loading import enter_for_loop, retire_loop, start_loop


def test_a_context_of_a_loop_is_left_when_the_loop_is_retired_and_its_tasks_have_ended():
    events, left, may_end = [], threading.Event(), threading.Event()

    @asynccontextmanager
    async def server() -> AsyncGenerator[str]:
        yield "address"
        events.append("left")
        left.set()

    async def work() -> None:
        events.append(await enter_for_loop(server()))
        await asyncio.to_thread(may_end.wait)
        events.append("worked")

    loop = start_loop("test")
    done = asyncio.run_coroutine_threadsafe(work(), loop)
    retire_loop(loop)
    may_end.set()
    done.result(10)
    assert left.wait(10)
    assert events == ["address", "worked", "left"]
