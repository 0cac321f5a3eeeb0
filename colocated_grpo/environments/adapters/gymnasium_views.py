"""Gymnasium environments as text. The toy-text environments have views here; others show ANSI or raw output."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

_COLOUR_CODE = re.compile(r"\x1b\[[\d;]*m")


class View(NamedTuple):
    """Text view of an environment for the policy."""

    rules: str
    actions: Sequence[str]
    describe: Callable[[Any, Any], str]
    """(unwrapped environment, observation) -> text"""


def _lake(env: Any, observation: int) -> str:
    rows = [[cell.decode() for cell in row] for row in env.desc]
    return _with_player(rows, divmod(int(observation), env.ncol))


def _cliff(env: Any, observation: int) -> str:
    height, width = env.shape
    rows = [["."] * width for _ in range(height)]
    rows[-1] = ["S", *"C" * (width - 2), "G"]
    return _with_player(rows, divmod(int(observation), width))


def _taxi(env: Any, observation: int) -> str:
    row, column, passenger, destination = env.decode(observation)
    stands = [f"{name} (row {place[0]}, column {place[1]})" for name, place in zip("RGYB", env.locs, strict=True)]
    where = "in the taxi" if passenger == len(stands) else f"at {stands[passenger]}"
    return f"Taxi at row {row}, column {column}. Passenger {where}. Destination {stands[destination]}."


def _blackjack(_env: Any, observation: tuple[int, int, int]) -> str:
    total, dealer, usable_ace = map(int, observation)
    return f"You have {total}{' with an ace that counts 11' if usable_ace else ''}. The dealer shows {dealer}."


def _plain(env: Any, observation: Any) -> str:
    """Return the rendered text of an environment made with render_mode 'ansi', else the observation itself."""
    if env.render_mode == "ansi":
        return _COLOUR_CODE.sub("", env.render()).strip()
    return str(observation)


def _with_player(rows: list[list[str]], place: tuple[int, int]) -> str:
    rows[place[0]][place[1]] = "P"
    return "\n".join(" ".join(row) for row in rows)


_LAKE = View(
    "Walk over the ice from S to G. P is you, F is ice, H is a hole that ends the walk. "
    "Where the ice is slippery a move may go to its left or right instead.",
    ("left", "down", "right", "up"),
    _lake,
)
_CLIFF = View(
    "Walk from S to G. P is you. Each step costs 1; C is a cliff: it costs 100 and puts you back to S.",
    ("up", "right", "down", "left"),
    _cliff,
)
_TAXI = View(
    "Drive to the passenger, pick it up, drive to the destination and drop it off for 20. Each step costs 1, a wrong "
    "pickup or dropoff 10. Rows count from the top and columns from the left, from 0; | is a wall.\n{map}",
    ("south", "north", "east", "west", "pickup", "dropoff"),
    _taxi,
)
_BLACKJACK = View(
    "Come closer to 21 than the dealer, and not above it. Hit takes a card, stick ends your turn.",
    ("stick", "hit"),
    _blackjack,
)
_VIEWS = {"FrozenLakeEnv": _LAKE, "CliffWalkingEnv": _CLIFF, "TaxiEnv": _TAXI, "BlackjackEnv": _BLACKJACK}


def view_of(env: Any, rules: str | None, actions: Sequence[str] | None) -> View:
    """Return the view of an unwrapped environment. Given rules and actions override its defaults."""
    numbers = tuple(map(str, range(int(env.action_space.n))))
    own = _VIEWS.get(type(env).__name__, View("", numbers, _plain))
    if "{map}" in own.rules:
        own = own._replace(rules=own.rules.replace("{map}", "\n".join(b"".join(row).decode() for row in env.desc)))
    return View(own.rules if rules is None else rules, actions or own.actions, own.describe)
