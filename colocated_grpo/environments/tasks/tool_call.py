"""Requests in natural language, to be answered with the right tool calls in one message."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from pydantic import Field

from colocated_grpo.environments.base import Item
from colocated_grpo.environments.rewards.tool_calls import credit, is_exact, read_calls, render_calls
from colocated_grpo.environments.tasks.procedural import Procedural, Template
from colocated_grpo.types import JsonObject

CITIES = ("Rome", "Oslo", "Lima", "Cairo", "Delhi", "Quito", "Kyoto", "Accra")
PEOPLE = ("Ann", "Bob", "Eve", "Gus", "Ivy", "Kim", "Leo", "Mia")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
CURRENCIES = ("euro", "yen", "peso", "rupee", "dollar", "franc")
TOOLS = "weather(city, day), timer(minutes), message(to, text), convert(amount, source, target)"

Request = tuple[str, str, JsonObject]
"""(text, tool name, arguments)."""


def _weather(rng: Random) -> Request:
    city, day = rng.choice(CITIES), rng.choice(DAYS)
    return f"tell me the weather in {city} on {day}", "weather", {"city": city, "day": day}


def _timer(rng: Random) -> Request:
    minutes = rng.randint(1, 99)
    return f"set a timer for {minutes} minutes", "timer", {"minutes": minutes}


def _message(rng: Random) -> Request:
    to, hour = rng.choice(PEOPLE), rng.randint(1, 12)
    return f"write to {to}: see you at {hour}", "message", {"to": to, "text": f"see you at {hour}"}


def _convert(rng: Random) -> Request:
    amount = rng.randint(1, 999)
    source, target = rng.sample(CURRENCIES, 2)
    arguments = {"amount": amount, "source": source, "target": target}
    return f"convert {amount} {source} to {target}", "convert", arguments


REQUESTS: tuple[Callable[[Random], Request], ...] = (_weather, _timer, _message, _convert)


class ToolCall(Procedural):
    """Reward 1 for exactly the expected calls in order; below 1/2 for partly right calls."""

    min_calls: int = Field(1, ge=1)
    """Calls of the shortest request."""
    max_calls: int = Field(2, ge=1, le=8)
    """Calls of the longest request."""
    partial: bool = True
    """Give partial credit for right names and arguments; False: reward 1 or 0."""
    template: Template = (
        f"Tools: {TOOLS}.\nAnswer with one "
        '<tool_call>{"name": ..., "arguments": {...}}</tool_call> for each thing asked.\n{question}'
    )
    """Prompt text; {question} is replaced by the request."""

    def score(self, item: Item, completion: str) -> dict[str, float]:
        given, expected = read_calls(completion), item["tool_calls"]
        correct = float(is_exact(given, expected))
        return {
            "reward": credit(given, expected) if self.partial else correct,
            "correct": correct,
            "format": float(bool(given)),
        }

    def _draw(self, rng: Random) -> Item:
        drawn = [rng.choice(REQUESTS)(rng) for _ in range(rng.randint(self.min_calls, self.max_calls))]
        question = ", then ".join(text for text, _, _ in drawn)
        calls = [{"name": name, "arguments": arguments} for _, name, arguments in drawn]
        return {"question": f"Please {question}.", "tool_calls": calls, "answer": render_calls(calls)}
