"""Learning beside TRL: the same work through both trainers, `python -m benchmarks.learn COMMAND`.

    tune     find TRL's fastest settings, a few steps each
    run      train once with one trainer, and write its curve as JSON
    suite    make many runs, several at a time; runs that have a JSON are skipped
    score    held-out rewards of all saved models, sampled by one engine
    probe    rewards of the start model on candidate tasks
    collect  write the runs and scores of a folder to docs/results/learn_*.json
    table    print the tables of these files
    draw     draw reward against step and against seconds

--help after a command lists its flags. Figures of runs that shared a device (--parallel) are compared per step only.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from benchmarks import learn_report
from benchmarks.learn_jobs import LearningRun, run_jobs
from benchmarks.learn_run import Work, library_variables, run_ours
from benchmarks.learn_tasks import GYM, GYM_ARGS, TASKS, task_of
from benchmarks.learn_trl import TRLSetup, run_trl
from colocated_grpo.runtime.verdict import end_process
from colocated_grpo.types import JsonObject

OURS, TRL = TRAINERS = ("ours", "trl")
SETUPS: dict[str, JsonObject] = {
    "plain": {},
    "liger": {"liger": True},
    "sleep": {"sleep": True},
    "half": {"micro_batch": 128},
    "compile": {"compile": True},
    "flash": {"attention": "flash_attention_4"},
    "liger-flash": {"liger": True, "attention": "flash_attention_4"},
    "liger-compile": {"liger": True, "compile": True},
}
"""Settings of TRL that `tune` compares; all without gradient checkpointing. A setup that fails is reported."""
WARMUP = 2
"""Steps of a tuning run that do not count."""
TUNED = "tuned"


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    options = parser().parse_args(arguments)
    options.arguments = arguments
    return options.command(options)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    one = commands.add_parser("run", help="train once")
    one.add_argument("--trainer", choices=TRAINERS, required=True)
    one.add_argument("--task", type=_task, default="sums", help=f"{', '.join(TASKS)} or {GYM}DATASET")
    one.add_argument("--mode", choices=["full", "lora"], default="full")
    one.add_argument("--seed", type=int, default=0)
    one.add_argument("--json", type=Path, required=True, help="result file to write")
    one.add_argument("--save", type=Path, help="folder for the final model")
    _add_work(one)
    one.set_defaults(command=run)

    many = commands.add_parser("suite", help="make many runs")
    many.add_argument("--tasks", type=_task, nargs="+", default=["sums"])
    many.add_argument("--modes", nargs="+", choices=["full", "lora"], default=["full"])
    many.add_argument("--trainers", nargs="+", choices=TRAINERS, default=list(TRAINERS))
    many.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    many.add_argument("--models", type=Path, help="folder for the final models")
    _add_work(many)
    _add_jobs(many)
    many.set_defaults(command=suite)

    tuning = commands.add_parser("tune", help="find TRL's fastest settings")
    tuning.add_argument("--task", type=_task, default="sums")
    tuning.add_argument("--mode", choices=["full", "lora"], default="full")
    tuning.add_argument("--setups", nargs="+", choices=SETUPS, default=list(SETUPS))
    _add_work(tuning, steps=6)
    _add_jobs(tuning)
    tuning.set_defaults(command=tune, parallel=1)

    scoring = commands.add_parser("score", help="held-out rewards of saved models")
    scoring.add_argument("--model", type=Path, required=True, help="the start model, scored as well")
    scoring.add_argument("--out", type=Path, required=True, help="folder of the runs' JSON files")
    scoring.add_argument("--prompts", type=int, default=256)
    scoring.set_defaults(command=score)

    probing = commands.add_parser("probe", help="rewards of the start model")
    probing.add_argument("--model", type=Path, required=True)
    probing.add_argument("--tasks", type=_task, nargs="+", default=[*TASKS, *(GYM + name for name in GYM_ARGS)])
    probing.add_argument("--prompts", type=int, default=64)
    probing.set_defaults(command=probe)
    learn_report.add_commands(commands)
    return parser


def _add_work(parser: argparse.ArgumentParser, steps: int = 100) -> None:
    parser.add_argument("--model", required=True, help="folder of the start model")
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--prompts", type=int, default=32, help="prompts per step")
    parser.add_argument("--group-size", type=int, default=8, help="completions per prompt")
    parser.add_argument("--parallel", type=int, default=1, help="runs on the device at the same time")
    parser.add_argument("--ours", type=_mapping, default={}, metavar="YAML", help="further settings of our trainer")
    parser.add_argument("--trl", type=_mapping, default={}, metavar="YAML", help="further arguments of GRPOConfig")
    parser.add_argument(
        "--setup", type=_setup, default=TRLSetup(), metavar="YAML", help="TRL's speed: {sleep: true}, or a file of tune"
    )
    parser.add_argument("--label", default="", help="part of the names of TRL's runs, to tell setups apart")


def _add_jobs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True, help="folder for one JSON and one log for each run")
    parser.add_argument("--timeout", type=float, default=400.0, help="seconds after which a run is ended")
    parser.add_argument("--seconds", type=float, default=570.0, help="seconds after which all runs are ended")


def _task(name: str) -> str:
    return task_of(name).name


def _mapping(text: str) -> JsonObject:
    content = yaml.safe_load(text)
    if not isinstance(content, dict):
        raise argparse.ArgumentTypeError(f"{text!r}: must be a YAML mapping")
    return content


def _setup(text: str) -> TRLSetup:
    """Return the setup of a YAML mapping, or the best one in a file of `tune`."""
    file = Path(text)
    return TRLSetup(**(json.loads(file.read_text())["best"] if file.suffix == ".json" else _mapping(text)))


def run(options: argparse.Namespace) -> int:
    """Train in this process and write the result. Never returns: vLLM's teardown may crash or block."""
    for name, value in library_variables(options.parallel).items():
        os.environ.setdefault(name, value)
    code = 0
    try:
        work = Work(
            task=options.task,
            mode=options.mode,
            model=options.model,
            seed=options.seed,
            steps=options.steps,
            prompts=options.prompts,
            group_size=options.group_size,
            parallel=options.parallel,
        )
        if options.trainer == OURS:
            record = run_ours(work, options.ours, options.save)
        else:
            record = run_trl(work, options.setup, options.trl, options.save)
        _write_run(options, work, record)
    except BaseException:
        traceback.print_exc()
        code = 1
    end_process(code)


