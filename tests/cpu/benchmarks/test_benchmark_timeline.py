"""The timeline benchmark counts completions as `decode_tail` does, and its picture shows what its JSON holds."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from benchmarks import timeline
from benchmarks.timeline_picture import decoding, picture
from colocated_grpo.phases import Clock
from colocated_grpo.rollout.engine import Request, Sampling
from colocated_grpo.rollout.inbox import Driver, Inbox
from tests.support.fakes import FakeEngine
from tests.support.ranks import TIMEOUT, start_module

SVG = "{http://www.w3.org/2000/svg}"


def test_the_recorded_counts_are_those_of_decode_tail():
    steps_of = dict(enumerate([3, 3, 3, 3, 5, 7, 7, 10]))
    engine = FakeEngine(decode_steps=lambda request: steps_of[cast(int, request.key)])
    driver, clock = Driver(engine, Inbox()), Clock(torch.device("cpu"))
    run: Any = SimpleNamespace(clock=clock, engine=engine, collector=SimpleNamespace(driver=driver))
    recorder = timeline.Recorder(run)

    with clock.time("step"), clock.time("generate"):
        sampling = Sampling(temperature=1.0, max_tokens=16)
        driver.submit([Request(key=key, token_ids=[1], seed=key, sampling=sampling) for key in steps_of])
        while driver.running:
            driver.step()

    [step] = recorder.steps
    assert [change[1:] for change in step["running"]] == [[8, 3], [4, 2], [3, 2], [1, 3]]
    assert driver.read_tail() == 3 / 10  # fewer than a quarter of 8
    assert decoding([step]) == {"decode steps": 10, "mean running": 4.1}
    began, ended = step["generate"]
    assert began <= step["running"][0][0] <= step["running"][-1][0] <= ended


def test_the_picture_has_a_panel_for_each_timeline_with_its_training_phases():
    step = {
        "step": [10.0, 16.0],
        "generate": [10.0, 14.0],
        "train": [14.0, 16.0],
        "running": [[10.0, 4, 2], [13.0, 1, 6]],
    }
    later = {**{name: [second + 6.0 for second in step[name]] for name in ("step", "generate", "train")}, "running": []}

    root = ET.fromstring(picture({"without": [step, {**later, "running": [[16.0, 2, 2]]}], "with": [step]}))

    panels = root.findall(f"{SVG}g")
    bands = [
        [(float(one.get("x", "")), float(one.get("width", ""))) for one in panel.findall(f"{SVG}rect")]
        for panel in panels
    ]
    seconds = (860 - 48 - 14) / 12  # the panels have the axis of the longer one
    assert bands[0] == [pytest.approx((48 + 4 * seconds, 2 * seconds)), pytest.approx((48 + 10 * seconds, 2 * seconds))]
    assert bands[1] == bands[0][:1]
    assert {text.text for text in root.iter(f"{SVG}text")} >= {
        "Without partial rollouts: 10 decode steps of 1.8 completions on average",
        "With partial rollouts: 8 decode steps of 1.8 completions on average",
    }


def test_both_kinds_of_runs_are_measured_and_drawn(tmp_path: Path):
    file, image, stderr = tmp_path / "timeline.json", tmp_path / "timeline.svg", tmp_path / "stderr"
    arguments = ["--gpus", "0", "--shape", "tiny", "--repeats", "1", "--json", str(file), "--image", str(image)]
    with start_module(timeline.__name__, arguments, 1, tmp_path / "stdout", stderr) as rank:
        assert rank.exit_codes(TIMEOUT) == [0], stderr.read_text()

    result = json.loads(file.read_text())
    assert [row["partial rollouts"] for row in result["rows"]] == ["without", "with"]
    most = {name: [step["running"][0][1] for step in steps] for name, steps in result["timelines"].items()}
    assert most["without"] == [32] * 4
    assert all(32 < first <= 48 for first in most["with"])  # new completions beside those that are continued
    assert image.read_text() == picture(result["timelines"])
