"""Seconds of a step as its work grows: `python -m colocated_grpo.benchmarks.growth --axis completions --gpus 1`.

Axes: `completions` a step at standard lengths; `length` of a completion, with stops that grow with the limit; `gpus`
from 1 to --gpus with the same work for each. One run is built for all sizes of an axis and trained at each in turn.
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
from typing import TYPE_CHECKING, Any

from colocated_grpo.benchmarks.ranks import config_of, main_in_ranks, model_folder, rank_parser
from colocated_grpo.benchmarks.results import describe, publish
from colocated_grpo.benchmarks.workload import MAX_PROMPT_TOKENS, STOP_SHARE, stop_tokens, vocabulary_of
from colocated_grpo.config.schema import Config
from colocated_grpo.errors import RunError
from colocated_grpo.runtime.distributed import World
from colocated_grpo.runtime.supervision import StopRequest
from colocated_grpo.tracking.files import METRICS_FILE, TRAIN, read_rows

if TYPE_CHECKING:
    from colocated_grpo.build.run import Run

STANDARD_LENGTH = 1024
DEFAULT_SIZES = {"completions": [64, 256, 1024, 4096], "length": [256, 1024, 4096, 8192], "gpus": [256]}
PHASES = ("generate", "train", "step")


@dataclass(frozen=True, kw_only=True)
class Size:
    """The work of one step over all ranks."""

    completions: int
    length: int
    """Longest completion; the mean grows in proportion."""

    @property
    def stop_share(self) -> float:
        return STOP_SHARE * STANDARD_LENGTH / self.length


def sizes_of(options: argparse.Namespace, ranks: int) -> list[Size]:
    """One size for each value of the axis, smallest first. For `gpus` the value is the completions of one rank."""
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
            whole = f"a multiple of --group-size={options.group_size}"
            parser.error(f"--axis={options.axis}: {size.completions} completions are not {whole}")
    if options.axis == "gpus" and options.ranks is None:
        most = options.gpus or options.nproc
        if most < 2:
            parser.error(f"--axis=gpus: compares one rank with several, and there is {most}")
        return compare_ranks(arguments, options, most)
    return main_in_ranks("growth", parser, measure, arguments)


def growth_parser() -> argparse.ArgumentParser:
    parser = rank_parser(__doc__)
    parser.add_argument("--axis", choices=DEFAULT_SIZES, default="completions")
    parser.add_argument("--sizes", type=int, nargs="+", help="values of the axis; of gpus: completions for each rank")
    parser.add_argument("--length", type=int, default=STANDARD_LENGTH, help="longest completion of the other axes")
    parser.add_argument("--completions", type=int, default=64, help="of a step on the length axis")
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--max-num-seqs", type=int, default=512, help="sequences that decode together on one rank")
    parser.add_argument("--steps", type=int, default=4, help="at each size, warm-up included")
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--ranks", type=int, help=argparse.SUPPRESS)  # marks one launch of the gpus axis
    return parser


def measure(world: World, options: argparse.Namespace) -> dict[str, Any]:
    """Train the steps of every size. Collective; the figures are rank 0's."""
    # They import vLLM, which neither --help nor the process that starts the ranks need wait for.
    from colocated_grpo.build.run import build_run
    from colocated_grpo.build.run import describe as facts_of
    from colocated_grpo.trainer import STOPPED, settle_garbage_collector, train

    sizes = sizes_of(options, world.size)
    with model_folder(options, world) as model, tempfile.TemporaryDirectory(prefix="benchmark-growth-") as scratch:
        config = growth_config(options, model, sizes, world.size)
        run = build_run(config, Path(scratch) / "run", world, StopRequest(world.store))
        run.tracker.start(config, facts_of(run), run.start)
        settle_garbage_collector()
        for index, size in enumerate(sizes):
            outcome = train(resized(run, size, index * options.steps, options.steps, vocabulary_of(model)))
            if outcome == STOPPED:
                break
        run.tracker.close(outcome)
        run.close()
        steps = [row for row in read_rows(Path(scratch) / "run" / METRICS_FILE) if row["kind"] == TRAIN]
    if not world.is_main:
        return {}
    parts = [steps[index * options.steps :][: options.steps] for index in range(len(sizes))]
    rows = [
        figures(size, part[options.warmup :], world.size)
        for size, part in zip(sizes, parts, strict=True)
        if len(part) == options.steps  # a stop keeps the sizes that were done
    ]
    if not rows:
        raise RunError("stopped before the smallest size was done")
    return {"axis": options.axis, "shape": options.shape, "rows": with_growth(rows)}


def growth_config(options: argparse.Namespace, model: Path, sizes: Sequence[Size], ranks: int) -> Config:
    """Settings that every size fits into."""
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
    """The run with the work of `size`, from step `start` on. Engine and policy are the same objects."""
    prompts = size.completions // run.config.rollout.group_size
    rollout = run.config.rollout.model_copy(update={"prompts_per_step": prompts, "max_completion_tokens": size.length})
    stop_token_ids = tuple(stop_tokens(vocabulary, size.stop_share))
    sampling = replace(run.supply.sampling, max_tokens=size.length, stop_token_ids=stop_token_ids)
    return replace(
        run,
        config=run.config.model_copy(update={"rollout": rollout, "training_steps": start + steps}),
        supply=run.supply.resized(rollout, sampling),
        start=start,
    )


def figures(size: Size, steps: Sequence[dict[str, float]], ranks: int) -> dict[str, float]:
    """Medians over steps of one size."""
    middle = lambda name: statistics.median(row[name] for row in steps)  # noqa: E731
    seconds = {f"{phase} s": middle(f"seconds/{phase}") for phase in PHASES}
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
    """The rows with their tokens, and their time for a token and throughput, over those of the first row."""
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


def compare_ranks(arguments: Sequence[str], options: argparse.Namespace, most: int) -> int:
    """One launch with a single rank and one with `most` of them, the same work for each rank."""
    flag = "--gpus" if options.gpus else "--nproc"
    rows = []
    with tempfile.TemporaryDirectory(prefix="benchmark-growth-") as scratch:
        for ranks in (1, most):
            file = Path(scratch) / f"{ranks}.json"
            again = ["--ranks", str(ranks), flag, str(ranks), "--json", str(file)]
            command = [sys.executable, "-m", "colocated_grpo.benchmarks.growth", *arguments, *again]
            subprocess.run(command, check=True)
            rows += json.loads(file.read_text())["rows"]
    rows = with_growth(rows)
    result = {"axis": "gpus", "shape": options.shape, "rows": rows}
    publish({**describe("growth", arguments, ranks=most), **result}, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
