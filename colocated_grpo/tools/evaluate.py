"""Evaluate a model on the evaluation sets of a config: colocated-grpo evaluate MODEL --config FILE

Under torchrun every rank has an engine and completes a part of the prompts.
"""

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path

from colocated_grpo.errors import ConfigError, RunError
from colocated_grpo.launch.cli import parse_rank_arguments
from colocated_grpo.runtime import program, verdict
from colocated_grpo.servers.engine_servers import lora_limit
from colocated_grpo.servers.options import ModelSubject, subject_of
from colocated_grpo.settings import config_file, inputs, rules
from colocated_grpo.settings.schema import Config
from colocated_grpo.tracking.text import figure
from colocated_grpo.types import STDERR, JsonObject


def read_settings(subject: ModelSubject, path: str | Path, overrides: Sequence[str]) -> Config:
    """Return a file's settings for the subject's model; an adapter's base may be overridden. Raises ConfigError."""
    model = ["--model.name", subject.model]
    # `keep_best` names a metric of the run's sets, which overrides may rename. An evaluation keeps nothing.
    nothing_kept = ["--evaluation.keep_best=null", "--evaluation.patience=null"]
    own = [*model, *overrides] if subject.adapter else [*overrides, *model]
    return with_subject(config_file.load_config(path, [*own, *nothing_kept]), subject)


def with_subject(config: Config, subject: ModelSubject) -> Config:
    """Return the config for engines of the subject in this process, without a policy. Raises ConfigError."""
    arguments: JsonObject = {"use_tqdm_on_load": False, **config.engine.args}
    if subject.adapter is not None:
        arguments |= {"enable_lora": True, "max_lora_rank": lora_limit(subject.rank)}
    config = config.model_copy(update={"weights": "copied"})
    config = config.with_values("engine", placement="colocated", args=arguments)
    return config.with_values("policy", lora=None, train_layers=None, routing_replay=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Evaluate and print the metrics. Returns exit code 0, 2 for wrong settings, 1 if the evaluation fails."""
    options, overrides = parse_rank_arguments(_parser(), arguments)
    try:
        if options.output is not None:
            program.check_writable("--output", options.output)  # else the results would be lost
        subject = subject_of(options.model)
        config = settings(subject, options.config, overrides)
        with program.frozen_imports():
            from colocated_grpo.tools.evaluation_run import evaluate, prepare_evaluation

        with prepare_evaluation(config, subject.adapter) as (evaluator, _):
            results = evaluate(evaluator)
        if os.environ["RANK"] == "0":
            print(options.model)
            for name, result in results.items():
                print(f"\n{name}: {result['prompts']} prompts x {result['samples']} completions")
                metrics = {key.removeprefix(f"{name}/"): value for key, value in result["metrics"].items()}
                for key in (key for key in metrics if not key.endswith(STDERR)):
                    print(f"  {key:<18} {figure(metrics, key)}")
            if options.output is not None:
                text = json.dumps({"model": options.model, "evaluations": results}, indent=1)
                options.output.write_text(text, encoding="utf-8")
    except (ConfigError, RunError, OSError) as error:
        return program.exit_code(error, shown=os.environ["RANK"] == "0")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = program.OneLineParser(
        prog="colocated-grpo evaluate",
        description="Evaluate a model on the evaluation sets of a config, or else on its held-out prompts.",
    )
    parser.add_argument("model", metavar="MODEL", help="folder of a model, an adapter or a run, or a name on the Hub")
    parser.add_argument("--config", metavar="FILE", help="YAML file with evaluation.sets (default: the run's own)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write metrics and completions to this JSON file")
    return parser


def settings(subject: ModelSubject, file: str | None, overrides: Sequence[str]) -> Config:
    """Return the config with the model in an engine a rank, and all sets, else held-out prompts. Raises ConfigError."""
    if (path := file or subject.run_config) is None:
        is_path = subject.model.startswith(("/", "."))
        missing = "no such folder; " if is_path and not Path(subject.model).exists() else ""
        rule = "a file with evaluation.sets is required unless MODEL is a run folder"
        raise ConfigError(f"MODEL={subject.model!r}: {missing}--config: {rule}")
    config = read_settings(subject, path, overrides)
    sets = [entry.model_copy(update={"every": 1}) for entry in config.evaluation.sets]
    config = config.with_values("evaluation", sets=sets, every=0 if sets else 1)
    rules.check_world(config, int(os.environ["WORLD_SIZE"]))
    return inputs.check_inputs(config)[0]


if __name__ == "__main__":
    verdict.run_program(main)
