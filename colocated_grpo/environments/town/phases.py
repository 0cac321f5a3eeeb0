"""The state machine of a game: the seats that act in each phase, and the phase that follows."""

from colocated_grpo.environments.town.legality import moves, nominations_needed
from colocated_grpo.environments.town.night import eliminate, resolve_night, winning_side
from colocated_grpo.environments.town.state import DRAW, NO_SEAT, Game, Phase

SIMULTANEOUS = frozenset({Phase.PRE_NIGHT, Phase.NIGHT, Phase.JUDGEMENT})
"""Phases whose choices stay secret until all seats have chosen, so all turns are open at once."""
MAYOR_VOTES = 3
"""Weight of the votes and nominations of a revealed mayor."""


def to_act(game: Game) -> list[int]:
    """Return the seats whose turn is open."""
    return game.waiting if game.phase in SIMULTANEOUS else game.waiting[:1]


def end_turn(game: Game, seat: int) -> None:
    """End the seat's turn. After the last turn of a phase, enter the next phase."""
    if game.waiting:  # The deciding nomination has already emptied the list.
        game.waiting.remove(seat)
    if not game.waiting:
        enter(game, _close(game))


def enter(game: Game, phase: Phase = Phase.PRE_NIGHT) -> None:
    """Enter the phase, skipping phases without a turn. Without a phase, the game begins."""
    while True:
        game.phase, game.choices = phase, {}
        game.waiting = _open(game)
        if game.waiting or phase is Phase.OVER:
            return
        phase = _close(game)


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


def channels(game: Game) -> list[tuple[int, ...]]:
    """Return the private channels of the night, of at least two seats: the jail, and the mafia outside the jail."""
    jail = () if game.prisoner == NO_SEAT else (game.living_with_role("jailor")[0], game.prisoner)
    mafia = tuple(seat for seat in game.mafia() if seat != game.prisoner)
    return [channel for channel in (jail, mafia) if len(channel) > 1]


def _open(game: Game) -> list[int]:
    """Do what happens on entering the phase. Return the seats that act in it."""
    living = game.living()
    match game.phase:
        case Phase.PRE_NIGHT:
            game.prisoner, game.accused = NO_SEAT, NO_SEAT
        case Phase.NIGHT_TALK:
            game.announce("nightfall")
            _promote(game)
            return [seat for channel in channels(game) for seat in channel]
        case Phase.DISCUSSION:
            game.acquitted, game.prisoner = [], NO_SEAT
            game.announce("dawn")
            game.rng().shuffle(living)
            return living * game.rules.discussion_rounds
        case Phase.NOMINATION:
            game.accused = NO_SEAT
            if len(game.acquitted) >= game.rules.trials_per_day:
                return []
            game.rng().shuffle(living)
            return living
        case Phase.DEFENCE:
            game.announce("trial", target=game.accused)
            return [game.accused]
        case Phase.JUDGEMENT:
            return [seat for seat in living if seat != game.accused]
        case Phase.LAST_WORDS:
            return [game.accused]
        case Phase.OVER:
            game.announce("over", text=game.winner or DRAW)
            return []
    return [seat for seat in living if moves(game, seat)]


def _promote(game: Game) -> None:
    """Make the first mafia member a mafioso if no godfather or mafioso lives: no other member can kill."""
    mafia = game.mafia()
    if mafia and not game.living_with_role("godfather") and not game.living_with_role("mafioso"):
        game.seats[mafia[0]].become("mafioso")
        game.announce("promoted", actor=mafia[0], text="mafioso", audience=mafia)


def _close(game: Game) -> Phase:
    """Do what happens on leaving the phase. Return the next phase."""
    match game.phase:
        case Phase.PRE_NIGHT:
            for jailor, (_, name) in game.choices.items():
                game.prisoner = game.index(name)
                game.announce("jailed", target=game.prisoner, audience=[game.prisoner])
                game.announce("action", actor=jailor, target=game.prisoner, text="jail", audience=())
            return Phase.NIGHT_TALK
        case Phase.NIGHT_TALK:
            return Phase.NIGHT
        case Phase.NIGHT:
            resolve_night(game)
            game.winner = winning_side(game)
            if game.winner is None:
                game.day += 1
                game.winner = DRAW if game.day > game.rules.max_days else None
            return Phase.OVER if game.winner else Phase.DISCUSSION
        case Phase.DISCUSSION:
            return Phase.NOMINATION
        case Phase.NOMINATION:
            return Phase.PRE_NIGHT if game.accused == NO_SEAT else Phase.DEFENCE
        case Phase.DEFENCE:
            return Phase.JUDGEMENT
        case Phase.JUDGEMENT:
            return _close_judgement(game)
    eliminate(game, game.accused, "hanged")
    game.winner = winning_side(game)
    return Phase.OVER if game.winner else Phase.PRE_NIGHT


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
