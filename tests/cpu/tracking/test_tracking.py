"""The tracker: console, run folder, W&B and TensorBoard."""

import errno
import inspect
import io
import json
import logging
import math
import os
import pty
import shutil
import stat
import subprocess
import sys
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import yaml

from colocated_grpo.errors import RunError
from colocated_grpo.settings.schema import Config
from colocated_grpo.tracking import files, records
from colocated_grpo.tracking.text import duration, number, visible
from colocated_grpo.tracking.tracker import NullTracker, Tracker, changed_settings
from colocated_grpo.types import Group
from tests.support.paths import ROOT
from tests.support.servers import until
from tests.support.tracked_run import HOSTILE, TrackedRun, config_of, groups_of, output_of, rollout_of, row_of


def test_every_step_is_one_console_line_and_one_row_with_all_metrics(tmp_path: Path) -> None:
    run = TrackedRun(tmp_path).train(last_step=3)
    lines = [line for line in run.printed.splitlines() if line.startswith("step ")]
    assert [line.split()[1] for line in lines] == ["0/6", "1/6", "2/6"]
    assert "reward 0.200" in lines[2] and "held-out 0.400" in lines[2] and "generate 0.500" in lines[2]
    rows = [row for row in files.read_metrics(tmp_path) if row["kind"] == "train"]
    assert rows == [{"kind": "train", "step": step, **row_of(step)} for step in range(3)]


def test_the_line_of_a_step_shows_failed_rewards_and_dropped_prompts_when_there_are_any(tmp_path: Path) -> None:
    run = TrackedRun(tmp_path).train(last_step=0)
    for step, count in enumerate((0.0, 3.0)):
        row = {**row_of(step), "reward_errors": count, "prompts_dropped": 2 * count}
        run.tracker.flush(step, row, groups_of(step))
    without, with_errors = [line for line in run.printed.splitlines() if line.startswith("step ")]
    assert "errors" not in without and "dropped" not in without
    assert "errors 3  dropped 6" in with_errors


def test_errors_of_scoring_are_shown_once_for_each_environment(tmp_path: Path) -> None:
    run = TrackedRun(tmp_path).train(last_step=0)
    unread, failed = rollout_of(0.0, "x", "reward: ValueError: 'x'"), rollout_of(None, "y", "OSError: judge is down")
    for step in range(2):
        row = {**row_of(step), "unscorable": 2.0}
        run.tracker.flush(step, row, [replace(groups_of(step)[0], rollouts=[unread, unread, failed])])
    lines = run.printed.splitlines()
    assert [line for line in lines if "completions of sort" in line] == [
        "step 0: 2 of 3 completions of sort made a scorer raise and got no credit from it (metric unscorable; "
        "shown once); the first: reward: ValueError: 'x'",
        "step 0: 1 of 3 completions of sort have no reward, because scoring failed (metric reward_errors; shown once); "
        "the first: OSError: judge is down",
    ]
    assert sum("unscorable 2" in line for line in lines) == 2


def test_the_banner_shows_model_ranks_loss_batch_and_folder_in_five_lines(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "colocated_grpo")
    printed = TrackedRun(tmp_path).train(last_step=0).printed
    for expected in ("tiny: 7 parameters", "2 x CPU", "dapo", "32 prompts x 8 completions", str(tmp_path)):
        assert expected in printed
    assert len(printed.splitlines()) == 5 and "micro-batches" not in printed
    assert "micro-batches: 64 tokens" in caplog.text


