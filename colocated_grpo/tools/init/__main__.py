"""Write a config for your data: colocated-grpo init questions.jsonl --model NAME --gpus N"""

import argparse
import os
import shlex
import sys
import textwrap
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import yaml

from colocated_grpo.environments.rows import dataset, readers
from colocated_grpo.errors import ConfigError, RunError
from colocated_grpo.launch.cli import visible_gpus
from colocated_grpo.runtime import processes, program, verdict
from colocated_grpo.settings import config_file, inputs
from colocated_grpo.settings.run_sizes import GIB, Placement, gib
from colocated_grpo.tools.init.choices import Choices, Setting, learning_rate, make_plan
from colocated_grpo.types import JsonObject

WIDTH = 110
SETTINGS = Path(__file__).parents[2] / "settings"
SETTINGS_PAGE = SETTINGS.parents[1] / "docs/settings.md"  # written from the docstrings in SETTINGS; not in a wheel


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the file. Returns 0, or 2 after printing what is wrong."""
    program.prepare_streams()
    parser = program.OneLineParser(
        prog="colocated-grpo init",
        description="Write a commented config for a data file, a model and a number of GPUs.",
    )
    parser.add_argument("data", type=Path, metavar="DATA", help=f"{', '.join(readers.READERS)}: one question a row")
    parser.add_argument("--model", required=True, metavar="NAME", help="folder or Hugging Face name")
    parser.add_argument("--gpus", type=int, metavar="N", help="GPUs of this node; 0: the CPU (default: all visible)")
    parser.add_argument("--gpu-memory", type=float, metavar="GIB", help="memory of one GPU (default: by nvidia-smi)")
    parser.add_argument("--reward", metavar="NAME", help="a built-in reward or file.py:function (default: by the data)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="YAML file (default: DATA.yaml in this folder)")
    options = parser.parse_args(arguments)
    program.set_up_logging("INFO")
    try:
        text = _text(options)
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(text, encoding="utf-8")
        inputs.check_inputs(config_file.read_config(options.output).config)
    except (ConfigError, RunError, OSError) as error:
        program.exit_code(error)
        return verdict.USAGE_ERROR
    with suppress(OSError):  # a closed console
        print(f"{text}\nwritten to {options.output}; the first lines are the next commands", flush=True)
    return 0


def _text(options: argparse.Namespace) -> str:
    """Return the text of the config. Sets the options that were left out."""
    options.output = options.output or Path(options.data.stem + ".yaml")
    if options.output.exists():
        raise ConfigError(f"--output={str(options.output)!r}: exists already; choose another name, or delete it")
    options.gpus = visible_gpus(os.environ) if options.gpus is None else options.gpus
    place = _placement(options)
    plan = make_plan(options.data, options.model, options.reward, place)
    command = f"colocated-grpo --gpus {options.gpus} --config {shlex.quote(str(options.output))}"
    page = SETTINGS_PAGE if SETTINGS_PAGE.is_file() else f"the docstrings in {SETTINGS}"
    heading = [f"Check it: {command} --dry-run", f"Train:    {command}", f"Settings: {page}"]
    return config_text(plan, options, place, heading)


def _placement(options: argparse.Namespace) -> Placement:
    if options.gpus < 0:
        raise ConfigError(f"--gpus={options.gpus}: must be at least 0")
    if options.gpus == 0:
        return Placement(ranks=1, on_gpu=False, device_bytes=psutil.virtual_memory().total)
    if options.gpu_memory is not None and options.gpu_memory <= 0:
        raise ConfigError(f"--gpu-memory={options.gpu_memory:g}: must be above 0")
    if not (memory := int((options.gpu_memory or 0) * GIB)):
        gpus = processes.visible(processes.list_gpus().gpus, os.environ)[: options.gpus]
        known = [gpu.total for gpu in gpus if gpu.total]
        if not known:
            advice = "add --gpu-memory 80 for the machine that will train, or use the CPU with --gpus 0"
            raise ConfigError(f"--gpus={options.gpus}: no GPU is visible here; {advice}")
        memory = min(known)
    return Placement(ranks=options.gpus, on_gpu=True, device_bytes=memory)


def config_text(plan: Choices, options: argparse.Namespace, place: Placement, heading: Sequence[str]) -> str:
    """Return YAML, in which file names are relative to the config's folder. heading: comments at its top."""
    folder = options.output.parent
    changes: JsonObject = {} if plan.memory is None else dict(plan.memory.changes)
    policy, engine = changes.pop("policy", {}), changes.pop("engine", {})
    rate, steps = learning_rate(plan.sizes, plan.memory), plan.steps.value
    evaluation = [Setting("every", max(1, steps // 10), "steps between evaluations on held-out rows")]
    sections: Mapping[str, Sequence[Setting]] = {
        "rollout": plan.rollout,
        "policy": [rate, *(Setting(key, value) for key, value in policy.items())],
        "engine": [Setting(key, value) for key, value in engine.items()],
        "evaluation": evaluation if dataset.num_held_out(None, plan.rows) else [],
        "checkpoint": [Setting("every", max(1, steps // 4), "steps; a stopped run continues with --resume auto")],
    }
    top = [Setting(key, value, "policy and engine use one copy of the weights") for key, value in changes.items()]
    blocks = [
        [f"# {line}" for line in heading],
        _lines(_model(plan, options.model, place, folder), ""),
        ["environments:", "  - type: dataset", *_section(_environment(plan, str(options.data), folder), "    ")],
        *(_lines(setting, "") for setting in [plan.steps, *top]),
        *([f"{name}:", *_section(section, "  ")] for name, section in sections.items() if section),
    ]
    return "\n\n".join("\n".join(block) for block in blocks) + "\n"


def _model(plan: Choices, name: str, place: Placement, folder: Path) -> Setting:
    name = _beside(name, folder) if Path(name).is_dir() else name
    if plan.sizes is None or plan.memory is None:
        return Setting("model", name, "the sizes are unknown: a dry run cannot compare the memory either")
    total, need = plan.sizes.total, plan.memory.need
    count = f"{total / 1e9:.3g} B" if total >= 1e9 else f"{total / 1e6:.3g} M"
    host = f", and {gib(need.host)} of host memory" if need.host else ""
    where = f"each GPU of {gib(place.device_bytes)}" if place.on_gpu else "the CPU"
    needs = f"{gib(need.training)} while training and {gib(need.generating)} while generating{host}"
    text = f"{count} parameters. By arithmetic, {where} needs at least {needs}: {plan.memory.why}."
    if place.on_gpu:
        sized = "a run sizes cache and micro-batches by the free memory that it finds"
        text += f" What is left holds the KV cache of {plan.memory.sequences:,} full sequences; {sized}."
    return Setting("model", name, text)


def _environment(plan: Choices, data: str, folder: Path) -> Sequence[Setting]:
    reward = plan.reward
    section = [
        Setting("name", _beside(data, folder), f"{plan.rows:,} rows"),
        Setting("prompt_column", plan.column),
        Setting("rewards", [_beside(reward.name, folder)], reward.why),
    ]
    if reward.rename is not None:
        section.append(Setting("columns", {reward.rename[0]: reward.rename[1]}, "the name that the reward reads"))
    if reward.system_prompt is not None:
        section.append(Setting("system_prompt", reward.system_prompt, "asks for the form that the reward reads"))
    return section


def _section(section: Sequence[Setting], indent: str) -> list[str]:
    return [line for setting in section for line in _lines(setting, indent)]


def _lines(setting: Setting, indent: str) -> list[str]:
    comment = [f"{indent}# {line}" for line in textwrap.wrap(setting.why, WIDTH - len(indent))]
    text = yaml.safe_dump(setting.value, default_flow_style=True, width=10**6, allow_unicode=True, sort_keys=False)
    text = f"{setting.value:g}" if isinstance(setting.value, float) else text.removesuffix("...\n").strip()
    return [*comment, f"{indent}{setting.key}: {text}"]


def _beside(name: str, folder: Path) -> str:
    """Return a file name, or 'file.py:function', relative to `folder`, which contains the config."""
    file, separator, wanted = name.rpartition(":") if ".py:" in name else (name, "", "")
    if not os.path.exists(file) or os.path.isabs(file):
        return name
    relative = os.path.relpath(file, folder)
    # Write a folder as ./folder: without the prefix, it could also be the name of a dataset or model on the Hub.
    return (relative if Path(file).is_file() or relative[0] == "." else f"./{relative}") + separator + wanted


if __name__ == "__main__":
    sys.exit(main())
