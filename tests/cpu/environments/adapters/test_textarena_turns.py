"""Self-play in textarena: pure scores, commits, and returns by the result of the seat."""

from __future__ import annotations

import json
import pickle
import random
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest

from colocated_grpo.environments import EnvironmentSetupError
from colocated_grpo.environments.adapters.textarena_turns import TextArenaTurns
from tests.support.arena_games import BRITTLE, RESTLESS
from tests.support.textarena_play import (
    DRAW,
    MAFIA,
    TIC_TAC_TOE,
    WIN_OF_FIRST,
    arena,
    built,
    commit_all,
    per_game,
    play,
    totals,
)


@per_game
def test_scoring_is_pure_and_the_same_in_every_process_and_thread(args):
    environment, elsewhere = TextArenaTurns(3, **args), TextArenaTurns(8, **args)
    rng = random.Random(0)
    for _ in range(15):
        before = environment.snapshot()
        turns = environment.next_batch()
        sent = pickle.loads(pickle.dumps(turns))
        replies = [f"[{rng.randrange(9)}]", "[check]", "hm", "", f"[{rng.randrange(9)}]"]
        expected = [environment.score(turn, replies) for turn in turns]
        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(elsewhere.score, sent * 4, [replies] * 8)) == expected * 4
        assert environment.score(turns[0], replies[::-1]) == expected[0][::-1]
        assert environment.snapshot() == before
        assert environment.next_batch() == turns
        for turn in turns:
            environment.commit(turn, rng.choice(replies))


@per_game
def test_a_committed_move_gets_the_outcome_that_score_gave(args):
    environment = TextArenaTurns(5, **args)
    outcomes, rng = {}, random.Random(0)
    for _ in range(80):
        turn = environment.next_batch()[0]
        move = rng.choice([f"[{rng.randrange(9)}]", "[check]", "[bet]", "[call]", "hm"])
        [outcomes[turn.id]] = environment.score(turn, [move])
        environment.commit(turn, move)
    games = environment.drain_games()
    assert len(games) > 3
    for game in games:
        by_policy = [event for event in game["events"] if event["player"] == "policy"]
        last = {event["number"]: 0.0 for event in by_policy} | {
            event["number"]: game["seats"][event["seat"]]["reward"] for event in game["events"][-1:]
        }
        for event in by_policy:
            outcome = outcomes[f"{game['game']}.{event['number']}"]
            assert outcome.parts["legal_rate"] == event["legal"]
            assert outcome.parts["end"] == last[event["number"]]
            assert outcome.reward == last[event["number"]] - (not event["legal"])


def test_each_turn_gets_the_result_of_its_own_seat():
    environment = arena()
    assert environment.delayed
    assert totals(environment, WIN_OF_FIRST) == [(0, 1), (1, -1), (0, 1), (1, -1), (0, 1)]
    assert totals(environment, DRAW) == [(place % 2, 0) for place in range(9)]
    assert environment.drain_returns() == []
    assert [game["winner"] for game in environment.drain_games()] == ["Player 0", "draw"]


def test_the_move_that_ends_a_game_gets_its_result_at_once_and_no_return():
    environment = arena()
    commit_all(environment, WIN_OF_FIRST[:-1])
    [turn] = environment.next_batch()
    assert [each.reward for each in environment.score(turn, ["[2]", "[5]", "[0]"])] == [1, 0, -1]
    environment.commit(turn, "[2]")
    assert [each.value for each in environment.drain_returns()] == [1, -1, 1, -1, 0]


def test_all_seats_of_a_team_get_its_result():
    environment = arena(**{**MAFIA, "games": 1})
    credited = Counter()
    while not (games := environment.drain_games()):
        [turn] = environment.next_batch()
        environment.commit(turn, "[1]" if turn.phase == "mafia" else "[0]")
        credited[turn.id] = turn.seat
    [game] = games
    paid = [seat["reward"] for seat in game["seats"]]
    assert {seat["reward"] for seat in game["seats"] if seat["role"] != "Mafia"} == {-paid[_mafia_of(game)]}
    returns = environment.drain_returns()
    assert [each.turn_id for each in returns] == list(credited)
    assert [each.value for each in returns[:-1]] == [paid[credited[each.turn_id]] for each in returns[:-1]]
    assert returns[-1].value == 0


def _mafia_of(game: dict) -> int:
    return next(place for place, seat in enumerate(game["seats"]) if seat["role"] == "Mafia")


def test_credit_may_be_discounted_or_left_out():
    mixed = totals(arena(credit="mix"), WIN_OF_FIRST)
    assert mixed == [(0, 0.5 * 0.97**2), (1, -0.5 * 0.97), (0, 0.5 * 0.97), (1, -0.5), (0, 1)]
    own = totals(arena(credit={"outcome": 2.0, "discount": 0.5}), WIN_OF_FIRST)
    assert own == [(0, 0.5), (1, -1), (0, 1), (1, -2), (0, 1)]
    environment = arena(credit="immediate")
    assert not environment.delayed
    assert [reward for *_, reward in commit_all(environment, WIN_OF_FIRST)] == [0, 0, 0, 0, 1]
    assert environment.drain_returns() == []
    made = built({**TIC_TAC_TOE, "credit": "immediate"})
    assert all((s.trained_now, s.released) == ([0, 1, 2], []) for _, s in play(made, made.open_source(), 10))


