"""Scripted players. They read an observation like everybody else and answer in the grammar."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from random import Random

from colocated_grpo.environments.town.acting import carry_out
from colocated_grpo.environments.town.casting import NAMES
from colocated_grpo.environments.town.endings import UNKNOWN
from colocated_grpo.environments.town.grammar import TOOLS, WAIT
from colocated_grpo.environments.town.legality import VOTES, Form, Slot
from colocated_grpo.environments.town.observations import Observation, observe
from colocated_grpo.environments.town.roles import ROLES, Faction
from colocated_grpo.environments.town.state import NOBODY, Event, Game, Phase
from colocated_grpo.environments.town.verdicts import judge

Player = Callable[[Observation, Random], str]
"""Gives a completion for what a seat sees."""

_NAME = re.compile(r"[A-Z]\w+")
_ACCUSATION = re.compile(r"I accuse (\w+)")
_CERTAIN = 5.0
_WORTH_A_SHOT, _WORTH_A_TRIAL = 2.0, 1.0
_BLUFF, _HUNCH = 0.15, 0.1
"""How often somebody without a finding accuses: to mislead, or because somebody has to."""
_CLUELESS = "I have seen nothing yet."


def reply(tag: str, argument: str = "") -> str:
    return "<think></think>" + (f"<{tag}>{argument}</{tag}>" if argument else f"<{tag}/>")


def random_player(view: Observation, rng: Random) -> str:
    """Any legal action, look-ups included: reaches every corner of the game."""
    tag = rng.choice(list(view.legal))
    return reply(tag, _random_argument(view.legal[tag], rng))


def _random_argument(slot: Slot, rng: Random) -> str:
    if slot.form is Form.EMPTY:
        return ""
    if slot.form is Form.CHOICE:
        return rng.choice(slot.options)
    text = f"I accuse {rng.choice(NAMES)}, number {rng.randrange(10**9)}"
    return text if slot.form is Form.TEXT else f"{rng.choice(slot.options)}: {text}"


def sensible_player(view: Observation, rng: Random) -> str:
    """Town shares what it finds and votes on it; the mafia and the others hide behind accusations."""
    answer = _BY_PHASE[view.phase](view, rng)
    return answer if answer else reply(WAIT)


def suspicion(view: Observation) -> dict[int, float]:
    """How guilty each other living seat looks. Accusations weigh what their speaker is worth, findings much more."""
    score: Counter[int] = Counter()
    known = {grave.seat: grave.role_name for grave in view.graves}
    numbers = {name: seat for seat, name in enumerate(view.names)}
    accusers: set[tuple[int, int]] = set()
    for event in view.events:
        if event.kind == "speech" and (match := _ACCUSATION.match(event.text)):
            accused = numbers.get(match[1], NOBODY)
            if accused >= 0 and (event.actor, accused) not in accusers:
                accusers.add((event.actor, accused))
                score[accused] += _worth(known.get(event.actor))
        elif event.kind == "result":
            for seat, weight in _finding(view, event, numbers):
                score[seat] += weight
        elif event.kind == "revealed":
            score[event.actor] -= _CERTAIN
    return {seat: score[seat] for seat in view.living if seat != view.seat}


def _finding(view: Observation, event: Event, numbers: dict[str, int]) -> Iterator[tuple[int, float]]:
    """What an own result says about whom: a caller at a door where somebody died is as good as caught."""
    if event.text in ("suspicious", "not suspicious"):
        yield event.target, _CERTAIN if event.text == "suspicious" else -_CERTAIN
        return
    died = {other.actor for other in view.events if other.kind == "killed" and other.day == event.day}
    seen = [numbers[name] for name in _NAME.findall(event.text) if name in numbers]
    if event.text.startswith("visited by") and event.target in died:
        yield from ((seat, _CERTAIN) for seat in seen)
    elif event.text.startswith("called on") and died.intersection(seen):
        yield event.target, _CERTAIN


def _worth(role_name: str | None) -> float:
    """Trust in somebody whose role death has shown, or not."""
    if role_name in (None, UNKNOWN):
        return 1.0
    return 2.0 if ROLES[role_name].faction is Faction.TOWN else -1.0


def _prey(view: Observation) -> list[int]:
    """Living seats that this one has no reason to spare."""
    return [seat for seat in view.living if seat != view.seat and seat not in view.allies]


def _most_suspect(view: Observation, rng: Random) -> tuple[int, float]:
    """Of those that may be harmed; chance decides between equals."""
    score = suspicion(view)
    prey = _prey(view)
    if not prey:
        return NOBODY, 0.0
    if view.mark in prey:
        return view.mark, _CERTAIN
    best = max(score[seat] for seat in prey)
    return rng.choice([seat for seat in prey if score[seat] == best]), best


def _honest(view: Observation) -> bool:
    return view.role.faction is Faction.TOWN


def _discuss(view: Observation, rng: Random) -> str | None:
    if "reveal" in view.legal and view.day > 2:
        return reply("reveal")
    if "speak" not in view.legal:
        return None
    suspect, score = _most_suspect(view, rng)
    if suspect == NOBODY:
        return None
    if _honest(view):
        convinced = score >= _CERTAIN - 2 or rng.random() < _HUNCH
        return reply("speak", f"I accuse {view.names[suspect]}." if convinced else _CLUELESS)
    if rng.random() < 0.1:
        return reply("whisper", f"{view.names[suspect]}: are you with me?")
    return reply("speak", f"I accuse {view.names[suspect]}." if rng.random() < _BLUFF else _CLUELESS)


def _nominate(view: Observation, rng: Random) -> str | None:
    suspect, score = _most_suspect(view, rng)
    eager = score >= _WORTH_A_TRIAL or (not _honest(view) and score > 0)
    if suspect == NOBODY or not eager or view.names[suspect] not in _options(view, "nominate"):
        return None
    return reply("nominate", view.names[suspect])


def _judge(view: Observation, rng: Random) -> str:
    if view.accused in view.allies:
        return reply("vote", "innocent" if rng.random() < 0.7 else "guilty")
    if not _honest(view):
        return reply("vote", "guilty" if rng.random() < 0.7 else "abstain")
    score = suspicion(view).get(view.accused, 0.0)
    return reply("vote", VOTES[0] if score >= _WORTH_A_TRIAL else VOTES[1])


def _speak_up(view: Observation, rng: Random) -> str | None:
    return reply("speak", "I am as innocent as any of you.") if "speak" in view.legal else None


def _plot(view: Observation, rng: Random) -> str | None:
    if not view.allies:
        return reply("speak", "Who is there?")
    prey = _prey(view)
    return reply("speak", f"Let us take {view.names[rng.choice(prey)]}.") if prey else None


def _lock_up(view: Observation, rng: Random) -> str | None:
    return reply("jail", view.names[_most_suspect(view, rng)[0]])


def _act_at_night(view: Observation, rng: Random) -> str | None:
    tags = [tag for tag in view.legal if tag != WAIT and tag not in TOOLS]
    if not tags:
        return None
    tag = rng.choice(tags)
    suspect, score = _most_suspect(view, rng)
    if tag in ("shoot", "execute") and score < _WORTH_A_SHOT:
        return None
    if tag in ("alert", "vest", "ignite"):
        return reply(tag) if rng.random() < 0.4 else None
    if tag == "execute":
        return reply(tag)
    options = _options(view, tag)
    names = [view.names[suspect]] if tag == "shoot" else _preferred(view, tag, options)
    return reply(tag, rng.choice([name for name in names if name in options] or options))


def _preferred(view: Observation, tag: str, options: tuple[str, ...]) -> list[str]:
    """The shown mayor, whom the mafia hunts and the town guards; for a sheriff whoever is still unknown."""
    if tag == "investigate":
        looked_into = {view.names[event.target] for event in view.events if event.kind == "result"}
        return [name for name in options if name not in looked_into]
    if tag in ("kill", "protect", "guard"):
        return [view.names[event.actor] for event in view.events if event.kind == "revealed"]
    return list(options)


def _options(view: Observation, tag: str) -> tuple[str, ...]:
    slot = view.legal.get(tag)
    return slot.options if slot else ()


_BY_PHASE: dict[Phase, Callable[[Observation, Random], str | None]] = {
    Phase.PRE_NIGHT: _lock_up,
    Phase.NIGHT_TALK: _plot,
    Phase.NIGHT: _act_at_night,
    Phase.DISCUSSION: _discuss,
    Phase.NOMINATION: _nominate,
    Phase.DEFENCE: _speak_up,
    Phase.JUDGEMENT: _judge,
    Phase.LAST_WORDS: _speak_up,
}

SCRIPTED: dict[str, Player] = {"random": random_player, "sensible": sensible_player}
"""Scripted players by label; any other label is played from outside."""


def scripted_turn(game: Game, seat: int, player: Player) -> None:
    completion = scripted_reply(game, seat, player)
    carry_out(game, seat, judge(game, seat, completion), completion)


def scripted_reply(game: Game, seat: int, player: Player) -> str:
    """The stream of chance hangs on the seat's own turn, so the order in which simultaneous seats act is no matter."""
    return player(observe(game, seat), Random(f"{game.seed}/{seat}/{game.seats[seat].acted}"))
