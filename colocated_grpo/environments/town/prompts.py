"""The prompt of a turn, built from the observation of its seat."""

from __future__ import annotations

from collections.abc import Callable

from colocated_grpo.environments.town.events import event_lines
from colocated_grpo.environments.town.grammar import LOOK_UP_TAGS
from colocated_grpo.environments.town.legality import ArgumentKind, ArgumentSpec
from colocated_grpo.environments.town.observations import Observation
from colocated_grpo.environments.town.state import NO_SEAT, Phase

Message = dict[str, str]
"""A chat message: role and content."""

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
    """Return the rules, the situation with the latest `memory` events, and the look-ups of this turn.

    A look-up only appends messages, so that sampled tokens keep their positions.
    """
    return _with_look_ups(
        view, [{"role": "system", "content": _rules(view)}, {"role": "user", "content": _situation(view, memory)}]
    )


def brief_prompt(view: Observation, memory: int) -> list[Message]:
    """Return the situation in few words, without the rules of the game and without older events."""
    people = {"Alive": view.living, "Mafia": view.allies, "Mark": [view.mark] if view.mark != NO_SEAT else []}
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


def _rules(view: Observation) -> str:
    role = view.role
    rules = _RULES.format(name=view.name, seats=len(view.names), role=role.name, faction=role.faction, card=role.card)
    if view.allies:
        rules += f" The mafia beside you: {_people(view, view.allies)}."
    if view.mark != NO_SEAT:
        rules += f" Your mark: {view.names[view.mark]}."
    return rules


def _people(view: Observation, roles: dict[int, str]) -> str:
    return ", ".join(f"{view.names[seat]} ({role_name})" for seat, role_name in roles.items())


def _situation(view: Observation, memory: int) -> str:
    events = [event for event in view.events[:-memory] if event.kind in _LASTING] + list(view.events[-memory:])
    return "\n".join(
        [
            *event_lines(events, view.names),
            "",
            f"Day {view.day}, {view.phase}. Alive: {', '.join(view.names[seat] for seat in view.living)}.",
            f"Dead: {_people(view, {grave.seat: grave.role_name for grave in view.graves}) or 'nobody'}.",
            _QUESTIONS[view.phase].format(accused=view.names[view.accused], needed=view.nominations_needed),
            *_choices(view),
        ]
    )


def _choices(view: Observation) -> list[str]:
    text = [f"Actions: {'; '.join(_usage(tag, spec) for tag, spec in view.legal.items() if tag not in LOOK_UP_TAGS)}"]
    if view.tool_calls:
        # Listed even when none is left: a look-up must not change the messages before it.
        look_ups = "; ".join(_usage(tag, spec) for tag, spec in view.look_ups.items())
        text.append(f"Look-ups, at most {view.tool_calls} a turn, answered before you act: {look_ups}")
    return text


def _usage(tag: str, spec: ArgumentSpec) -> str:
    """Return the syntax of the action. Example: <vote>guilty|innocent|abstain</vote>"""
    if spec.kind is ArgumentKind.EMPTY:
        return f"<{tag}/>"
    inside = {
        ArgumentKind.TEXT: "text",
        ArgumentKind.CHOICE: "role" if tag == "get_role" else "|".join(spec.options),
        ArgumentKind.ADDRESSED: "name: text",
    }
    return f"<{tag}>{inside[spec.kind]}</{tag}>"
