"""The view of one seat, through which prompts and scripts read a game without its secrets, and the game in words."""

from collections.abc import Callable, Iterable, Sequence

from colocated_grpo.environments.chat import Message
from colocated_grpo.environments.town import legality, phases
from colocated_grpo.environments.town.roles import ROLES, Faction
from colocated_grpo.environments.town.state import NO_SEAT, Event, Game, Phase
from colocated_grpo.types import JsonObject


class Observation:
    """Everything that a seat may know at one moment. Seats are referred to by index."""

    def __init__(self, game: Game, seat: int) -> None:
        holder = game.seats[seat]
        self.seat = seat
        self.names = tuple(other.name for other in game.seats)
        self.name = holder.name
        self.role = holder.role
        self.phase = game.phase
        self.day = game.day
        self.living = tuple(game.living())
        mafia = {
            index: other.role_name for index, other in enumerate(game.seats) if other.role.faction is Faction.MAFIA
        }
        self.allies = {index: name for index, name in mafia.items() if seat in mafia and index != seat}
        """Role names of the other mafia members by seat, dead ones included. Empty outside the mafia."""
        self.will = holder.will
        # The deciding nomination sets game.accused before the trial makes the accused public.
        self.accused = game.accused if game.phase in (Phase.DEFENCE, Phase.JUDGEMENT, Phase.LAST_WORDS) else NO_SEAT
        self.nominations_needed = legality.nominations_needed(game)
        dead = {index: other for index, other in enumerate(game.seats) if not other.alive}
        self.graves = {index: other.role_name for index, other in dead.items()}
        """Role names of the dead by seat."""
        self.wills = {other.name: other.will for other in dead.values()}
        self.events = tuple(event for event in game.events if event.audience is None or seat in event.audience)
        """Events that the seat saw, oldest first."""
        self.legal = legality.legal_actions(game, seat)
        self.look_ups = legality.look_ups(game, seat)
        """Look-ups of the phase, listed even if none is left in this turn."""
        self.dialog = tuple(holder.dialog)
        """(completion, observation) of each look-up of this turn so far."""
        self.tool_calls = game.rules.tool_calls


_SENTENCES = {
    "dawn": "--- Day {day} ---",
    "nightfall": "--- Night {day} ---",
    "speech": '{actor}: "{text}"',
    "whisper": '{actor} whispers to {target}: "{text}"',
    "whispered": "{actor} whispers to {target}.",
    "mafia_chat": '{actor} to the mafia: "{text}"',
    "jailor_says": 'The jailor: "{text}"',
    "prisoner_says": '{actor}, in jail: "{text}"',
    "jailed": "{target} is locked up for the night.",
    "promoted": "{actor} is the mafia's {text} now.",
    "killed": "{actor} was found dead. Role: {text}.",
    "hanged": "{actor} was hanged. Role: {text}.",
    "nominated": "{actor} nominates {target}.",
    "trial": "{target} is on trial.",
    "vote": "{actor} votes {text}.",
    "condemned": "{target} is condemned: {text}.",
    "acquitted": "{target} is let go: {text}.",
    "revealed": "{actor} shows the mayor's chain of office.",
    "note": "(Only you: {text})",
    "result": "(Result on {target}: {text}.)",
    "rejected": "(Your reply did nothing. {text}.)",
    "over": "The game is over: {text}.",
    "action": "[{actor} chooses: {text} -> {target}]",
    "thought": "[{actor} thinks: {text}]",
}
"""Wording by kind of event, the same in prompts, look-ups and transcripts."""


def event_lines(events: Iterable[Event], names: Sequence[str]) -> list[str]:
    """Return each event as one line. names: player names by seat."""
    return [
        _SENTENCES[event.kind].format(
            day=event.day,
            actor=names[event.actor] if event.actor >= 0 else "",
            target=names[event.target] if event.target >= 0 else "",
            text=event.text,
        )
        for event in events
    ]


