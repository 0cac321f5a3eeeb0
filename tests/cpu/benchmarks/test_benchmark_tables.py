"""The tables of the docs show the figures in docs/results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import tables
from colocated_grpo.types import JsonObject
from tests.support.paths import ROOT

STEPS, GROWTH = (tables.markers(name) for name in ("whole steps", "growth"))
OURS = {
    "seconds/step": 6.0, "seconds/generate": 4.0, "seconds/train": 1.5, "seconds/sync": 0.0066, "mfu": 0.4321,
    "memory/generate_gib": 49.0, "memory/train_gib": 31.0,
}  # fmt: skip
TRL = {
    "seconds/step": 30.0, "seconds/generate": 14.0, "seconds/score": 3.5, "seconds/train": 12.0, "seconds/sync": 0.25,
    "memory/generate_gib": 65.0, "memory/train_gib": 116.0,
}  # fmt: skip


def result(shape: str, parameters: int, **peers: JsonObject | None) -> JsonObject:
    return {
        "work": {"shape": shape},
        "gpu": "NVIDIA H200",
        "ranks": 1,
        "parameters": parameters,
        "ours": {"median": OURS},
        **peers,
    }


def growth(axis: str, sizes: list[int]) -> JsonObject:
    row = {"ranks": 1, "longest": 256, "generate s": 1.0, "train s": 0.05, "step s": 1.2, "step us/token": 187.5}
    rows = [{**row, "completions": size, "tokens": 100.0 * size, "tokens/s x": 1.0} for size in sizes]
    return {"axis": axis, "shape": "tiny", "gpu": "NVIDIA H200", "rows": rows}


def project(folder: Path, **results: JsonObject) -> Path:
    (folder / tables.RESULTS).mkdir(parents=True)
    page = ["before", *STEPS, "between", GROWTH[0], "old", GROWTH[1], "after"]
    (folder / tables.PAGE).write_text("\n".join(page) + "\n")
    for name, content in results.items():
        (folder / tables.RESULTS / f"{name}.json").write_text(json.dumps(content))
    return folder


def test_the_tables_hold_the_figures_of_the_files(tmp_path: Path):
    peer = {"median": TRL}
    root = project(
        tmp_path,
        step_a_large={**result("qwen3-8b", 8, peer=peer), "lora": {"r": 32}},
        step_small=result("qwen3-0.6b", 1, peer=peer),
        step_without_ours={"median": {}},
        growth_a_length=growth("length", [1024]),
        growth_completions=growth("completions", [64, 4096]),
        sync={"rows": []},
    )

    tables.main(root)
    tables.main(root)

    assert (root / tables.PAGE).read_text().splitlines() == [
        "before",
        STEPS[0],
        "",
        "| Model and GPUs | Step, ours | Step, TRL | Generate / train / sync, ours "
        "| Generate / score + train / sync, TRL | GPU memory at a phase's end, ours "
        "| GPU memory at a phase's end, TRL |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        "| [qwen3-0.6b, 1 x NVIDIA H200](results/step_small.json) | 6.0 s | 30.0 s (5.0 x) "
        "| 4.0 s / 1.5 s / 6.6 ms | 14.0 s / 15.5 s / 0.2 s | 49 GiB | 116 GiB |",
        "| [qwen3-8b, LoRA of rank 32, 1 x NVIDIA H200](results/step_a_large.json) | 6.0 s | 30.0 s (5.0 x) "
        "| 4.0 s / 1.5 s / 6.6 ms | 14.0 s / 15.5 s / 0.2 s | 49 GiB | 116 GiB |",
        "",
        STEPS[1],
        "between",
        GROWTH[0],
        "",
        f"| {' | '.join(tables.GROWTH_COLUMNS)} |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        "| [tiny, 1 x NVIDIA H200](results/growth_completions.json) | 64 | 256 | 6,400 | 1.0 s | 50.0 ms | 1.2 s "
        "| 187.5 | 1.00 |",
        "| [tiny, 1 x NVIDIA H200](results/growth_completions.json) | 4,096 | 256 | 409,600 | 1.0 s | 50.0 ms "
        "| 1.2 s | 187.5 | 1.00 |",
        "| [tiny, 1 x NVIDIA H200](results/growth_a_length.json) | 1,024 | 256 | 102,400 | 1.0 s | 50.0 ms "
        "| 1.2 s | 187.5 | 1.00 |",
        "",
        GROWTH[1],
        "after",
    ]


def test_a_result_without_a_peer_has_dashes_for_it(tmp_path: Path):
    root = project(tmp_path, step_alone=result("qwen3-0.6b", 1, peer=None))

    assert tables.step_lines(root)[2:] == [
        "| [qwen3-0.6b, 1 x NVIDIA H200](results/step_alone.json) | 6.0 s | - "
        "| 4.0 s / 1.5 s / 6.6 ms | - | 49 GiB | - |"
    ]


def test_without_result_files_there_are_no_tables(tmp_path: Path):
    root = project(tmp_path)
    assert tables.step_lines(root) == tables.growth_lines(root) == []


@pytest.mark.parametrize("marker", [*STEPS, *GROWTH])
def test_a_page_without_a_marker_is_rejected(tmp_path: Path, marker: str):
    root = project(tmp_path)
    (root / tables.PAGE).write_text((root / tables.PAGE).read_text().replace(marker, ""))
    with pytest.raises(ValueError, match="needs the two lines"):
        tables.with_tables(root)


def test_the_page_matches_its_result_files():
    assert tables.with_tables(ROOT) == (ROOT / tables.PAGE).read_text()