def _write_run(options: argparse.Namespace, work: Work, record: JsonObject) -> None:
    from benchmarks.results import describe

    result = {
        **describe("learn", options.arguments, ranks=1),
        "trainer": options.trainer,
        "label": options.label if options.trainer == TRL else "",
        "work": {**asdict(work), "model": Path(work.model).name, "lr": work.lr},
        "saved": None if options.save is None else str(options.save),
        **record,
    }
    write(options.json, result)
    rewards = [row["reward"] for row in record["steps"]]
    print(f"first and last ten steps: {statistics.mean(rewards[:10]):.3f} {statistics.mean(rewards[-10:]):.3f}")
    print(f"median seconds of a step: {statistics.median(row['seconds'] for row in record['steps']):.3f}")


def write(file: Path, content: JsonObject) -> None:
    """Write JSON atomically: a file that exists is complete."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    part.write_text(json.dumps(content, indent=1, default=str) + "\n")
    part.rename(file)


def suite(options: argparse.Namespace) -> int:
    jobs = list(suite_jobs(options))
    return 1 if run_jobs(jobs, options.parallel, options.timeout, time.time() + options.seconds) else 0


def suite_jobs(options: argparse.Namespace) -> Iterator[LearningRun]:
    """Yield the runs: all trainers of one seed before the next seed, so that an interrupted suite stays paired."""
    for task, mode, seed, trainer in product(options.tasks, options.modes, options.seeds, options.trainers):
        label = f"-{options.label}" if options.label and trainer == TRL else ""
        name = f"{_work_name(options.model, task, mode)}_{trainer}{label}_{seed}"
        save = [] if options.models is None else ["--save", str(options.models / name)]
        yield _job(options, name, task, mode, trainer, seed, options.setup, [*save, "--label", options.label])


def _work_name(model: str, task: str, mode: str) -> str:
    return f"{Path(model).name}_{task.removeprefix(GYM)}_{mode}"


def _job(
    options: argparse.Namespace, name: str, task: str, mode: str, trainer: str, seed: int, setup: TRLSetup, more: Any
) -> LearningRun:
    result = options.out / f"{name}.json"
    values = {
        "trainer": trainer, "task": task, "mode": mode, "seed": seed, "json": result, "model": options.model,
        "steps": options.steps, "prompts": options.prompts, "group-size": options.group_size,
        "parallel": options.parallel, "ours": json.dumps(options.ours), "trl": json.dumps(options.trl),
        "setup": json.dumps(asdict(setup)),
    }  # fmt: skip
    flags = [text for flag, value in values.items() for text in (f"--{flag}", str(value))]
    return LearningRun(name=name, flags=[*flags, *more], result=result)


def tune(options: argparse.Namespace) -> int:
    """Measure TRL's setups one after the other, and write the fastest to OUT/tuned_*.json."""
    work = _work_name(options.model, options.task, options.mode)
    setups = {name: TRLSetup(**SETUPS[name]) for name in options.setups}
    jobs = {
        name: _job(options, f"{TUNED}-{name}_{work}", options.task, options.mode, TRL, 0, setup, ["--label", name])
        for name, setup in setups.items()
    }
    run_jobs(list(jobs.values()), 1, options.timeout, time.time() + options.seconds)
    tries: list[JsonObject] = []
    for name, job in jobs.items():
        seconds = None
        if job.result.exists():
            rows = json.loads(job.result.read_text())["steps"][WARMUP:]
            seconds = statistics.median(row["seconds"] for row in rows)
        tries.append({"name": name, "setup": asdict(setups[name]), "median_seconds": seconds})
        print(f"{name}: {'failed' if seconds is None else f'{seconds:.3f} s a step'}")
    measured = [each for each in tries if each["median_seconds"] is not None]
    if not measured:
        return 1
    best = min(measured, key=lambda each: each["median_seconds"])
    write(options.out / f"{TUNED}_{work}.json", {"best": best["setup"], "steps": options.steps, "tries": tries})
    return 0


