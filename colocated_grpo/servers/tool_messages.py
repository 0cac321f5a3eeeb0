"""Tool calls in OpenAI's format, parsed from sampled text, and back to that text in later requests."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence

from colocated_grpo.environments.rewards.tool_calls import OPEN, read_calls
from colocated_grpo.types import JsonObject


def assistant_message(text: str) -> JsonObject:
    """Return the message with its <tool_call> blocks as `tool_calls`; as plain content without well-formed blocks."""
    calls = read_calls(text)
    if not calls:
        return {"role": "assistant", "content": text}
    return {
        "role": "assistant",
        "content": text.partition(OPEN)[0].strip() or None,
        "tool_calls": [
            {
                "id": f"call_{uuid.uuid4().hex}",
                "type": "function",
                "function": {"name": call["name"], "arguments": json.dumps(call["arguments"])},
            }
            for call in calls
        ],
    }


def as_sampled(messages: Sequence[JsonObject], sampled: Mapping[str, str]) -> list[JsonObject]:
    """Return the messages with parsed calls replaced by the text from which they were parsed.

    sampled: texts by the id of a call. A template would write the calls anew, with other spaces or order.
    """
    return [_as_sampled(message, sampled) for message in messages]


def _as_sampled(message: JsonObject, sampled: Mapping[str, str]) -> JsonObject:
    calls = message.get("tool_calls")
    first = calls[0] if isinstance(calls, list) and calls else None
    text = sampled.get(str(first.get("id"))) if isinstance(first, dict) else None
    return message if text is None else {"role": message["role"], "content": text}
