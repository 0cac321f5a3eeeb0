"""The command `colocated-grpo atropos`: command lines of Atropos' example trainer, translated into a run's settings.

Names and defaults of the flags are those of Atropos' guides and of Atropos 0.4.0. docs/guides/from_atropos.md explains
the meanings of the flags. Settings that no flag sets are in atropos_command.yaml.
"""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from colocated_grpo.settings import config_file, tree
from colocated_grpo.settings.errors import ConfigError, dotted, raise_on, sections
from colocated_grpo.settings.names import atropos_meanings as means
from colocated_grpo.settings.schema import Config
from colocated_grpo.types import JsonObject

BASE = Path(__file__).with_suffix(".yaml")
MODEL = "--model-name"


class Flag:
    def __init__(self, names: str, kind: type, default: object, meaning: means.Translate, *choices: str) -> None:
        """names: separated by spaces. kind: bool is a flag without a value, list a flag with one or more values."""
        self.names = names.split()
        self.kind = kind
        self.default = default
        self.meaning = meaning
        self.choices = choices or None


_ADAFACTOR = "Adafactor uses --lr as it is"
_ADAPTER = "not needed: the modes lora_only and lora_restart train an adapter"
_MEETING = "not needed: the launcher lets the ranks find each other; see --nodes and --master-addr"
_RECORDS = "not needed: every step's times and memory are in metrics.jsonl (seconds/*, memory/*)"
_UTILIZATION = means.server("engine.gpu_memory_utilization")

