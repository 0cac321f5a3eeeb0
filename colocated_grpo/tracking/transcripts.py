"""Stored rollouts and games, split into passages by speaker, for the report and the tools."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from colocated_grpo.tracking import files
from colocated_grpo.tracking.files import Row, game_title
from colocated_grpo.tracking.page import section
from colocated_grpo.tracking.text import as_html, number

POLICY, PROMPT, ENVIRONMENT = "policy", "prompt", "environment"
"""Speakers of text that no chat template marks."""
_BAR = "\uff5c"  # DeepSeek's templates write a full-width bar
# One alternative for each family of templates. The groups hold the role.
_HEADER = re.compile(
    r"<\|im_start\|>(\w+)\n?"  # ChatML: Qwen, SmolLM
    r"|<\|start_header_id\|>(\w+)<\|end_header_id\|>\s{0,2}"  # Llama 3
    r"|<\|start_of_role\|>(\w+)(?:<\|end_of_role\|>|[^<]*<\|end_of_role\|>)"  # Granite
    r"|<\|start\|>(\w+)[^<]*(?:<\|channel\|>[^<]*)?<\|message\|>"  # gpt-oss
    r"|<(?:start_of_turn|\|turn)>(\w+)\n?"  # Gemma
    r"|<\|(system|user|assistant|tool|observation|developer)\|>\n?"  # Phi, GLM, OLMo, this package's models
    rf"|<{_BAR}(User|Assistant){_BAR}>"  # DeepSeek
    r"|\[(INST|SYSTEM_PROMPT|TOOL_RESULTS|/INST)\]\s?"  # Mistral
)
_MISTRAL = {"INST": "user", "SYSTEM_PROMPT": "system", "TOOL_RESULTS": "tool", "/INST": "assistant"}
_TOKEN = re.compile(
    rf"<\|[\w ]+\|>|<{_BAR}[^<>]+{_BAR}>|</?s>|<(?:bos|eos|pad|end_of_turn|turn\||sop)>"
    r"|\[gMASK\]|\[/(?:SYSTEM_PROMPT|TOOL_RESULTS)\]"
)
HELD_OUT_SHOWN = 8
TRAINING_ROLLOUTS_SHOWN = 6
GAMES_SHOWN = 6
MAX_TEXT_LENGTH = 6000
"""Characters shown of a message; rollouts.jsonl has the full text."""
MAX_GAME_LENGTH = 30_000
"""Characters shown of a transcript; games.jsonl has the full text."""


@dataclass(frozen=True, slots=True)
class Passage:
    """Consecutive text of one speaker. Example: Passage("user", "3+4=", sampled=False)"""

    speaker: str
    text: str
    sampled: bool
    """True: written by the policy in this rollout. False: read by the policy."""


def prompt_messages(row: Row) -> list[Passage]:
    """Return the messages of a rollout's prompt."""
    return list(_parsed(row["prompt"], PROMPT))


def completion_messages(row: Row) -> list[Passage]:
    """Return the policy's turns and the observations between them."""
    turns = row.get("turns") or [{"sampled": True, "text": row["completion"]}]
    messages: list[Passage] = []
    for turn in turns:
        if turn["sampled"]:
            # Do not search sampled text for headers: a policy may write headers itself.
            messages.append(Passage(POLICY, _TOKEN.sub("", turn["text"]) if row.get("turns") else turn["text"], True))
        else:
            messages += _parsed(turn["text"], ENVIRONMENT)
    return messages


def one_line(messages: Sequence[Passage], limit: int) -> str:
    """Return the text of the last messages on one line of at most `limit` characters."""
    text = " ".join(" ".join(message.text.split()) for message in messages)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _parsed(text: str, speaker: str) -> Iterator[Passage]:
    """Yield the messages of text rendered by a chat template; one message of `speaker` if there is no header."""
    begin = 0
    for header in _HEADER.finditer(text):
        yield from _message(speaker, text[begin : header.start()])
        role = next(filter(None, header.groups()))
        speaker, begin = _MISTRAL.get(role, role.lower()), header.end()
    yield from _message(speaker, text[begin:])


