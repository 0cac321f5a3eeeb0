"""The report page and the three tools that read a run folder: report, show_rollouts and compare_runs."""

import json
import math
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from colocated_grpo.tools import compare_runs, show_rollouts
from colocated_grpo.tracking import files, report
from colocated_grpo.tracking.charts import NUM_COLORS, chart_sections
from colocated_grpo.tracking.page import HEIGHT, MAX_POINTS, WIDTH, Series, downsample, line_chart, nice_ticks
from colocated_grpo.tracking.report import header, write_report
from colocated_grpo.types import Group
from tests.support.tracked_run import HOSTILE, TrackedRun, finished_run, groups_of, rollout_of, row_of

VOID = {"meta", "br"}
STACKED = {"generate": 3.0, "train": 1.0, "sync": 2.0}


class Page(HTMLParser):
    """Tags, attributes and text of a page. Raises AssertionError if tags are not balanced."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: set[str] = set()
        self.text = ""
        self._open: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def hostile_run(run_dir: Path) -> Path:
    """A run with hostile text wherever a model, a dataset or an exception can put it."""
    run = TrackedRun(run_dir).train(last_step=0)
    prompt = replace(groups_of(0)[0].prompt, text=HOSTILE, source=HOSTILE)
    rollouts = [rollout_of(1.0, HOSTILE), rollout_of(None, HOSTILE, error=HOSTILE)]
    group = Group(prompt=prompt, rollouts=rollouts)
    run.tracker.evaluation(0, {"held_out/reward": 0.5}, [group])
    for step in range(2):
        run.tracker.flush(step, {**row_of(step), f"reward/{HOSTILE}": float(step)}, [group])
    run.tracker.close(HOSTILE)
    return run_dir


def test_the_report_shows_curves_settings_and_rollouts_before_and_after_training(tmp_path: Path) -> None:
    page = Page(finished_run(tmp_path) / "report.html")
    assert page.tags.count("svg") >= 3
    for expected in (
        "0.200 -> 0.800",
        "my_own/metric",
        "policy.lr",
        "rollouts before and after (steps 0 and 6)",
    ):
        assert expected in page.text
    assert page.text.count("step 0 sample 0") == page.text.count("step 6 sample 0") == 8


def test_hostile_completions_are_escaped_in_the_report(tmp_path: Path) -> None:
    path = hostile_run(tmp_path) / "report.html"
    page = Page(path)
    assert "script" not in page.tags and "</pre></div><script>alert(1)</script>" in page.text
    assert "\x1b" not in path.read_text(encoding="utf-8")


def test_the_report_loads_nothing_external(tmp_path: Path) -> None:
    path = finished_run(tmp_path) / "report.html"
    page = Page(path)
    assert not page.attributes & {"src", "href", "srcset", "data", "action", "onload", "onclick"}
    assert not {"script", "link", "img", "iframe", "object"} & set(page.tags)
    assert not re.search(r"url\(|@import|https?://", path.read_text(encoding="utf-8"))


def test_the_report_has_one_curve_for_each_environment() -> None:
    rows = [
        {"kind": "train", "step": step, "env/a:x/reward": step, "env/b/reward": 2 * step, "env/b/reward_std": step}
        for step in range(3)
    ]
    page = "".join(chart_sections(rows))
    assert page.count("Reward by environment") == 1
    assert "a:x <b>2</b>" in page and "b <b>4</b>" in page
    assert "reward_std" not in page


def test_a_run_killed_after_one_step_gets_a_report(tmp_path: Path) -> None:
    TrackedRun(tmp_path).train(last_step=1)
    page = Page(write_report(tmp_path))
    assert "did not end properly" in page.text and "reward = 0" in page.text
    assert '<details class="quiet" open>' in (tmp_path / "report.html").read_text(), "nothing else shows the metrics"


def test_rebuilding_the_report_gives_the_same_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = (finished_run(tmp_path) / "report.html").read_bytes()
    (tmp_path / "report.html").unlink()
    assert report.main([str(tmp_path)]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "report.html")
    assert (tmp_path / "report.html").read_bytes() == written


def test_the_phases_of_the_bar_have_colours_of_their_own_and_short_ones_are_left_out(tmp_path: Path) -> None:
    seconds = {f"seconds/phase{index}": 1.0 if index % 2 else 0.001 for index in range(14)}
    rows = [{"kind": "train", "step": 0, "seconds/step": 7.5, **seconds}]
    bar = header(tmp_path, rows, running=True).partition('class="bar">')[2].partition("</div>")[0]
    shown = re.findall(r'class="b(\d)" style="[^"]*" title="(\w+) ', bar)
    assert shown == [(str(index), f"phase{2 * index + 1}") for index in range(7)] + [(str(NUM_COLORS), "other")]


def test_a_slow_first_step_and_values_that_hardly_vary_do_not_flatten_or_fill_the_charts() -> None:
    rows = [
        {"kind": "train", "step": step, "seconds/step": 1.0 + step / 9, "ratio": 1 + step / 1e6} for step in range(9)
    ]
    html = "".join(chart_sections([{**rows[0], "seconds/step": 60.0}, *rows[1:]]))
    assert "whole step: 1.111" in html and "step: 60" not in html
    assert "Importance ratio" not in html and "<summary>Metrics with a single value (1)</summary>ratio = 1<" in html


def test_a_held_out_value_is_drawn_with_its_standard_error() -> None:
    rows = [
        {"kind": "evaluation", "step": step, "held_out/reward": 0.1 * step, "held_out/reward_stderr": 0.25}
        for step in range(3)
    ]
    html = "".join(chart_sections(rows))
    assert "step 2\nheld-out: 0.200 +- 0.250" in html and html.count('class="l1 raw"') == 3
    assert "stderr" not in html


def test_a_completion_is_shown_with_its_prompt_answer_reward_and_advantage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = Page(finished_run(tmp_path) / "report.html")
    assert page.text.count("reference answer") >= 8 and "2 sorted" in page.text and "advantage 1 |" in page.text
    assert show_rollouts.main([str(tmp_path), "--best", "1"]) == 0
    printed = capsys.readouterr().out
    assert "reward 2.300, advantage 1" in printed and "sort 2" in printed and "2 sorted" in printed


def test_a_null_metric_leaves_a_gap_and_not_a_zero() -> None:
    rows = [{"kind": "train", "step": step, "reward": value} for step, value in enumerate((0.5, None, 0.7))]
    html = "".join(chart_sections(rows))
    assert "step 0\ntraining: 0.500" in html and "step 2\ntraining: 0.700" in html and "step 1\n" not in html


def test_huge_values_do_not_break_the_charts() -> None:
    rows = [{"kind": "train", "step": step, "loss": value} for step, value in enumerate((0.5, 1e308, -1e308, 0.7))]
    html = "".join(chart_sections(rows))
    assert "loss: 0.500" in html and "loss: 0.700" in html


def points_of(svg: str) -> list[tuple[float, float]]:
    (line,) = ElementTree.fromstring(svg).findall("polyline")
    return [(float(x), float(y)) for x, y in (pair.split(",") for pair in line.attrib["points"].split())]


def test_a_line_is_drawn_to_scale() -> None:
    drawn = points_of(line_chart([Series(name="reward", points=[(0, 0.0), (5, 0.5), (10, 1.0)])]))
    (left, bottom), middle, (right, top) = drawn
    assert left < right and top < bottom
    assert middle == pytest.approx(((left + right) / 2, (top + bottom) / 2), abs=0.1)


@given(low=st.floats(-1e6, 1e6), span=st.floats(1e-2, 1e6))
def test_axis_ticks_are_few_ascending_and_cover_the_data(low: float, span: float) -> None:
    ticks = nice_ticks(low, low + span)
    assert 2 <= len(ticks) <= 8 and ticks == sorted(set(ticks))
    slack = 1e-6 * max(span, abs(low))
    assert ticks[0] <= low + slack and ticks[-1] >= low + span - slack


@example(low=0.9999988, span=4e-7)
@example(low=4.75e-7, span=1e-7)
@given(low=st.floats(-1e9, 1e9), span=st.floats(0, 1e9))
def test_axis_labels_are_distinct_and_fit_the_margin(low: float, span: float) -> None:
    texts = ElementTree.fromstring(line_chart([Series(name="x", points=[(0, low), (1, low + span)])])).findall("text")
    labels = [text.text for text in texts if text.attrib["text-anchor"] == "end"]
    assert len(set(labels)) == len(labels) >= 2
    assert max(len(label.replace(".", "").replace("-", "")) for label in labels) <= 8, "digits that fit into LEFT - 6"


@pytest.mark.parametrize("length", [1, MAX_POINTS, MAX_POINTS + 1, 2 * MAX_POINTS, 1000])
def test_a_long_series_is_averaged_without_losing_a_point(length: int) -> None:
    points = downsample([(step, float(step % 7)) for step in range(length)])
    assert len(points) <= MAX_POINTS
    size = math.ceil(length / MAX_POINTS)
    sums = [value * min(size, length - index * size) for index, (_, value) in enumerate(points)]
    assert math.fsum(sums) == pytest.approx(sum(step % 7 for step in range(length)))


@example([5e-324])
@given(st.lists(st.floats(-1e99, 1e99), min_size=1, max_size=60))
def test_any_finite_series_gives_well_formed_svg_within_its_frame(values: list[float]) -> None:
    svg = line_chart([Series(name="<&>", points=list(enumerate(values)))])
    for line in ElementTree.fromstring(svg).findall("polyline"):
        for pair in line.attrib["points"].split():
            x, y = map(float, pair.split(","))
            assert 0 <= x <= WIDTH and 0 <= y <= HEIGHT


@pytest.mark.parametrize("tool", [report.main, show_rollouts.main, lambda runs: compare_runs.main(runs * 2)])
def test_a_folder_that_is_not_a_run_is_a_one_line_error(
    tool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tool([str(tmp_path / "nowhere")]) == 2
    assert capsys.readouterr().err == f"error: {tmp_path / 'nowhere'}: no such run folder\n"
    assert tool([str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"error: {tmp_path}: not a run folder (it has no metrics.jsonl)\n"


@pytest.mark.parametrize("tool", [report.main, lambda runs: compare_runs.main(runs * 2)])
def test_a_run_without_a_finished_step_is_a_one_line_error(
    tool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    TrackedRun(tmp_path).train(last_step=0)
    assert tool([str(tmp_path)]) == 2
    assert "no metrics yet" in capsys.readouterr().err


@pytest.mark.parametrize("tool", [report.main, lambda runs: compare_runs.main(runs * 2)])
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"loss": 1}', ":1: 'step' is missing"),
        ("[1]", ":1: must be an object, not [1]"),
        ('{"kind": "train", "step": "0"}', ":1: 'step' is '0', not int"),
        ('{"kind": "train", "step": 0, "loss": "low"}', ":1: 'loss' is 'low', not a number"),
    ],
)
def test_metrics_of_another_program_are_a_one_line_error(
    tool, line: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "metrics.jsonl").write_text(f"{line}\n")
    assert tool([str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"error: {tmp_path / 'metrics.jsonl'}{message}\n"


ROLLOUT = {"kind": "train", "step": 0, "prompt_index": 0, "source": "sort", "prompt": "a", "completion": "b"}
ROLLOUT |= {"reward": 1.0, "parts": {}, "error": None, "finish_reason": "stop", "completion_tokens": 1}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"loss": 1}, ":1: 'kind' is missing"),
        ([1], ":1: must be an object, not [1]"),
        (ROLLOUT | {"reward": "high"}, ":1: 'reward' is 'high', not int | float | None"),
        (ROLLOUT | {"parts": {"correct": "yes"}}, ":1: 'correct' is 'yes', not a number"),
    ],
)
def test_rollouts_of_another_program_are_a_one_line_error(
    row: object, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / "rollouts.jsonl").write_text(json.dumps(row) + "\n")
    assert show_rollouts.main([str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"error: {tmp_path / 'rollouts.jsonl'}{message}\n"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("environment.json", "[]", "must be an object, not []"),
        ("environment.json", '{"starts": [1]}', "must be an object, not 1"),
        ("environment.json", '{"starts": 1}', "'starts' must be a list, not 1"),
        ("summary.json", "[]", "must be an object, not []"),
        ("config.yaml", "- 1", "must be an object, not [1]"),
        ("config.yaml", "a: [", "not YAML (while parsing"),
        ("games.jsonl", '{"step": 0, "game": 0, "winner": "x"}\n', "'source' is missing"),
    ],
)
def test_other_files_of_another_program_are_a_one_line_error(
    name: str, text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"kind": "train", "step": 0}\n')
    (tmp_path / name).write_text(text)
    assert report.main([str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {tmp_path / name}") and message in line


@pytest.mark.parametrize(
    ("options", "rewards"),
    [
        ([], [0.0, 0.3, 1.3, 2.3]),
        (["--step", "1", "--best", "2"], [2.3, 1.3]),
        (["--worst", "1"], [0.0]),
        (["--evaluation", "--best", "1"], [19.0]),
    ],
)
def test_rollouts_are_selected_by_step_kind_and_reward(
    options: list[str], rewards: list[float], tmp_path: Path
) -> None:
    rows = files.read_rollouts(finished_run(tmp_path))
    selected = show_rollouts.select(rows, show_rollouts._parser().parse_args([str(tmp_path), *options]))
    assert [row["reward"] for row in selected] == rewards
    assert {row["step"] for row in selected} == {1 if "--step" in options else 6 if "--evaluation" in options else 5}


def test_rollouts_are_printed_with_reward_and_without_escape_sequences(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hostile_run(tmp_path)
    capsys.readouterr()
    assert show_rollouts.main([str(tmp_path), "--best", "1"]) == 0
    printed = capsys.readouterr().out
    assert "reward 1" in printed and "<script>alert(1)</script>\\x1b[2J" in printed
    assert "\x1b" not in printed and "\x07" not in printed


def test_a_rollout_is_printed_with_every_part_of_its_reward(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    finished_run(tmp_path)
    [row] = files.read_rollouts(tmp_path)[-1:]
    names = [f"a_reward_with_a_long_name_{index}" for index in range(9)]
    (tmp_path / "rollouts.jsonl").write_text(json.dumps({**row, "parts": dict.fromkeys(names, 0.25)}) + "\n")
    options = ["--evaluation"] if row["kind"] == files.EVALUATION else []
    capsys.readouterr()
    assert show_rollouts.main([str(tmp_path), *options]) == 0
    printed = capsys.readouterr().out
    assert [name for name in names if name not in printed] == []


def test_a_step_without_rollouts_is_a_one_line_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    finished_run(tmp_path)
    capsys.readouterr()
    assert show_rollouts.main([str(tmp_path), "--step", "99"]) == 2
    assert capsys.readouterr().err == f"error: {tmp_path}: no training rollouts stored at step 99\n"


def edited_copy(run_dir: Path, copy: Path, **changes: float) -> Path:
    """Copy a run's metrics with `changes` in the row of training step 3."""
    copy.mkdir()
    rows = files.read_metrics(run_dir)
    edited = [{**row, **changes} if (row["kind"], row["step"]) == ("train", 3) else row for row in rows]
    (copy / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in edited))
    return copy