def game_record(game: Game) -> JsonObject:
    """Return an ended game for the run folder: cast and result, transcript, and one row for each event.

    The transcript has all secrets. A line that only some seats saw ends with their names.
    """
    names = [f"{seat.name} ({seat.role_name})" for seat in game.seats]
    lines = ["Cast: " + ", ".join(names)]
    for event, line in zip(game.events, event_lines(game.events, names), strict=True):
        lines.append(f"    {line}  <- {', '.join(game.names(event.audience))}" if event.audience else line)
    seats = [
        {
            "name": seat.name,
            "role": seat.role_name,
            "faction": str(seat.role.faction),
            "player": seat.player,
            "alive": seat.alive,
            "result": phases.seat_result(game, index),
        }
        for index, seat in enumerate(game.seats)
    ]
    return {
        "game": game.number,
        "seed": game.seed,
        "winner": str(game.winner),
        "days": game.day,
        "seats": seats,
        "transcript": "\n".join(lines) + "\n",
        "events": [_event_row(game, number, event) for number, event in enumerate(game.events)],
    }


def _event_row(game: Game, number: int, event: Event) -> JsonObject:
    actor = game.seats[event.actor] if event.actor >= 0 else None
    return {
        "game": game.number,
        "seed": game.seed,
        "number": number,
        "day": event.day,
        "phase": event.phase,
        "kind": event.kind,
        "actor": actor.name if actor else "",
        # The role at the end of the game: a member of the mafia may have been promoted since this event.
        "role": actor.role_name if actor else "",
        "target": game.seats[event.target].name if event.target >= 0 else "",
        "text": event.text,
        # An event that no seat saw is only recorded.
        "audience": "all" if event.audience is None else ", ".join(game.names(event.audience)) or "record",
    }


_RULES = """\
You are {name}, one of {seats} people in a small town. The town wants to hang every killer; the mafia knows its own \
and wants to reach half of the living; others have goals of their own. By night people act in secret. By day all \
talk, nominate, and judge whoever is brought to trial.
Your role: {role} ({faction}). {card}
Answer with <think>your reasoning</think> followed by exactly one action tag and nothing else."""

_QUESTIONS = {
    Phase.PRE_NIGHT: "Night is near.",
    Phase.NIGHT_TALK: "It is night. You may talk in your closed circle.",
    Phase.NIGHT: "It is night. Choose what to do.",
    Phase.DISCUSSION: "The town talks.",
    Phase.NOMINATION: "The town may bring somebody to trial: it takes {needed} who name the same person.",
    Phase.DEFENCE: "You are on trial. Defend yourself.",
    Phase.JUDGEMENT: "Judge {accused}.",
    Phase.LAST_WORDS: "You are condemned. Your last words.",
}

_LASTING = frozenset({"result", "killed", "hanged", "revealed"})
"""Kinds of events that stay in the full prompt even if they are older than the latest `memory` events."""


def full_prompt(view: Observation, memory: int) -> list[Message]:
    """Return rules, situation and look-ups. A look-up only appends messages: sampled tokens keep their positions."""
    role = view.role
    rules = _RULES.format(name=view.name, seats=len(view.names), role=role.name, faction=role.faction, card=role.card)
    if view.allies:
        rules += f" The mafia beside you: {_people(view, view.allies)}."
    return _with_look_ups(
        view, [{"role": "system", "content": rules}, {"role": "user", "content": _situation(view, memory)}]
    )


def brief_prompt(view: Observation, memory: int) -> list[Message]:
    """Return the situation in few words, without the rules of the game and without older events."""
    people = {"Alive": view.living, "Mafia": view.allies}
    text = [
        f"{view.name}, {view.role.name}. Day {view.day}, {view.phase}.",
        *(f"{label}: {' '.join(view.names[seat] for seat in seats)}." for label, seats in people.items() if seats),
        *([f"On trial: {view.names[view.accused]}."] if view.accused != NO_SEAT else []),
        *event_lines(view.events[-memory:], view.names),
        " ".join(_usage(tag, spec) for tag, spec in view.legal.items()),
    ]
    return _with_look_ups(view, [{"role": "user", "content": "\n".join(text)}])


