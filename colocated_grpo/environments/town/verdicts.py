"""Judges a reply against the state of the game, and applies it. A seat changes the game only through this code."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

from colocated_grpo.environments.town import legality
from colocated_grpo.environments.town.phases import channels, end_turn, nominate
from colocated_grpo.environments.town.state import NO_SEAT, Game, Phase
from colocated_grpo.environments.town.texts import look_up


class Status(IntEnum):
    """Class of a reply. The value is the reward for form."""

    MALFORMED = -1
    ILLEGAL = 0
    OK = 1


@dataclass(frozen=True, slots=True)
class Verdict:
    """A judged reply. A reply whose status is not OK has the effect of WAIT."""

    status: Status
    code: str
    """'ok', or the error code."""
    detail: str
    tag: str = legality.WAIT
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


def judge(game: Game, seat: int, completion: str, legal: legality.LegalActions | None = None) -> Verdict:
    """Judge a completion. Pure.

    legal: the seat's legal actions, if the caller already has them.
    """
    reply = legality.parse(completion)
    if isinstance(reply, legality.Malformed):
        return Verdict(Status.MALFORMED, reply.code, reply.detail)
    legal = legality.legal_actions(game, seat) if legal is None else legal
    if reply.tag not in legal:
        code, detail = legality.rejection(game, seat, reply.tag)
        return Verdict(Status.ILLEGAL, code, detail, think=reply.think)
    try:
        argument, text = _resolve_argument(game, seat, reply, legal[reply.tag])
    except IllegalAction as error:
        return Verdict(Status.ILLEGAL, error.code, str(error), think=reply.think)
    return Verdict(Status.OK, "ok", "", reply.tag, argument, text, reply.think)


def _resolve_argument(game: Game, seat: int, reply: legality.Reply, spec: legality.ArgumentSpec) -> tuple[str, str]:
    """Return the argument and text of a Verdict. Raises IllegalAction."""
    if spec.kind is legality.ArgumentKind.EMPTY:
        return "", ""
    if spec.kind is legality.ArgumentKind.TEXT:
        return _bounded_text(game, reply.argument), ""
    if spec.kind is legality.ArgumentKind.CHOICE:
        return _option(game, seat, reply.argument, spec), ""
    name, colon, text = reply.argument.partition(":")
    if not (colon and text.strip()):
        raise IllegalAction("no_addressee", f"write <{reply.tag}>name: text</{reply.tag}>")
    return _option(game, seat, name.strip(), spec), _bounded_text(game, text.strip())


def _option(game: Game, seat: int, written: str, spec: legality.ArgumentSpec) -> str:
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


MAX_RECORDED_THOUGHT = 500
"""Maximum recorded characters of the think block."""


def apply_verdict(game: Game, seat: int, verdict: Verdict, completion: str) -> str | None:
    """Apply a judged reply to the game. A reply that is not OK acts as waiting.

    A look-up leaves the turn open, and its observation is returned. Any other reply ends the turn, and None is
    returned.
    """
    holder = game.seats[seat]
    holder.acted += 1
    if verdict.think:
        game.record("thought", actor=seat, text=legality.clean_line(verdict.think[:MAX_RECORDED_THOUGHT]))
    if verdict.status is not Status.OK:
        game.notify([seat], "rejected", actor=seat, text=f"{verdict.code}: {verdict.detail}")
    elif verdict.tag in legality.LOOK_UP_TAGS:
        observation = look_up(game, seat, verdict.tag, verdict.argument)
        holder.dialog.append((completion, observation))
        return observation
    elif verdict.tag != legality.WAIT:
        _IMMEDIATE.get(verdict.tag, _choose)(game, seat, verdict)
    holder.dialog = []
    end_turn(game, seat)
    return None


def _choose(game: Game, seat: int, verdict: Verdict) -> None:
    """Store a choice. The choices of all seats take effect together when the phase closes."""
    game.choices[seat] = (verdict.tag, verdict.argument)


def _speak(game: Game, seat: int, verdict: Verdict) -> None:
    if game.phase is not Phase.NIGHT_TALK:
        game.announce("speech", actor=seat, text=verdict.argument)
        return
    channel = next(channel for channel in channels(game) if seat in channel)
    if game.prisoner not in channel:
        game.notify(channel, "mafia_chat", actor=seat, text=verdict.argument)
    elif seat == game.prisoner:
        game.notify(channel, "prisoner_says", actor=seat, text=verdict.argument)
    else:
        # No actor: the prisoner must not learn which seat is the jailor.
        game.notify(channel, "jailor_says", actor=NO_SEAT, text=verdict.argument)


def _whisper(game: Game, seat: int, verdict: Verdict) -> None:
    target = game.index(verdict.argument)
    game.notify([seat, target], "whisper", actor=seat, target=target, text=verdict.text)
    game.announce("whispered", actor=seat, target=target)


def _reveal(game: Game, seat: int, verdict: Verdict) -> None:
    game.seats[seat].revealed = True
    game.announce("revealed", actor=seat)


def _nominate(game: Game, seat: int, verdict: Verdict) -> None:
    nominate(game, seat, game.index(verdict.argument))


_IMMEDIATE: dict[str, Callable[[Game, int, Verdict], None]] = {
    "speak": _speak,
    "whisper": _whisper,
    "reveal": _reveal,
    "nominate": _nominate,
}
"""Actions that take effect at once, by tag."""
