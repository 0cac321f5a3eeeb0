"""The syntax of a reply (one think block and one action tag), and the actions that a seat may take now."""

import re
from dataclasses import dataclass
from typing import NamedTuple

from colocated_grpo.environments.town.roles import DAY_POWERS, NIGHT_TAGS, ROLES, Aim, Faction
from colocated_grpo.environments.town.state import NO_SEAT, Game, Phase

WAIT = "wait"
LOOK_UP_TAGS = frozenset({"get_role", "roles", "chat_history", "graveyard", "check_will", "view_will", "write_will"})
ROLE_TAGS = NIGHT_TAGS | DAY_POWERS
"""Tags that only some roles have."""
PHASE_TAGS = {
    Phase.PRE_NIGHT: {"jail"},
    Phase.NIGHT_TALK: {"speak"},
    Phase.NIGHT: NIGHT_TAGS,
    Phase.DISCUSSION: {"speak", "whisper", "reveal"},
    Phase.NOMINATION: {"nominate", "reveal"},
    Phase.DEFENCE: {"speak"},
    Phase.JUDGEMENT: {"vote"},
    Phase.LAST_WORDS: {"speak"},
    Phase.OVER: set(),
}
"""Tags of each phase, in addition to WAIT and look-ups."""
BARE_TAGS = frozenset({WAIT, "reveal", "execute", "roles", "graveyard", "view_will"})
"""Tags written as <tag/>."""
ARGUMENT_TAGS = LOOK_UP_TAGS.union(*PHASE_TAGS.values()) - BARE_TAGS
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
class Problem:
    """Why a reply has no effect. Example: Problem("missing_tag", "no action follows the think block")"""

    code: str
    detail: str


def parse(text: str) -> Reply | Problem:
    """Parse a reply strictly; only whitespace around the think block and around the action is ignored."""
    text = text.strip()
    if not text.startswith(_OPEN):
        return Problem("missing_think", "a reply starts with <think>")
    think, closed, rest = text[len(_OPEN) :].partition(_CLOSE)
    if not closed:
        return Problem("unclosed_think", "<think> is never closed")
    if _OPEN in think or _OPEN in rest or _CLOSE in rest:
        return Problem("multiple_think", "a reply has exactly one think block")
    return _parse_action(think.strip(), rest.strip())


def _parse_action(think: str, rest: str) -> Reply | Problem:
    if not rest:
        return Problem("missing_tag", "no action follows the think block")
    if bare := _BARE.fullmatch(rest):
        tag, argument = bare[1], None
    elif (full := _WITH_ARGUMENT.fullmatch(rest)) and full[1] == full[3]:
        tag, argument = full[1], clean_line(full[2])
    else:
        tags = _ANY_TAG.findall(rest)
        if len(tags) > 1:
            return Problem("multiple_tags", "a reply has exactly one action")
        if tags and not (rest.startswith("<") and rest.endswith(">")):
            return Problem("text_outside_tags", "nothing may stand outside the think block and the action")
        return Problem("invalid_xml", "the action is not <tag/> or <tag>...</tag>")
    if tag not in BARE_TAGS | ARGUMENT_TAGS:
        return Problem("unknown_tag", f"there is no <{tag[:20]}>")
    if tag in BARE_TAGS:
        return Reply(think, tag) if argument is None else Problem("unexpected_argument", f"write <{tag}/>")
    return Reply(think, tag, argument) if argument else Problem("missing_argument", f"write <{tag}>...</{tag}>")


def clean_line(text: str) -> str:
    """Return the printable characters as one line, so that a speaker cannot fake further events."""
    return " ".join("".join(char if char.isprintable() else " " for char in text).split())


VOTES = ("guilty", "innocent", "abstain")


class ArgumentSpec(NamedTuple):
    """The argument that an action accepts: one of the options, text, or an option, a colon and text."""

    options: tuple[str, ...] = ()
    text: bool = False


LegalActions = dict[str, ArgumentSpec]
"""Argument specs by tag. WAIT is always legal."""
EMPTY, TEXT = ArgumentSpec(), ArgumentSpec(text=True)


def legal_actions(game: Game, seat: int) -> LegalActions:
    """Return all legal actions of the seat: WAIT, its moves, and look-ups while the turn has any left."""
    legal = {WAIT: EMPTY, **moves(game, seat)}
    if len(game.seats[seat].dialog) < game.rules.tool_calls:
        legal |= look_ups(game, seat)
    return legal


