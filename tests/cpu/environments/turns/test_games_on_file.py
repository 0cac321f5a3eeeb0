"""Records of ended games in the run folder: writing, truncation at a resume, report and terminal."""

from __future__ import annotations

import json
import tracemalloc

from colocated_grpo.tools import show_rollouts
from colocated_grpo.tracking.files import EVENTS_FILE, GAMES_FILE, append_games, keep_rows_before, read_games
from tests.support.tracked_run import HOSTILE, TrackedRun


def game(number: int, text: str = "hello") -> dict:
    return {
        "source": "town",
        "game": number,
        "winner": "mafia",
        "seats": [{"name": "Ada", "role": "doctor"}, {"name": "Bram", "role": "spy"}],
        "transcript": f"Cast: Ada\n{text}\n",
        "events": [{"game": number, "day": 1, "text": text}, {"game": number, "day": 2, "text": "over"}],
    }


def events(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / EVENTS_FILE).read_text().splitlines()]


def test_games_and_their_events_are_written(tmp_path):
    append_games(tmp_path, 3, [game(0), game(1, 'says "no",\nthen leaves')])
    append_games(tmp_path, 4, [])
    append_games(tmp_path, 5, [{"source": "other", "game": 0, "winner": "nobody"}])
    assert [(row["step"], row["source"], row["game"]) for row in read_games(tmp_path)] == [
        (3, "town", 0),
        (3, "town", 1),
        (5, "other", 0),
    ]
    assert "events" not in (tmp_path / GAMES_FILE).read_text()
    assert len(events(tmp_path)) == 4


def test_a_games_own_step_does_not_replace_that_of_the_run(tmp_path):
    own = {**game(0), "step": 99, "events": [{"step": 99, "source": "here", "text": "hm"}]}
    append_games(tmp_path, 3, [own])
    assert [row["step"] for row in read_games(tmp_path)] == [3]
    assert events(tmp_path) == [{"step": 3, "source": "town", "text": "hm"}]


def test_a_run_without_games_writes_no_games_file(tmp_path):
    keep_rows_before(tmp_path, 0, print)
    append_games(tmp_path, 1, [])
    assert list(tmp_path.iterdir()) == []


def test_events_whose_game_was_not_written_before_a_kill_are_dropped(tmp_path):
    append_games(tmp_path, 0, [game(0)])
    (tmp_path / GAMES_FILE).unlink()
    keep_rows_before(tmp_path, 0, print)
    append_games(tmp_path, 0, [game(0)])
    assert len(read_games(tmp_path)) == 1
    assert len(events(tmp_path)) == 2


def test_a_resume_drops_the_games_of_the_steps_that_it_repeats(tmp_path):
    for step in range(4):
        append_games(tmp_path, step, [game(step)])
    keep_rows_before(tmp_path, 2, print)
    assert [row["game"] for row in read_games(tmp_path)] == [0, 1]
    append_games(tmp_path, 2, [game(7)])
    assert [row["game"] for row in read_games(tmp_path)] == [0, 1, 7]
    assert [row["game"] for row in events(tmp_path)] == [0, 0, 1, 1, 7, 7]


def test_a_resume_streams_the_events_instead_of_loading_them(tmp_path):
    long_game = {**game(0), "events": [{"game": 0, "day": day, "text": "hm" * 50} for day in range(2_000)]}
    for step in range(10):
        append_games(tmp_path, step, [long_game])
    tracemalloc.start()
    keep_rows_before(tmp_path, 9, print)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2 * 2**20
    assert len(events(tmp_path)) == 9 * 2_000


def test_the_report_and_the_terminal_show_games_and_escape_their_text(tmp_path, capsys):
    run = TrackedRun(tmp_path).train()
    run.tracker.games(5, [game(4, "an early one"), game(5, f"the last words {HOSTILE}")])
    run.finish()
    report = (tmp_path / "report.html").read_text()
    assert "Games (latest 2 of 2)" in report
    assert "town, game 5, ended in step 5: mafia" in report
    assert "<td>doctor</td>" in report
    assert "the last words" in report
    assert "<script>" not in report
    assert show_rollouts.main([str(tmp_path), "--game"]) == 0
    shown = capsys.readouterr().out
    assert "the last words" in shown
    assert "an early one" not in shown
    assert "\x1b[2J" not in shown
    assert show_rollouts.main([str(tmp_path), "--game", "4"]) == 0
    assert "an early one" in capsys.readouterr().out
    assert show_rollouts.main([str(tmp_path), "--game", "6"]) == 2
    assert "no game 6 has ended" in capsys.readouterr().err
