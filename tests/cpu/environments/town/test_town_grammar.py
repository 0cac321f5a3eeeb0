"""Syntax of replies, legality by phase and role, and the regular expression of legal replies."""

from __future__ import annotations

import re
import time
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colocated_grpo.environments.town.legality import (
    ARGUMENT_TAGS,
    BARE_TAGS,
    Problem,
    Reply,
    clean_line,
    legal_actions,
    parse,
    reply_pattern,
)
from colocated_grpo.environments.town.players import reply
from colocated_grpo.environments.town.state import Phase, snapshot_game
from colocated_grpo.environments.town.verdicts import Status, judge
from tests.support.town_tables import argument_for, judged, random_games, seat, table

PIECES = (
    *("<think>", "</think>", "<wait/>", "<speak>", "</speak>", "<vote>guilty</vote>", "<think", "<kill>", "<", ">"),
    *("<nominate>Bram</nominate>", "<whisper>Ada: hi</whisper>", "Ada", "/", " ", "\n", "\x00", "\u202e", "\ud800"),
)
hostile = st.lists(st.sampled_from(PIECES) | st.text(max_size=8), max_size=12).map("".join)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", "missing_think"),
        ("<wait/>", "missing_think"),
        ("well <think></think><wait/>", "missing_think"),
        ("<think>I wonder", "unclosed_think"),
        ("<think>a</think>", "missing_tag"),
        ("<think>a<think>b</think><wait/>", "multiple_think"),
        ("<think>a</think><think>b</think><wait/>", "multiple_think"),
        ("<think>a</think><wait/><wait/>", "multiple_tags"),
        ("<think>a</think><vote>guilty</vote><vote>innocent</vote>", "multiple_tags"),
        ("<think>a</think>I say <wait/>", "text_outside_tags"),
        ("<think>a</think><wait/> done", "text_outside_tags"),
        ("<think>a</think>just words", "invalid_xml"),
        ("<think>a</think><speak>hello", "text_outside_tags"),
        ("<think>a</think><speak>hello</vote>", "invalid_xml"),
        ("<think>a</think><speak>1 < 2</speak>", "invalid_xml"),
        ("<think>a</think><SPEAK>hello</SPEAK>", "invalid_xml"),
        ("<think>a</think><dance/>", "unknown_tag"),
        ("<think>a</think><speak/>", "missing_argument"),
        ("<think>a</think><speak> \n </speak>", "missing_argument"),
        ("<think>a</think><wait>now</wait>", "unexpected_argument"),
    ],
)
def test_each_syntax_error_has_its_code_and_scores_minus_one(text, code):
    assert parse(text).code == code
    verdict = judged(table(), "Ada", text)
    assert (verdict.status, verdict.code) == (Status.MALFORMED, code)
    assert int(verdict.status) == -1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>a < b</think><wait/>", Reply("a < b", "wait")),
        ("  <think></think>\n\n<wait />\n", Reply("", "wait")),
        ("<think>x</think> <speak> good  day\nall </speak>", Reply("x", "speak", "good day all")),
        ("<think>say <wait/>?</think><vote>guilty</vote>", Reply("say <wait/>?", "vote", "guilty")),
    ],
)
def test_well_formed_replies_are_parsed(text, expected):
    assert parse(text) == expected


def test_every_tag_is_written_in_exactly_one_way():
    assert not BARE_TAGS & ARGUMENT_TAGS
    for tag in BARE_TAGS:
        assert parse(reply(tag)) == Reply("", tag)
    for tag in ARGUMENT_TAGS:
        assert parse(reply(tag, "x")) == Reply("", tag, "x")


@given(hostile)
def test_hostile_text_is_judged_without_an_exception(text):
    game = table("mayor")
    game.phase = Phase.DISCUSSION
    before = snapshot_game(game)
    verdict = judged(game, "Ada", text)
    assert verdict.status in (Status.MALFORMED, Status.ILLEGAL, Status.OK)
    assert isinstance(parse(text), Problem) == (verdict.status is Status.MALFORMED)
    assert snapshot_game(game) == before


@given(st.text())
def test_cleaned_speech_is_one_printable_line(text):
    cleaned = clean_line(text)
    assert cleaned.isprintable()
    assert cleaned == " ".join(cleaned.split())


@pytest.mark.parametrize("piece", ["<", "<think>", "<a", "<a>", "</think>", "a", " ", "\n", "<wait/>", "<speak>"])
def test_long_hostile_replies_are_parsed_in_linear_time(piece):
    began = time.process_time()
    for opening in ("", "<think>", "<think></think>", "<think></think><speak>"):
        parse(opening + piece * 200_000)
    assert time.process_time() - began < 10


