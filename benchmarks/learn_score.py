"""Held-out scores of `benchmarks.learn`: one engine samples with the weights of every model in turn."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from zlib import crc32

from safetensors import safe_open
from torch import Tensor

from benchmarks.harness import config_of
from benchmarks.learn_tasks import LearnTask
from colocated_grpo.evaluation.evaluator import EvaluationSet, Evaluator
from colocated_grpo.runtime.text_part import weight_files
from colocated_grpo.servers.options import ModelSubject
from colocated_grpo.settings.schema import Config
from colocated_grpo.tools.evaluate import with_subject
from colocated_grpo.tools.evaluation_run import prepare_evaluation
from colocated_grpo.types import JsonObject

TEMPERATURES = {"sampled": 1.0, "greedy": 0.0}
SHOWN = ("mean", "mean_stderr", "length", "truncated", "errors")
SEED = 20_000
"""Seed of the held-out prompts and of sampling, the same for every model."""
CACHE_BYTES = 4 << 30


def score_models(
    start: Path, tasks: Sequence[LearnTask], models: Mapping[str, tuple[Path, LearnTask]], prompts: int
) -> Iterator[tuple[str, JsonObject]]:
    """Yield (name, held-out scores) of each model: the mean reward and its standard error, sampled and greedy.

    The start model comes first, on each task and under the task's name; then `models`, folders with the start model's
    architecture. All get the same prompts. The seeds of completions depend only on the name, so a score does not depend
    on the other models.
    """
    with prepare_evaluation(scoring_config(start, tasks, prompts), None) as (evaluator, engine):
        sets = {each.name.removeprefix("eval/"): each for each in evaluator.due(0)}
        for task in tasks:
            yield task.name, _score(evaluator, sets, task, task.name)
        for name, (folder, task) in models.items():
            engine.load_weights(_tensors(folder))
            engine.weights_changed(0)
            yield name, _score(evaluator, sets, task, name)


def scoring_config(start: Path, tasks: Sequence[LearnTask], prompts: int) -> Config:
    sets = [
        {"name": _set_name(task, name), "source": task.source, "prompts": prompts, "temperature": value, "every": 1}
        for task in tasks
        for name, value in TEMPERATURES.items()
    ]
    config = config_of(
        start,
        argparse.Namespace(settings=[]),
        environments=[tasks[0].source],
        seed=SEED,
        evaluation={"every": 0, "sets": sets},
        rollout={
            "max_prompt_tokens": max(task.max_prompt for task in tasks),
            "max_completion_tokens": max(task.max_completion for task in tasks),
        },
        # Always awake. The cache has a fixed size, which does not depend on other processes on the device.
        engine={"sleep": False, "kv_cache_memory_bytes": CACHE_BYTES},
    )
    return with_subject(config, ModelSubject(model=str(start)))


def _set_name(task: LearnTask, sampling: str) -> str:
    return f"{task.name.replace(':', '.')}-{sampling}"


def _score(evaluator: Evaluator, sets: Mapping[str, EvaluationSet], task: LearnTask, name: str) -> JsonObject:
    scores = {}
    for sampling in TEMPERATURES:
        each = sets[_set_name(task, sampling)]
        each = replace(each, sampling=replace(each.sampling, max_tokens=task.max_completion))
        metrics, groups = evaluator.evaluate(crc32(name.encode()), each)
        shown = {key: metrics[f"{each.name}/{key}"] for key in SHOWN if f"{each.name}/{key}" in metrics}
        examples = [(group.prompt.text, group.rollouts[0].text) for group in groups[:3]]
        scores[sampling] = {**shown, "prompts": len(groups), "examples": examples}
    return scores


def _tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    for file in weight_files(folder):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (no dict)
                yield name, tensors.get_tensor(name)
