"""The state machine of a game: the seats that act in each phase, and the phase that follows."""

from collections.abc import Callable

from colocated_grpo.environments.town.legality import moves, nominations_needed
from colocated_grpo.environments.town.night import eliminate, resolve_night, settle_winner
from colocated_grpo.environments.town.state import DRAW, NO_SEAT, Game, Phase

SIMULTANEOUS = frozenset({Phase.PRE_NIGHT, Phase.NIGHT, Phase.JUDGEMENT})
"""Phases whose choices stay secret until all seats have chosen, so all turns are open at once."""
MAYOR_VOTES = 3
"""Weight of the votes and nominations of a revealed mayor."""


def begin(game: Game) -> None:
    enter(game, Phase.PRE_NIGHT)


def to_act(game: Game) -> list[int]:
    """Return the seats whose turn is open."""
    return game.waiting if game.phase in SIMULTANEOUS else game.waiting[:1]


def end_turn(game: Game, seat: int) -> None:
    """End the seat's turn. After the last turn of a phase, enter the next phase."""
    if game.waiting:  # The deciding nomination has already emptied the list.
        game.waiting.remove(seat)
    if not game.waiting:
        enter(game, _CLOSE[game.phase](game))


def enter(game: Game, phase: Phase) -> None:
    """Enter the phase, skipping phases without a turn."""
    while True:
        game.phase, game.choices = phase, {}
        game.waiting = _OPEN[phase](game)
        if game.waiting or phase is Phase.OVER:
            return
        phase = _CLOSE[phase](game)


def nominate(game: Game, seat: int, target: int) -> None:
    """Count a nomination. The deciding nomination ends the phase at once and starts the trial."""
    game.choices[seat] = ("nominate", game.seats[target].name)
    game.announce("nominated", actor=seat, target=target)
    voters = [voter for voter, (_, name) in game.choices.items() if name == game.seats[target].name]
    if sum(vote_weight(game, voter) for voter in voters) >= nominations_needed(game):
        game.accused = target
        game.waiting = []


def vote_weight(game: Game, seat: int) -> int:
    return MAYOR_VOTES if game.seats[seat].revealed else 1


def seats_with_moves(game: Game) -> list[int]:
    return [seat for seat in game.living() if moves(game, seat)]


def channels(game: Game) -> list[tuple[int, ...]]:
    """Return the private channels of the night: the jail, and the mafia outside the jail.

    A channel has at least two seats.
    """
    jail = () if game.prisoner == NO_SEAT else (game.living_with_role("jailor")[0], game.prisoner)
    mafia = tuple(seat for seat in game.mafia() if seat != game.prisoner)
    return [channel for channel in (jail, mafia) if len(channel) > 1]


def _open_pre_night(game: Game) -> list[int]:
    game.prisoner, game.accused = NO_SEAT, NO_SEAT
    return seats_with_moves(game)


def _close_pre_night(game: Game) -> Phase:
    for jailor, (_, name) in game.choices.items():
        game.prisoner = game.index(name)
        game.notify([game.prisoner], "jailed", target=game.prisoner)
        game.record("action", actor=jailor, target=game.prisoner, text="jail")
    return Phase.NIGHT_TALK


def _open_night_talk(game: Game) -> list[int]:
    game.announce("nightfall")
    _promote(game)
    return [seat for channel in channels(game) for seat in channel]


def _promote(game: Game) -> None:
    """Make the first mafia member a mafioso if godfather and mafioso are dead.

    No other member of the mafia can kill.
    """
    mafia = game.mafia()
    if mafia and not game.living_with_role("godfather") and not game.living_with_role("mafioso"):
        game.seats[mafia[0]].become("mafioso")
        game.notify(mafia, "promoted", actor=mafia[0], text="mafioso")


def _close_night(game: Game) -> Phase:
    resolve_night(game)
    if settle_winner(game):
        return Phase.OVER
    game.day += 1
    if game.day > game.rules.max_days:
        game.winner = DRAW
        return Phase.OVER
    return Phase.DISCUSSION


def _open_discussion(game: Game) -> list[int]:
    game.acquitted, game.prisoner = [], NO_SEAT
    game.announce("dawn")
    return _living_shuffled(game) * game.rules.discussion_rounds


def _open_nomination(game: Game) -> list[int]:
    game.accused = NO_SEAT
    return _living_shuffled(game) if len(game.acquitted) < game.rules.trials_per_day else []


def _living_shuffled(game: Game) -> list[int]:
    order = game.living()
    game.rng().shuffle(order)
    return order


def _close_nomination(game: Game) -> Phase:
    return Phase.PRE_NIGHT if game.accused == NO_SEAT else Phase.DEFENCE


def _open_defence(game: Game) -> list[int]:
    game.announce("trial", target=game.accused)
    return [game.accused]


def _open_judgement(game: Game) -> list[int]:
    return [seat for seat in game.living() if seat != game.accused]


def _close_judgement(game: Game) -> Phase:
    tally = {"guilty": 0, "innocent": 0, "abstain": 0}
    for seat, (_, vote) in sorted(game.choices.items()):
        tally[vote] += vote_weight(game, seat)
        game.announce("vote", actor=seat, target=game.accused, text=vote)
    counted = f"{tally['guilty']} guilty, {tally['innocent']} innocent"
    if tally["guilty"] > tally["innocent"]:
        game.announce("condemned", target=game.accused, text=counted)
        return Phase.LAST_WORDS
    game.announce("acquitted", target=game.accused, text=counted)
    game.acquitted.append(game.accused)
    return Phase.NOMINATION


def _close_last_words(game: Game) -> Phase:
    eliminate(game, game.accused, "hanged")
    return Phase.OVER if settle_winner(game) else Phase.PRE_NIGHT


def _open_over(game: Game) -> list[int]:
    game.announce("over", text=game.winner or DRAW)
    return []


# Functions called on entering a phase. Each returns the seats that act in the phase.
_OPEN: dict[Phase, Callable[[Game], list[int]]] = {
    Phase.PRE_NIGHT: _open_pre_night,
    Phase.NIGHT_TALK: _open_night_talk,
    Phase.NIGHT: seats_with_moves,
    Phase.DISCUSSION: _open_discussion,
    Phase.NOMINATION: _open_nomination,
    Phase.DEFENCE: _open_defence,
    Phase.JUDGEMENT: _open_judgement,
    Phase.LAST_WORDS: lambda game: [game.accused],
    Phase.OVER: _open_over,
}
# Functions called on leaving a phase. Each returns the next phase.
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