@pytest.mark.parametrize(
    ("phase", "completion", "code"),
    [
        (Phase.DISCUSSION, reply("vote", "guilty"), "wrong_phase"),
        (Phase.DISCUSSION, reply("kill", "Bram"), "wrong_phase"),
        (Phase.NIGHT, reply("speak", "hello"), "wrong_phase"),
        (Phase.NIGHT, reply("kill", "Bram"), "wrong_role"),
        (Phase.NIGHT, reply("investigate", "Nobody"), "target_not_found"),
        (Phase.NIGHT, reply("investigate", "Gwen"), "target_dead"),
        (Phase.NIGHT, reply("investigate", "Ada"), "target_self"),
        (Phase.NIGHT, reply("chat_history", "2"), "tool_not_now"),
        (Phase.DISCUSSION, reply("reveal"), "wrong_role"),
        (Phase.DISCUSSION, reply("whisper", "hello"), "no_addressee"),
        (Phase.DISCUSSION, reply("whisper", "Gwen: hello"), "target_dead"),
        (Phase.DISCUSSION, reply("speak", "x" * 401), "too_long"),
        (Phase.DISCUSSION, reply("check_will", "Bram"), "target_not_allowed"),
        (Phase.NOMINATION, reply("nominate", "Cleo"), "target_not_allowed"),
        (Phase.NOMINATION, reply("nominate", "Ada"), "target_self"),
        (Phase.DEFENCE, reply("speak", "it was not me"), "not_your_turn_to"),
        (Phase.JUDGEMENT, reply("vote", "Bram"), "target_not_allowed"),
        (Phase.JUDGEMENT, reply("vote", "perhaps"), "target_not_found"),
    ],
)
def test_each_illegal_action_has_its_code_and_scores_zero(phase, completion, code):
    game = table("sheriff")
    game.phase, game.day, game.accused, game.acquitted = phase, 2, game.index("Bram"), [game.index("Cleo")]
    seat(game, "Gwen").alive = False
    verdict = judged(game, "Ada", completion)
    assert (verdict.status, verdict.code) == (Status.ILLEGAL, code)
    assert int(verdict.status) == 0


def test_the_mafia_cannot_kill_its_own_members():
    game = table("godfather", "informer")
    game.phase = Phase.NIGHT
    assert judged(game, "Ada", reply("kill", "Bram")).code == "target_not_allowed"


def test_names_and_votes_are_case_insensitive():
    game = table()
    game.phase = Phase.NOMINATION
    assert judged(game, "Ada", reply("nominate", "BRAM")).argument == "Bram"
    game.phase = Phase.JUDGEMENT
    assert judged(game, "Ada", reply("vote", "Guilty")).argument == "guilty"


def test_waiting_is_legal_in_every_phase():
    game = table()
    for phase in Phase:
        game.phase = phase
        verdict = judged(game, "Ada", reply("wait"))
        assert int(verdict.status) == 1


def test_look_ups_of_a_turn_are_limited():
    game = table(tool_calls=2)
    game.phase = Phase.DISCUSSION
    for _ in range(2):
        assert judged(game, "Ada", reply("roles")).status is Status.OK
        seat(game, "Ada").dialog.append((reply("roles"), "..."))
    assert judged(game, "Ada", reply("roles")).code == "too_many_tools"


def test_exactly_the_listed_legal_actions_are_judged_ok():
    checked = 0
    for step, game in enumerate(random_games(9)):
        if step % 7:
            continue
        actor, rng = game.waiting[0], Random(step)
        legal = legal_actions(game, actor)
        for tag in sorted(BARE_TAGS | ARGUMENT_TAGS):
            argument = argument_for(legal[tag], rng) if tag in legal else "Ada" if tag in ARGUMENT_TAGS else ""
            assert (judge(game, actor, reply(tag, argument)).status is Status.OK) == (tag in legal), tag
            checked += 1
    assert checked > 1000


def test_the_reply_pattern_matches_every_legal_option_and_no_illegal_tag():
    for step, game in enumerate(random_games(4, seats=7)):
        if step % 11:
            continue
        actor = game.waiting[0]
        legal = legal_actions(game, actor)
        pattern = re.compile(reply_pattern(legal, game.rules.max_speech))
        for tag, spec in legal.items():
            if not spec.text:
                assert all(pattern.fullmatch(reply(tag, option)) for option in spec.options or ("",))
            else:
                written = reply(tag, argument_for(spec, Random(step)))
                assert pattern.fullmatch(written.replace("<think>", "<think>hm, so"))
        for tag in (BARE_TAGS | ARGUMENT_TAGS) - legal.keys():
            assert not pattern.fullmatch(reply(tag, "" if tag in BARE_TAGS else "Ada"))


def test_the_reply_pattern_matches_speech_up_to_its_limit():
    game = table(max_speech=30)
    game.phase = Phase.DISCUSSION
    pattern = re.compile(reply_pattern(legal_actions(game, 0), 30))
    for length, fine in ((30, True), (31, False)):
        completion = reply("speak", "x" * length)
        assert bool(pattern.fullmatch(completion)) == fine
        assert (judge(game, 0, completion).code == "ok") == fine


TALK = table("mayor")
TALK.phase, TALK.day = Phase.DISCUSSION, 3


@given(st.from_regex(reply_pattern(legal_actions(TALK, 0), TALK.rules.max_speech, max_thought=20), fullmatch=True))
def test_every_match_of_the_reply_pattern_is_legal(completion):
    assert judge(TALK, 0, completion).code == "ok"
