"""Scripted players: functions from the observation of a seat to a reply, like the policy."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from random import Random

from colocated_grpo.environments.town import legality, verdicts
from colocated_grpo.environments.town.roles import ROLES, Faction
from colocated_grpo.environments.town.state import NAMES, NO_SEAT, Event, Game, Phase
from colocated_grpo.environments.town.texts import Observation

Player = Callable[[Observation, Random], str]
"""(observation, random stream) -> completion."""

_NAME = re.compile(r"[A-Z]\w+")
_ACCUSATION = re.compile(r"I accuse (\w+)")
_CERTAIN = 5.0
"""Suspicion added by a finding. An accusation adds -1 to 2, depending on the speaker."""
_SHOT_THRESHOLD, _TRIAL_THRESHOLD = 2.0, 1.0
"""Minimum suspicion to shoot a player, and minimum suspicion to nominate a player or vote guilty."""
_BLUFF_RATE, _HUNCH_RATE = 0.15, 0.1
"""Rates of accusations without a finding. The first rate is for the other factions, which mislead. The second rate is
for the town, which could not start a vote without accusations."""
_NO_FINDING = "I have seen nothing yet."


def reply(tag: str, argument: str = "") -> str:
    """Return a well-formed reply with an empty think block."""
    return "<think></think>" + (f"<{tag}>{argument}</{tag}>" if argument else f"<{tag}/>")


def random_player(view: Observation, rng: Random) -> str:
    """Reply with any legal action, look-ups included, so that random games cover every rule."""
    tag = rng.choice(list(view.legal))
    options, takes_text = view.legal[tag]
    text = [f"I accuse {rng.choice(NAMES)}, number {rng.randrange(10**9)}"] if takes_text else []
    option = [rng.choice(options)] if options else []
    return reply(tag, ": ".join(option + text))


def sensible_player(view: Observation, rng: Random) -> str:
    """Play by rules of thumb: the town reports its findings and votes by them, the other factions bluff."""
    return _BY_PHASE[view.phase](view, rng) or reply(legality.WAIT)


def suspicion(view: Observation) -> dict[int, float]:
    """Return the suspicion against every other living seat. Higher is more suspect."""
    score: defaultdict[int, float] = defaultdict(float)
    numbers = {name: seat for seat, name in enumerate(view.names)}
    accusers: set[tuple[int, int]] = set()
    for event in view.events:
        if event.kind == "speech" and (match := _ACCUSATION.match(event.text)):
            if (accused := numbers.get(match[1], NO_SEAT)) >= 0 and (event.actor, accused) not in accusers:
                accusers.add((event.actor, accused))
                # An accusation weighs more or less once its speaker's death has revealed the role.
                speaker = view.graves.get(event.actor)
                score[accused] += 1.0 if speaker is None else 2.0 if ROLES[speaker].faction is Faction.TOWN else -1.0
        elif event.kind == "result":
            for seat, weight in _finding(view, event, numbers):
                score[seat] += weight
        elif event.kind == "revealed":
            score[event.actor] -= _CERTAIN
    return {seat: score[seat] for seat in view.living if seat != view.seat}


def _finding(view: Observation, event: Event, numbers: dict[str, int]) -> Iterator[tuple[int, float]]:
    """Yield (seat, suspicion) for one of the seat's own results. A victim's visitor of that night gets _CERTAIN."""
    if event.text in ("suspicious", "not suspicious"):
        yield event.target, _CERTAIN if event.text == "suspicious" else -_CERTAIN
        return
    died = {other.actor for other in view.events if other.kind == "killed" and other.day == event.day}
    seen = [numbers[name] for name in _NAME.findall(event.text) if name in numbers]
    if event.text.startswith("visited by") and event.target in died:
        yield from ((seat, _CERTAIN) for seat in seen)


def _rivals(view: Observation) -> list[int]:
    """Return the other living seats that are not allies."""
    return [seat for seat in view.living if seat != view.seat and seat not in view.allies]


def _most_suspect(view: Observation, rng: Random) -> tuple[int, float]:
    """Return the most suspect rival and its suspicion. Ties are broken at random."""
    score = suspicion(view)
    if not (rivals := _rivals(view)):
        return NO_SEAT, 0.0
    highest = max(score[seat] for seat in rivals)
    return rng.choice([seat for seat in rivals if score[seat] == highest]), highest


def _discuss(view: Observation, rng: Random) -> str | None:
    if "reveal" in view.legal and view.day > 2:
        return reply("reveal")
    suspect, score = _most_suspect(view, rng)
    if suspect == NO_SEAT:
        return None
    if view.role.faction is Faction.TOWN:
        convinced = score >= _CERTAIN - 2 or rng.random() < _HUNCH_RATE
        return reply("speak", f"I accuse {view.names[suspect]}." if convinced else _NO_FINDING)
    if rng.random() < 0.1:
        return reply("whisper", f"{view.names[suspect]}: are you with me?")
    return reply("speak", f"I accuse {view.names[suspect]}." if rng.random() < _BLUFF_RATE else _NO_FINDING)


def _nominate(view: Observation, rng: Random) -> str | None:
    suspect, score = _most_suspect(view, rng)
    eager = score >= _TRIAL_THRESHOLD or (view.role.faction is not Faction.TOWN and score > 0)
    if suspect == NO_SEAT or not eager or view.names[suspect] not in view.legal.get("nominate", legality.EMPTY).options:
        return None
    return reply("nominate", view.names[suspect])


def _vote(view: Observation, rng: Random) -> str:
    if view.accused in view.allies:
        return reply("vote", "innocent" if rng.random() < 0.7 else "guilty")
    if view.role.faction is not Faction.TOWN:
        return reply("vote", "guilty" if rng.random() < 0.7 else "abstain")
    return reply("vote", "guilty" if suspicion(view).get(view.accused, 0.0) >= _TRIAL_THRESHOLD else "innocent")


def _plead(view: Observation, rng: Random) -> str | None:
    return reply("speak", "I am as innocent as any of you.")


def _talk_at_night(view: Observation, rng: Random) -> str | None:
    if not view.allies:
        return reply("speak", "Who is there?")
    rivals = _rivals(view)
    return reply("speak", f"Let us take {view.names[rng.choice(rivals)]}.") if rivals else None


def _act_at_night(view: Observation, rng: Random) -> str | None:
    tags = [tag for tag in view.legal if tag != legality.WAIT and tag not in legality.LOOK_UP_TAGS]
    if not tags:
        return None
    tag = rng.choice(tags)
    suspect, score = _most_suspect(view, rng)
    if tag in ("shoot", "execute") and score < _SHOT_THRESHOLD:
        return None
    if tag == "execute":
        return reply(tag)
    options = view.legal[tag].options
    names = [view.names[suspect]] if tag == "shoot" else _preferred(view, tag, options)
    return reply(tag, rng.choice([name for name in names if name in options] or options))


def _preferred(view: Observation, tag: str, options: tuple[str, ...]) -> list[str]:
    """Return the targets to prefer: players not yet investigated, and revealed mayors to kill or to protect."""
    if tag == "investigate":
        investigated = {view.names[event.target] for event in view.events if event.kind == "result"}
        return [name for name in options if name not in investigated]
    if tag in ("kill", "protect"):
        return [view.names[event.actor] for event in view.events if event.kind == "revealed"]
    return list(options)


_BY_PHASE: dict[Phase, Callable[[Observation, Random], str | None]] = {
    Phase.PRE_NIGHT: lambda view, rng: reply("jail", view.names[_most_suspect(view, rng)[0]]),
    Phase.NIGHT_TALK: _talk_at_night,
    Phase.NIGHT: _act_at_night,
    Phase.DISCUSSION: _discuss,
    Phase.NOMINATION: _nominate,
    Phase.DEFENCE: _plead,
    Phase.JUDGEMENT: _vote,
    Phase.LAST_WORDS: _plead,
}

SCRIPTED: dict[str, Player] = {"random": random_player, "sensible": sensible_player}
"""Scripted players by label. Models play the seats with any other label."""


def scripted_turn(game: Game, seat: int, player: Player) -> None:
    """Let a scripted player take an open turn."""
    completion = scripted_reply(game, seat, player)
    verdicts.apply_verdict(game, seat, verdicts.judge(game, seat, completion), completion)


def scripted_reply(game: Game, seat: int, player: Player) -> str:
    """Return a script's reply to an open turn, random by the seat's own turns: simultaneous seats act in any order."""
    return player(Observation(game, seat), Random(f"{game.seed}/{seat}/{game.seats[seat].acted}"))
