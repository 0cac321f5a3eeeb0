"""Files of ended games: games.jsonl (seats, result, transcript), and their events as .jsonl and .csv."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from pathlib import Path

from colocated_grpo.tracking.rows import STEP_ROW, Row, RowSchema, json_line, keep_before, read_rows
from colocated_grpo.types import JsonObject

GAMES_FILE = "games.jsonl"
EVENTS_FILE = "game_events.jsonl"
EVENTS_TABLE = "game_events.csv"
GAME_ROW = RowSchema({"step": int, "source": str, "game": int, "winner": object})


class GameWriter:
    """Append ended games. No file is created before the first one.

    Games of steps >= `first_step` are dropped on opening: they ended after the checkpoint that is resumed.
    """

    def __init__(self, run_dir: Path, first_step: int, note: Callable[[str], None]) -> None:
        self._folder = run_dir
        self._columns: list[str] = []
        if (run_dir / GAMES_FILE).exists():
            keep_before(run_dir / GAMES_FILE, first_step, GAME_ROW, note)
        # Checked separately: events are written before games, so a kill may leave events only.
        if (run_dir / EVENTS_FILE).exists():
            keep_before(run_dir / EVENTS_FILE, first_step, STEP_ROW, note)
            # Rebuilt from the .jsonl: a kill may have cut the table's last line.
            (run_dir / EVENTS_TABLE).unlink(missing_ok=True)
            self._append_to_table(read_rows(run_dir / EVENTS_FILE))

    def write(self, step: int, games: Sequence[JsonObject]) -> None:
        """Append the games that ended in `step`. The files are closed again, so a killed run keeps every ended game."""
        if not games:
            return
        events = [
            {"step": step, "source": game["source"], **event} for game in games for event in game.get("events", ())
        ]
        self._append(EVENTS_FILE, events)
        self._append_to_table(events)
        self._append(GAMES_FILE, [{"step": step, **{k: v for k, v in game.items() if k != "events"}} for game in games])

    def _append(self, name: str, rows: Sequence[Row]) -> None:
        with (self._folder / name).open("a", encoding="utf-8") as file:
            file.writelines(map(json_line, rows))

    def _append_to_table(self, events: Iterable[Row]) -> None:
        """Append rows with the columns of the first event. Further keys are in the .jsonl only."""
        events = iter(events)
        first = next(events, None)
        if first is None:
            return
        self._columns = self._columns or list(first)
        with (self._folder / EVENTS_TABLE).open("a", newline="", encoding="utf-8", errors="replace") as file:
            writer = csv.DictWriter(file, self._columns, restval="", extrasaction="ignore")
            if file.tell() == 0:
                writer.writeheader()
            writer.writerows(chain([first], events))


def read_games(run_dir: Path) -> list[Row]:
    """Return the ended games, oldest first."""
    return list(read_rows(run_dir / GAMES_FILE, GAME_ROW))


def title(game: Row) -> str:
    """Return a one-line title. Example: 'town, game 12, ended in step 40: mafia'"""
    return f"{game['source']}, game {game['game']}, ended in step {game['step']}: {game['winner']}"
