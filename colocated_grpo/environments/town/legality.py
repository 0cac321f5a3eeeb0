"""The syntax of a reply (one think block and one action tag), and the actions that a seat may take now."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum

from colocated_grpo.environments.town.roles import DAY_POWERS, NIGHT_TAGS, ROLES, Ability, Aim, Faction
from colocated_grpo.environments.town.state import Game, Phase

WAIT = "wait"
LOOK_UP_TAGS = frozenset({"get_role", "roles", "chat_history", "graveyard", "check_will", "view_will", "write_will"})
_BARE_NIGHT_TAGS = {role.ability.tag for role in ROLES.values() if role.ability and role.ability.aim is Aim.NONE}
BARE_TAGS = frozenset({WAIT, "reveal", "roles", "graveyard", "view_will"} | _BARE_NIGHT_TAGS)
"""Tags written as <tag/>."""
ARGUMENT_TAGS = frozenset(
    {"speak", "whisper", "nominate", "vote", "jail", "get_role", "chat_history", "check_will", "write_will"}
    | NIGHT_TAGS - _BARE_NIGHT_TAGS
)
"""Tags written as <tag>argument</tag>."""

_OPEN, _CLOSE = "<think>", "</think>"
# No part of these patterns can match the same text in two ways, so hostile input is parsed in linear time.
_BARE = re.compile(r"<([a-z_]+) ?/>")
_WITH_ARGUMENT = re.compile(r"<([a-z_]+)>([^<>]*)</([a-z_]+)>")
_ANY_TAG = re.compile(r"<[a-z_]+ ?/?>")


@dataclass(frozen=True, slots=True)
class Reply:
    """A well-formed reply. Example: Reply(think="he lied", tag="nominate", argument="Ada")"""

    think: str
    tag: str
    argument: str = ""


@dataclass(frozen=True, slots=True)
class Malformed:
    """A syntax error. Example: Malformed("missing_tag", "no action follows the think block")"""

    code: str
    detail: str


def parse(text: str) -> Reply | Malformed:
    """Parse a reply strictly; only whitespace around the think block and around the action is ignored."""
    text = text.strip()
    if not text.startswith(_OPEN):
        return Malformed("missing_think", "a reply starts with <think>")
    think, closed, rest = text[len(_OPEN) :].partition(_CLOSE)
    if not closed:
        return Malformed("unclosed_think", "<think> is never closed")
    if _OPEN in think or _OPEN in rest or _CLOSE in rest:
        return Malformed("multiple_think", "a reply has exactly one think block")
    return _parse_action(think.strip(), rest.strip())


def _parse_action(think: str, rest: str) -> Reply | Malformed:
    if not rest:
        return Malformed("missing_tag", "no action follows the think block")
    if bare := _BARE.fullmatch(rest):
        tag, argument = bare[1], None
    elif (full := _WITH_ARGUMENT.fullmatch(rest)) and full[1] == full[3]:
        tag, argument = full[1], clean_line(full[2])
    else:
        return _action_error(rest)
    if tag not in BARE_TAGS and tag not in ARGUMENT_TAGS:
        return Malformed("unknown_tag", f"there is no <{tag[:20]}>")
    if tag in BARE_TAGS:
        return Reply(think, tag) if argument is None else Malformed("unexpected_argument", f"write <{tag}/>")
    if not argument:
        return Malformed("missing_argument", f"write <{tag}>...</{tag}>")
    return Reply(think, tag, argument)


def _action_error(rest: str) -> Malformed:
    """Return the error of a text that is not exactly one tag."""
    tags = _ANY_TAG.findall(rest)
    if len(tags) > 1:
        return Malformed("multiple_tags", "a reply has exactly one action")
    if tags and not (rest.startswith("<") and rest.endswith(">")):
        return Malformed("text_outside_tags", "nothing may stand outside the think block and the action")
    return Malformed("invalid_xml", "the action is not <tag/> or <tag>...</tag>")


def clean_line(text: str) -> str:
    """Return the printable characters as one line, so that a speaker cannot fake further events."""
    return " ".join("".join(char if char.isprintable() else " " for char in text).split())


VOTES = ("guilty", "innocent", "abstain")


class ArgumentKind(StrEnum):
    """Kind of argument between an action's tags."""

    EMPTY = "empty"
    CHOICE = "choice"
    """One of the options."""
    TEXT = "text"
    ADDRESSED = "addressed"
    """One of the options, a colon, and text."""


