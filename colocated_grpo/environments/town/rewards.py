"""What a reply is worth: its form at once, a hint of whether it helps, and a share of how the game ended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from colocated_grpo.environments.town.endings import result
from colocated_grpo.environments.town.roles import Faction
from colocated_grpo.environments.town.state import Game, Phase, TurnRecord
from colocated_grpo.environments.town.verdicts import Status, Verdict
from colocated_grpo.environments.turns.credit import OutcomeCredit

ATTACKS = frozenset({"kill", "shoot", "execute", "douse", "jail", "frame", "silence", "distract"})
CARE = frozenset({"protect", "guard"})
LOOKS = frozenset({"investigate", "watch", "track", "spy"})
_NOMINATION, _VOTE, _NIGHT, _LOOK = 0.25, 0.5, 0.5, 0.1
"""Hints stay below the 1.0 between an illegal and a legal reply: form comes first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit(OutcomeCredit):
    """How the three parts add up."""

    form: float = 1.0
    """Weight of the reply's form: -1 malformed, 0 illegal, 1 carried out."""
    shaping: float = 0.0
    """Weight of how well a legal action serves its seat's side, -0.5 to 0.5."""


CREDITS = {
    "immediate": Credit(),
    "phase": Credit(shaping=1.0),
    "terminal": Credit(outcome=1.0),
    "mix": Credit(shaping=0.5, outcome=0.5, discount=0.97),
}
"""Credit modes by name."""


def immediate_reward(credit: Credit, parts: dict[str, float]) -> float:
    return credit.form * parts["form"] + credit.shaping * parts["shaping"]


def reward_parts(game: Game, seat: int, verdict: Verdict) -> dict[str, float]:
    """Form and shaping of a judged reply. Pure; knows every role, as a teacher does."""
    legal = verdict.status is Status.OK
    return {"form": float(verdict.status), "shaping": shaping(game, seat, verdict) if legal else 0.0}


def shaping(game: Game, seat: int, verdict: Verdict) -> float:
    """In [-0.5, 0.5]: whether a legal action serves the seat's side."""
    judge = _BY_PHASE.get(game.phase)
    return judge(game, seat, verdict) if judge else 0.0


def side_with(game: Game, seat: int, other: int) -> float:
    """+1 the seat wants the other to live, -1 to die, 0 it does not matter."""
    one, two = game.seats[seat], game.seats[other]
    if one.role_name == "executioner":
        return -1.0 if other == one.mark else 0.0
    if one.role.faction is Faction.NEUTRAL:
        return -1.0 if one.role.hostile else 0.0
    if one.role.faction is Faction.MAFIA:
        return 1.0 if two.role.faction is Faction.MAFIA else -1.0
    if two.role.faction is Faction.TOWN:
        return 1.0
    # To hang a jester is to let it win; other neutrals without blood on their hands are only a waste of a rope.
    return -1.0 if two.role.hostile else 0.5 * (two.role_name == "jester")


def _nominated(game: Game, seat: int, verdict: Verdict) -> float:
    return -_NOMINATION * side_with(game, seat, game.index(verdict.argument)) if verdict.tag == "nominate" else 0.0


def _voted(game: Game, seat: int, verdict: Verdict) -> float:
    sign = {"guilty": -1.0, "innocent": 1.0}.get(verdict.argument, 0.0) if verdict.tag == "vote" else 0.0
    return sign * _VOTE * side_with(game, seat, game.accused)


def _chosen_at_night(game: Game, seat: int, verdict: Verdict) -> float:
    if verdict.tag in LOOKS:
        return _LOOK
    target = game.prisoner if verdict.tag == "execute" else None
    if verdict.argument and (verdict.tag in ATTACKS or verdict.tag in CARE):
        target = game.index(verdict.argument)
    if target is None:
        return 0.0
    return (_NIGHT if verdict.tag in CARE else -_NIGHT) * side_with(game, seat, target)


_BY_PHASE: dict[Phase, Callable[[Game, int, Verdict], float]] = {
    Phase.PRE_NIGHT: _chosen_at_night,
    Phase.NIGHT: _chosen_at_night,
    Phase.NOMINATION: _nominated,
    Phase.JUDGEMENT: _voted,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Return:
    """What the end of a game adds to the reward of one earlier turn."""

    turn_id: str
    game: int
    seat: int
    player: str
    phase: str
    reward: float
    """The immediate reward that was given when the turn was committed."""
    outcome: float
    """+1 the seat won, -1 it lost, 0 a draw."""
    value: float
    """Weighted and discounted outcome; add it to `reward`."""


def outcome_returns(game: Game, credit: Credit) -> list[Return]:
    """One for each recorded turn of an ended game, in the order in which they were committed."""
    shares = credit.weights([record.seat for record in game.turns])
    return [_one_return(game, record, share) for record, share in zip(game.turns, shares, strict=True)]


def _one_return(game: Game, record: TurnRecord, share: float) -> Return:
    outcome = result(game, record.seat)
    return Return(
        turn_id=record.turn_id,
        game=game.number,
        seat=record.seat,
        player=game.seats[record.seat].player,
        phase=record.phase,
        reward=record.reward,
        outcome=outcome,
        value=share * outcome,
    )
