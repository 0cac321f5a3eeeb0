"""The weight bridge modes of Atropos' example trainer, and the command line that they are chosen by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

SHARED_VARIABLE, BRIDGE_VARIABLE = "VLLM_ENABLE_SHARED_WEIGHTS", "VLLM_BRIDGE_CONFIG_PATH"
MODE, BROADCAST, SINGLE_COPY = "--weight-bridge-mode", "--use-shared-memory", "--single-copy"
BRIDGE_CONFIG = "--vllm-config-path"


@dataclass(frozen=True, kw_only=True)
class Mode:
    bridge: Literal["broadcast", "shared", "adapter", "restart"]
    """Value of engine.bridge."""
    server_runs: bool = False
    """True if the server is started before the trainer. Else the launcher starts it."""
    adapter: bool = False
    """True if an adapter is trained."""
    at_interval: bool = True
    """True if weights reach the server every --vllm-restart-interval steps. Else after every step."""


MODES = {
    "none": Mode(bridge="restart"),
    "shared_vllm": Mode(bridge="shared", server_runs=True, at_interval=False),
    "lora_only": Mode(bridge="adapter", server_runs=True, adapter=True),
    "lora_restart": Mode(bridge="restart", adapter=True),
}
BROADCAST_MODE = Mode(bridge="broadcast", server_runs=True, at_interval=False)
"""shared_vllm with --use-shared-memory."""
UNIFIED = Mode(bridge="shared", at_interval=False)
"""example_trainer.run, which starts its server and has no --weight-bridge-mode. Its guide sets the variable above."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command line of Atropos' example trainer."""

    given: Mapping[str, Any]
    """Values of the flags that were given, by their first name."""
    defaults: Mapping[str, Any]
    """Values of all flags that have a default in Atropos' trainer."""
    overrides: Sequence[str]
    """Arguments after Atropos' flags: settings of this project."""
    environment: Mapping[str, str]
    gpus: int
    """GPUs of this node: visible, or chosen by --gpus."""
    gpus_chosen: bool
    """True if --gpus was given."""

    def value(self, name: str) -> Any:
        """Return the value of a flag: given, else its default, else None."""
        return self.given.get(name, self.defaults.get(name))

    def override(self, key: str) -> str | None:
        """Return the text of an override; None without one."""
        for index, argument in enumerate(self.overrides):
            name, has_value, text = argument.partition("=")
            if name == f"--{key}":
                return text if has_value else "".join(self.overrides[index + 1 : index + 2])
        return None

    @property
    def mode_name(self) -> str:
        return "shared_vllm" if self.mode is UNIFIED else self.value(MODE)

    @property
    def mode(self) -> Mode:
        if not {MODE, BROADCAST} & {*self.given} and self.environment.get(SHARED_VARIABLE) == "1":
            return UNIFIED
        name = self.value(MODE)
        return BROADCAST_MODE if name == "shared_vllm" and BROADCAST in self.given else MODES[name]

    @property
    def server_url(self) -> str | None:
        """Address of the server that runs already; None if the launcher starts one, or there is none."""
        connects = self.mode.server_runs and self.override("engine.placement") != "colocated"
        return f"http://localhost:{self.value('--vllm-port')}" if connects else None