def test_runs_that_differ_only_in_wall_clock_are_equal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = finished_run(tmp_path / "a")
    copy = edited_copy(run, tmp_path / "b", **{"seconds/step": 9.0, "tokens_per_second": 1.0, "memory/train_gib": 2.0})
    assert compare_runs.main([str(run), str(copy), "--assert-equal"]) == 0
    printed = capsys.readouterr().out.replace("\n", "")
    assert "0 differ" in printed and f"A: {run}" in printed and f"B: {copy}" in printed


def test_a_metric_that_differs_is_shown_with_its_first_differing_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = finished_run(tmp_path / "a")
    copy = edited_copy(run, tmp_path / "b", reward=0.30000000000000010)
    assert compare_runs.main([str(run), str(copy)]) == 0
    assert compare_runs.main([str(run), str(copy), "--assert-equal"]) == 1
    (line,) = {line for line in capsys.readouterr().out.splitlines() if " reward " in line}
    assert line.split()[-1] == "3"
    assert compare_runs.main([str(run), str(copy), "--assert-equal", "--ignore", "rew*"]) == 0


def test_a_missing_step_or_metric_is_a_difference(tmp_path: Path) -> None:
    rows = files.read_metrics(finished_run(tmp_path))
    shorter = compare_runs.compare(rows, rows[:-3], ignore=())
    assert compare_runs.first_difference(*shorter["reward"]) == 4
    more = compare_runs.compare(rows, [{**row, "grad_norm": None} for row in rows], ignore=())
    assert compare_runs.first_difference(*more["grad_norm"]) == 0


def test_a_set_is_one_line_on_the_console_and_one_chart_in_the_report(tmp_path: Path) -> None:
    run = TrackedRun(tmp_path).train()
    for step in (0, 6):
        row = {f"eval/aime/{name}": 0.25 + step / 10 for name in ("mean", "pass@1", "pass@8", "maj@8")}
        run.tracker.evaluation(
            step, row | {"eval/aime/mean_stderr": 0.05 + step, "eval/aime/length": 9.0}, groups_of(0)
        )
    run.finish()
    assert "evaluation of aime, step 0:  mean 0.250 +- 0.050  pass@1 0.250  pass@8" in run.printed
    assert "held-out evaluation, step 6:  reward 0.800" in run.printed
    page = "".join(chart_sections(files.read_metrics(tmp_path)))
    assert page.count("Evaluation of aime") == 1
    assert "eval/aime/mean" not in page
    assert "eval/aime/length = 9" in page, "a metric that stays constant is listed"
    [before, *_] = [row for row in files.read_metrics(tmp_path) if "held_out/reward" in row]
    assert "eval/aime/mean" not in before
