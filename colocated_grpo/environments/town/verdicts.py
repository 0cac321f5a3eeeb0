"""Judges a reply against the state of the game: malformed, illegal, or legal with its resolved argument."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from colocated_grpo.environments.town.grammar import WAIT, Malformed, Reply, parse
from colocated_grpo.environments.town.legality import (
    ArgumentKind,
    ArgumentSpec,
    LegalActions,
    legal_actions,
    rejection,
)
from colocated_grpo.environments.town.state import Game


class Status(IntEnum):
    """Class of a reply. The value is the reward for form."""

    MALFORMED = -1
    ILLEGAL = 0
    OK = 1


@dataclass(frozen=True, slots=True)
class Verdict:
    """A judged reply. Unless its status is OK, it has the effect of WAIT."""

    status: Status
    code: str
    """'ok', or the error code."""
    detail: str
    tag: str = WAIT
    argument: str = ""
    """For a whisper, the addressee. Names are in their canonical spelling."""
    text: str = ""
    """Text of a whisper."""
    think: str = ""


class IllegalAction(Exception):
    """The tag is legal, but its argument is not."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(detail)
        self.code = code


def judge(game: Game, seat: int, completion: str, legal: LegalActions | None = None) -> Verdict:
    """Judge a completion; pure. legal: the seat's legal actions, if the caller has them already."""
    reply = parse(completion)
    if isinstance(reply, Malformed):
        return Verdict(Status.MALFORMED, reply.code, reply.detail)
    legal = legal_actions(game, seat) if legal is None else legal
    if reply.tag not in legal:
        code, detail = rejection(game, seat, reply.tag)
        return Verdict(Status.ILLEGAL, code, detail, think=reply.think)
    try:
        argument, text = _resolve_argument(game, seat, reply, legal[reply.tag])
    except IllegalAction as error:
        return Verdict(Status.ILLEGAL, error.code, str(error), think=reply.think)
    return Verdict(Status.OK, "ok", "", reply.tag, argument, text, reply.think)


def _resolve_argument(game: Game, seat: int, reply: Reply, spec: ArgumentSpec) -> tuple[str, str]:
    """Return the argument and text of a Verdict. Raises IllegalAction."""
    if spec.kind is ArgumentKind.EMPTY:
        return "", ""
    if spec.kind is ArgumentKind.TEXT:
        return _bounded_text(game, reply.argument), ""
    if spec.kind is ArgumentKind.CHOICE:
        return _option(game, seat, reply.argument, spec), ""
    name, colon, text = reply.argument.partition(":")
    if not (colon and text.strip()):
        raise IllegalAction("no_addressee", f"write <{reply.tag}>name: text</{reply.tag}>")
    return _option(game, seat, name.strip(), spec), _bounded_text(game, text.strip())


def _option(game: Game, seat: int, written: str, spec: ArgumentSpec) -> str:
    """Return the option that equals `written`, ignoring case. Raises IllegalAction."""
    folded = written.casefold()
    for option in spec.options:
        if option.casefold() == folded:
            return option
    for index, other in enumerate(game.seats):
        if other.name.casefold() == folded:
            if index == seat:
                raise IllegalAction("target_self", "not yourself")
            if not other.alive:
                raise IllegalAction("target_dead", f"{other.name} is dead")
            raise IllegalAction("target_not_allowed", f"{other.name} is no choice for this")
    raise IllegalAction("target_not_found", f"{written[:20]!r} is none of {', '.join(spec.options)}")


def _bounded_text(game: Game, text: str) -> str:
    if len(text) > game.rules.max_speech:
        raise IllegalAction("too_long", f"{len(text)} characters, at most {game.rules.max_speech}")
    return text
