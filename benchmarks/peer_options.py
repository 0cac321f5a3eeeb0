"""Command-line flags of benchmarks that run TRL, and the work and setup that they select."""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from benchmarks.adapters import arguments_for, peft_arguments
from benchmarks.peer import WARMUP, PeerSetup, PeerSpec
from benchmarks.peer_tuning import engine_fraction, total_device_bytes
from benchmarks.throughput import ModelSize
from colocated_grpo.settings.errors import ConfigError
from colocated_grpo.settings.schema import Config
from colocated_grpo.settings.training import PolicyConfig
from colocated_grpo.types import JsonObject

SEED: int = Config.model_fields["seed"].default
CHECKPOINTING = {"on": True, "off": False, None: None}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flag that runs TRL too, and those of its setup."""
    group = parser.add_argument_group("the same work through TRL")
    group.add_argument("--peer", choices=["trl"], help="run the same work through this trainer afterwards")
    _add_setup(group)


def add_setup_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of TRL's setup, for a benchmark that runs TRL alone."""
    _add_setup(parser.add_argument_group("TRL"))
    parser.set_defaults(peer="trl")


def _add_setup(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--peer-steps", type=int, default=4, metavar="N", help="measured steps, after one warm-up step")
    group.add_argument(
        "--peer-micro-batch",
        "--peer-batch",
        type=int,
        metavar="N",
        help="sequences per forward pass on one rank; default: the largest that fits",
    )
    group.add_argument(
        "--peer-checkpointing",
        choices=["on", "off"],
        help="gradient checkpointing; default: off where that fits",
    )
    group.add_argument(
        "--peer-gpu-memory",
        type=float,
        metavar="FRACTION",
        help="vllm_gpu_memory_utilization; default: enough for the work",
    )
    group.add_argument(
        "--peer-until",
        type=float,
        metavar="SECONDS",
        help="time from now after which TRL begins no further step; it always makes one measured step",
    )
    group.add_argument(
        "--peer-args",
        type=_yaml,
        default={},
        metavar="YAML",
        help="further arguments of GRPOConfig: '{torch_compile: true}'",
    )


def _yaml(text: str) -> Any:
    """Raises ValueError, which argparse reports in one line, if the text is not YAML."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError from error


def check(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Exit with a usage error where flags contradict each other."""
    setup = options.peer_micro_batch, options.peer_checkpointing, options.peer_gpu_memory
    if options.peer_micro_batch is not None and options.peer_micro_batch < 1:
        parser.error(f"--peer-micro-batch={options.peer_micro_batch}: must be at least 1")
    if not isinstance(options.peer_args, dict):
        parser.error(f"--peer-args={options.peer_args}: must be a YAML mapping, such as '{{torch_compile: true}}'")
    if options.peer is None and setup != (None, None, None):
        parser.error("--peer: missing; the other --peer-* flags need --peer trl")
    if options.peer and options.peer_steps < 1:
        parser.error(f"--peer-steps={options.peer_steps}: must be at least 1")
    if options.peer and options.gpus == 0 and options.nproc > 1:
        parser.error(f"--nproc={options.nproc}: on the CPU --peer runs one rank")


def check_possible(options: argparse.Namespace, policy: PolicyConfig) -> None:
    """Raise ConfigError, before a model is made, if TRL cannot run this work here.

    policy: our trainer's, because TRL trains the same parameters.
    """
    if policy.lora is not None:
        peft_arguments(policy.lora)
    if line := problem(options, policy):
        raise ConfigError(line)


def adapter(options: argparse.Namespace, policy: PolicyConfig, model: Path) -> JsonObject | None:
    """Return arguments of PEFT's LoraConfig for the adapter; None without. Raises ConfigError if TRL's would differ."""
    if policy.lora is None:
        return None
    return peft_arguments(policy.lora) if options.peer is None else arguments_for(model, policy.lora)


def problem(options: argparse.Namespace, policy: PolicyConfig) -> str | None:
    """Return one line that says why TRL cannot run this work here; None if it can.

    policy: our trainer's, because TRL trains the same parameters.
    """
    if options.peer is None:
        return None
    ranks = max(1, options.gpus)
    completions = options.prompts * options.group_size
    on_ranks = f"{completions} completions on {ranks} rank{'s' if ranks > 1 else ''}"
    if completions % ranks:
        return f"--gpus={ranks}: {on_ranks} are not a multiple of it"
    if options.peer_micro_batch and completions % (ranks * options.peer_micro_batch):
        return f"--peer-micro-batch={options.peer_micro_batch}: {on_ranks} are not a multiple of it"
    if policy.train_layers is not None:
        return "policy.train_layers: TRL trains all weights or an adapter; leave it out with --peer trl"
    if policy.lora is not None and policy.lora.layers is not None:
        return "policy.lora.layers: adapters of TRL are in all blocks; leave it out with --peer trl"
    if find_spec("trl") is None:
        return "--peer=trl: the package trl is not installed; pip install trl"
    if options.gpus and find_spec("liger_kernel") is None:
        return "--peer=trl: TRL is fastest with liger-kernel, which is not installed; pip install liger-kernel"
    return None


def spec(options: argparse.Namespace, model: Path, size: ModelSize, lora: JsonObject | None, began: float) -> PeerSpec:
    """Return the work with TRL's setup. The search for the micro-batch starts with the whole batch.

    lora: arguments of PEFT's LoraConfig. began: Unix time from which --peer-until counts.
    """
    completions = options.prompts * options.group_size // max(1, options.gpus)
    fraction = options.peer_gpu_memory
    if fraction is None:
        device_bytes = total_device_bytes(options.gpus)
        fraction = engine_fraction(
            size, completions, options.max_completion, options.gpus, device_bytes, adapters=lora is not None
        )
    liger = True if options.gpus else None  # Liger's kernels need a GPU
    return PeerSpec(
        model=str(model.resolve()),
        prompts=options.prompts,
        group_size=options.group_size,
        max_completion=options.max_completion,
        steps=WARMUP + options.peer_steps,
        until=None if options.peer_until is None else began + options.peer_until,
        seed=SEED,
        gpus=options.gpus,
        setup=PeerSetup(micro_batch=completions, liger=liger, engine_fraction=fraction),
        lora=lora,
        extra_arguments=options.peer_args,
    )
