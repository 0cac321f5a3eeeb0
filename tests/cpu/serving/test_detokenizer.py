"""Text of a stream: whatever the tokens, its parts make up the whole, and no part says what it must not."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as some

from colocated_grpo.serving.detokenizer import Spelling, before_stop

TEXTS = some.text(alphabet="ab \u00e9\u20ac\U0001f600", max_size=30)
STOPS = some.lists(some.text(alphabet="ab \u20ac", min_size=1, max_size=3), max_size=3)


def of_bytes(tokens: Sequence[int]) -> str:
    """A tokenizer with one token for each byte."""
    return bytes(tokens).decode(errors="replace")


def of_words(tokens: Sequence[int]) -> str:
    """A tokenizer that writes a space between words and none in front."""
    return " ".join("wxyz"[token] for token in tokens)


def parts(decode, tokens: Sequence[int], sizes: Sequence[int], stop: Sequence[str]) -> tuple[list[str], Spelling]:
    spelling = Spelling(decode, stop)
    given, rest = [], list(tokens)
    for size in [*sizes, len(tokens)]:
        given.append(spelling.add(rest[:size]))
        rest = rest[size:]
    return given, spelling


def until_stopped(text: str, sizes: Sequence[int], stop: Sequence[str]) -> str:
    """What an engine samples: it ends with the tokens that complete the first stop string."""
    tokens, come = text.encode(), 0
    for size in [*sizes, len(tokens)]:
        come += size
        sampled = tokens[:come].decode(errors="ignore")
        if any(string in sampled for string in stop):
            return sampled
    return text


SIZES = some.lists(some.integers(1, 4), max_size=40)


@given(TEXTS, SIZES, STOPS)
def test_the_parts_make_up_the_whole_text_before_the_first_stop_string(text, sizes, stop):
    text = until_stopped(text, sizes, stop)
    given, spelling = parts(of_bytes, text.encode(), sizes, stop)
    whole = before_stop(text, stop)
    said = "".join(given)
    assert whole.startswith(said)
    assert spelling.given == len(said)
    longest = max((len(one) for one in stop), default=1)
    assert len(whole) - len(said) < longest, "no more is held back than what may become a stop string"


@given(TEXTS, SIZES)
def test_no_part_ends_within_a_character(text, sizes):
    given, _ = parts(of_bytes, text.encode(), sizes, [])
    assert "".join(given) == text
    assert not any("\ufffd" in part for part in given)


@given(some.lists(some.integers(0, 3), max_size=12), SIZES)
def test_what_stands_between_tokens_is_kept(tokens, sizes):
    given, _ = parts(of_words, tokens, sizes, [])
    assert "".join(given) == of_words(tokens)


def test_bytes_that_are_no_text_do_not_hold_up_what_follows():
    given, _ = parts(of_bytes, b"a\xffbc", [1, 1, 1, 1], [])
    assert given == ["a", "", "\ufffdb", "c", ""]