@dataclass(frozen=True, slots=True)
class ArgumentSpec:
    """The arguments that an action accepts. Example: ArgumentSpec(ArgumentKind.CHOICE, ("Ada", "Bram"))"""

    kind: ArgumentKind
    options: tuple[str, ...] = ()


LegalActions = dict[str, ArgumentSpec]
"""Argument specs by tag. WAIT is always legal."""
EMPTY, TEXT = ArgumentSpec(ArgumentKind.EMPTY), ArgumentSpec(ArgumentKind.TEXT)

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
"""Tags of each phase, in addition to WAIT and look-ups."""
ROLE_TAGS = NIGHT_TAGS | DAY_POWERS
"""Tags that only some roles have."""


def legal_actions(game: Game, seat: int) -> LegalActions:
    """Return all legal actions of the seat: WAIT, its moves, and look-ups while the turn has any left."""
    legal = {WAIT: EMPTY, **moves(game, seat)}
    if len(game.seats[seat].dialog) < game.rules.tool_calls:
        legal |= look_ups(game, seat)
    return legal


def moves(game: Game, seat: int) -> LegalActions:
    """Return the actions that change the game.

    In PRE_NIGHT and NIGHT, a seat without such an action gets no turn.
    """
    by_role = _MOVES.get(game.phase)
    return by_role(game, seat) if by_role else {}


def look_ups(game: Game, seat: int) -> LegalActions:
    """Return the look-ups of the phase, sorted by tag, even if none is left in this turn."""
    legal: LegalActions = {"get_role": _choice(ROLES), "roles": EMPTY, "view_will": EMPTY, "write_will": TEXT}
    dead = [other.name for other in game.seats if not other.alive]
    if dead:
        legal |= {"graveyard": EMPTY, "check_will": _choice(dead)}
    if game.phase not in (Phase.NIGHT_TALK, Phase.NIGHT) and game.day > 1:
        legal["chat_history"] = _choice(str(day) for day in range(2, game.day + 1))
    return {tag: legal[tag] for tag in sorted(legal)}


def others(game: Game, seat: int) -> list[int]:
    return [index for index in game.living() if index != seat]