def score(options: argparse.Namespace) -> int:
    """Score the models that the runs in OUT have saved, and add them to OUT/scores_*.json."""
    file = learn_report.scores_file(options.out, options.model.name)
    scores: JsonObject = json.loads(file.read_text()) if file.exists() else {}
    models, tasks = {}, {}
    for name, result in learn_report.read_runs(options.out).items():
        if result["work"]["model"] == options.model.name and result["saved"] and Path(result["saved"]).is_dir():
            task = tasks.setdefault(result["work"]["task"], task_of(result["work"]["task"]))
            if name not in scores:
                models[name] = Path(result["saved"]), task
    if not models:
        print(f"--out={options.out}: no model to score, or all are scored")
        return 0
    return _sample(options, list(tasks.values()), models, lambda name, row: write(file, scores | {name: row}), scores)


def probe(options: argparse.Namespace) -> int:
    return _sample(options, [task_of(name) for name in options.tasks], {}, lambda _name, _row: None, {})


def _sample(options: argparse.Namespace, tasks: Any, models: Any, keep: Any, scores: JsonObject) -> int:
    """Print and keep the scores of each model. Never returns, as `run`."""
    from colocated_grpo.runtime.program import rank_environment

    variables = library_variables(1) | rank_environment(os.environ)
    for name, value in variables.items():
        os.environ.setdefault(name, value)
    code = 0
    try:
        from benchmarks.learn_score import score_models

        for name, row in score_models(options.model, tasks, models, options.prompts):
            scores[name] = row
            keep(name, row)
            figures = (f"{key} {part['mean']:.3f} +- {part.get('mean_stderr', 0):.3f}" for key, part in row.items())
            print(f"{name}: {', '.join(figures)}; {row['sampled']['length']:.0f} tokens", flush=True)
    except BaseException:
        traceback.print_exc()
        code = 1
    end_process(code)


if __name__ == "__main__":
    sys.exit(main())
