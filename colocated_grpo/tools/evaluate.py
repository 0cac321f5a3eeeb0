"""Evaluate a model on the evaluation sets of a config: python -m colocated_grpo.tools.evaluate MODEL --config FILE

MODEL is a model's folder, a name on the Hub, an adapter's folder, or a run folder. Under torchrun every rank has an
engine and completes a part of the prompts.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from colocated_grpo.runtime.program import (
    OneLineParser,
    frozen_imports,
    parse_rank_arguments,
    prepare_libraries,
)
from colocated_grpo.runtime.verdict import RUN_ERROR, USAGE_ERROR, run_program
from colocated_grpo.types import JsonObject

if TYPE_CHECKING:
    from colocated_grpo.settings.schema import Config
    from colocated_grpo.tools.subject import ModelSubject


def main(arguments: Sequence[str] | None = None) -> int:
    """Evaluate and print the metrics. Returns exit code 0, 2 for wrong settings, 1 if the evaluation fails."""
    options, overrides = parse_rank_arguments(_parser(), arguments)
    prepare_libraries("WARNING", prefix=f"[rank {os.environ['RANK']}] ")
    from colocated_grpo.errors import RunError
    from colocated_grpo.settings.errors import ConfigError
    from colocated_grpo.tools.subject import subject_of

    try:
        subject = subject_of(options.model)
        config = settings(subject, options.config, overrides)
        with frozen_imports():
            from colocated_grpo.tools.evaluation_run import evaluate

        results = evaluate(config, subject.adapter)
        if results is not None:  # on rank 0
            print_results(options.model, results)
            if options.output is not None:
                text = json.dumps({"model": options.model, "evaluations": results}, indent=1)
                Path(options.output).write_text(text, encoding="utf-8")
    except (ConfigError, RunError, OSError) as error:
        if os.environ["RANK"] == "0":
            print(*(f"error: {line}" for line in str(error).splitlines()), sep="\n", file=sys.stderr)
        return USAGE_ERROR if isinstance(error, ConfigError) else RUN_ERROR
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="python -m colocated_grpo.tools.evaluate",
        description="Evaluate a model on the evaluation sets of a config, or else on its held-out prompts.",
        allow_abbrev=False,
    )
    parser.add_argument("model", metavar="MODEL", help="folder of a model, an adapter or a run, or a name on the Hub")
    parser.add_argument("--config", metavar="FILE", help="YAML file with evaluation.sets (default: the run's own)")
    parser.add_argument("--output", metavar="FILE", help="write metrics and completions to this JSON file")
    return parser


def settings(subject: ModelSubject, config_file: str | None, overrides: Sequence[str]) -> Config:
    """Return the config with the model, one engine per rank, and all sets due; without sets, the held-out prompts.

    Raises ConfigError.
    """
    from colocated_grpo.settings.errors import ConfigError
    from colocated_grpo.settings.inputs import check_inputs
    from colocated_grpo.settings.rules import check_world
    from colocated_grpo.tools.subject import read_settings

    path = config_file or subject.run_config
    if path is None:
        raise ConfigError("--config: required unless MODEL is a run folder; give a file with evaluation.sets")
    config = read_settings(subject, path, overrides)
    sets = [entry.model_copy(update={"every": 1}) for entry in config.evaluation.sets]
    if not sets and not config.evaluation.every:
        raise ConfigError("evaluation: nothing to evaluate; add evaluation.sets, or set evaluation.every above 0")
    every = 0 if sets else config.evaluation.every
    evaluation = config.evaluation.model_copy(update={"sets": sets, "every": every})
    config = config.model_copy(update={"evaluation": evaluation})
    check_world(config, int(os.environ["WORLD_SIZE"]))
    return check_inputs(config)[0]


def print_results(model: str, results: JsonObject) -> None:
    """Print a line for each metric, with its standard error."""
    from colocated_grpo.evaluation.metrics import STDERR

    print(model)
    for name, result in results.items():
        metrics = {key.removeprefix(f"{name}/"): value for key, value in result["metrics"].items()}
        print(f"\n{name}: {result['prompts']} prompts x {result['samples']} completions")
        for key, value in metrics.items():
            if not key.endswith(STDERR):
                error = metrics.get(key + STDERR)
                print(f"  {key:<18} {value:10.4f}" + ("" if error is None else f"  +- {error:.4f}"))


if __name__ == "__main__":
    run_program(main)