def _message(speaker: str, text: str) -> Iterator[Passage]:
    """Yield one message; nothing if its text is empty, as after the header that opens the policy's reply."""
    if shown := _TOKEN.sub("", text).strip():
        yield Passage(speaker, shown, sampled=False)


def before_and_after(rollouts: Sequence[Row]) -> str:
    """Show the first HELD_OUT_SHOWN held-out prompts, in prompt order, at the first and the last evaluation."""
    held_out = [row for row in rollouts if row["kind"] == files.EVALUATION]
    if not held_out:
        return ""
    first, last = held_out[0]["step"], held_out[-1]["step"]
    before = {row["prompt_index"]: row for row in held_out if row["step"] == first}
    after = {row["prompt_index"]: row for row in held_out if row["step"] == last}
    prompts = sorted(before.keys() & after.keys())[:HELD_OUT_SHOWN]
    if first == last:
        cards = "".join(_card([before[index]]) for index in prompts)
        return section(f"Held-out rollouts at step {first}", cards)
    cards = "".join(_card([before[index], after[index]]) for index in prompts)
    return section(f"Held-out rollouts before and after (steps {first} and {last})", cards)


def last_training_rollouts(rollouts: Sequence[Row]) -> str:
    """Show rollouts of the last training step, the best first."""
    train = [row for row in rollouts if row["kind"] == files.TRAIN]
    if not train:
        return ""
    step = train[-1]["step"]
    shown = [row for row in train if row["step"] == step][::-1][:TRAINING_ROLLOUTS_SHOWN]
    cards = "".join(_card([row]) for row in shown)
    return section(f"Training rollouts of step {step}, from best to worst", cards)


def latest_games(games: Sequence[Row]) -> str:
    """Show the latest games, newest first: seats, winner and transcript."""
    if not games:
        return ""
    shown = games[::-1][:GAMES_SHOWN]
    parts = "".join(
        f"<details><summary>{as_html(game_title(game))}</summary>{_seats(game.get('seats', []))}"
        f'<pre class="game">{_shortened(game.get("transcript", ""), MAX_GAME_LENGTH)}</pre></details>'
        for game in shown
    )
    return section(f"Games (latest {len(shown)} of {len(games)})", parts)


def _seats(seats: list[Row]) -> str:
    if not seats:
        return ""
    head = "".join(f"<th>{as_html(name)}</th>" for name in seats[0])
    lines = ("".join(f"<td>{as_html(value)}</td>" for value in seat.values()) for seat in seats)
    return f"<table><tr>{head}</tr>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def _card(rollouts: Sequence[Row]) -> str:
    """Show one prompt and one or two rollouts of it, side by side."""
    row = rollouts[0]
    label = f'<div class="label">{as_html(row["source"])}, prompt {row["prompt_index"]}</div>'
    sides = "".join(f"<div>{_label(rollout)}{_bubbles(completion_messages(rollout))}</div>" for rollout in rollouts)
    prompt = _bubbles(prompt_messages(row))
    return f'<article class="card">{label}{prompt}<div class="sides n{len(rollouts)}">{sides}</div></article>'


def _label(row: Row) -> str:
    facts = [f"step {row['step']}", f"{row['completion_tokens']} tokens", row["finish_reason"]]
    facts += [f"{name} {number(value)}" for name, value in row["parts"].items()]
    if row["error"]:
        facts.append(row["error"])
    return f'<div class="label"><b class="reward">{number(row["reward"])}</b> {as_html(" | ".join(facts))}</div>'


def _bubbles(messages: Sequence[Passage]) -> str:
    bubbles = "".join(
        f'<div class="bubble {"sampled" if message.sampled else "observed"}"><span>{as_html(message.speaker)}</span>'
        f"<pre>{_shortened(message.text)}</pre></div>"
        for message in messages
    )
    return f'<div class="chat">{bubbles}</div>'


def _shortened(text: str, limit: int = MAX_TEXT_LENGTH) -> str:
    omitted = len(text) - limit
    if omitted <= 0:
        return as_html(text)
    return f'{as_html(text[:limit])}<i class="quiet"> ... {omitted} more characters</i>'
