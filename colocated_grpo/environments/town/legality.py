"""What a seat may do now, by phase and role. A pure function of the game."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from colocated_grpo.environments.town.grammar import TOOLS, WAIT
from colocated_grpo.environments.town.roles import DAY_POWERS, NIGHT_TAGS, ROLES, Ability, Aim, Faction
from colocated_grpo.environments.town.state import Game, Phase

VOTES = ("guilty", "innocent", "abstain")


class Form(StrEnum):
    """What stands between the tags of an action."""

    EMPTY = "empty"
    CHOICE = "choice"
    """One of the options."""
    TEXT = "text"
    ADDRESSED = "addressed"
    """One of the options, a colon, and text."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Example: Slot(Form.CHOICE, ("Ada", "Bram"))"""

    form: Form
    options: tuple[str, ...] = ()


Legal = dict[str, Slot]
"""Tag -> what it takes. Waiting is always among them."""
EMPTY, TEXT = Slot(Form.EMPTY), Slot(Form.TEXT)

PHASE_TAGS = {
    Phase.PRE_NIGHT: {"jail"},
    Phase.NIGHT_TALK: {"speak"},
    Phase.NIGHT: set(NIGHT_TAGS),
    Phase.DISCUSSION: {"speak", "whisper", "reveal"},
    Phase.NOMINATION: {"nominate", "reveal"},
    Phase.DEFENCE: {"speak"},
    Phase.JUDGEMENT: {"vote"},
    Phase.LAST_WORDS: {"speak"},
    Phase.OVER: set(),
}
"""Tags that somebody may use in the phase, beside waiting and look-ups."""
SPEECH = frozenset({"speak", "whisper"})
ROLE_TAGS = NIGHT_TAGS | DAY_POWERS
"""Tags that take a role."""


def legal_actions(game: Game, seat: int) -> Legal:
    """Everything the seat may answer now."""
    legal = {WAIT: EMPTY, **deeds(game, seat)}
    if len(game.seats[seat].dialog) < game.rules.tool_calls:
        legal |= look_ups(game, seat)
    return legal


def deeds(game: Game, seat: int) -> Legal:
    """What changes the game: a seat without any need not be asked at night."""
    finder = _DEEDS.get(game.phase)
    return finder(game, seat) if finder else {}


def look_ups(game: Game, seat: int) -> Legal:
    legal: Legal = {"get_role": Slot(Form.CHOICE, tuple(ROLES)), "roles": EMPTY, "view_will": EMPTY, "write_will": TEXT}
    dead = tuple(other.name for other in game.seats if not other.alive)
    if dead:
        legal |= {"graveyard": EMPTY, "check_will": Slot(Form.CHOICE, dead)}
    if game.phase not in (Phase.NIGHT_TALK, Phase.NIGHT) and game.day > 1:
        legal["chat_history"] = Slot(Form.CHOICE, tuple(str(day) for day in range(2, game.day + 1)))
    return {tag: legal[tag] for tag in sorted(legal)}


def others(game: Game, seat: int) -> list[int]:
    return [index for index in game.living() if index != seat]


