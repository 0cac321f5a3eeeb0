"""The state machine of a game: seats that act in each phase, nights and deaths, the phase that follows, and the end."""

from typing import NamedTuple

from colocated_grpo.environments.town.legality import moves, nominations_needed
from colocated_grpo.environments.town.roles import Ability, Aim, Faction, Power, Priority
from colocated_grpo.environments.town.state import DRAW, NO_SEAT, Game, Phase

_LAST_PAIR = 2


def eliminate(game: Game, seat: int, kind: str) -> None:
    """Remove a seat from the living and announce its role. kind: 'killed' or 'hanged'."""
    victim = game.seats[seat]
    victim.alive = False
    game.announce(kind, actor=seat, text=victim.role_name)
    if kind == "hanged" and victim.role_name == "jester":
        victim.goal_reached = True


def winning_side(game: Game) -> str | None:
    """Return the winning faction, DRAW if at most harmless neutrals are alive, or None while the game is open."""
    living = game.living()
    mafia = len(game.mafia())
    killers = [i for i in living if game.seats[i].role.hostile and game.seats[i].role.faction is Faction.NEUTRAL]
    if not living:
        return DRAW
    if killers:
        # With two players left, a vote cannot stop the killer. A mafia member still can, at night.
        return Faction.NEUTRAL if not mafia and len(living) <= _LAST_PAIR else None
    if mafia:
        return Faction.MAFIA if 2 * mafia >= len(living) else None
    town = any(game.seats[index].role.faction is Faction.TOWN for index in living)
    return Faction.TOWN if town else DRAW


def seat_result(game: Game, seat: int) -> float:
    """Return +1 if the seat won, -1 if it lost, 0 for a draw. Raises ValueError before the game is over."""
    holder = game.seats[seat]
    if game.phase is not Phase.OVER:
        raise ValueError(f"game {game.number}: it is not over, so no seat has a result")
    if holder.goal_reached:
        return 1.0
    if holder.role_name == "jester":
        return -1.0
    if game.winner == DRAW:
        return 0.0
    if holder.role.faction is Faction.NEUTRAL:
        return 1.0 if game.winner == Faction.NEUTRAL and holder.alive else -1.0
    return 1.0 if holder.role.faction == game.winner else -1.0


class NightAction(NamedTuple):
    """An ability that a seat uses tonight."""

    seat: int
    ability: Ability
    target: int


def resolve_night(game: Game) -> None:
    """Apply the choices of the night to the game and eliminate the victims."""
    actions = _delegate_kill(game, _unjailed_actions(game))
    actions.sort(key=lambda action: (action.ability.priority, action.seat))
    defence = {seat: game.seats[seat].role.defence for seat in game.living()}
    dead: set[int] = set()
    for action in actions:
        if action.ability.priority is Priority.PROTECT:
            defence[action.target] = max(defence[action.target], Power.STRONG)
        elif action.ability.priority is Priority.INVESTIGATE:
            # The whole mafia learns what one of its members finds.
            in_mafia = game.seats[action.seat].role.faction is Faction.MAFIA
            audience, finding = game.mafia() if in_mafia else [action.seat], _finding(game, action, actions)
            game.announce("result", action.seat, action.target, finding, audience=audience)
        elif action.ability.attack > defence[action.target]:
            dead.add(action.target)
        else:
            game.announce("note", text="Somebody attacked you, and you lived.", audience=[action.target])
            game.announce("note", text="Your victim survived the attack.", audience=[action.seat])
    for seat in sorted(dead):
        eliminate(game, seat, "killed")


def _unjailed_actions(game: Game) -> list[NightAction]:
    """Return the chosen actions, without those aimed at the prisoner, which fail but still spend a use."""
    actions = []
    for seat, (tag, argument) in sorted(game.choices.items()):
        if (ability := game.seats[seat].role.ability) is None:
            continue
        target = game.index(argument) if argument else game.prisoner  # an execution
        game.announce("action", actor=seat, target=target, text=tag, audience=())
        if ability.uses is not None:
            game.seats[seat].uses[tag] -= 1
        if ability.aim is not Aim.NONE and target == game.prisoner:
            text = f"{game.seats[target].name} could not be reached: the jail was locked."
            game.announce("note", text=text, audience=[seat])
        else:
            actions.append(NightAction(seat, ability, target))
    return actions


def _delegate_kill(game: Game, actions: list[NightAction]) -> list[NightAction]:
    """Let the mafioso carry out the godfather's kill, in place of both their actions, unless the mafioso is jailed."""
    godfather, mafioso = game.living_with_role("godfather"), game.living_with_role("mafioso")
    order = next((action for action in actions if action.seat in godfather), None)
    if order is None or not mafioso or mafioso[0] == game.prisoner:
        return actions
    others = [action for action in actions if action.seat not in godfather + mafioso]
    return [*others, order._replace(seat=mafioso[0])]


def _finding(game: Game, action: NightAction, actions: list[NightAction]) -> str:
    """Return what an investigation finds. Lookouts see all visits of the night, those of its victims included."""
    role = game.seats[action.target].role
    if action.ability.tag == "spy":
        return role.name
    if action.ability.tag == "investigate":
        return "suspicious" if role.suspicious else "not suspicious"
    # An execution is no visit.
    callers = [one.seat for one in actions if one.ability.aim is not Aim.NONE and one.target == action.target]
    return "visited by " + (", ".join(game.names(seat for seat in callers if seat != action.seat)) or "nobody")


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
