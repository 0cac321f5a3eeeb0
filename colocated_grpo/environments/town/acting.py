"""Carries out one judged reply: the only place where a seat changes the game."""

from __future__ import annotations

from collections.abc import Callable

from colocated_grpo.environments.town.grammar import TOOLS, WAIT, clean
from colocated_grpo.environments.town.phases import acted, channels, nominate
from colocated_grpo.environments.town.state import NOBODY, Game, Phase
from colocated_grpo.environments.town.tools import look_up
from colocated_grpo.environments.town.verdicts import Status, Verdict

LONGEST_THOUGHT = 500
"""Characters of the think block that the record keeps."""


def carry_out(game: Game, seat: int, verdict: Verdict, completion: str) -> str | None:
    """Returns the observation that a look-up gives; the seat then goes on. None: the turn is over."""
    holder = game.seats[seat]
    holder.acted += 1
    if verdict.think:
        game.record("thought", actor=seat, text=clean(verdict.think[:LONGEST_THOUGHT]))
    if verdict.status is not Status.OK:
        game.tell([seat], "rejected", actor=seat, text=f"{verdict.code}: {verdict.detail}")
    elif verdict.tag in TOOLS:
        observation = look_up(game, seat, verdict.tag, verdict.argument)
        holder.dialog.append((completion, observation))
        return observation
    elif verdict.tag != WAIT:
        _DO.get(verdict.tag, _choose)(game, seat, verdict)
    holder.dialog = []
    acted(game, seat)
    return None


def _choose(game: Game, seat: int, verdict: Verdict) -> None:
    """Takes effect with everybody else's choice, when the phase closes."""
    game.choices[seat] = (verdict.tag, verdict.argument)


def _speak(game: Game, seat: int, verdict: Verdict) -> None:
    if game.phase is not Phase.NIGHT_TALK:
        game.announce("speech", actor=seat, text=verdict.argument)
        return
    circle = next(circle for circle in channels(game) if seat in circle)
    if game.prisoner not in circle:
        game.tell(circle, "mafia_chat", actor=seat, text=verdict.argument)
    elif seat == game.prisoner:
        game.tell(circle, "prisoner_says", actor=seat, text=verdict.argument)
    else:
        # Without a name: the prisoner is not to learn who the jailor is.
        game.tell(circle, "jailor_says", actor=NOBODY, text=verdict.argument)


def _whisper(game: Game, seat: int, verdict: Verdict) -> None:
    target = game.index(verdict.argument)
    game.tell([seat, target], "whisper", actor=seat, target=target, text=verdict.text)
    game.announce("whispered", actor=seat, target=target)


def _reveal(game: Game, seat: int, verdict: Verdict) -> None:
    game.seats[seat].revealed = True
    game.announce("revealed", actor=seat)


def _nominate(game: Game, seat: int, verdict: Verdict) -> None:
    nominate(game, seat, game.index(verdict.argument))


_DO: dict[str, Callable[[Game, int, Verdict], None]] = {
    "speak": _speak,
    "whisper": _whisper,
    "reveal": _reveal,
    "nominate": _nominate,
}
