"""The day's course: who acts in each phase, and what the phase leads to."""

from __future__ import annotations

from collections.abc import Callable

from colocated_grpo.environments.town.endings import bury, close_if_won, declare
from colocated_grpo.environments.town.legality import deeds, needed_to_accuse
from colocated_grpo.environments.town.night import resolve_night
from colocated_grpo.environments.town.state import DRAW, NOBODY, Game, Phase

SIMULTANEOUS = frozenset({Phase.PRE_NIGHT, Phase.NIGHT, Phase.JUDGEMENT})
"""Nobody learns anything before all have chosen, so all are asked at once."""
MAYORS_VOTES = 3


def begin(game: Game) -> None:
    enter(game, Phase.PRE_NIGHT)


def to_act(game: Game) -> list[int]:
    """Seats that are asked now."""
    return game.waiting if game.phase in SIMULTANEOUS else game.waiting[:1]


def acted(game: Game, seat: int) -> None:
    """The seat's turn is over; the last one of a phase brings on the next."""
    if game.waiting:  # A nomination that carries empties the list at once.
        game.waiting.remove(seat)
    if not game.waiting:
        enter(game, _CLOSE[game.phase](game))


def enter(game: Game, phase: Phase) -> None:
    """Opens the phase, and those after it as long as nobody has anything to do."""
    while True:
        game.phase, game.choices = phase, {}
        game.waiting = _OPEN[phase](game)
        if game.waiting or phase is Phase.OVER:
            return
        phase = _CLOSE[phase](game)


def nominate(game: Game, seat: int, target: int) -> None:
    """Enough who name the same person bring that one to trial, there and then."""
    game.choices[seat] = ("nominate", game.seats[target].name)
    game.announce("nominated", actor=seat, target=target)
    support = sum(weight(game, voter) for voter, (_, name) in game.choices.items() if name == game.seats[target].name)
    if support >= needed_to_accuse(game):
        game.accused = target
        game.waiting = []


def weight(game: Game, seat: int) -> int:
    return MAYORS_VOTES if game.seats[seat].revealed else 1


def with_deeds(game: Game) -> list[int]:
    return [seat for seat in game.living() if deeds(game, seat)]


def channels(game: Game) -> list[tuple[int, ...]]:
    """Closed circles of the night: the jail, and the mafia at liberty. One alone has nobody to talk to."""
    jail = () if game.prisoner == NOBODY else (game.holders("jailor")[0], game.prisoner)
    mafia = tuple(seat for seat in game.mafia() if seat != game.prisoner)
    return [circle for circle in (jail, mafia) if len(circle) > 1]


def _open_pre_night(game: Game) -> list[int]:
    game.prisoner, game.accused = NOBODY, NOBODY
    for seat in game.seats:
        seat.muted = False
    return with_deeds(game)


def _close_pre_night(game: Game) -> Phase:
    for jailor, (_, name) in game.choices.items():
        game.prisoner = game.index(name)
        game.tell([game.prisoner], "jailed", target=game.prisoner)
        game.record("action", actor=jailor, target=game.prisoner, text="jail")
    return Phase.NIGHT_TALK


def _open_night_talk(game: Game) -> list[int]:
    game.announce("nightfall")
    _promote(game)
    return [seat for circle in channels(game) for seat in circle]


def _promote(game: Game) -> None:
    """A mafia without a killer could never win, so its eldest member becomes one."""
    mafia = game.mafia()
    if mafia and not game.holders("godfather") and not game.holders("mafioso"):
        game.seats[mafia[0]].become("mafioso")
        game.tell(mafia, "promoted", actor=mafia[0], text="mafioso")


def _close_night(game: Game) -> Phase:
    resolve_night(game)
    if close_if_won(game):
        return Phase.OVER
    game.day += 1
    if game.day > game.rules.max_days:
        game.winner = DRAW
        return Phase.OVER
    return Phase.DISCUSSION


def _open_discussion(game: Game) -> list[int]:
    game.acquitted, game.prisoner = [], NOBODY
    game.announce("dawn")
    return _in_random_order(game) * game.rules.discussion_rounds


def _open_nomination(game: Game) -> list[int]:
    game.accused = NOBODY
    return _in_random_order(game) if len(game.acquitted) < game.rules.trials_per_day else []


def _in_random_order(game: Game) -> list[int]:
    order = game.living()
    game.rng().shuffle(order)
    return order


def _close_nomination(game: Game) -> Phase:
    return Phase.PRE_NIGHT if game.accused == NOBODY else Phase.DEFENCE


def _open_defence(game: Game) -> list[int]:
    game.announce("trial", target=game.accused)
    return [game.accused]


def _open_judgement(game: Game) -> list[int]:
    return [seat for seat in game.living() if seat != game.accused]


def _close_judgement(game: Game) -> Phase:
    tally = {"guilty": 0, "innocent": 0, "abstain": 0}
    for seat, (_, vote) in sorted(game.choices.items()):
        tally[vote] += weight(game, seat)
        game.announce("vote", actor=seat, target=game.accused, text=vote)
    counted = f"{tally['guilty']} guilty, {tally['innocent']} innocent"
    if tally["guilty"] > tally["innocent"]:
        game.announce("condemned", target=game.accused, text=counted)
        return Phase.LAST_WORDS
    game.announce("acquitted", target=game.accused, text=counted)
    game.acquitted.append(game.accused)
    return Phase.NOMINATION


def _close_last_words(game: Game) -> Phase:
    bury(game, game.accused, "hanged")
    return Phase.OVER if close_if_won(game) else Phase.PRE_NIGHT


def _open_over(game: Game) -> list[int]:
    declare(game)
    return []


_OPEN: dict[Phase, Callable[[Game], list[int]]] = {
    Phase.PRE_NIGHT: _open_pre_night,
    Phase.NIGHT_TALK: _open_night_talk,
    Phase.NIGHT: with_deeds,
    Phase.DISCUSSION: _open_discussion,
    Phase.NOMINATION: _open_nomination,
    Phase.DEFENCE: _open_defence,
    Phase.JUDGEMENT: _open_judgement,
    Phase.LAST_WORDS: lambda game: [game.accused],
    Phase.OVER: _open_over,
}
_CLOSE: dict[Phase, Callable[[Game], Phase]] = {
    Phase.PRE_NIGHT: _close_pre_night,
    Phase.NIGHT_TALK: lambda game: Phase.NIGHT,
    Phase.NIGHT: _close_night,
    Phase.DISCUSSION: lambda game: Phase.NOMINATION,
    Phase.NOMINATION: _close_nomination,
    Phase.DEFENCE: lambda game: Phase.JUDGEMENT,
    Phase.JUDGEMENT: _close_judgement,
    Phase.LAST_WORDS: _close_last_words,
}
