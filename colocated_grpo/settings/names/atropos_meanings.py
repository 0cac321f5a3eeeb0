"""Meanings of the flags of Atropos' example trainer.

Each flag has a function (value, command line) -> settings and notes. The function raises ValueError with the violated
rule. The first part of this file has the command line and the weight bridge modes from which a command line chooses.
"""

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from colocated_grpo.settings.names.translation import group_size_of
from colocated_grpo.types import JsonObject

SHARED_VARIABLE, BRIDGE_VARIABLE = "VLLM_ENABLE_SHARED_WEIGHTS", "VLLM_BRIDGE_CONFIG_PATH"
MODE, BROADCAST, SINGLE_COPY = "--weight-bridge-mode", "--use-shared-memory", "--single-copy"
BRIDGE_CONFIG = "--vllm-config-path"


@dataclass(frozen=True, kw_only=True)
class Mode:
    bridge: Literal["broadcast", "shared", "adapter", "restart"]
    """Value of engine.bridge."""
    server_runs: bool = False
    """True if the server is started before the trainer. False: the launcher starts the server."""
    adapter: bool = False
    """True if an adapter is trained."""


MODES = {
    "none": Mode(bridge="restart"),
    "shared_vllm": Mode(bridge="shared", server_runs=True),
    "lora_only": Mode(bridge="adapter", server_runs=True, adapter=True),
    "lora_restart": Mode(bridge="restart", adapter=True),
}
BROADCAST_MODE = Mode(bridge="broadcast", server_runs=True)
"""Mode of shared_vllm with --use-shared-memory."""
UNIFIED = Mode(bridge="shared")
"""Mode of example_trainer.run, which starts its server. Its guide sets SHARED_VARIABLE."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command line of Atropos' example trainer."""

    given: Mapping[str, object]
    """Values of the flags in this command line, by the first name of each flag."""
    defaults: Mapping[str, object]
    """Values of all flags that have a default in Atropos' trainer."""
    overrides: Mapping[str, str]
    """Settings of this project in the command line: dotted name -> text."""
    environment: Mapping[str, str]
    gpus: int
    """GPUs of this node: visible, or chosen by --gpus."""
    gpus_chosen: bool
    """True if --gpus was given."""

    def value(self, name: str) -> Any:
        """Return the value of a flag: the given value, else the flag's default, else None."""
        return self.given.get(name, self.defaults.get(name))

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
        """Address of a server that already runs; None if the launcher starts a server, or if there is none."""
        connects = self.mode.server_runs and self.overrides.get("engine.placement") != "colocated"
        return f"http://localhost:{self.value('--vllm-port')}" if connects else None


@dataclass(frozen=True, kw_only=True)
class Meaning:
    settings: JsonObject = field(default_factory=dict)
    """Values by dotted name."""
    launcher: JsonObject = field(default_factory=dict)
    """Values of the launcher's own flags. A flag that the user gives takes precedence."""
    note: str = ""
    """Line that is printed if the flag was given."""
    remark: str = ""
    """Line that is also printed if the flag has its default."""
    warning: str = ""
    """Warning that is also printed if the flag has its default."""


Translate = Callable[[Any, Command], Meaning]


# Kinds


def sets(*keys: str) -> Translate:
    """Return a meaning that gives the value to these settings."""
    return lambda value, _command: Meaning(settings={} if value is None else dict.fromkeys(keys, value))


def given(**meaning: Any) -> Translate:
    """Return a meaning that a switch has if it is given."""
    return lambda value, _command: Meaning(**meaning) if value else Meaning()


def server(key: str) -> Translate:
    """Return a meaning that gives the value to an engine setting, for a server that the launcher starts."""

    def translate(value: object, command: Command) -> Meaning:
        url = command.server_url
        return Meaning(settings={key: value}, note=f"the server at {url} was started with its own" if url else "")

    return translate


def adapter(key: str) -> Translate:
    """Return a meaning that gives the value to a setting of the adapter, in modes that train one."""
    meaning = sets(key)
    return lambda value, command: meaning(value, command) if command.mode.adapter else _trains_all_weights(command)


def _trains_all_weights(command: Command) -> Meaning:
    return Meaning(note=f"no effect with {MODE} {command.mode_name}, which trains all weights")


