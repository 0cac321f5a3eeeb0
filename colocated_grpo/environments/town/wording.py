"""Events as sentences: one wording for prompts, look-ups and transcripts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from colocated_grpo.environments.town.state import Event

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


def sentence(event: Event, names: Sequence[str]) -> str:
    actor = names[event.actor] if event.actor >= 0 else ""
    target = names[event.target] if event.target >= 0 else ""
    return _SENTENCES[event.kind].format(day=event.day, actor=actor, target=target, text=event.text)


def lines(events: Iterable[Event], names: Sequence[str]) -> list[str]:
    return [sentence(event, names) for event in events]
