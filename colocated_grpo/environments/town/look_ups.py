"""Look-ups: actions that return information from the seat's own observation and leave its turn open."""

from __future__ import annotations

from collections.abc import Callable

from colocated_grpo.environments.town.events import event_lines
from colocated_grpo.environments.town.observations import Observation, observe
from colocated_grpo.environments.town.roles import ROLES
from colocated_grpo.environments.town.state import Game


def look_up(game: Game, seat: int, tag: str, argument: str) -> str:
    """Return the observation of a legal look-up. Only write_will changes the game."""
    if tag == "write_will":
        game.seats[seat].will = argument
        answer = "Your will is kept."
    else:
        answer = _ANSWERS[tag](observe(game, seat), argument)
    left = game.rules.tool_calls - len(game.seats[seat].dialog) - 1
    return f"<observation>{answer} (look-ups left this turn: {left})</observation>"


def _get_role(view: Observation, name: str) -> str:
    role = ROLES[name]
    tags = ", ".join(ability.tag for ability in role.abilities) or role.day_power or "none"
    return f"{name} ({role.faction}; actions: {tags}). {role.card}"


def _roles(view: Observation, argument: str) -> str:
    """List all roles of the game, not those dealt: the cast is secret."""
    by_faction: dict[str, list[str]] = {}
    for name, role in ROLES.items():
        by_faction.setdefault(role.faction, []).append(name)
    return "; ".join(f"{faction}: {', '.join(names)}" for faction, names in by_faction.items())


def _chat_history(view: Observation, day: str) -> str:
    events = [event for event in view.events if str(event.day) == day]
    return "\n".join(event_lines(events, view.names)) or "Nothing was said."


def _graveyard(view: Observation, argument: str) -> str:
    return "; ".join(f"{grave.name}: {grave.role_name}" for grave in view.graves)


def _check_will(view: Observation, name: str) -> str:
    will = next(grave.will for grave in view.graves if grave.name == name)
    return f'The will of {name}: "{will}"' if will else f"{name} left no will."


def _view_will(view: Observation, argument: str) -> str:
    return f'Your will: "{view.will}"' if view.will else "You have not written a will."


_ANSWERS: dict[str, Callable[[Observation, str], str]] = {
    "get_role": _get_role,
    "roles": _roles,
    "chat_history": _chat_history,
    "graveyard": _graveyard,
    "check_will": _check_will,
    "view_will": _view_will,
}
