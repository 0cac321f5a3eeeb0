"""Stored rollouts as messages: who speaks, what was sampled, and without the tokens of the chat template."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from colocated_grpo.tracking.rows import Row

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


@dataclass(frozen=True, slots=True)
class Message:
    """Consecutive text of one speaker. Example: Message("user", "3+4=", sampled=False)"""

    speaker: str
    text: str
    sampled: bool
    """True: written by the policy in this rollout. False: what it read."""


def prompt_messages(row: Row) -> list[Message]:
    """Return the messages of a rollout's prompt."""
    return list(_parsed(row["prompt"], PROMPT))


def completion_messages(row: Row) -> list[Message]:
    """Return what the policy wrote, and between its turns what it observed."""
    turns = row.get("turns") or [{"sampled": True, "text": row["completion"]}]
    messages: list[Message] = []
    for turn in turns:
        if turn["sampled"]:
            # No search for headers: a policy may write anything.
            messages.append(Message(POLICY, _TOKEN.sub("", turn["text"]) if row.get("turns") else turn["text"], True))
        else:
            messages += _parsed(turn["text"], ENVIRONMENT)
    return messages


def one_line(messages: Sequence[Message], limit: int) -> str:
    """Return the text of the last messages on one line of at most `limit` characters."""
    text = " ".join(" ".join(message.text.split()) for message in messages)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _parsed(text: str, speaker: str) -> Iterator[Message]:
    """Yield the messages in text that a chat template has written; all as one of `speaker` if it has no header."""
    begin = 0
    for header in _HEADER.finditer(text):
        yield from _message(speaker, text[begin : header.start()])
        role = next(filter(None, header.groups()))
        speaker, begin = _MISTRAL.get(role, role.lower()), header.end()
    yield from _message(speaker, text[begin:])


def _message(speaker: str, text: str) -> Iterator[Message]:
    """Yield a message unless it is empty, such as the opening of the one that the policy writes."""
    if shown := _TOKEN.sub("", text).strip():
        yield Message(speaker, shown, sampled=False)
