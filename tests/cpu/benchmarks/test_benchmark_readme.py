"""The tables of the README are what the files of results hold."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from colocated_grpo.benchmarks import readme
from tests.support.paths import ROOT

STEPS, GROWTH = (readme.markers(name) for name in ("whole steps", "growth"))


def sample(shape: str, parameters: int, *, peer: bool) -> dict[str, object]:
    ours = {
        "seconds/step": 6.0, "seconds/generate": 4.0, "seconds/train": 1.5, "seconds/sync": 0.0066, "mfu": 0.4321,
        "memory/generate_gib": 49.0, "memory/train_gib": 31.0,
    }  # fmt: skip
    theirs = {"median": {"seconds/step": 30.0, "memory/generate_gib": 65.0, "memory/train_gib": 16.0}}
    return {
        "work": {"shape": shape},
        "gpu": "NVIDIA H200",
        "ranks": 1,
        "parameters": parameters,
        "ours": {"median": ours},
        "peer": theirs if peer else None,
        "speedup": {"seconds/step": 5.0} if peer else {},
    }


def growth(axis: str, sizes: list[int]) -> dict[str, object]:
    row = {"ranks": 1, "longest": 256, "generate s": 1.0, "train s": 0.05, "step s": 1.2, "step us/token": 187.5}
    rows = [{**row, "completions": size, "tokens": 100.0 * size, "tokens/s x": 1.0} for size in sizes]
    return {"axis": axis, "shape": "tiny", "gpu": "NVIDIA H200", "rows": rows}


def project(folder: Path, **results: object) -> Path:
    (folder / readme.RESULTS).mkdir(parents=True)
    lines = ["before", *STEPS, "between", GROWTH[0], "old", GROWTH[1], "after"]
    (folder / "README.md").write_text("\n".join(lines) + "\n")
    for name, result in results.items():
        (folder / readme.RESULTS / f"{name}.json").write_text(json.dumps(result))
    return folder


def test_the_tables_hold_what_the_files_hold(tmp_path: Path):
    root = project(
        tmp_path,
        step_a_large=sample("qwen3-8b", 8, peer=False),
        step_small=sample("qwen3-0.6b", 1, peer=True),
        step_of_old={"median": {}},
        growth_a_length=growth("length", [1024]),
        growth_completions=growth("completions", [64, 4096]),
        sync={"rows": []},
    )

    readme.main(root)
    readme.main(root)

    assert (root / "README.md").read_text().splitlines() == [
        "before",
        STEPS[0],
        "",
        *readme.STEP_HEAD,
        "| [qwen3-0.6b, 1 x NVIDIA H200](docs/results/step_small.json) | 30.0 s | 6.0 s | 5.0 x | "
        "4.0 s / 1.5 s / 6.6 ms | 43 % | 65 GiB / 16 GiB | 49 GiB / 31 GiB |",
        "| [qwen3-8b, 1 x NVIDIA H200](docs/results/step_a_large.json) | - | 6.0 s | - | "
        "4.0 s / 1.5 s / 6.6 ms | 43 % | - / - | 49 GiB / 31 GiB |",
        "",
        STEPS[1],
        "between",
        GROWTH[0],
        "",
        *readme.GROWTH_HEAD,
        "| [tiny, 1 x NVIDIA H200](docs/results/growth_completions.json) | 64 | 256 | 6,400 | 1.0 s | 50.0 ms | 1.2 s "
        "| 187.5 | 1.00 |",
        "| [tiny, 1 x NVIDIA H200](docs/results/growth_completions.json) | 4,096 | 256 | 409,600 | 1.0 s | 50.0 ms "
        "| 1.2 s | 187.5 | 1.00 |",
        "| [tiny, 1 x NVIDIA H200](docs/results/growth_a_length.json) | 1,024 | 256 | 102,400 | 1.0 s | 50.0 ms "
        "| 1.2 s | 187.5 | 1.00 |",
        "",
        GROWTH[1],
        "after",
    ]


def test_without_files_nothing_is_claimed(tmp_path: Path):
    root = project(tmp_path)
    assert readme.step_lines(root) == readme.growth_lines(root) == []


def test_a_readme_without_markers_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="needs the two lines"):
        readme.with_tables("no markers", tmp_path)


def test_the_readme_is_what_its_files_give():
    text = (ROOT / "README.md").read_text()

    assert readme.with_tables(text, ROOT) == text
