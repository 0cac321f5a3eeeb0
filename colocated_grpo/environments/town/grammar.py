"""The syntax of a reply: one think block, then one action tag. Which tags a seat may use is decided in legality.py."""

from __future__ import annotations

import re
from dataclasses import dataclass

from colocated_grpo.environments.town.roles import ROLES, Aim

WAIT = "wait"
LOOK_UP_TAGS = frozenset({"get_role", "roles", "chat_history", "graveyard", "check_will", "view_will", "write_will"})
_BARE_NIGHT_TAGS = {a.tag for role in ROLES.values() for a in role.abilities if a.aim is Aim.NONE}
_AIMED_NIGHT_TAGS = {a.tag for role in ROLES.values() for a in role.abilities if a.aim is not Aim.NONE}
BARE_TAGS = frozenset({WAIT, "reveal", "roles", "graveyard", "view_will"} | _BARE_NIGHT_TAGS)
"""Tags written as <tag/>."""
ARGUMENT_TAGS = frozenset(
    {"speak", "whisper", "nominate", "vote", "jail", "get_role", "chat_history", "check_will", "write_will"}
    | _AIMED_NIGHT_TAGS
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
