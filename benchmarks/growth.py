"""Step time as the work grows: `python -m benchmarks.growth --axis completions --gpus 1`.

Axes: `completions` per step at the standard length; `length` of the longest completion, with the mean in proportion;
`gpus`, 1 compared with --gpus at the same work per GPU. Each launch builds one run and trains every size in turn.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.harness import built_run, config_of, main_in_ranks, model_folder, rank_parser
from benchmarks.results import describe, publish
from benchmarks.workload import MAX_PROMPT_TOKENS, STOP_PROBABILITY, stop_tokens, vocabulary_of
from colocated_grpo.errors import RunError
from colocated_grpo.rollout.supply import PromptSupply
from colocated_grpo.runtime.distributed import World
from colocated_grpo.runtime.verdict import FINISHED, STOPPED
from colocated_grpo.settings.schema import Config
from colocated_grpo.tracking.files import METRICS_FILE, TRAIN, read_rows
from colocated_grpo.types import JsonObject

if TYPE_CHECKING:
    from colocated_grpo.run import Run

STANDARD_LENGTH = 1024
DEFAULT_SIZES = {"completions": [64, 256, 1024, 4096], "length": [256, 1024, 4096, 8192], "gpus": [256]}
PHASES = ("generate", "train", "step")


@dataclass(frozen=True, kw_only=True)
class Size:
    """Work of one step over all ranks."""

    completions: int
    length: int
    """Longest completion, in tokens; the mean grows in proportion."""

    @property
    def stop_probability(self) -> float:
        return STOP_PROBABILITY * STANDARD_LENGTH / self.length


def sizes_of(options: argparse.Namespace, ranks: int) -> list[Size]:
    """Return one size for each value of the axis, smallest first. On `gpus` the value is completions per rank."""
    makers = {
        "completions": lambda value: Size(completions=value, length=options.length),
        "length": lambda value: Size(completions=options.completions, length=value),
        "gpus": lambda value: Size(completions=value * ranks, length=options.length),
    }
    return [makers[options.axis](value) for value in sorted(options.sizes or DEFAULT_SIZES[options.axis])]


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    parser = growth_parser()
    options, _settings = parser.parse_known_args(arguments)
    for size in sizes_of(options, ranks=1):
        if size.completions % options.group_size:
            multiple = f"a multiple of --group-size={options.group_size}"
            parser.error(f"--axis={options.axis}: {size.completions} completions are not {multiple}")
    if options.axis == "gpus" and options.ranks is None:
        ranks = options.gpus or options.nproc
        if ranks < 2:
            parser.error(f"--axis=gpus: compares one rank with several, but {ranks} was given; set --gpus to 2 or more")
        return compare_ranks(arguments, options, ranks)
    return main_in_ranks("growth", parser, measure, arguments)


def growth_parser() -> argparse.ArgumentParser:
    parser = rank_parser(__doc__)
    parser.add_argument("--axis", choices=DEFAULT_SIZES, default="completions")
    parser.add_argument("--sizes", type=int, nargs="+", help="values of the axis; on gpus: completions per rank")
    parser.add_argument("--length", type=int, default=STANDARD_LENGTH, help="longest completion on the other axes")
    parser.add_argument("--completions", type=int, default=64, help="completions per step on the length axis")
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--max-num-seqs", type=int, default=512, help="sequences that decode together on one rank")
    parser.add_argument("--steps", type=int, default=4, help="steps at each size, warm-up included")
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--ranks", type=int, help=argparse.SUPPRESS)  # set on each launch of the gpus axis
    return parser


def measure(world: World, options: argparse.Namespace) -> JsonObject:
    """Train the steps of every size. Collective; rank 0 returns the result."""
    # Imported here because it imports vLLM, which takes seconds and is needed in the ranks only.
    from colocated_grpo.trainer import train

    sizes = sizes_of(options, world.size)
    with model_folder(options, world) as model, tempfile.TemporaryDirectory(prefix="benchmark-growth-") as scratch:
        config = growth_config(options, model, sizes, world.size)
        with built_run(config, Path(scratch) / "run", world) as run:
            outcome = FINISHED
            for index, size in enumerate(sizes):
                outcome = train(resized(run, size, index * options.steps, options.steps, vocabulary_of(model)))
                if outcome == STOPPED:
                    break
            run.tracker.close(outcome)
        steps = [row for row in read_rows(Path(scratch) / "run" / METRICS_FILE) if row["kind"] == TRAIN]
    if not world.is_main:
        return {}
    parts = [steps[index * options.steps :][: options.steps] for index in range(len(sizes))]
    rows = [
        figures(size, part[options.warmup :], world.size)
        for size, part in zip(sizes, parts, strict=True)
        if len(part) == options.steps  # a stopped run keeps its completed sizes
    ]
    if not rows:
        raise RunError("stopped before the smallest size was completed; nothing was measured")
    return {"axis": options.axis, "shape": options.shape, "rows": with_growth(rows)}


def growth_config(options: argparse.Namespace, model: Path, sizes: Sequence[Size], ranks: int) -> Config:
    """Return the settings of a run whose limits allow every size."""
    largest = max(size.completions for size in sizes)
    rollout = {
        "prompts_per_step": largest // options.group_size,
        "group_size": options.group_size,
        "max_prompt_tokens": MAX_PROMPT_TOKENS,
        "max_completion_tokens": max(size.length for size in sizes),
    }
    return config_of(
        model,
        options,
        training_steps=len(sizes) * options.steps,
        rollout=rollout,
        engine={"max_num_seqs": min(options.max_num_seqs, -(-largest // ranks))},
        evaluation={"every": 0},
        checkpoint={"every": 0, "final": False},
        tracking={"console": "plain", "rollouts_per_step": 0},
    )


def resized(run: Run, size: Size, start: int, steps: int, vocabulary: int) -> Run:
    """Return the run with the work of `size` from step `start` on. It shares engine and policy with `run`."""
    assert isinstance(run.supply, PromptSupply), "the workload is a task, whose prompts this run samples itself"
    prompts = size.completions // run.config.rollout.group_size
    rollout = run.config.rollout.model_copy(update={"prompts_per_step": prompts, "max_completion_tokens": size.length})
    stop_token_ids = tuple(stop_tokens(vocabulary, size.stop_probability))
    sampling = replace(run.supply.sampling, max_tokens=size.length, stop_token_ids=stop_token_ids)
    return replace(
        run,
        config=run.config.model_copy(update={"rollout": rollout, "training_steps": start + steps}),
        supply=replace(run.supply, config=rollout, sampling=sampling),
        start=start,
    )


def figures(size: Size, steps: Sequence[dict[str, float]], ranks: int) -> dict[str, float]:
    """Return the medians over the steps of one size."""
    seconds = {f"{phase} s": statistics.median(row[f"seconds/{phase}"] for row in steps) for phase in PHASES}
    tokens = statistics.median(row["tokens_per_second"] * row["seconds/step"] for row in steps)
    return {
        "ranks": ranks,
        "completions": size.completions,
        "longest": size.length,
        "tokens": tokens,
        **seconds,
        **{f"{phase} us/token": 1e6 * value / tokens for phase, value in zip(PHASES, seconds.values(), strict=True)},
    }


def with_growth(rows: Sequence[dict[str, float]]) -> list[dict[str, float]]:
    """Add to each row its tokens, time per token and throughput relative to the first row."""
    first = rows[0]
    return [
        {
            **row,
            "tokens x": row["tokens"] / first["tokens"],
            "time per token x": row["step us/token"] / first["step us/token"],
            "tokens/s x": first["step us/token"] / row["step us/token"],
        }
        for row in rows
    ]


def compare_ranks(arguments: Sequence[str], options: argparse.Namespace, most_ranks: int) -> int:
    """Launch once with a single rank and once with `most_ranks`, with the same work per rank, and publish both."""
    flag = "--gpus" if options.gpus else "--nproc"
    rows = []
    with tempfile.TemporaryDirectory(prefix="benchmark-growth-") as scratch:
        for ranks in (1, most_ranks):
            file = Path(scratch) / f"{ranks}.json"
            again = ["--ranks", str(ranks), flag, str(ranks), "--json", str(file)]
            command = [sys.executable, "-m", "benchmarks.growth", *arguments, *again]
            subprocess.run(command, check=True)
            rows += json.loads(file.read_text())["rows"]
    rows = with_growth(rows)
    result = {"axis": "gpus", "shape": options.shape, "rows": rows}
    publish({**describe("growth", arguments, ranks=most_ranks), **result}, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
