"""Streamed text: for any tokens, its increments add up to the whole text and stay clear of stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from colocated_grpo.servers.text import Decode, Detokenizer, before_stop

TEXTS = st.text(alphabet="ab \u00e9\u20ac\U0001f600", max_size=30)
STOPS = st.lists(st.text(alphabet="ab \u20ac", min_size=1, max_size=3), max_size=3)
SIZES = st.lists(st.integers(1, 4), max_size=40)
"""Tokens per increment."""


def decode_bytes(tokens: Sequence[int]) -> str:
    """A tokenizer with one token for each byte."""
    return bytes(tokens).decode(errors="replace")


def decode_words(tokens: Sequence[int]) -> str:
    """A tokenizer that puts a space between words and none in front."""
    return " ".join("wxyz"[token] for token in tokens)


def increments(
    decode: Decode, tokens: Sequence[int], sizes: Sequence[int], stop: Sequence[str]
) -> tuple[list[str], Detokenizer]:
    detokenizer = Detokenizer(decode, stop)
    ends = accumulate([*sizes, len(tokens)])
    return [detokenizer.increment(list(tokens[:end])) for end in ends], detokenizer


def until_stopped(text: str, sizes: Sequence[int], stop: Sequence[str]) -> str:
    """Return what an engine samples: it ends with the tokens that complete the first stop string."""
    tokens, num_sampled = text.encode(), 0
    for size in [*sizes, len(tokens)]:
        num_sampled += size
        sampled = tokens[:num_sampled].decode(errors="ignore")
        if any(string in sampled for string in stop):
            return sampled
    return text


@given(TEXTS, SIZES, STOPS)
def test_increments_add_up_to_the_text_before_the_first_stop_string(text, sizes, stop):
    text = until_stopped(text, sizes, stop)
    texts, detokenizer = increments(decode_bytes, text.encode(), sizes, stop)
    whole = before_stop(text, stop)
    emitted = "".join(texts)
    assert whole.startswith(emitted)
    assert detokenizer.emitted == len(emitted)
    longest = max((len(string) for string in stop), default=1)
    assert len(whole) - len(emitted) < longest, "only a possible beginning of a stop string is pending"


@given(TEXTS, SIZES)
def test_no_increment_ends_within_a_character(text, sizes):
    texts, _ = increments(decode_bytes, text.encode(), sizes, [])
    assert "".join(texts) == text
    assert not any("\ufffd" in part for part in texts)


@given(st.lists(st.integers(0, 3), max_size=12), SIZES)
def test_spaces_between_tokens_of_two_increments_are_kept(tokens, sizes):
    texts, _ = increments(decode_words, tokens, sizes, [])
    assert "".join(texts) == decode_words(tokens)


def test_bytes_that_are_not_utf_8_do_not_delay_the_text_after_them():
    texts, _ = increments(decode_bytes, b"a\xffbc", [1, 1, 1, 1], [])
    assert texts == ["a", "", "\ufffdb", "c", ""]