@pytest.mark.parametrize(
    ("rows", "warnings"),
    [
        ([{"loss": -10.5}] * 2, 0),
        ([{"loss": -10.5}] * 2 + [{"loss": -9.9}] + [{"loss": -10.5}] * 2, 0),
        ([{"loss": -10.5}, {"ratio": 2.1}, {"loss": -10.5}], 1),
        ([{"ratio": 2.1}] * 7, 1),
        ([{"ratio": 2.1}] * 3 + [{"ratio": 1.0}] + [{"ratio": 2.1}] * 3, 2),
        ([{"ratio": 2.0, "loss": -10.0}] * 3, 0),
    ],
)
def test_three_steps_in_a_row_with_too_large_updates_are_warned_about_once(
    tmp_path: Path, rows: list[dict[str, float]], warnings: int
) -> None:
    run = TrackedRun(tmp_path).train(last_step=0)
    for step, row in enumerate(rows):
        run.tracker.flush(step, row, groups_of(step))
    assert run.printed.count("the loss was below -10 or the ratio above 2") == warnings


def test_nan_and_infinity_are_written_as_null_so_that_the_file_is_strict_json(tmp_path: Path) -> None:
    run = TrackedRun(tmp_path).train(last_step=0)
    run.tracker.flush(0, {"reward": math.nan, "grad_norm": math.inf, "loss": 1.0}, groups_of(0))

    def reject(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    row = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=reject)
    assert row == {"kind": "train", "step": 0, "reward": None, "grad_norm": None, "loss": 1.0}


def test_a_run_whose_folder_is_deleted_ends_with_an_error(tmp_path: Path) -> None:
    run = TrackedRun(tmp_path / "run").train(last_step=2)
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(RunError, match="deleted during the run"):
        run.tracker.flush(2, row_of(2), groups_of(2))


def test_a_killed_and_resumed_run_writes_the_same_files_as_an_uninterrupted_one(tmp_path: Path) -> None:
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    TrackedRun(whole).train().finish()
    TrackedRun(resumed).train(last_step=5)  # killed after step 4; the last checkpoint is from step 2
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        with (resumed / name).open("a") as cut:
            cut.write('{"kind": "train", "st')
    TrackedRun(resumed).train(first_step=2).finish()
    for name in ("metrics.jsonl", "rollouts.jsonl", "summary.json", "config.yaml"):
        assert (resumed / name).read_bytes() == (whole / name).read_bytes(), name
    assert [start["first_step"] for start in files.read_environment(resumed)] == [0, 2]


def test_a_resumed_run_lists_the_settings_changed_since_its_last_start(tmp_path: Path) -> None:
    first = TrackedRun(tmp_path, config_of()).train(last_step=2)
    assert "settings changed" not in first.printed
    same = TrackedRun(tmp_path, config_of()).train(first_step=2, last_step=3)
    assert "settings changed" not in same.printed
    other = config_of().model_copy(update={"training_steps": 9, "seed": 5})
    printed = TrackedRun(tmp_path, other).train(first_step=3, last_step=4).printed
    assert "settings changed since the last start: training_steps 6 -> 9, seed 0 -> 5\n" in printed


def test_a_resumed_run_lists_files_of_its_settings_modified_since_its_last_start(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "package").mkdir()
    rewards = ["my_rewards.py:right", "package.rewards:right"]
    source = {"type": "dataset", "name": "rows.jsonl", "rewards": rewards}
    config = Config.model_validate(
        {"model": {"name": "tiny"}, "environments": [source], "tracking": {"console": "plain"}}
    )
    edited = Path("my_rewards.py"), Path("package/rewards.py")
    for file in (*edited, Path("rows.jsonl")):
        file.touch()
        os.utime(file, (0, 0))
    run = tmp_path / "run"
    assert "files modified" not in TrackedRun(run, config).train(last_step=2).printed
    assert "files modified" not in TrackedRun(run, config).train(first_step=2, last_step=3).printed
    for file in edited:
        os.utime(file, (2**32, 2**32))
    printed = TrackedRun(run, config).train(first_step=3, last_step=4).printed
    assert "files modified since the last start: my_rewards.py, package/rewards.py\n" in printed


