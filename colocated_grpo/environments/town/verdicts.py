"""Judges a reply against the state of the game, and applies it. A seat changes the game only through this code."""

from dataclasses import dataclass
from enum import IntEnum

from colocated_grpo.environments.town import legality
from colocated_grpo.environments.town.legality import Problem
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
    """The chosen option, in its canonical spelling."""
    text: str = ""
    think: str = ""


def judge(game: Game, seat: int, completion: str, legal: legality.LegalActions | None = None) -> Verdict:
    """Judge a completion. Pure. legal: the seat's legal actions, if the caller already has them."""
    reply = legality.parse(completion)
    if isinstance(reply, Problem):
        return Verdict(Status.MALFORMED, reply.code, reply.detail)
    legal = legality.legal_actions(game, seat) if legal is None else legal
    if reply.tag in legal:
        resolved = _resolve_argument(game, seat, reply, legal[reply.tag])
    else:
        resolved = legality.rejection(game, seat, reply.tag)
    if isinstance(resolved, Problem):
        return Verdict(Status.ILLEGAL, resolved.code, resolved.detail, think=reply.think)
    return Verdict(Status.OK, "ok", "", reply.tag, *resolved, think=reply.think)


def _resolve_argument(
    game: Game, seat: int, reply: legality.Reply, spec: legality.ArgumentSpec
) -> tuple[str, str] | Problem:
    """Return the argument and text of a Verdict. Options are found without regard to case."""
    named, text = reply.argument, reply.argument if spec.text else ""
    if spec.options and spec.text:
        named, _, text = (part.strip() for part in reply.argument.partition(":"))
        if not text:
            return Problem("no_addressee", f"write <{reply.tag}>name: text</{reply.tag}>")
    by_folded = {option.casefold(): option for option in spec.options}
    if spec.options and named.casefold() not in by_folded:
        return _wrong_option(game, seat, named, spec.options)
    if len(text) > game.rules.max_speech:
        return Problem("too_long", f"{len(text)} characters, at most {game.rules.max_speech}")
    return by_folded.get(named.casefold(), ""), text


def _wrong_option(game: Game, seat: int, named: str, options: tuple[str, ...]) -> Problem:
    for index, other in enumerate(game.seats):
        if other.name.casefold() == named.casefold():
            if index == seat:
                return Problem("target_self", "not yourself")
            if not other.alive:
                return Problem("target_dead", f"{other.name} is dead")
            return Problem("target_not_allowed", f"{other.name} is no choice for this")
    return Problem("target_not_found", f"{named[:20]!r} is none of {', '.join(options)}")


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
        thought = legality.clean_line(verdict.think[:MAX_RECORDED_THOUGHT])
        game.announce("thought", actor=seat, text=thought, audience=())
    if verdict.status is not Status.OK:
        game.announce("rejected", actor=seat, text=f"{verdict.code}: {verdict.detail}", audience=[seat])
    elif verdict.tag in legality.LOOK_UP_TAGS:
        observation = look_up(game, seat, verdict.tag, verdict.argument or verdict.text)
        holder.dialog.append((completion, observation))
        return observation
    else:
        _act(game, seat, verdict)
    holder.dialog = []
    end_turn(game, seat)
    return None


def _act(game: Game, seat: int, verdict: Verdict) -> None:
    """Carry out an action, or store a choice. All choices of a phase take effect together when the phase closes."""
    match verdict.tag:
        case legality.WAIT:
            return
        case "speak":
            _speak(game, seat, verdict.text)
        case "whisper":
            target = game.index(verdict.argument)
            game.announce("whisper", actor=seat, target=target, text=verdict.text, audience=[seat, target])
            game.announce("whispered", actor=seat, target=target)
        case "reveal":
            game.seats[seat].revealed = True
            game.announce("revealed", actor=seat)
        case "nominate":
            nominate(game, seat, game.index(verdict.argument))
        case _:
            game.choices[seat] = (verdict.tag, verdict.argument)


def _speak(game: Game, seat: int, text: str) -> None:
    kind, channel = "speech", None
    if game.phase is Phase.NIGHT_TALK:
        channel = next(channel for channel in channels(game) if seat in channel)
        if game.prisoner not in channel:
            kind = "mafia_chat"
        else:
            kind = "prisoner_says" if seat == game.prisoner else "jailor_says"
    # The prisoner must not learn which seat is the jailor.
    game.announce(kind, actor=NO_SEAT if kind == "jailor_says" else seat, text=text, audience=channel)
