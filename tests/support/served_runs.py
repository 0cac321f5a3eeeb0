"""Training runs whose engines are servers, and tasks that kill the engine or block their rank amid a batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.workload import MAX_PROMPT_TOKENS
from colocated_grpo.tracking import files
from tests.support.serve_process import START_SECONDS, ServeProcess
from tests.support.training_runs import Settings, TrainingRun, deterministic, without_wall_clock

STEPS = 6
PROMPTS, GROUP_SIZE = 8, 4
"""Completions of a step."""
SEQUENCES = 8
"""Sequences that a server decodes together: a quarter of a step's completions.

Requests are then still under way when the first group is scored.
"""
SERVER_FLAGS = ("--max-num-seqs", str(SEQUENCES), "--max-model-len", str(MAX_PROMPT_TOKENS + 16))

# An order is in a file beside this module: the action, after how many completions, and the process of the server. The
# engine is killed by the thread that submits requests, before they are sent: a reward's thread may be late.
TASK = """
import ctypes, json, threading
from pathlib import Path
import psutil
from benchmarks.workload import RandomWork
from colocated_grpo.servers.remote import RemoteEngine

ORDER, COUNTS, LOCK = Path(__file__).with_suffix(".json"), {"block": 0, "kill": 0}, threading.Lock()

def ordered(action, count):
    with LOCK:
        COUNTS[action] += count
        order = json.loads(ORDER.read_text()) if ORDER.exists() else {"action": None}
        if order["action"] != action or COUNTS[action] <= order["after"]:
            return None
        ORDER.rename(ORDER.with_suffix(".done"))
        return order

class Work(RandomWork):
    def score(self, item, completion):
        if ordered("block", 1):
            ctypes.PyDLL(None).sleep(3600)
        return super().score(item, completion)

def submit(engine, requests, submit=RemoteEngine.submit):
    requests = list(requests)
    submit(engine, requests)
    if order := ordered("kill", len(requests)):
        [process] = psutil.Process(order["server"]).children()
        process.kill()

RemoteEngine.submit = submit
"""


PARTIAL: Settings = {"partial": {"oversample": 2, "max_age": 2}, "group_size": 2, "max_completion_tokens": 100}
"""Few completions of the random model reach the limit."""


def write_task(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    task = folder / "work.py"
    task.write_text(TASK)
    return task


BLOCKING_LINE = 1 + TASK.splitlines().index("            ctypes.PyDLL(None).sleep(3600)")
"""PyDLL holds the interpreter lock during the call, but takes no core."""


def kill_engine(task: Path, server: ServeProcess, step: int) -> Path:
    """Order the task to kill the server's engine while it samples for this step of a run that starts at step 0.

    Returns a file that exists afterwards.
    """
    return _order(task, action="kill", after=step * PROMPTS * GROUP_SIZE + SEQUENCES, server=server.process.pid)


def block_rank(task: Path, step: int) -> Path:
    """Order the task to hold the interpreter lock for ever, at BLOCKING_LINE, in this step of a run from step 0.

    Returns a file that exists afterwards.
    """
    return _order(task, action="block", after=step * PROMPTS * GROUP_SIZE)


def _order(task: Path, **order: str | int) -> Path:
    task.with_suffix(".json").write_text(json.dumps(order))
    done = task.with_suffix(".done")
    done.unlink(missing_ok=True)
    return done


def work(task: Path, *servers: ServeProcess, **changes: Any) -> Settings:
    """Return the settings of a deterministic run in which every step moves the weights; co-located without servers."""
    engine = {"max_num_seqs": SEQUENCES, **changes.pop("engine", {})}
    if servers:
        engine |= {"placement": "server", "urls": [server.url for server in servers], "server_timeout": START_SECONDS}
    return deterministic(
        environments=changes.pop("environments", [{"type": "task", "name": f"{task}:Work"}]),
        engine=engine,
        rollout={
            "prompts_per_step": PROMPTS,
            "group_size": GROUP_SIZE,
            "max_prompt_tokens": MAX_PROMPT_TOKENS,
            "max_completion_tokens": 16,
            **changes.pop("rollout", {}),
        },
        **{"training_steps": STEPS, "evaluation": {"every": 0}, "checkpoint": {"every": 2}, **changes},
    )


def trained(run: TrainingRun) -> list[dict[str, Any]]:
    """Return the rows of training without times."""
    return without_wall_clock(run.rows(files.TRAIN))
