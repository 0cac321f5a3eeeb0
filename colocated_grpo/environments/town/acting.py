"""Applies one judged reply to the game: the only code through which a seat changes the game state."""

from __future__ import annotations

from collections.abc import Callable

from colocated_grpo.environments.town.grammar import LOOK_UP_TAGS, WAIT, clean_line
from colocated_grpo.environments.town.look_ups import look_up
from colocated_grpo.environments.town.phases import channels, end_turn, nominate
from colocated_grpo.environments.town.state import NO_SEAT, Game, Phase
from colocated_grpo.environments.town.verdicts import Status, Verdict

MAX_RECORDED_THOUGHT = 500
"""Maximum recorded characters of the think block."""


def apply_verdict(game: Game, seat: int, verdict: Verdict, completion: str) -> str | None:
    """Apply a judged reply to the game. A reply that is not OK acts as waiting.

    Returns the observation of a look-up, which leaves the turn open; None if the turn has ended.
    """
    holder = game.seats[seat]
    holder.acted += 1
    if verdict.think:
        game.record("thought", actor=seat, text=clean_line(verdict.think[:MAX_RECORDED_THOUGHT]))
    if verdict.status is not Status.OK:
        game.notify([seat], "rejected", actor=seat, text=f"{verdict.code}: {verdict.detail}")
    elif verdict.tag in LOOK_UP_TAGS:
        observation = look_up(game, seat, verdict.tag, verdict.argument)
        holder.dialog.append((completion, observation))
        return observation
    elif verdict.tag != WAIT:
        _IMMEDIATE.get(verdict.tag, _choose)(game, seat, verdict)
    holder.dialog = []
    end_turn(game, seat)
    return None


def _choose(game: Game, seat: int, verdict: Verdict) -> None:
    """Store a choice. The choices of all seats take effect together when the phase closes."""
    game.choices[seat] = (verdict.tag, verdict.argument)


def _speak(game: Game, seat: int, verdict: Verdict) -> None:
    if game.phase is not Phase.NIGHT_TALK:
        game.announce("speech", actor=seat, text=verdict.argument)
        return
    channel = next(channel for channel in channels(game) if seat in channel)
    if game.prisoner not in channel:
        game.notify(channel, "mafia_chat", actor=seat, text=verdict.argument)
    elif seat == game.prisoner:
        game.notify(channel, "prisoner_says", actor=seat, text=verdict.argument)
    else:
        # No actor: the prisoner must not learn which seat is the jailor.
        game.notify(channel, "jailor_says", actor=NO_SEAT, text=verdict.argument)


def _whisper(game: Game, seat: int, verdict: Verdict) -> None:
    target = game.index(verdict.argument)
    game.notify([seat, target], "whisper", actor=seat, target=target, text=verdict.text)
    game.announce("whispered", actor=seat, target=target)


def _reveal(game: Game, seat: int, verdict: Verdict) -> None:
    game.seats[seat].revealed = True
    game.announce("revealed", actor=seat)


def _nominate(game: Game, seat: int, verdict: Verdict) -> None:
    nominate(game, seat, game.index(verdict.argument))


_IMMEDIATE: dict[str, Callable[[Game, int, Verdict], None]] = {
    "speak": _speak,
    "whisper": _whisper,
    "reveal": _reveal,
    "nominate": _nominate,
}
"""Actions that take effect at once, by tag."""