def test_a_resumed_run_with_other_length_limits_warns_that_its_held_out_rewards_do_not_compare(tmp_path: Path) -> None:
    config = config_of()
    TrackedRun(tmp_path, config).train(last_step=2)
    longer = config.with_values("rollout", max_completion_tokens=99, max_prompt_tokens=77, group_size=2)
    lengths = f"{config.rollout.max_completion_tokens} -> 99", f"{config.rollout.max_prompt_tokens} -> 77"
    printed = TrackedRun(tmp_path, longer).train(first_step=2, last_step=3).printed
    [line] = [line for line in printed.splitlines() if line.startswith("warning: ")]
    assert {*line.removeprefix("warning: ").partition(": ")[0].split(", ")} == {
        f"rollout.max_completion_tokens {lengths[0]}",
        f"rollout.max_prompt_tokens {lengths[1]}",
    }
    assert line.endswith(": rewards, held-out ones included, do not compare with those from before this start")
    same = TrackedRun(tmp_path, longer.with_values("rollout", group_size=4)).train(first_step=3, last_step=4)
    assert "settings changed" in same.printed and "warning: " not in same.printed


def test_an_entry_that_was_removed_or_added_is_a_changed_setting() -> None:
    one, two = ({"rewards": [{"name": name, "weight": 1.0} for name in names]} for names in ("a", "ab"))
    assert changed_settings(two, one) == ["rewards.1.name b -> None"]
    assert changed_settings(one, two) == ["rewards.1.name None -> b"]
    assert changed_settings({"seed": 0}, {"seed": 0, "new_in_this_version": 1}) == []


def test_an_incomplete_last_line_is_skipped_and_earlier_damage_is_an_error_for_readers(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n{"step": 1')
    assert list(files.read_rows(path)) == [{"step": 0}]
    path.write_text('{"step": 0}\n{"step"\n{"step": 2}\n')
    with pytest.raises(files.RunFolderError, match=r"metrics.jsonl:2: not a JSON line"):
        list(files.read_rows(path))


@pytest.mark.parametrize(
    ("name", "line", "problem"),
    [
        ("metrics.jsonl", '{"step"', "not a JSON line (Expecting ':' delimiter)"),
        ("metrics.jsonl", "[" * 100_000, "not a JSON line (maximum recursion depth"),
        ("metrics.jsonl", '{"kind": "train", "step": 0, "loss": NaN}', "not a JSON line (NaN is not JSON)"),
        ("metrics.jsonl", '{"kind": "train", "step": 0, "loss": "low"}', "'loss' is 'low', not a number"),
        ("metrics.jsonl", '{"step": 0}', "'kind' is missing"),
        ("rollouts.jsonl", '{"kind": "train", "step": 0}', "'prompt_index' is missing"),
        ("games.jsonl", '{"step": 0}', "'source' is missing"),
        ("game_events.jsonl", "0", "must be an object, not 0"),
    ],
)
def test_a_resumed_run_leaves_damaged_lines_out_and_keeps_the_file_as_it_was(
    tmp_path: Path, name: str, line: str, problem: str
) -> None:
    whole, damaged = tmp_path / "whole", tmp_path / "damaged"
    games = [{"source": "town", "game": 0, "winner": "mafia", "events": [{"event": "vote"}]}]
    for folder in (whole, damaged):
        run = TrackedRun(folder).train(last_step=3)
        run.tracker.games(1, games)
    lines = (damaged / name).read_text().splitlines(keepends=True)
    before = "".join([lines[0], line + "\n", *lines[1:]])
    (damaged / name).write_text(before)
    TrackedRun(whole).train(first_step=3).finish()
    resumed = TrackedRun(damaged).train(first_step=3).finish()
    for file in ("metrics.jsonl", "rollouts.jsonl", "games.jsonl", "game_events.jsonl"):
        assert (damaged / file).read_bytes() == (whole / file).read_bytes(), file
    [note] = [text for text in resumed.printed.splitlines() if name in text]
    assert note.startswith(f"{damaged / name}:2: {problem}")
    assert note.endswith(f"; left out 1 such lines, the file as it was is {name}.damaged")
    assert (damaged / f"{name}.damaged").read_text() == before
    assert "finished after 6 steps" in resumed.printed


@pytest.mark.parametrize("text", ["", "[]", '{"starts": 1}', "[" * 100_000, '{"starts": [1'])
def test_a_damaged_environment_file_is_set_aside_by_a_resumed_run(tmp_path: Path, text: str) -> None:
    TrackedRun(tmp_path).train(last_step=2)
    (tmp_path / "environment.json").write_text(text)
    printed = TrackedRun(tmp_path).train(first_step=2).finish().printed
    assert printed.count("; set aside as environment.json.damaged\n") == 1
    assert (tmp_path / "environment.json.damaged").read_text() == text
    assert [start["first_step"] for start in files.read_environment(tmp_path)] == [2]


def test_a_damaged_config_file_of_the_last_start_is_written_again(tmp_path: Path) -> None:
    TrackedRun(tmp_path).train(last_step=2)
    (tmp_path / "config.yaml").write_text("a: [")
    printed = TrackedRun(tmp_path).train(first_step=2, last_step=3).printed
    assert "config.yaml: not YAML" in printed and "; it is written again\n" in printed
    assert files.read_config(tmp_path)["training_steps"] == 6


SECRET = "hunter2-0123456789"


def test_secrets_among_the_settings_are_masked_in_the_records_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["--environments.0.args.api_key", SECRET, f"--environments.0.args.hf_token={SECRET}", "--seed", "5"]
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "colocated_grpo", *arguments])
    entry = {"type": "task", "name": "sort", "args": {"api_key": SECRET, "login": {"password": SECRET}, "digits": 3}}
    config = Config.model_validate({**config_of().model_dump(exclude_unset=True), "environments": [entry]})
    tmp_path.chmod(0o755)
    run = TrackedRun(tmp_path, config).train(last_step=2)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (tmp_path, tmp_path / "config.yaml")] == [0o700, 0o600]
    assert "environments.0.args.api_key, environments.0.args.login.password: secrets" in run.printed
    entry["args"]["api_key"] = f"{SECRET}-new"
    config = Config.model_validate({**config_of().model_dump(exclude_unset=True), "environments": [entry]})
    printed = run.printed + TrackedRun(tmp_path, config).train(first_step=2).finish().printed
    assert "environments.0.args.api_key *** -> ***" in printed
    report = (tmp_path / "report.html").read_text()
    assert "digits" in report and "environments.0.args.login.password" in report
    command = files.read_environment(tmp_path)[0]["command"]
    assert command.endswith("--environments.0.args.api_key '***' '--environments.0.args.hf_token=***' --seed 5")
    assert SECRET not in printed + report + (tmp_path / "environment.json").read_text()