def nominations_needed(game: Game) -> int:
    """Return how many nominations of one player start a trial. A nomination by a revealed mayor counts three times."""
    return -(-len(game.living()) // game.rules.one_names_in)


def prisoner_of(game: Game, seat: int) -> int | None:
    """Return tonight's prisoner if the seat is the jailor and has a prisoner, else None."""
    jailing = game.prisoner >= 0 and game.seats[seat].role_name == "jailor"
    return game.prisoner if jailing else None


def _choice(options: Iterable[str]) -> ArgumentSpec:
    return ArgumentSpec(ArgumentKind.CHOICE, tuple(options))


def _choice_of(game: Game, seats: Iterable[int]) -> ArgumentSpec:
    return _choice(game.names(seats))


def _targets(game: Game, seat: int, ability: Ability) -> list[int]:
    outsiders_only = ability.aim is Aim.OUTSIDER
    return [i for i in others(game, seat) if not (outsiders_only and game.seats[i].role.faction is Faction.MAFIA)]


def _pre_night(game: Game, seat: int) -> LegalActions:
    return {"jail": _choice_of(game, others(game, seat))} if game.seats[seat].role.day_power == "jail" else {}


def _night(game: Game, seat: int) -> LegalActions:
    ability = game.seats[seat].role.ability
    if ability is None or seat == game.prisoner or game.day < ability.from_night:
        return {}
    if game.seats[seat].uses.get(ability.tag) == 0:
        return {}
    if ability.aim is Aim.NONE:
        return {} if prisoner_of(game, seat) is None else {ability.tag: EMPTY}
    targets = _choice_of(game, _targets(game, seat, ability))
    return {ability.tag: targets} if targets.options else {}


def _discussion(game: Game, seat: int) -> LegalActions:
    whisper = ArgumentSpec(ArgumentKind.ADDRESSED, game.names(others(game, seat)))
    return {"speak": TEXT, "whisper": whisper, **_reveal(game, seat)}


def _nomination(game: Game, seat: int) -> LegalActions:
    spec = _choice_of(game, (index for index in others(game, seat) if index not in game.acquitted))
    legal: LegalActions = {"nominate": spec} if spec.options else {}
    return legal | _reveal(game, seat)


def _reveal(game: Game, seat: int) -> LegalActions:
    holder = game.seats[seat]
    return {"reveal": EMPTY} if holder.role.day_power == "reveal" and not holder.revealed else {}


def _accused_only(game: Game, seat: int) -> LegalActions:
    return {"speak": TEXT} if seat == game.accused else {}


def _judgement(game: Game, seat: int) -> LegalActions:
    return {} if seat == game.accused else {"vote": _choice(VOTES)}


_MOVES: dict[Phase, Callable[[Game, int], LegalActions]] = {
    Phase.PRE_NIGHT: _pre_night,
    Phase.NIGHT_TALK: lambda game, seat: {"speak": TEXT},
    Phase.NIGHT: _night,
    Phase.DISCUSSION: _discussion,
    Phase.NOMINATION: _nomination,
    Phase.DEFENCE: _accused_only,
    Phase.JUDGEMENT: _judgement,
    Phase.LAST_WORDS: _accused_only,
}


def rejection(game: Game, seat: int, tag: str) -> tuple[str, str]:
    """Return the error code and the reason for a tag that is not among the seat's legal actions."""
    holder = game.seats[seat]
    if tag in LOOK_UP_TAGS:
        if len(holder.dialog) >= game.rules.tool_calls:
            return "too_many_tools", f"at most {game.rules.tool_calls} look-ups a turn"
        return "tool_not_now", f"<{tag}> has nothing to show now"
    if tag not in PHASE_TAGS[game.phase]:
        return "wrong_phase", f"<{tag}> is not for the phase {game.phase}"
    if tag in ROLE_TAGS:
        return _role_rejection(game, seat, tag)
    return "not_your_turn_to", f"<{tag}> is not yours to use now"


def _role_rejection(game: Game, seat: int, tag: str) -> tuple[str, str]:
    holder = game.seats[seat]
    ability = holder.role.ability
    if tag not in (ability and ability.tag, holder.role.day_power):
        return "wrong_role", f"a {holder.role_name} cannot {tag}"
    if seat == game.prisoner:
        return "jailed", "you are in jail"
    if holder.uses.get(tag) == 0 or (tag == "reveal" and holder.revealed):
        return "no_uses_left", f"<{tag}> is used up"
    if ability is not None and tag == ability.tag and game.day < ability.from_night:
        return "too_early", f"<{tag}> starts on night {ability.from_night}"
    return "no_target", f"there is no one to {tag}"


MAX_PATTERN_THOUGHT = 400
"""Maximum characters of the think block in the pattern."""
_PATTERN_TEXT = "[A-Za-z0-9][A-Za-z0-9 ,.!?':;-]"
"""Character classes of speech: one for the first character, one for all others. Both exclude tag brackets and
characters that the parser replaces."""


def reply_pattern(legal: LegalActions, max_speech: int, max_thought: int = MAX_PATTERN_THOUGHT) -> str:
    """Return a regular expression that matches well-formed legal replies, for structured output.

    The expression uses only alternation, character classes and bounded repeats, which every structured-output engine
    supports.
    """
    actions = "|".join(_action_pattern(tag, spec, max_speech) for tag, spec in legal.items())
    return f"<think>[^<>]{{0,{max_thought}}}</think>({actions})"


def _action_pattern(tag: str, spec: ArgumentSpec, max_speech: int) -> str:
    if spec.kind is ArgumentKind.EMPTY:
        return f"<{tag}/>"
    options = "|".join(re.escape(option) for option in spec.options)
    text = f"{_PATTERN_TEXT}{{0,{max_speech - 1}}}"
    arguments = {
        ArgumentKind.CHOICE: f"({options})",
        ArgumentKind.TEXT: text,
        ArgumentKind.ADDRESSED: f"({options}): {text}",
    }
    return f"<{tag}>{arguments[spec.kind]}</{tag}>"