def nothing(note: str = "") -> Translate:
    return lambda _value, _command: Meaning(note=note)


def refused(instead: str) -> Translate:
    def translate(value: object, _command: Command) -> Meaning:
        if value is not None:
            raise ValueError(f"not supported; {instead}")
        return Meaning()

    return translate


# Training


def learning_rate(value: float, command: Command) -> Meaning:
    """Set policy.lr to the highest rate that the run reaches: below `value` if warmup is longer than the run."""
    warmup, steps = command.value("--warmup-steps"), command.value("--training-steps")
    return Meaning(settings={"policy.lr": value * steps / warmup if warmup > steps else value})


def warmup(value: int, command: Command) -> Meaning:
    steps = command.value("--training-steps")
    if value <= steps:
        return Meaning(settings={"policy.warmup_steps": value})
    reached = command.value("--lr") * steps / value
    note = f"longer than --training-steps {steps}, so the learning rate rises to {reached:g} only"
    return Meaning(settings={"policy.warmup_steps": steps}, note=note)


def sequences(value: int, command: Command) -> Meaning:
    """Split --batch-size x --gradient-accumulation-steps into prompts and completions."""
    total = value * command.value("--gradient-accumulation-steps")
    if value < 1 or total < 2:
        raise ValueError("times --gradient-accumulation-steps must be at least 2 sequences, which are compared")
    size = group_size_of(total)
    return Meaning(settings={"rollout.prompts_per_step": total // size, "rollout.group_size": size})


def sequence_length(value: int, _command: Command) -> Meaning:
    """Split the length equally: only the sum limits the sequences of an Atropos environment."""
    if value < 2:
        raise ValueError("must be at least 2, a token of prompt and one sampled")
    prompt = value // 2
    return Meaning(settings={"rollout.max_prompt_tokens": prompt, "rollout.max_completion_tokens": value - prompt})


def model_length(value: int, command: Command) -> Meaning:
    if "--max-model-len" not in command.given:
        value = max(value, command.value("--seq-len"))
    return server("engine.max_model_len")(value, command)


def optimizer(value: str, _command: Command) -> Meaning:
    """Set the optimizer. Its weight decay is the default of its library, which Atropos' trainer does not change."""
    decay = 0.0 if value == "adafactor" else 0.01
    missing = value == "adamw_8bit" and importlib.util.find_spec("bitsandbytes") is None
    return Meaning(
        settings={"policy.optimizer.type": "adamw" if missing else value, "policy.optimizer.weight_decay": decay},
        warning="bitsandbytes is not installed; using adamw with four times the state" if missing else "",
    )


def trained_layers(value: str | None, command: Command) -> Meaning:
    if value is not None and command.mode.adapter:
        return Meaning(note=f"no effect with {MODE} {command.mode_name}; --lora-layer-indices chooses its blocks")
    return sets("policy.train_layers")(value, command)


def save_path(value: str, _command: Command) -> Meaning:
    path = Path(value)
    path = path if path.name not in ("", "..") else path.resolve()
    if not path.name:
        raise ValueError("must name a folder")
    return Meaning(settings={"output_dir": str(path.parent), "run_name": path.name})


def dtype(value: str, command: Command) -> Meaning:
    """Set the type of engine and policy. A CPU run without this flag computes in float32."""
    if "--dtype" not in command.given and command.gpus == 0:
        value = "auto"
    if value == "float16":
        return Meaning(settings={"engine.dtype": value}, note="of the server; the policy computes in bfloat16")
    return Meaning(settings={"engine.dtype": value, "policy.compute_dtype": value})


# Weights and servers


def bridge(_value: str, command: Command) -> Meaning:
    if BROADCAST in command.given and SINGLE_COPY in command.given:
        raise ValueError(f"{BROADCAST} keeps two copies of the weights, {SINGLE_COPY} one; remove one of them")
    settings: JsonObject = {"engine.bridge": command.mode.bridge}
    if command.server_url:
        settings["engine.urls"] = [command.server_url]
    return Meaning(settings=settings)


def copies(_value: bool | None, command: Command) -> Meaning:
    """Return no settings, because `bridge` reads these flags."""
    if command.mode_name == "shared_vllm":
        return Meaning()
    return Meaning(note=f"no effect with {MODE} {command.mode_name}; {MODE} shared_vllm needs it")


def restart_interval(value: int, command: Command) -> Meaning:
    if command.mode.bridge in ("adapter", "restart"):
        return Meaning(settings={"sync_frequency": value})
    return Meaning(settings={"sync_frequency": 1}, note=f"no effect: {command.mode_name} has weights after each step")


def port(value: int, command: Command) -> Meaning:
    """Set the port at which environments sample: the port of a server that already runs, else the port of the run."""
    if command.server_url is None:
        return Meaning(settings={"environments.0.server.port": value})
    return Meaning(
        settings={"environments.0.server.port": value + 1},
        remark=f"environments sample from the server at port {value}; the run itself listens at port {value + 1}",
    )


def bridge_config(value: str | None, command: Command) -> Meaning:
    path = value or command.environment.get(BRIDGE_VARIABLE)
    if command.mode.bridge == "shared":
        return sets("engine.bridge_config")(path, command)
    return Meaning(note="no effect: only a shared copy of the weights has such a file")


def dropout(value: float, command: Command) -> Meaning:
    if not 0 <= value < 1:
        raise ValueError("must be at least 0 and less than 1")
    if not command.mode.adapter:
        return _trains_all_weights(command)
    return Meaning(remark="read as 0: the engine samples without dropout" if value else "")


# Processes


def server_gpu(value: int | None, command: Command) -> Meaning:
    """Give the server GPUs of its own if `value` is not 0, the trainer's first GPU."""
    if command.gpus == 0 or command.server_url is not None or command.mode.bridge == "shared":
        return Meaning(note="not read: the server has its GPU already, or shares the trainer's")
    return Meaning(launcher={"engine_gpus": _server_gpus(command)} if value else {})


def _server_gpus(command: Command) -> int:
    """Return the number of GPUs that only the server uses."""
    shares = command.gpus == 0 or command.server_url is not None or command.mode.bridge == "shared"
    return 0 if shares or not command.value("--vllm-gpu") else command.value("--tensor-parallel-size")


def device(value: str | None, _command: Command) -> Meaning:
    if value is None:
        return Meaning()
    if value == "cpu":
        return Meaning(launcher={"gpus": 0})
    if value in ("cuda", "cuda:0"):
        return Meaning(note="nothing to set: a run uses the visible GPUs")
    raise ValueError("must be cuda or cpu; choose GPUs with CUDA_VISIBLE_DEVICES")


def world_size(value: int | None, command: Command) -> Meaning:
    """Set the number of ranks. Atropos' trainer is one process, on one GPU unless CUDA_VISIBLE_DEVICES has several."""
    if value is not None and value < 1:
        raise ValueError("must be at least 1")
    if value is not None and value > 1:
        return Meaning(launcher={"gpus": value + _server_gpus(command)} if command.gpus else {"nproc": value})
    if command.gpus_chosen or command.gpus < 2 or "CUDA_VISIBLE_DEVICES" in command.environment:
        return Meaning()
    gpus = 1 + _server_gpus(command)
    return Meaning(launcher={"gpus": gpus}, remark="one GPU, as in Atropos' trainer; for more add --gpus N")


def rank(value: int, _command: Command) -> Meaning:
    if value:
        advice = "start it once, without --trainer-rank; on further machines add --nodes, --node-rank and --master-addr"
        raise ValueError(f"one command starts all ranks of a machine: {advice}")
    return Meaning(note="not needed: the launcher numbers the ranks")


def inference_nodes(value: int, command: Command) -> Meaning:
    """Require addresses of servers on other machines. Without the flag, NUM_INFERENCE_NODES gives the number."""
    if "--num-inference-nodes" not in command.given:
        text = command.environment.get("NUM_INFERENCE_NODES") or str(value)
        if not text.lstrip("-").isdecimal():
            raise ValueError(f"NUM_INFERENCE_NODES={text!r} must be a whole number")
        value = int(text)
    if value > 0 and "engine.urls" not in command.overrides:
        raise ValueError("servers on other machines are named by address: add --engine.urls '[http://HOST:9001]'")
    return Meaning(note="" if value > 0 else "not needed: the server is on this machine")
