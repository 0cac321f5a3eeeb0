"""Event loops of user code."""

from __future__ import annotations

import asyncio
import threading

from colocated_grpo.environments.user_code.loading import retire_loop, start_loop


def test_a_retired_loop_ends_with_its_thread_once_its_tasks_have_ended():
    may_end, events = threading.Event(), []

    async def work() -> None:
        thread = threading.current_thread()
        await asyncio.to_thread(may_end.wait)
        events.append(thread)

    loop = start_loop("test")
    done = asyncio.run_coroutine_threadsafe(work(), loop)
    retire_loop(loop)
    may_end.set()
    done.result(10)
    [thread] = events
    thread.join(10)
    assert loop.is_closed() and not thread.is_alive()
