"""The variables that tell a rank its place among the others: torchrun's, or SLURM's in their stead.

Standard library only: the entry point of a rank imports this first.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

LAST_PORT = 65535
ANY_PORT = "0"
"""MASTER_PORT of a single rank: its store takes any free port, as no other rank connects."""


def rank_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return torchrun's variables if RANK is not set: derived from those of srun, or those of a single rank."""
    if "RANK" in environment:
        return {}
    # Only srun sets SLURM_STEP_NUM_TASKS. A batch script without it runs once, whatever SLURM_NTASKS says.
    if "SLURM_PROCID" in environment and "SLURM_STEP_NUM_TASKS" in environment:
        return _slurm_environment(environment)
    return {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": ANY_PORT,
    }


def environment_problem(environment: Mapping[str, str]) -> str | None:
    """Return one line about missing or invalid torchrun variables, which another tool may have set; else None."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        if name not in environment:
            return f"RANK={environment['RANK']!r}: set, but {name} is not; unset RANK, or start with torchrun"
        if name != "MASTER_ADDR" and not environment[name].isdecimal():
            return f"{name}={environment[name]!r}: must be a whole number"
    single = environment["WORLD_SIZE"] == "1"
    if not (0 if single else 1) <= int(environment["MASTER_PORT"]) <= LAST_PORT:
        return f"MASTER_PORT={environment['MASTER_PORT']}: must be a port, 1-{LAST_PORT}"
    if int(environment["RANK"]) >= int(environment["WORLD_SIZE"]):
        return f"RANK={environment['RANK']}: must be less than WORLD_SIZE={environment['WORLD_SIZE']}"
    return None


def _slurm_environment(environment: Mapping[str, str]) -> dict[str, str]:
    def step_or_job(name: str, default: str) -> str:
        # A job step may use fewer tasks and nodes than its job.
        return environment.get(f"SLURM_STEP_{name}") or environment.get(f"SLURM_{name}") or default

    tasks = environment["SLURM_STEP_NUM_TASKS"]
    job = re.sub(r"\D", "", environment.get("SLURM_JOB_ID", "")) or "0"
    return {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": tasks,
        "LOCAL_RANK": environment.get("SLURM_LOCALID", "0"),
        "LOCAL_WORLD_SIZE": re.split(r"\D", step_or_job("TASKS_PER_NODE", tasks))[0],  # "4(x2)" on two equal nodes
        "MASTER_ADDR": environment.get("MASTER_ADDR") or first_host(step_or_job("NODELIST", "127.0.0.1")),
        "MASTER_PORT": environment.get("MASTER_PORT") or str(20000 + int(job) % 20000),
    }


def first_host(nodelist: str) -> str:
    """Return the first host of a SLURM node list: 'gpu[03-07,12],login' -> 'gpu03'."""
    found = re.match(r"([^\[,]+)(?:\[(\d+)[^\]]*\]([^,\[]*))?", nodelist)
    return "".join(part or "" for part in found.groups()) if found else nodelist