def moves(game: Game, seat: int) -> LegalActions:
    """Return the actions that change the game. In PRE_NIGHT and NIGHT, a seat without such an action gets no turn."""
    others = [index for index in game.living() if index != seat]
    role = game.seats[seat].role
    tags = PHASE_TAGS[game.phase] & {role.ability and role.ability.tag, role.day_power}
    by_role = {tag: spec for tag in tags if isinstance(spec := role_action(game, seat, tag), ArgumentSpec)}
    match game.phase:
        case Phase.NIGHT_TALK:
            return {"speak": TEXT}
        case Phase.DISCUSSION:
            return {"speak": TEXT, "whisper": ArgumentSpec(game.names(others), text=True), **by_role}
        case Phase.NOMINATION:
            candidates = game.names(index for index in others if index not in game.acquitted)
            return ({"nominate": ArgumentSpec(candidates)} if candidates else {}) | by_role
        case Phase.DEFENCE | Phase.LAST_WORDS:
            return {"speak": TEXT} if seat == game.accused else {}
        case Phase.JUDGEMENT:
            return {} if seat == game.accused else {"vote": ArgumentSpec(VOTES)}
    return by_role


def role_action(game: Game, seat: int, tag: str) -> ArgumentSpec | Problem:
    """Return the argument of a tag in ROLE_TAGS, or the reason why the seat cannot use the tag now."""
    holder = game.seats[seat]
    ability = holder.role.ability
    if tag not in (ability and ability.tag, holder.role.day_power):
        return Problem("wrong_role", f"a {holder.role_name} cannot {tag}")
    if seat == game.prisoner:
        return Problem("jailed", "you are in jail")
    if holder.uses.get(tag) == 0 or (tag == "reveal" and holder.revealed):
        return Problem("no_uses_left", f"<{tag}> is used up")
    aim = Aim.OTHER
    if ability is not None and tag == ability.tag:
        aim = ability.aim
        if game.day < ability.from_night:
            return Problem("too_early", f"<{tag}> starts on night {ability.from_night}")
    if tag == "reveal" or (aim is Aim.NONE and game.prisoner != NO_SEAT):
        return EMPTY
    forbidden = Faction.MAFIA if aim is Aim.OUTSIDER else None
    targets = [i for i in game.living() if i != seat and game.seats[i].role.faction is not forbidden]
    if aim is Aim.NONE or not targets:
        return Problem("no_target", f"there is no one to {tag}")
    return ArgumentSpec(game.names(targets))


def look_ups(game: Game, seat: int) -> LegalActions:
    """Return the look-ups of the phase, sorted by tag, even if none is left in this turn."""
    legal = {"get_role": ArgumentSpec(tuple(ROLES)), "roles": EMPTY, "view_will": EMPTY, "write_will": TEXT}
    if dead := tuple(other.name for other in game.seats if not other.alive):
        legal |= {"graveyard": EMPTY, "check_will": ArgumentSpec(dead)}
    if game.phase not in (Phase.NIGHT_TALK, Phase.NIGHT) and game.day > 1:
        legal["chat_history"] = ArgumentSpec(tuple(str(day) for day in range(2, game.day + 1)))
    return dict(sorted(legal.items()))


def nominations_needed(game: Game) -> int:
    """Return how many nominations of one player start a trial. A nomination by a revealed mayor counts three times."""
    return -(-len(game.living()) // game.rules.one_names_in)


def rejection(game: Game, seat: int, tag: str) -> Problem:
    """Return the reason why a tag is not among the seat's legal actions."""
    if tag in LOOK_UP_TAGS:
        if len(game.seats[seat].dialog) >= game.rules.tool_calls:
            return Problem("too_many_tools", f"at most {game.rules.tool_calls} look-ups a turn")
        return Problem("tool_not_now", f"<{tag}> has nothing to show now")
    if tag not in PHASE_TAGS[game.phase]:
        return Problem("wrong_phase", f"<{tag}> is not for the phase {game.phase}")
    if tag in ROLE_TAGS and isinstance(problem := role_action(game, seat, tag), Problem):
        return problem
    return Problem("not_your_turn_to", f"<{tag}> is not yours to use now")


MAX_PATTERN_THOUGHT = 400
"""Maximum characters of the think block in the pattern."""
_PATTERN_TEXT = "[A-Za-z0-9][A-Za-z0-9 ,.!?':;-]"
"""Character classes of speech: one for the first character, one for all others. Both exclude tag brackets and
characters that the parser replaces."""


def reply_pattern(legal: LegalActions, max_speech: int, max_thought: int = MAX_PATTERN_THOUGHT) -> str:
    """Return a regular expression of the legal replies, in the syntax that every structured-output engine supports."""
    actions = []
    for tag, spec in legal.items():
        options = [f"({'|'.join(map(re.escape, spec.options))})"] if spec.options else []
        text = [f"{_PATTERN_TEXT}{{0,{max_speech - 1}}}"] if spec.text else []
        actions.append(f"<{tag}/>" if spec == EMPTY else f"<{tag}>{': '.join(options + text)}</{tag}>")
    return f"<think>[^<>]{{0,{max_thought}}}</think>({'|'.join(actions)})"