def test_stored_rollouts_include_the_best_and_the_worst(tmp_path: Path) -> None:
    TrackedRun(tmp_path).train(last_step=1)
    rewards = [row["reward"] for row in files.read_rollouts(tmp_path) if row["kind"] == "train"]
    assert rewards == [0.0, 0.3, 1.3, 2.3]


def test_a_rollout_whose_reward_failed_is_stored_as_the_worst(tmp_path: Path) -> None:
    run = TrackedRun(tmp_path).train(last_step=0)
    failed = rollout_of(None, "oops", error="ValueError: boom")
    group = Group(prompt=groups_of(0)[0].prompt, rollouts=[rollout_of(-5.0, "bad"), failed, rollout_of(1.0, "good")])
    run.tracker.flush(0, row_of(0), [group])
    stored = files.read_rollouts(tmp_path)
    assert [(row["completion"], row["error"]) for row in stored] == [
        ("oops", "ValueError: boom"),
        ("bad", None),
        ("good", None),
    ]


def test_no_rollouts_are_stored_with_rollouts_per_step_0(tmp_path: Path) -> None:
    TrackedRun(tmp_path, config_of(rollouts_per_step=0)).train()
    assert files.read_rollouts(tmp_path) == []


def test_every_evaluation_stores_rollouts_of_the_same_prompts(tmp_path: Path) -> None:
    TrackedRun(tmp_path).train().finish()
    held_out = [row for row in files.read_rollouts(tmp_path) if row["kind"] == "evaluation"]
    prompts = {step: [row["prompt_index"] for row in held_out if row["step"] == step] for step in (0, 2, 4, 6)}
    assert prompts[0] == prompts[2] == prompts[4] == prompts[6]
    assert len(prompts[0]) == records.HELD_OUT_ROLLOUTS and {0, 19} <= set(prompts[0])