def needed_to_accuse(game: Game) -> int:
    """Nominations, a shown mayor's counted three times."""
    return -(-len(game.living()) // game.rules.one_names_in)


def prisoner_of(game: Game, seat: int) -> int | None:
    """Whom this seat holds in jail tonight."""
    held = game.prisoner >= 0 and game.seats[seat].role_name == "jailor"
    return game.prisoner if held else None


def _targets(game: Game, seat: int, ability: Ability) -> list[int]:
    outsiders_only = ability.aim is Aim.OUTSIDER
    return [i for i in others(game, seat) if not (outsiders_only and game.seats[i].role.faction is Faction.MAFIA)]


def _named(game: Game, seats: Iterable[int]) -> Slot:
    return Slot(Form.CHOICE, game.names(seats))


def _pre_night(game: Game, seat: int) -> Legal:
    return {"jail": _named(game, others(game, seat))} if game.seats[seat].role.day_power == "jail" else {}


def _night(game: Game, seat: int) -> Legal:
    if seat == game.prisoner:
        return {}
    legal: Legal = {}
    for ability in game.seats[seat].role.abilities:
        spent = game.seats[seat].uses.get(ability.tag) == 0
        no_prisoner = ability.tag == "execute" and prisoner_of(game, seat) is None
        if spent or no_prisoner or game.day < ability.from_night:
            continue
        legal[ability.tag] = EMPTY if ability.aim is Aim.NOBODY else _named(game, _targets(game, seat, ability))
    return {tag: slot for tag, slot in legal.items() if slot.form is Form.EMPTY or slot.options}


def _talk(game: Game, seat: int) -> Legal:
    return {} if game.seats[seat].muted else {"speak": TEXT}


def _discussion(game: Game, seat: int) -> Legal:
    legal = _talk(game, seat)
    if legal:
        legal["whisper"] = Slot(Form.ADDRESSED, game.names(others(game, seat)))
    return legal | _chain_of_office(game, seat)


def _nomination(game: Game, seat: int) -> Legal:
    slot = _named(game, (index for index in others(game, seat) if index not in game.acquitted))
    legal: Legal = {"nominate": slot} if slot.options else {}
    return legal | _chain_of_office(game, seat)


def _chain_of_office(game: Game, seat: int) -> Legal:
    holder = game.seats[seat]
    return {"reveal": EMPTY} if holder.role.day_power == "reveal" and not holder.revealed else {}


def _accused_only(game: Game, seat: int) -> Legal:
    return _talk(game, seat) if seat == game.accused else {}


def _judgement(game: Game, seat: int) -> Legal:
    return {} if seat == game.accused else {"vote": Slot(Form.CHOICE, VOTES)}


_DEEDS = {
    Phase.PRE_NIGHT: _pre_night,
    # A threat of the night before binds by day; the channels of the night stay open.
    Phase.NIGHT_TALK: lambda game, seat: {"speak": TEXT},
    Phase.NIGHT: _night,
    Phase.DISCUSSION: _discussion,
    Phase.NOMINATION: _nomination,
    Phase.DEFENCE: _accused_only,
    Phase.JUDGEMENT: _judgement,
    Phase.LAST_WORDS: _accused_only,
}


def objection(game: Game, seat: int, tag: str) -> tuple[str, str]:
    """Error code and reason for a tag that is not among the seat's legal actions."""
    holder = game.seats[seat]
    if tag in TOOLS:
        if len(holder.dialog) >= game.rules.tool_calls:
            return "too_many_tools", f"at most {game.rules.tool_calls} look-ups a turn"
        return "tool_not_now", f"<{tag}> has nothing to show now"
    if tag not in PHASE_TAGS[game.phase]:
        return "wrong_phase", f"<{tag}> is not for the phase {game.phase}"
    if tag in ROLE_TAGS:
        return _objection_to_role(game, seat, tag)
    if holder.muted and tag in SPEECH:
        return "muted", "you were threatened and must keep silent today"
    return "not_your_turn_to", f"<{tag}> is not yours to use now"


def _objection_to_role(game: Game, seat: int, tag: str) -> tuple[str, str]:
    holder = game.seats[seat]
    ability = holder.role.ability(tag)
    if ability is None and holder.role.day_power != tag:
        return "wrong_role", f"a {holder.role_name} cannot {tag}"
    if seat == game.prisoner:
        return "jailed", "you are in jail"
    if holder.uses.get(tag) == 0 or (tag == "reveal" and holder.revealed):
        return "no_uses_left", f"<{tag}> is used up"
    if ability is not None and game.day < ability.from_night:
        return "too_early", f"<{tag}> starts on night {ability.from_night}"
    return "no_target", f"there is nobody to {tag}"
