"""Groups that environments post to Atropos' API server, checked and kept as JSON text.

Text takes a fifth of the memory of parsed lists, and a batch is sent by joining texts. Columns of numbers are checked
one sequence at a time, so that a group of any size needs little more memory than its text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import Raw, Struct

from colocated_grpo.types import JsonObject
from colocated_grpo.web.shape import BodyShape

MAX_SEQUENCES = 1 << 14
MAX_ROW_NUMBERS = 1 << 20
"""Numbers of one sequence. Bounds the memory for the objects of one row."""
MAX_SPACES = 1 << 10
"""Between two sequences."""
MAX_SETTINGS_BYTES = 1 << 20
"""Length of `overrides`, `group_overrides` and `generation_params`."""
TEXTS = BodyShape(values=1 << 18, containers=1 << 17, strings=1 << 17, depth=32)
"""`messages` and `images`. The depth could overflow the stack of a reader."""
NUMBERS = b"0123456789+-.eE,[] \t\r\n"


class InvalidGroup(Exception):
    """A group that is not accepted. The message names the rule."""


ABSENT = Raw(b"null")


class Message(Struct):
    """A chat message. Only the presence of its two keys is checked."""

    role: Raw
    content: Raw


class Columns(Struct):
    """The fields of one scored group, in the order in which they are sent, as JSON text."""

    tokens: Raw
    masks: Raw
    scores: Raw
    advantages: Raw = ABSENT
    ref_logprobs: Raw = ABSENT
    messages: Raw = ABSENT
    generation_params: Raw = ABSENT
    inference_logprobs: Raw = ABSENT
    overrides: Raw = ABSENT
    group_overrides: Raw = ABSENT
    images: Raw = ABSENT
    env_id: int | None = None
    distill_token_ids: Raw = ABSENT
    distill_logprobs: Raw = ABSENT


FIELDS = Columns.__struct_fields__


@dataclass(frozen=True)
class ScoredGroup:
    """One scored group. The lengths of its lists are not checked against each other."""

    size: int
    """Number of sequences."""
    env_id: int | None
    text: bytes
    """A JSON object with every field, null where absent."""


def read_group(body: bytes) -> ScoredGroup:
    """Parse POST /scored_data. Raises InvalidGroup, TooComplex or msgspec's errors at the first problem."""
    return _checked(_ONE.decode(body))


def read_groups(body: bytes) -> list[ScoredGroup]:
    """Parse POST /scored_data_list, like `read_group`."""
    return [_checked(columns) for columns in _SEVERAL.decode(body)]


def no_group() -> JsonObject:
    """Return what GET /latest_example sends before the first group."""
    empty = ["tokens", "masks", "scores", "advantages", "ref_logprobs", "generation_params", "inference_logprobs"]
    return {name: [] for name in [*empty, "messages", "images"]}


_ONE, _SEVERAL = msgspec.json.Decoder(Columns), msgspec.json.Decoder(list[Columns])
_INTEGERS, _FLOATS = msgspec.json.Decoder(list[int]), msgspec.json.Decoder(list[float])
_SCORES = msgspec.json.Decoder(list[float | bool])
_SETTINGS, _OVERRIDES = msgspec.json.Decoder(dict[str, Any]), msgspec.json.Decoder(list[dict[str, Any]])
_MESSAGES = msgspec.json.Decoder(list[list[Message]])


def _checked(columns: Columns) -> ScoredGroup:
    size = _check_rows("tokens", columns.tokens, _INTEGERS.decode)
    _check_rows("masks", columns.masks, _INTEGERS.decode)
    for name in ("advantages", "ref_logprobs", "inference_logprobs"):
        _if_present(columns, name, lambda text, name=name: _check_rows(name, text, _FLOATS.decode))
    for name in ("distill_token_ids", "distill_logprobs"):
        _if_present(columns, name, lambda text, name=name: _check_numbers(name, text))
    for name, decode in (
        ("generation_params", _SETTINGS.decode),
        ("group_overrides", _SETTINGS.decode),
        ("overrides", _OVERRIDES.decode),
    ):
        _if_present(columns, name, lambda text, name=name, decode=decode: _check_settings(name, text, decode))
    _if_present(columns, "messages", _check_messages)
    _if_present(columns, "images", lambda text: TEXTS.check(bytes(text)))
    columns.scores = Raw(_scores(columns.scores))
    return ScoredGroup(size, columns.env_id, _text(columns))