def test_a_config_without_secrets_has_the_usual_permissions(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    TrackedRun(tmp_path).train(last_step=0)
    before = os.umask(0o022)
    os.umask(before)
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (tmp_path, tmp_path / "config.yaml")]
    assert modes == [0o755, 0o666 & ~before]


def test_the_written_config_loads_back_as_the_same_config(tmp_path: Path) -> None:
    run = TrackedRun(tmp_path).train(last_step=0)
    assert Config.model_validate(yaml.safe_load((tmp_path / "config.yaml").read_text())) == run.config


def test_the_environment_file_records_package_versions_and_the_command(tmp_path: Path) -> None:
    TrackedRun(tmp_path).train(last_step=0)
    (start,) = files.read_environment(tmp_path)
    assert start["packages"].keys() >= {"torch", "transformers", "pydantic"}
    assert "pytest" in start["command"]


def test_the_summary_has_the_held_out_reward_before_and_after_and_is_removed_on_resume(tmp_path: Path) -> None:
    run = TrackedRun(tmp_path).train().finish()
    assert files.read_summary(tmp_path) == {
        "state": "finished",
        "steps": 6,
        "held_out_reward": {"before": {"step": 0, "value": 0.2}, "after": {"step": 6, "value": pytest.approx(0.8)}},
    }
    assert "held-out reward 0.200 -> 0.800 (steps 0 -> 6)" in run.printed
    assert f"report: {tmp_path / 'report.html'}" in run.printed
    TrackedRun(tmp_path).train(first_step=4, last_step=5)
    assert files.read_summary(tmp_path) == {}


def test_each_atropos_batch_replaces_the_previous_one(tmp_path: Path) -> None:
    for tokens in ([[1, 2]], [[3]]):
        files.write_atropos_batch(tmp_path, [{"tokens": tokens}])
    assert [path.name for path in tmp_path.iterdir()] == ["atropos_batch.json"]
    assert json.loads((tmp_path / files.ATROPOS_BATCH_FILE).read_text()) == [{"tokens": [[3]]}]


def test_close_works_before_the_start_before_the_first_step_and_twice(tmp_path: Path) -> None:
    run = TrackedRun(tmp_path / "never started")
    run.tracker.note("loading")
    run.tracker.close("stopped")
    assert "loading" in run.printed and not run.run_dir.exists()
    run = TrackedRun(tmp_path / "no step").train(last_step=0)
    run.tracker.close("stopped")
    run.tracker.close("stopped")
    assert run.printed.count("stopped after 0 steps") == 1
    assert not (run.run_dir / "report.html").exists()


def test_a_hostile_note_is_escaped_in_an_ascii_log(tmp_path: Path) -> None:
    run = TrackedRun(tmp_path, encoding="ascii")
    run.tracker.note("reward failed: \u00e9" + HOSTILE)
    assert "\\xe9" in run.printed and "\\x1b[2J" in run.printed and "\x1b" not in run.printed


