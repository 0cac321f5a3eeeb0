"""All checks by name, in the order of the report, and their execution."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial

from colocated_grpo.errors import in_one_line
from colocated_grpo.settings.schema import Config
from colocated_grpo.tools.doctor import machine, model_checks, network, packages, run_checks, services
from colocated_grpo.tools.doctor.results import Finding, Result, failed
from colocated_grpo.tools.doctor.subject import Subject

MAX_SECONDS = 90.0
"""Limit of a single check. Checks end within seconds on a healthy machine; those that start processes have limits of
their own, which are lower."""

MachineCheck = Callable[[Subject], Finding]
RunCheck = Callable[[Subject, Config], Finding]

MACHINE: Mapping[str, MachineCheck] = {
    "gpus": machine.check_gpus,
    "driver": machine.check_driver,
    "gpu_memory": machine.check_gpu_memory,
    "nvlink": machine.check_nvlink,
    "torch": packages.check_torch,
    "torch_parts": packages.check_torch_parts,
    "transformers": packages.check_transformers,
    "vllm": packages.check_vllm,
    "packages": packages.check_packages,
    "variables": machine.check_variables,
    "shared_memory": machine.check_shared_memory,
    "hostnames": network.check_hostnames,
    "collective": network.check_collective,
    "settings": run_checks.check_settings,
}
"""Checks that need no config."""
RUN: Mapping[str, RunCheck] = {
    "optional_packages": packages.check_optional_packages,
    "files": run_checks.check_files,
    "model": model_checks.check_model,
    "model_files": model_checks.check_model_files,
    "memory": model_checks.check_memory,
    "disk": model_checks.check_disk,
    "run_folder": run_checks.check_run_folder,
    "wandb": run_checks.check_wandb,
    "ports": network.check_ports,
    "engine_servers": services.check_engine_servers,
    "weight_bridge": services.check_weight_bridge,
    "environments": services.check_environments,
    "atropos_api": services.check_atropos_api,
    "atropos_environments": services.check_atropos_environments,
    "server_type": services.check_server_type,
    "logprobs": services.check_atropos_logprobs,
}
"""Checks of the run that a config describes; left out without a valid one."""


def examine(subject: Subject) -> Iterator[Result]:
    """Yield the results in the order of the tables, each as soon as it is known."""
    config = subject.config
    for name, machine_check in MACHINE.items():
        yield _result(name, bounded(partial(machine_check, subject)))
    if config is not None:
        for name, run_check in RUN.items():
            yield _result(name, bounded(partial(run_check, subject, config)))


def _result(name: str, finding: Finding) -> Result:
    return Result(name, finding.status, finding.detail, finding.fix)


def bounded(check: Callable[[], Finding], seconds: float = MAX_SECONDS) -> Finding:
    """Return the finding of a check, or a failure if it raises or takes longer than `seconds`."""
    found: list[Finding] = []

    def run() -> None:
        try:
            found.append(check())
        except Exception as error:  # one broken check must not hide the results of the others
            found.append(failed(f"the check itself failed: {in_one_line(error)}", "report this as a defect"))

    # A daemon: a check that hangs, for example in a name lookup, does not keep the process alive.
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else failed(f"no result after {seconds:g} s", "repeat; check network and file system")