def _if_present(columns: Columns, name: str, check: Callable[[Raw], object]) -> None:
    text = getattr(columns, name)
    if bytes(memoryview(text)[:4]) != b"null":
        check(text)


def _check_rows(name: str, column: Raw, decode: Callable[[memoryview], object]) -> int:
    """Return the number of rows of a list of lists of numbers, which `decode` checks row by row."""
    num_rows, text = 0, bytes(column)
    view = memoryview(text)
    for start, end in _rows(name, text):
        num_rows += 1
        if num_rows > MAX_SEQUENCES:
            raise InvalidGroup(f"{name}: more than {MAX_SEQUENCES} sequences")
        if end - start > 2 * MAX_ROW_NUMBERS and text.count(b",", start, end) >= MAX_ROW_NUMBERS:
            raise InvalidGroup(f"{name}: a sequence has more than {MAX_ROW_NUMBERS} numbers")
        try:
            decode(view[start:end])
        except msgspec.MsgspecError as error:
            raise InvalidGroup(f"{name}: sequence {num_rows - 1}: {error}") from None
    return num_rows


def _rows(name: str, text: bytes) -> Iterator[tuple[int, int]]:
    """Yield begin and end of each inner list. The column is known to be valid JSON, so commas and brackets match."""
    end, between = 0, b""
    if text.startswith(b"["):
        end = 1
        while (start := text.find(b"[", end)) > 0 and text[end : min(start, end + MAX_SPACES)].strip() == between:
            end, between = text.index(b"]", start) + 1, b","
            yield start, end
    if text[end : end + MAX_SPACES].strip() != b"]":
        raise InvalidGroup(f"{name}: must be a list of lists of numbers")


def _check_numbers(name: str, column: Raw) -> None:
    """Check a column that is only passed on: nested lists of numbers."""
    if bytes(column).translate(None, NUMBERS):
        raise InvalidGroup(f"{name}: must be nested lists of numbers")


def _check_settings(name: str, text: Raw, decode: Callable[[Raw], object]) -> None:
    if len(memoryview(text)) > MAX_SETTINGS_BYTES:
        raise InvalidGroup(f"{name}: more than {MAX_SETTINGS_BYTES} bytes")
    TEXTS.check(bytes(text))
    try:
        decode(text)
    except msgspec.MsgspecError as error:
        raise InvalidGroup(f"{name}: {error}") from None


def _check_messages(text: Raw) -> None:
    TEXTS.check(bytes(text))
    try:
        _MESSAGES.decode(text)
    except msgspec.MsgspecError as error:
        raise InvalidGroup(f"messages: {error}") from None


def _scores(text: Raw) -> bytes:
    """Return the scores as a list of floats. Environments also send true and false, as atroposlib allows."""
    if bytes(text).count(b",") >= MAX_SEQUENCES:
        raise InvalidGroup(f"scores: more than {MAX_SEQUENCES} sequences")
    try:
        return msgspec.json.encode([float(score) for score in _SCORES.decode(text)])
    except msgspec.MsgspecError as error:
        raise InvalidGroup(f"scores: {error}") from None


def _text(columns: Columns) -> bytes:
    """Return the group as one JSON object."""
    parts: list[bytes | Raw] = []
    for name in FIELDS:
        value = getattr(columns, name)
        text = value if isinstance(value, Raw) else msgspec.json.encode(value)
        parts += [b"," if parts else b"{", b'"', name.encode(), b'":', text]
    return b"".join([*parts, b"}"])
