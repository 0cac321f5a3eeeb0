"""The sentence at the top of the report, and the bar of where the time goes."""

import random
import re
from pathlib import Path

import pytest

from colocated_grpo.tracking.charts import MEANINGS, chart_sections, family_charts, meaning
from colocated_grpo.tracking.files import json_line
from colocated_grpo.tracking.report import verdict, write_report
from tests.support.paths import ROOT
from tests.support.tracked_run import TrackedRun, finished_run

GUIDE = ROOT / "docs/guides/metrics.md"


def rows(rewards: list[float], constant: float = 0.25) -> list[dict]:
    return [{"kind": "train", "step": i, "reward": r, "groups/constant": constant} for i, r in enumerate(rewards)]


def noise(steps: int, slope: float, seed: int = 0) -> list[float]:
    rng = random.Random(seed)
    return [0.3 + slope * step + rng.gauss(0, 0.05) for step in range(steps)]


def test_a_rising_reward_is_stated_with_its_size_and_its_noise() -> None:
    sentence = verdict(rows(noise(40, 0.01)))
    assert sentence.startswith("The training reward has risen over 40 steps: ")
    before, after, change, error = map(float, re.findall(r"[+]?\d+\.\d+", sentence)[:4])
    assert change == pytest.approx(0.3, abs=0.05) and change == pytest.approx(after - before, abs=2e-3)
    assert error == pytest.approx(0.05 * (2 / 10) ** 0.5, rel=0.5)
    assert sentence.endswith("25% of the groups had no signal (equal rewards).")


def test_a_falling_reward_is_called_falling() -> None:
    assert verdict(rows(noise(40, -0.005))).startswith("The training reward has fallen over 40 steps")


def test_noise_is_rarely_called_learning() -> None:
    called = ["not changed" not in verdict(rows(noise(40, 0.0, seed))) for seed in range(200)]
    assert sum(called) < 30, "two standard errors: about one in twenty"


def test_few_steps_give_no_verdict_and_too_little_signal_gives_advice() -> None:
    sentence = verdict(rows([0.1, 0.9], constant=0.9))
    assert sentence.startswith("2 steps: too few to tell learning from noise; 90% of the groups had no signal")
    assert "90% at the end: prompts of another difficulty would teach more" in sentence
    assert verdict([]) == ""


def test_truncation_is_named_in_place_of_the_prompts() -> None:
    cut = [{**row, "truncated": 0.1 + row["step"] / 50} for row in rows([0.0] * 40, constant=0.9)]
    sentence = verdict(cut)
    assert "79% of the completions were cut at the end: raise rollout.max_completion_tokens" in sentence
    assert "difficulty" not in sentence
    repeating = [{**row, "truncated/repetition": row["truncated"] / 2} for row in cut]
    assert "39% of the completions were cut at the end: raise rollout.max_completion_tokens" in verdict(repeating)


def test_the_tile_of_the_reward_agrees_with_the_verdict(tmp_path: Path) -> None:
    TrackedRun(tmp_path).train(last_step=0)
    (tmp_path / "metrics.jsonl").write_text("".join(map(json_line, rows([0.9, *[0.1] * 19, *[0.5] * 19, 0.0]))))
    page = write_report(tmp_path).read_text()
    assert "0.180 -&gt; 0.450</strong><small>means of 10 steps" in page and ": 0.180 -&gt; 0.450, " in page


def test_the_tile_of_one_evaluation_shows_no_change(tmp_path: Path) -> None:
    TrackedRun(tmp_path).train(last_step=0)
    evaluations = [
        {"kind": "evaluation", "step": 0, "held_out/reward": 0.25, "held_out/reward_stderr": 0.5},
        {"kind": "evaluation", "step": 1, "held_out/reward": 0.75, "held_out/reward_stderr": 0.125},
    ]
    shown = [
        "0.250</strong><small>step 0, +-&NoBreak;&nbsp;0.500<",
        "0.250 -&gt; 0.750</strong><small>step 0 -&gt; 1, +-&NoBreak;&nbsp;0.500 -&gt; 0.125<",
    ]
    for count, tile in enumerate(shown, start=1):
        lines = [*evaluations[:count], *rows([0.5])]
        (tmp_path / "metrics.jsonl").write_text("".join(map(json_line, lines)))
        page = write_report(tmp_path).read_text()
        assert tile in page and "0.500</strong><small>first and last step" in page


def test_the_report_opens_with_the_verdict_and_the_shares_of_the_phases(tmp_path: Path) -> None:
    page = (finished_run(tmp_path) / "report.html").read_text()
    assert page.index('class="verdict"') < page.index('class="tiles"') < page.index('class="bar"') < page.index("<svg")
    assert re.findall(r'style="width:([\d.]+%)" title="(\w+)', page) == [
        ("50.00%", "generate"),
        ("25.00%", "train"),
        ("25.00%", "other"),
    ]


def test_metrics_of_environments_and_games_are_drawn_by_prefix_and_in_charts_that_can_be_read() -> None:
    keys = [
        "env/sorting/reward",
        "reward/format",
        "env/math/reward",
        "env/math/reward_std",
        "town/win_rate/mafia",
        "town/win_rate/town",
    ]
    keys += ["town/turns", "town/legal_rate"]
    keys += ["mismatch/outside", "prompt_tokens", *(f"town/action/{index}" for index in range(11))]
    drawn = [(chart.title, list(chart.lines.values())) for chart in family_charts(keys)]
    assert drawn == [
        ("Reward by environment", ["sorting", "math"]),
        ("Parts of the reward", ["format"]),
        ("town/win_rate", ["mafia", "town"]),
        ("town/turns", ["turns"]),
        ("town/legal_rate", ["legal_rate"]),
        ("town/action", [str(index) for index in range(9)]),
        ("town/action", ["9", "10"]),
    ]


def test_the_report_explains_metrics_in_the_words_of_the_guide() -> None:
    table = dict.fromkeys(MEANINGS, "")
    for line in GUIDE.read_text().splitlines():
        cells = line.strip("|").split(" | ")
        for key in re.findall(r"`([^`]+)`", cells[0]) if line.startswith("|") else ():
            table[key] = " | ".join(cells[1:]).replace("`", "")
    assert {key: text for key, text in MEANINGS.items() if text not in table[key]} == {}
    assert meaning("held_out/reward") == MEANINGS["reward"] and meaning("reward/format") == MEANINGS["reward/<name>"]
    assert meaning("my_own/metric") == ""


def test_the_text_of_a_chart_explains_each_of_its_lines() -> None:
    drawn = [{"kind": "train", "step": step, "padding": 0.1 * step, "imbalance": 0.2 * step} for step in range(3)]
    page = "".join(chart_sections(drawn))
    assert f'<p class="meaning">{MEANINGS["padding"]}; {MEANINGS["imbalance"]}</p>' in page
