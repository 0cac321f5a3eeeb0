"""Judges a reply against the frozen game: malformed, illegal, or fine, and what it then means."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from colocated_grpo.environments.town.grammar import WAIT, Malformed, Reply, parse
from colocated_grpo.environments.town.legality import Form, Legal, Slot, legal_actions, objection
from colocated_grpo.environments.town.state import Game


class Status(IntEnum):
    """Its value is the reward for form."""

    MALFORMED = -1
    ILLEGAL = 0
    OK = 1


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the game does with a reply; everything but OK acts as waiting."""

    status: Status
    code: str
    """'ok', or why not."""
    detail: str
    tag: str = WAIT
    argument: str = ""
    """Names as the town spells them; for a whisper the addressee."""
    text: str = ""
    """What a whisper says."""
    think: str = ""


class Refused(Exception):
    """The argument of a legal tag is not one that it takes."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(detail)
        self.code = code


def judge(game: Game, seat: int, completion: str, legal: Legal | None = None) -> Verdict:
    """Pure. `legal` saves working out the legal actions again for siblings of one turn."""
    reply = parse(completion)
    if isinstance(reply, Malformed):
        return Verdict(Status.MALFORMED, reply.code, reply.detail)
    legal = legal_actions(game, seat) if legal is None else legal
    if reply.tag not in legal:
        code, detail = objection(game, seat, reply.tag)
        return Verdict(Status.ILLEGAL, code, detail, think=reply.think)
    try:
        argument, text = _FILL[legal[reply.tag].form](game, seat, reply, legal[reply.tag])
    except Refused as refused:
        return Verdict(Status.ILLEGAL, refused.code, str(refused), think=reply.think)
    return Verdict(Status.OK, "ok", "", reply.tag, argument, text, reply.think)


def _empty(game: Game, seat: int, reply: Reply, slot: Slot) -> tuple[str, str]:
    return "", ""


def _choice(game: Game, seat: int, reply: Reply, slot: Slot) -> tuple[str, str]:
    return _resolve(game, seat, reply.argument, slot), ""


def _text(game: Game, seat: int, reply: Reply, slot: Slot) -> tuple[str, str]:
    return _short_enough(game, reply.argument), ""


def _addressed(game: Game, seat: int, reply: Reply, slot: Slot) -> tuple[str, str]:
    name, colon, text = reply.argument.partition(":")
    if not (colon and text.strip()):
        raise Refused("no_addressee", f"write <{reply.tag}>name: text</{reply.tag}>")
    return _resolve(game, seat, name.strip(), slot), _short_enough(game, text.strip())


_FILL = {Form.EMPTY: _empty, Form.CHOICE: _choice, Form.TEXT: _text, Form.ADDRESSED: _addressed}


def _resolve(game: Game, seat: int, written: str, slot: Slot) -> str:
    folded = written.casefold()
    for option in slot.options:
        if option.casefold() == folded:
            return option
    for index, other in enumerate(game.seats):
        if other.name.casefold() == folded:
            if index == seat:
                raise Refused("target_self", "not yourself")
            if not other.alive:
                raise Refused("target_dead", f"{other.name} is dead")
            raise Refused("target_not_allowed", f"{other.name} is no choice for this")
    raise Refused("target_not_found", f"{written[:20]!r} is none of {', '.join(slot.options)}")


def _short_enough(game: Game, text: str) -> str:
    if len(text) > game.rules.max_speech:
        raise Refused("too_long", f"{len(text)} characters, at most {game.rules.max_speech}")
    return text
