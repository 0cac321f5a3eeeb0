"""The form of a reply: one think block, then one terminal tag, and nothing else. Says nothing about who may do what."""

from __future__ import annotations

import re
from dataclasses import dataclass

from colocated_grpo.environments.town.roles import ROLES, Aim

WAIT = "wait"
TOOLS = frozenset({"get_role", "roles", "chat_history", "graveyard", "check_will", "view_will", "write_will"})
_BARE_NIGHT_TAGS = {a.tag for role in ROLES.values() for a in role.abilities if a.aim is Aim.NOBODY}
_AIMED_NIGHT_TAGS = {a.tag for role in ROLES.values() for a in role.abilities if a.aim is not Aim.NOBODY}
BARE_TAGS = frozenset({WAIT, "reveal", "roles", "graveyard", "view_will"} | _BARE_NIGHT_TAGS)
"""Written <tag/>."""
FULL_TAGS = frozenset(
    {"speak", "whisper", "nominate", "vote", "jail", "get_role", "chat_history", "check_will", "write_will"}
    | _AIMED_NIGHT_TAGS
)
"""Written <tag>argument</tag>."""

_OPEN, _CLOSE = "<think>", "</think>"
# Neither part can match the same text in two ways, so hostile input costs linear time.
_BARE = re.compile(r"<([a-z_]+) ?/>")
_FULL = re.compile(r"<([a-z_]+)>([^<>]*)</([a-z_]+)>")
_ANY_TAG = re.compile(r"<[a-z_]+ ?/?>")


@dataclass(frozen=True, slots=True)
class Reply:
    """A well-formed reply. Example: Reply(think="he lied", tag="nominate", argument="Ada")"""

    think: str
    tag: str
    argument: str = ""


@dataclass(frozen=True, slots=True)
class Malformed:
    code: str
    detail: str


def parse(text: str) -> Reply | Malformed:
    """Strict: whitespace around the two parts is the only freedom."""
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
    elif (full := _FULL.fullmatch(rest)) and full[1] == full[3]:
        tag, argument = full[1], clean(full[2])
    else:
        return _not_one_tag(rest)
    if tag not in BARE_TAGS and tag not in FULL_TAGS:
        return Malformed("unknown_tag", f"there is no <{tag[:20]}>")
    if tag in BARE_TAGS:
        return Reply(think, tag) if argument is None else Malformed("unexpected_argument", f"write <{tag}/>")
    if not argument:
        return Malformed("missing_argument", f"write <{tag}>...</{tag}>")
    return Reply(think, tag, argument)


def _not_one_tag(rest: str) -> Malformed:
    tags = _ANY_TAG.findall(rest)
    if len(tags) > 1:
        return Malformed("multiple_tags", "a reply has exactly one action")
    if tags and not (rest.startswith("<") and rest.endswith(">")):
        return Malformed("text_outside_tags", "nothing may stand outside the think block and the action")
    return Malformed("invalid_xml", "the action is not <tag/> or <tag>...</tag>")


def clean(text: str) -> str:
    """One line of printable characters: a speaker must not be able to fake another line of the record."""
    return " ".join("".join(char if char.isprintable() else " " for char in text).split())
