"""Games that ended during a run: games.jsonl (cast, result, transcript), and their events as .jsonl and .csv."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from colocated_grpo.tracking import files
from colocated_grpo.tracking.files import Row

GAMES_FILE = "games.jsonl"
EVENTS_FILE = "game_events.jsonl"
EVENTS_TABLE = "game_events.csv"
GAME: files.Shape = {"step": int, "source": str, "game": int, "winner": object}


class GameWriter:
    """Appends ended games. Those of steps >= `first_step` belong to a lost branch: dropped. No game, no file."""

    def __init__(self, run_dir: Path, first_step: int) -> None:
        self._folder = run_dir
        self._columns: list[str] = []
        if (run_dir / GAMES_FILE).exists():
            files.keep_before(run_dir / GAMES_FILE, first_step)
        if (run_dir / EVENTS_FILE).exists():  # written before the games: a kill may have left it alone
            files.keep_before(run_dir / EVENTS_FILE, first_step)
            # Made again from the rows that can be trusted: a kill may have cut its last line.
            (run_dir / EVENTS_TABLE).unlink(missing_ok=True)
            self._append_to_table(files.read_rows(run_dir / EVENTS_FILE))

    def write(self, step: int, games: Sequence[dict[str, Any]]) -> None:
        """Opens and closes the files: a killed run keeps every game that ended."""
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
            file.writelines(map(files.json_line, rows))

    def _append_to_table(self, events: Iterable[Row]) -> None:
        """Columns are those of the first event; what other environments add is in the .jsonl."""
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
    """Oldest first."""
    return list(files.read_rows(run_dir / GAMES_FILE, GAME))


def title(game: Row) -> str:
    """One line. Example: 'town, game 12, ended in step 40: mafia'"""
    return f"{game['source']}, game {game['game']}, ended in step {game['step']}: {game['winner']}"
