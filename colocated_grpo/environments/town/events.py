"""Events as text: sentences for prompts and look-ups, flat rows and a transcript for the record of an ended game."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from colocated_grpo.environments.town.endings import seat_result
from colocated_grpo.environments.town.state import Event, Game
from colocated_grpo.types import JsonObject

_SENTENCES = {
    "dawn": "--- Day {day} ---",
    "nightfall": "--- Night {day} ---",
    "speech": '{actor}: "{text}"',
    "whisper": '{actor} whispers to {target}: "{text}"',
    "whispered": "{actor} whispers to {target}.",
    "mafia_chat": '{actor} to the mafia: "{text}"',
    "jailor_says": 'The jailor: "{text}"',
    "prisoner_says": '{actor}, in jail: "{text}"',
    "jailed": "{target} is locked up for the night.",
    "promoted": "{actor} is the mafia's {text} now.",
    "killed": "{actor} was found dead. Role: {text}.",
    "hanged": "{actor} was hanged. Role: {text}.",
    "nominated": "{actor} nominates {target}.",
    "trial": "{target} is on trial.",
    "vote": "{actor} votes {text}.",
    "condemned": "{target} is condemned: {text}.",
    "acquitted": "{target} is let go: {text}.",
    "revealed": "{actor} shows the mayor's chain of office.",
    "note": "(Only you: {text})",
    "result": "(Result on {target}: {text}.)",
    "rejected": "(Your reply did nothing. {text}.)",
    "over": "The game is over: {text}.",
    "action": "[{actor} chooses: {text} -> {target}]",
    "thought": "[{actor} thinks: {text}]",
}
"""Wording by kind of event, the same in prompts, look-ups and transcripts."""


def event_line(event: Event, names: Sequence[str]) -> str:
    """Return the event as one line. names: player names by seat."""
    actor = names[event.actor] if event.actor >= 0 else ""
    target = names[event.target] if event.target >= 0 else ""
    return _SENTENCES[event.kind].format(day=event.day, actor=actor, target=target, text=event.text)


def event_lines(events: Iterable[Event], names: Sequence[str]) -> list[str]:
    return [event_line(event, names) for event in events]


def game_record(game: Game) -> JsonObject:
    """Return an ended game for the run folder: cast and result, transcript, and one row for each event."""
    return {**_summary(game), "transcript": _transcript(game), "events": list(_event_rows(game))}


def _summary(game: Game) -> JsonObject:
    seats = [
        {
            "name": seat.name,
            "role": seat.role_name,
            "faction": str(seat.role.faction),
            "player": seat.player,
            "alive": seat.alive,
            "result": seat_result(game, index),
        }
        for index, seat in enumerate(game.seats)
    ]
    return {"game": game.number, "seed": game.seed, "winner": str(game.winner), "days": game.day, "seats": seats}


def _event_rows(game: Game) -> Iterator[JsonObject]:
    for number, event in enumerate(game.events):
        yield {
            "game": game.number,
            "seed": game.seed,
            "number": number,
            "day": event.day,
            "phase": str(event.phase),
            "kind": event.kind,
            "actor": _name(game, event.actor),
            # The role at the end of the game: an executioner may have become a jester since this event.
            "role": game.seats[event.actor].role_name if event.actor >= 0 else "",
            "target": _name(game, event.target),
            "text": event.text,
            "audience": _audience(game, event),
        }


def _transcript(game: Game) -> str:
    """Return the whole game, secrets included. A line that only some seats saw ends with their names."""
    names = [f"{seat.name} ({seat.role_name})" for seat in game.seats]
    cast = "Cast: " + ", ".join(names)
    return "\n".join([cast, *(_transcript_line(game, event, names) for event in game.events)]) + "\n"


def _transcript_line(game: Game, event: Event, names: list[str]) -> str:
    line = event_line(event, names)
    # An empty audience needs no suffix: thoughts and choices are in brackets already.
    return f"    {line}  <- {_audience(game, event)}" if event.audience else line


def _name(game: Game, seat: int) -> str:
    return game.seats[seat].name if seat >= 0 else ""


def _audience(game: Game, event: Event) -> str:
    """Return 'all', the names of the seats that saw the event, or 'record' if none did."""
    if event.audience is None:
        return "all"
    return ", ".join(game.names(event.audience)) or "record"
