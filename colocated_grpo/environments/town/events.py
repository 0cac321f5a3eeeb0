"""The record of ended games: rows for CSV and JSONL, and a transcript for people."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from colocated_grpo.environments.town.endings import result
from colocated_grpo.environments.town.state import Event, Game
from colocated_grpo.environments.town.wording import sentence


def rows(game: Game) -> Iterator[dict[str, Any]]:
    """One for each event. audience: 'all', names, or 'record' for what no seat saw."""
    for number, event in enumerate(game.events):
        yield {
            "game": game.number,
            "seed": game.seed,
            "number": number,
            "day": event.day,
            "phase": str(event.phase),
            "kind": event.kind,
            "actor": _name(game, event.actor),
            # The role at the end: an executioner may have become a jester on the way.
            "role": game.seats[event.actor].role_name if event.actor >= 0 else "",
            "target": _name(game, event.target),
            "text": event.text,
            "audience": _audience(game, event),
        }


def summary(game: Game) -> dict[str, Any]:
    """The cast and the result of an ended game, as plain data."""
    seats = [
        {
            "name": seat.name,
            "role": seat.role_name,
            "faction": str(seat.role.faction),
            "player": seat.player,
            "alive": seat.alive,
            "result": result(game, index),
        }
        for index, seat in enumerate(game.seats)
    ]
    return {"game": game.number, "seed": game.seed, "winner": str(game.winner), "days": game.day, "seats": seats}


def transcript(game: Game) -> str:
    """The whole game, secrets included. Lines that not everybody saw say who did."""
    names = [f"{seat.name} ({seat.role_name})" for seat in game.seats]
    cast = "Cast: " + ", ".join(names)
    return "\n".join([cast, *(_line(game, event, names) for event in game.events)]) + "\n"


def record(game: Game) -> dict[str, Any]:
    """An ended game for the run folder: cast and result, every event, and the transcript."""
    return {**summary(game), "transcript": transcript(game), "events": list(rows(game))}


def _name(game: Game, seat: int) -> str:
    return game.seats[seat].name if seat >= 0 else ""


def _audience(game: Game, event: Event) -> str:
    if event.audience is None:
        return "all"
    return ", ".join(game.names(event.audience)) or "record"


def _line(game: Game, event: Event, names: list[str]) -> str:
    line = sentence(event, names)
    # Thoughts and choices wear brackets already; the others need their circle named.
    return f"    {line}  <- {_audience(game, event)}" if event.audience else line
