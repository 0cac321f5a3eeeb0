"""The chat that a seat reads, made from its observation alone."""

from __future__ import annotations

from collections.abc import Callable

from colocated_grpo.environments.town.grammar import TOOLS
from colocated_grpo.environments.town.legality import Form, Slot
from colocated_grpo.environments.town.observations import Observation
from colocated_grpo.environments.town.state import NOBODY, Phase
from colocated_grpo.environments.town.wording import lines

Message = dict[str, str]

_RULES = """\
You are {name}, one of {seats} people in a small town. The town wants to hang every killer; the mafia knows its own \
and wants to reach half of the living; others have goals of their own. By night people act in secret. By day all \
talk, nominate, and judge whoever is brought to trial.
Your role: {role} ({faction}). {card}
Answer with <think>your reasoning</think> followed by exactly one action tag and nothing else."""

_ASKED = {
    Phase.PRE_NIGHT: "Night is near.",
    Phase.NIGHT_TALK: "It is night. You may talk in your closed circle.",
    Phase.NIGHT: "It is night. Choose what to do.",
    Phase.DISCUSSION: "The town talks.",
    Phase.NOMINATION: "The town may bring somebody to trial: it takes {needed} who name the same person.",
    Phase.DEFENCE: "You are on trial. Defend yourself.",
    Phase.JUDGEMENT: "Judge {accused}.",
    Phase.LAST_WORDS: "You are condemned. Your last words.",
}

_NEVER_FORGOTTEN = frozenset({"result", "killed", "hanged", "revealed"})
"""Kinds of events that stay in the prompt however long ago they were."""


def messages(view: Observation, memory: int) -> list[Message]:
    """Rules, situation, then the look-ups of this turn. `memory`: how many of the latest events are told.

    The messages after a look-up begin with those before it, so that tokens already sampled stay where they are.
    """
    return _with_look_ups(
        view, [{"role": "system", "content": _rules(view)}, {"role": "user", "content": _situation(view, memory)}]
    )


def brief(view: Observation, memory: int) -> list[Message]:
    """The same knowledge in few words: the rules of the game and the older past are left out."""
    people = {"Alive": view.living, "Mafia": view.allies, "Mark": [view.mark] if view.mark != NOBODY else []}
    told = [
        f"{view.name}, {view.role.name}. Day {view.day}, {view.phase}.",
        *(f"{what}: {' '.join(view.names[seat] for seat in seats)}." for what, seats in people.items() if seats),
        *([f"On trial: {view.names[view.accused]}."] if view.accused != NOBODY else []),
        *lines(view.events[-memory:], view.names),
        " ".join(_form(tag, slot) for tag, slot in view.legal.items()),
    ]
    return _with_look_ups(view, [{"role": "user", "content": "\n".join(told)}])


PROMPTS: dict[str, Callable[[Observation, int], list[Message]]] = {"full": messages, "brief": brief}
"""Wordings by name."""


def _with_look_ups(view: Observation, chat: list[Message]) -> list[Message]:
    for completion, observation in view.dialog:
        chat += [{"role": "assistant", "content": completion}, {"role": "user", "content": observation}]
    return chat


def _rules(view: Observation) -> str:
    role = view.role
    rules = _RULES.format(name=view.name, seats=len(view.names), role=role.name, faction=role.faction, card=role.card)
    if view.allies:
        rules += f" The mafia beside you: {_people(view, view.allies)}."
    if view.mark != NOBODY:
        rules += f" Your mark: {view.names[view.mark]}."
    return rules


def _people(view: Observation, roles: dict[int, str]) -> str:
    return ", ".join(f"{view.names[seat]} ({role_name})" for seat, role_name in roles.items())


def _situation(view: Observation, memory: int) -> str:
    told = [event for event in view.events[:-memory] if event.kind in _NEVER_FORGOTTEN] + list(view.events[-memory:])
    return "\n".join(
        [
            *lines(told, view.names),
            "",
            f"Day {view.day}, {view.phase}. Alive: {', '.join(view.names[seat] for seat in view.living)}.",
            f"Dead: {_people(view, {grave.seat: grave.role_name for grave in view.graves}) or 'nobody'}.",
            _ASKED[view.phase].format(accused=view.names[view.accused], needed=view.needed_to_accuse),
            *_choices(view),
        ]
    )


def _choices(view: Observation) -> list[str]:
    told = [f"Actions: {'; '.join(_form(tag, slot) for tag, slot in view.legal.items() if tag not in TOOLS)}"]
    if view.tool_calls:
        # All of them, also when some are spent: a look-up must not rewrite what was already read.
        look_ups = "; ".join(_form(tag, slot) for tag, slot in view.look_ups.items())
        told.append(f"Look-ups, at most {view.tool_calls} a turn, answered before you act: {look_ups}")
    return told


def _form(tag: str, slot: Slot) -> str:
    if slot.form is Form.EMPTY:
        return f"<{tag}/>"
    inside = {
        Form.TEXT: "text",
        Form.CHOICE: "role" if tag == "get_role" else "|".join(slot.options),
        Form.ADDRESSED: "name: text",
    }
    return f"<{tag}>{inside[slot.form]}</{tag}>"
