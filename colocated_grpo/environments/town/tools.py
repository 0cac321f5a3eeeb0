"""Look-ups: a seat asks, is answered with what it may know, and goes on with its turn."""

from __future__ import annotations

from collections.abc import Callable

from colocated_grpo.environments.town.observations import Observation, observe
from colocated_grpo.environments.town.roles import ROLES
from colocated_grpo.environments.town.state import Game
from colocated_grpo.environments.town.wording import lines


def look_up(game: Game, seat: int, tool: str, argument: str) -> str:
    """The observation for a legal look-up. Writing the own will is the only one that leaves a trace."""
    if tool == "write_will":
        game.seats[seat].will = argument
        answer = "Your will is kept."
    else:
        answer = _ANSWERS[tool](observe(game, seat), argument)
    left = game.rules.tool_calls - len(game.seats[seat].dialog) - 1
    return f"<observation>{answer} (look-ups left this turn: {left})</observation>"


def _get_role(view: Observation, name: str) -> str:
    role = ROLES[name]
    tags = ", ".join(ability.tag for ability in role.abilities) or role.day_power or "none"
    return f"{name} ({role.faction}; actions: {tags}). {role.card}"


def _roles(view: Observation, argument: str) -> str:
    """All that can be met, not those dealt: which ones are in play is for the town to find out."""
    by_faction: dict[str, list[str]] = {}
    for name, role in ROLES.items():
        by_faction.setdefault(role.faction, []).append(name)
    return "; ".join(f"{faction}: {', '.join(names)}" for faction, names in by_faction.items())


def _chat_history(view: Observation, day: str) -> str:
    heard = [event for event in view.events if str(event.day) == day]
    return "\n".join(lines(heard, view.names)) or "Nothing was said."


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