FLAGS: tuple[Flag, ...] = (
    # Model and training
    Flag("--model-name --model", str, None, means.sets("model.name")),
    Flag("--lr --learning-rate", float, 1e-5, means.learning_rate),
    Flag("--training-steps", int, 10, means.sets("training_steps")),
    Flag("--warmup-steps", int, 0, means.warmup),
    Flag("--batch-size", int, 2, means.sequences),
    Flag("--gradient-accumulation-steps", int, 32, means.nothing()),
    Flag("--seq-len", int, 2048, means.sequence_length),
    Flag("--optimizer", str, "adamw_8bit", means.optimizer, "adamw", "adamw_8bit", "adafactor"),
    Flag("--adafactor-scale-parameter", bool, None, means.refused(_ADAFACTOR)),
    Flag("--adafactor-relative-step", bool, None, means.refused(_ADAFACTOR)),
    Flag("--device", str, None, means.device),
    Flag("--save-path", str, "trained_model_checkpoints", means.save_path),
    Flag("--checkpoint-interval", int, 3, means.sets("checkpoint.export_every")),
    Flag("--clip-eps", float, 0.2, means.sets("loss.clip_low", "loss.clip_high")),
    Flag("--kl-coef", float, 0.0, means.sets("loss.kl.coef")),
    Flag("--train-layer-indices", str, None, means.trained_layers),
    # Weights
    Flag(means.MODE, str, "none", means.bridge, *means.MODES),
    Flag(means.BROADCAST, bool, None, means.copies),
    Flag(means.SINGLE_COPY, bool, None, means.copies),
    Flag(means.BRIDGE_CONFIG, str, None, means.bridge_config),
    Flag("--vllm-restart-interval", int, 3, means.restart_interval),
    Flag("--lora-r", int, 16, means.adapter("policy.lora.rank")),
    Flag("--lora-alpha", float, 32, means.adapter("policy.lora.alpha")),
    Flag("--lora-dropout", float, 0.05, means.dropout),
    Flag("--lora-target-modules", list, ["q_proj", "v_proj"], means.adapter("policy.lora.target_modules")),
    Flag("--lora-layer-indices", str, None, means.adapter("policy.lora.layers")),
    # Server
    Flag("--vllm-port --port", int, 9001, means.port),
    Flag("--vllm-gpu", int, None, means.server_gpu),
    Flag("--gpu-memory-utilization --vllm-gpu-memory-utilization", float, 0.45, _UTILIZATION),
    Flag("--max-model-len", int, 4096, means.model_length),
    Flag("--dtype", str, "bfloat16", means.dtype, "bfloat16", "float16", "auto"),
    Flag("--tensor-parallel-size", int, 1, means.server("engine.tensor_parallel_size")),
    Flag("--enforce-eager", bool, False, means.server("engine.enforce_eager")),
    Flag("--enable-lora", bool, None, means.nothing(_ADAPTER)),
    # Atropos and tracking
    Flag("--atropos-url", str, "http://localhost:8000", means.sets("environments.0.url")),
    Flag("--use-wandb", bool, None, means.given(settings={"tracking.wandb": "online"})),
    Flag("--wandb-project", str, None, means.sets("tracking.wandb_project")),
    Flag("--wandb-group", str, None, means.sets("tracking.wandb_group")),
    # Processes and logs
    Flag("--trainer-rank", int, 0, means.rank),
    Flag("--world-size", int, None, means.world_size),
    Flag("--init-method", str, "env://", means.nothing(_MEETING)),
    Flag("--num-inference-nodes", int, 0, means.inference_nodes),
    Flag("--debug-loading", bool, None, means.given(launcher={"log_level": "DEBUG"})),
    Flag("--benchmark", bool, None, means.nothing(_RECORDS)),
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add Atropos' flags to the launcher's. A flag that is not given leaves no attribute."""
    parser.prog += " atropos"
    parser.description = "Run a command line of Atropos' example trainer: docs/guides/from_atropos.md"
    group = parser.add_argument_group("flags of Atropos' example trainer")
    for flag in FLAGS:
        shown = "" if flag.default is None or flag.default is False else f"default: {_text(flag.default)}"
        options: dict[str, Any] = {"dest": flag.names[0], "default": argparse.SUPPRESS, "help": shown}
        if flag.kind is bool:
            options["action"] = "store_true"
        else:
            metavar = {int: "N", float: "X"}.get(flag.kind, "TEXT")
            metavar = "{" + ",".join(flag.choices) + "}" if flag.choices else metavar
            kind, nargs = (str, "+") if flag.kind is list else (flag.kind, None)
            options |= {"type": kind, "nargs": nargs, "choices": flag.choices, "metavar": metavar}
        group.add_argument(*flag.names, **options)


def read_command(
    arguments: Sequence[str],
    parser: argparse.ArgumentParser,
    environment: Mapping[str, str],
    visible_gpus: Callable[[Mapping[str, str]], int],
) -> tuple[argparse.Namespace, list[str], list[str]]:
    """Return the launcher's flags, overrides of settings (the user's own last), and lines to print. Raises ConfigError.

    parser: the launcher's parser. Atropos' flags are added to it.
    """
    add_flags(parser)
    options, rest = parser.parse_known_args(arguments)
    if options.config is not None:
        raise ConfigError(f"--config={options.config}: not used by this command; add settings as --section.key VALUE")
    _reject_unknown_flags(rest, parser)
    command = means.Command(
        given={flag.names[0]: getattr(options, flag.names[0]) for flag in FLAGS if hasattr(options, flag.names[0])},
        defaults={flag.names[0]: flag.default for flag in FLAGS},
        overrides={dotted(key): text for key, text in config_file.parse_overrides(rest)},
        environment=environment,
        gpus=visible_gpus(environment) if options.gpus is None else options.gpus,
        gpus_chosen=options.gpus is not None,
    )
    if MODEL not in command.given:
        raise ConfigError(f"{MODEL}: required: a folder or the name of a model on the Hugging Face Hub")
    settings: JsonObject = {}
    launcher: JsonObject = {"config": str(BASE)}
    notes: list[str] = []
    problems: list[str] = []
    for flag in FLAGS:
        name, value = flag.names[0], command.value(flag.names[0])
        try:
            meaning = flag.meaning(value, command)
        except ValueError as rule:
            problems.append(f"{name}={_text(value)}: {rule}")
            continue
        settings |= meaning.settings
        launcher |= meaning.launcher
        shown = name if flag.kind is bool else f"{name} {_text(value)}"
        given = meaning.note if name in command.given else ""
        lines = (("note", given), ("note", meaning.remark), ("warning", meaning.warning))
        notes += [f"{kind}: {shown}: {text}" for kind, text in lines if text]
    raise_on(*problems)
    for name, value in launcher.items():
        if getattr(options, name) == parser.get_default(name):  # the user's own flag takes precedence
            setattr(options, name, value)
    overrides = [word for key, value in settings.items() for word in (f"--{key}", _text(value))]
    return options, [*overrides, *rest], notes


def _reject_unknown_flags(arguments: Sequence[str], parser: argparse.ArgumentParser) -> None:
    """Raise ConfigError for a flag that is neither Atropos', nor the launcher's, nor a setting of this project."""
    flags = [name for action in parser._actions for name in action.option_strings if name.startswith("--")]
    settings = [f"--{name}" for name, field in Config.model_fields.items() if not sections(field.annotation)]
    lines = []
    for argument in arguments:
        name = argument.partition("=")[0]
        known = "." in name or f"--{name[2:].replace('-', '_')}" in settings
        if name.startswith("--") and not known:
            near = get_close_matches(name.replace("_", "-"), [*flags, *settings], n=1)
            lines.append(f"{name}: unknown flag; " + (f"did you mean {near[0]}?" if near else "--help lists all flags"))
    raise_on(*lines)


def _text(value: object) -> str:
    """Return the command-line argument that is parsed as this value."""
    if isinstance(value, str) and tree.parse_value(value) == value:
        return value
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else json.dumps(value)