def test_an_invalid_move_is_penalised_and_the_second_in_a_row_loses_the_game():
    environment = arena()
    [turn] = environment.next_batch()
    outcomes = environment.score(turn, ["[9]", "honk", "", "<think>[4]?</think>", "<think>[4]", "hm</think>[4]", "4"])
    assert [each.reward for each in outcomes] == [-1, -1, -1, -1, -1, 0, 0]
    assert [each.parts["legal_rate"] for each in outcomes] == [0, 0, 0, 0, 0, 1, 1]
    assert [each.parts["parse_rate"] for each in outcomes] == [1, 1, 0, 0, 0, 1, 1]
    environment.commit(turn, "[4]")
    environment.commit(environment.next_batch()[0], "[4]")
    [first] = environment.next_batch()
    assert first.seat == 1
    assert "attempted an invalid move" in first.messages
    assert [each.reward for each in environment.score(first, ["[4]", "[0]"])] == [-2, 0]
    environment.commit(first, "[4]")
    assert [each.value for each in environment.drain_returns()] == [1, -1, 0]
    assert arena(invalid_reward=-0.25).score(turn, ["[9]", "[4]"])[0].reward == -0.25


def test_an_empty_reply_is_invalid_even_in_free_discussion():
    environment = arena(**{**MAFIA, "games": 1})
    while "Discuss for" not in (turn := environment.next_batch()[0]).messages:
        environment.commit(turn, "[0]" if "[0]" in turn.messages.splitlines()[-2] else "[1]")
    outcomes = environment.score(turn, ["Who was it?", "", "<think>It was me."])
    assert [each.reward for each in outcomes] == [0, -1, -1]


def test_a_prompt_contains_the_rules_the_latest_messages_and_one_board():
    long, short = (arena(memory=memory, instruction="Answer [n].") for memory in (60, 3))
    for environment in (long, short):
        commit_all(environment, WIN_OF_FIRST[:-1])
        [turn] = environment.next_batch()
        assert turn.messages.startswith("You are Player 0 in Tic Tac Toe.")
        assert turn.messages.endswith("It is your turn.\nAnswer [n].")
        assert turn.messages.count("Current Board") == 1
        assert "O | O | 2" in turn.messages
        assert "in cell 4" in turn.messages
        assert ("in cell 0" in turn.messages) == (environment is long)


def test_frozen_seats_have_turns_that_are_not_trained():
    environment = arena(players=["policy", "frozen"])
    players = set()
    for _ in range(20):
        for turn in environment.next_batch():
            players.add((turn.player, turn.trainable))
            environment.commit(turn, "[4]")
    assert players == {("policy", True), ("frozen", False)}


def test_win_rates_are_reported_for_each_kind_of_player():
    environment = arena(players=["policy", "random"])
    while (stats := environment.drain_stats())["games"] == 0:
        [turn] = environment.next_batch()
        environment.commit(turn, "honk")
    assert (stats["win_rate/policy"], stats["win_rate/random"], stats["win_rate/draw"]) == (0, 1, 0)


def test_a_game_that_raises_ends_as_broken_and_the_others_continue():
    environment = arena(game=BRITTLE)
    moves = ["[0]", "[crash]"]
    assert totals(environment, moves) == [(0, 0), (1, -1)]
    [game] = environment.drain_games()
    assert game["winner"] == "broken"
    assert game["error"].startswith("IndexError: the table fell over (arena_games.py, line ")
    assert environment.drain_stats()["broken"] == 1
    assert totals(environment, WIN_OF_FIRST)[-1] == (0, 1)
    for _ in range(150):
        totals(environment, moves)
    assert environment.drain_stats()["broken"] == 150


def test_a_game_without_end_is_cut_short_and_lost_by_all_seats():
    environment = arena(game=RESTLESS, max_turns=3)
    assert totals(environment, ["[4]", "[4]", "[4]"]) == [(0, -1), (1, -1), (0, -1)]
    stats = environment.drain_stats()
    assert (stats["unfinished"], stats["turns_per_game"], stats["win_rate/draw"]) == (1, 3, 0)
    kinder = arena(game=RESTLESS, max_turns=2, unfinished_reward=0.5)
    assert totals(kinder, ["[4]", "[9]"]) == [(0, 0.5), (1, -0.5)]
    assert kinder.drain_games()[0]["winner"] == "unfinished"


def test_a_turn_takes_one_commit():
    environment = arena()
    [turn] = environment.next_batch()
    environment.commit(turn, "[4]")
    with pytest.raises(ValueError, match="exactly one commit"):
        environment.commit(turn, "[4]")


def test_an_ended_game_leaves_a_complete_record():
    environment = arena()
    commit_all(environment, WIN_OF_FIRST)
    [game] = environment.drain_games()
    assert [(event["seat"], event["text"]) for event in game["events"]] == list(
        zip([0, 1, 0, 1, 0], WIN_OF_FIRST, strict=True)
    )
    lines = game["transcript"].splitlines()
    assert lines[0] == "Seats: Player 0 (Player 0, policy), Player 1 (Player 1, policy)"
    assert lines[-1] == "The game is over: Player 0."
    assert "[Player 1] [4]" in lines
    assert "Your goal" not in game["transcript"]
    assert not [line for line, following in pairwise(lines) if line == following and line]
    assert json.loads(json.dumps(game)) == game


def test_a_snapshot_with_too_few_games_is_rejected():
    with pytest.raises(ValueError, match="games=4, but the snapshot holds 2"):
        arena(games=4).restore(arena(games=2).snapshot())


def test_a_missing_textarena_names_the_pip_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "textarena", None)
    with pytest.raises(EnvironmentSetupError, match="pip install textarena"):
        arena()