@pytest.mark.parametrize("mode", ["plain", "live"])
@pytest.mark.parametrize("error", [errno.EIO, errno.EPIPE, errno.ENOSPC])
def test_a_run_continues_after_its_terminal_or_pipe_closes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, error: int
) -> None:
    class FailingOutput(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(error, os.strerror(error))  # a closed terminal, a closed pipe, a full disk

    monkeypatch.setattr(sys, "stdout", FailingOutput())
    config = config_of(console=mode)
    run = TrackedRun(tmp_path, config)
    run.tracker = Tracker(tmp_path, output_of(config), config.tracking)
    run.train().finish()
    assert len(files.read_metrics(tmp_path)) == 10
    assert files.read_summary(tmp_path)["state"] == "finished"


def test_a_run_continues_after_user_code_closes_standard_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = TrackedRun(tmp_path)
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    run.tracker = Tracker(tmp_path, output_of(config_of()), config_of().tracking)
    run.train(last_step=2)
    sys.stdout.close()
    run.train(first_step=3).finish()
    assert files.read_summary(tmp_path)["state"] == "finished"


def test_steps_are_shown_even_if_user_code_redirects_standard_output(tmp_path: Path, capsys) -> None:
    run = TrackedRun(tmp_path)
    run.tracker = Tracker(tmp_path, output_of(config_of()), config_of().tracking)
    with redirect_stdout(io.StringIO()):
        run.train()
    assert "step 5/6" in capsys.readouterr().out


def test_the_null_tracker_has_the_same_methods() -> None:
    def methods(cls: type) -> dict[str, str]:
        return {name: str(inspect.signature(f)) for name, f in vars(cls).items() if callable(f) and name[0] != "_"}

    assert methods(Tracker) == methods(NullTracker)


def test_tracking_and_its_tools_import_no_torch() -> None:
    modules = "colocated_grpo.tracking.report, colocated_grpo.tools.show_rollouts"
    program = (
        f"import sys, {modules}, colocated_grpo.tools.compare_runs; print({{'torch', 'wandb'}} & sys.modules.keys())"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"


LIVE_PROGRAM = """
import sys
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
sys.path[:0] = {paths!r}
from tests.support.tracked_run import config_of, groups_of, output_of, row_of
from colocated_grpo.tracking.tracker import Tracker
config = config_of(console="auto")
tracker = Tracker(Path({run_dir!r}), output_of(config), config.tracking)
tracker.start(config_of().model_dump(mode="json"), {{"model": ""}}, 0, None)
tracker.flush(0, row_of(0), groups_of(0))
tracker.note("a note [bold] between")
raise RuntimeError("the third layer exploded")
"""


def test_an_exception_under_the_live_display_restores_the_terminal(tmp_path: Path) -> None:
    paths = [str(ROOT), os.getcwd()]
    program = LIVE_PROGRAM.format(paths=paths, run_dir=str(tmp_path))
    master, terminal = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "120"}
    process = subprocess.Popen([sys.executable, "-c", program], stdout=terminal, stderr=terminal, env=environment)
    os.close(terminal)
    shown = read_all(master)
    assert process.wait() == 1
    hidden, restored = shown.rindex("\x1b[?25l"), shown.rindex("\x1b[?25h")
    assert hidden < restored
    for expected in ("s/step", "1/6", "a note [bold] between", "the third layer exploded"):
        assert expected in shown


def read_all(descriptor: int) -> str:
    received = b""
    while True:
        try:
            received += (chunk := os.read(descriptor, 65536))
        except OSError:  # Linux reports EIO when the other end of a pseudo-terminal closes
            chunk = b""
        if not chunk:
            os.close(descriptor)
            return received.decode()


def test_wandb_offline_writes_to_the_run_folder_and_nothing_to_the_console(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    clear_wandb_settings(monkeypatch, tmp_path)
    monkeypatch.setitem(sys.modules, "openai", ModuleType("openai"))  # vLLM imports it, and W&B then names a product
    monkeypatch.setattr(sys, "argv", ["rank.py", f"--environments.1.rewards.0.args.openai_api_key={SECRET}", "--n"])
    tables = {"completions_every": 4, "completions_rows": 3}
    run = TrackedRun(tmp_path / "run", config_of(wandb="offline", **tables)).train()
    run.finish()
    assert "tracking.wandb disabled" not in run.printed
    assert "wandb:" not in "".join(capfd.readouterr())
    (written,) = (tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb")
    # W&B's own process writes the file, and may be a moment behind.
    until(lambda: b"my_own/metric" in written.read_bytes(), 30)
    assert b"openai_api_key=***" in written.read_bytes()
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]
    assert (tmp_path / "run" / "wandb_run_id").read_text() in written.name
    sent = sorted(written.parent.glob("files/media/table/completions*.json"), key=lambda path: path.stat().st_mtime_ns)
    first, second = (json.loads(path.read_text()) for path in sent)
    assert first["columns"] == [
        *("step", "prompt", "completion", "reward", "reward/correct", "environment", "finish_reason")
    ]
    assert [(row[0], row[2], row[3]) for row in second["data"]] == [
        (4, "step 4 sample 0", 0.0),
        (4, "step 4 sample 1", 1.1),
        (4, "step 4 sample 3", 2.3),
    ]
    assert [row[0] for row in first["data"]] == [0, 0, 0]


def test_wandb_online_without_an_api_key_is_one_line_and_the_run_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clear_wandb_settings(monkeypatch, tmp_path)
    run = TrackedRun(tmp_path / "run", config_of(wandb="online")).train().finish()
    (line,) = [line for line in run.printed.splitlines() if "tracking.wandb" in line]
    assert line.startswith("tracking.wandb disabled: no API key")
    assert len(files.read_metrics(tmp_path / "run")) == 10


def test_the_link_of_a_wandb_run_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = SimpleNamespace(
        url="https://wandb.example/run",
        define_metric=lambda *_, **__: None,
        log=lambda row: None,
        finish=lambda: None,
    )
    monkeypatch.setattr("wandb.login", lambda **_: True)
    monkeypatch.setattr("wandb.init", lambda **_: run)
    printed = TrackedRun(tmp_path / "run", config_of(wandb="online")).train().finish().printed
    assert "tracking.wandb: https://wandb.example/run\n" in printed


def clear_wandb_settings(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("NETRC", str(home / "no_netrc"))


def test_tensorboard_has_every_metric_and_a_resume_replaces_steps_after_the_checkpoint(tmp_path: Path) -> None:
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    config = config_of(tensorboard=True)
    TrackedRun(tmp_path, config).train(last_step=5).tracker.close("killed")
    TrackedRun(tmp_path, config).train(first_step=2).finish()
    events = event_accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("my_own/metric")] == [0, 1, 2, 3, 4, 5]
    assert events.Scalars("held_out/reward")[-1].value == pytest.approx(0.8)


def test_a_failing_sink_is_reported_once_and_disabled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def log(step: int, row: dict[str, float]) -> None:
        calls.append(step)
        if step == 1:
            raise ConnectionError("service is gone\nwith a long story")

    monkeypatch.setattr(records, "_tensorboard", lambda run_dir, first_step: records.Sink(log=log, finish=lambda: None))
    run = TrackedRun(tmp_path, config_of(tensorboard=True)).train().finish()
    assert calls == [0, 0, 1]
    notes = [line for line in run.printed.splitlines() if "tracking.tensorboard" in line]
    assert notes == ["tracking.tensorboard disabled: service is gone"]


def test_numbers_are_formatted_short_and_missing_ones_as_a_dash() -> None:
    shown = {value: number(value) for value in (0.0, 1.0, 0.1234, 12.345, 123.45, 12345.6, 0.00123, 1.23e-6, -0.5)}
    assert list(shown.values()) == ["0", "1", "0.123", "12.35", "123.5", "12,346", "0.0012", "1.2e-06", "-0.500"]
    assert {number(None), number(math.nan), number(math.inf)} == {"-"}
    assert [duration(seconds) for seconds in (4.2, 75, 3725)] == ["4s", "1m 15s", "1h 02m"]


def test_visible_keeps_printable_text_and_escapes_control_characters() -> None:
    assert visible("a\nb\tc \u00e9\u4e2d") == "a\nb\tc \u00e9\u4e2d"
    assert visible("\x1b[31m\x00\u202e\ud800") == "\\x1b[31m\\x00\\u202e\\ud800"