PROMPT_STYLES: dict[str, Callable[[Observation, int], list[Message]]] = {"full": full_prompt, "brief": brief_prompt}
"""(observation, memory) -> messages, by the name in `args.prompts`."""


def _with_look_ups(view: Observation, chat: list[Message]) -> list[Message]:
    for completion, observation in view.dialog:
        chat += [{"role": "assistant", "content": completion}, {"role": "user", "content": observation}]
    return chat


def _people(view: Observation, roles: dict[int, str]) -> str:
    return ", ".join(f"{view.names[seat]} ({role_name})" for seat, role_name in roles.items())


def _situation(view: Observation, memory: int) -> str:
    events = [event for event in view.events[:-memory] if event.kind in _LASTING] + list(view.events[-memory:])
    actions = [_usage(tag, spec) for tag, spec in view.legal.items() if tag not in legality.LOOK_UP_TAGS]
    text = [
        *event_lines(events, view.names),
        "",
        f"Day {view.day}, {view.phase}. Alive: {', '.join(view.names[seat] for seat in view.living)}.",
        f"Dead: {_people(view, view.graves) or 'nobody'}.",
        _QUESTIONS[view.phase].format(accused=view.names[view.accused], needed=view.nominations_needed),
        f"Actions: {'; '.join(actions)}",
    ]
    if view.tool_calls:
        # Look-ups are listed even if none is left, because a look-up must not change earlier messages.
        look_ups = "; ".join(_usage(tag, spec) for tag, spec in view.look_ups.items())
        text.append(f"Look-ups, at most {view.tool_calls} a turn, answered before you act: {look_ups}")
    return "\n".join(text)


def _usage(tag: str, spec: legality.ArgumentSpec) -> str:
    """Return the syntax of the action. Example: <vote>guilty|innocent|abstain</vote>"""
    if spec == legality.EMPTY:
        return f"<{tag}/>"
    options = "role" if tag == "get_role" else "|".join(spec.options)
    inside = options if not spec.text else "name: text" if spec.options else "text"
    return f"<{tag}>{inside}</{tag}>"


def look_up(game: Game, seat: int, tag: str, argument: str) -> str:
    """Return the observation of a legal look-up. Only write_will changes the game."""
    if tag == "write_will":
        game.seats[seat].will = argument
    answer = _answer(Observation(game, seat), tag, argument)
    left = game.rules.tool_calls - len(game.seats[seat].dialog) - 1
    return f"<observation>{answer} (look-ups left this turn: {left})</observation>"


def _answer(view: Observation, tag: str, argument: str) -> str:
    match tag:
        case "get_role":
            role = ROLES[argument]
            tags = ", ".join(filter(None, [role.ability.tag if role.ability else None, role.day_power]))
            return f"{argument} ({role.faction}; actions: {tags or 'none'}). {role.card}"
        case "roles":  # all roles of the game, whether dealt or not, because the cast is secret
            by_faction = {role.faction: [] for role in ROLES.values()}
            for name, role in ROLES.items():
                by_faction[role.faction].append(name)
            return "; ".join(f"{faction}: {', '.join(names)}" for faction, names in by_faction.items())
        case "chat_history":
            events = [event for event in view.events if str(event.day) == argument]
            return "\n".join(event_lines(events, view.names)) or "Nothing was said."
        case "graveyard":
            return "; ".join(f"{view.names[seat]}: {role_name}" for seat, role_name in view.graves.items())
        case "check_will":
            will = view.wills[argument]
            return f'The will of {argument}: "{will}"' if will else f"{argument} left no will."
        case "view_will":
            return f'Your will: "{view.will}"' if view.will else "You have not written a will."
    return "Your will is kept."
