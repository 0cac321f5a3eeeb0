"""Town as a turn environment: pure scores, one commit for each turn, exact snapshots, and game records."""

from __future__ import annotations

import ast
import json
import pickle
import time
from collections.abc import Iterator
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colocated_grpo.environments.town.environment import TownSettings
from colocated_grpo.environments.town.players import reply
from colocated_grpo.environments.town.state import Phase, Rules
from colocated_grpo.environments.town.verdicts import CREDITS
from tests.support.town_tables import legal_of, play, play_game, random_reply, small_town


@given(st.lists(st.text(max_size=40), max_size=3), st.integers(0, 40))
@settings(max_examples=25)
def test_scoring_is_pure_and_repeatable(texts, commits):
    environment = small_town(games=1)
    play(environment, commits)
    turn = environment.next_batch()[0]
    completions = [*texts, random_reply(turn, Random(commits)), reply("wait"), reply("kill", "Ada"), "<think>"]
    before = json.dumps(environment.snapshot(), sort_keys=True)
    first = environment.score(turn, completions)
    assert environment.score(turn, completions) == first
    assert environment.score(turn, completions[::-1]) == first[::-1]
    assert json.dumps(environment.snapshot(), sort_keys=True) == before


def test_a_commit_returns_the_outcome_that_score_gave():
    environment = small_town()
    for _ in range(60):
        turn = environment.next_batch()[0]
        answer = random_reply(turn, Random(turn.id))
        scored = environment.score(turn, [answer])[0]
        assert environment.commit(turn, answer) == scored


def test_a_turn_takes_exactly_one_commit():
    environment = small_town()
    turn = environment.next_batch()[0]
    environment.commit(turn, reply("wait"))
    with pytest.raises(ValueError, match="exactly one commit"):
        environment.commit(turn, reply("wait"))


def test_another_environment_scores_a_turn_the_same():
    """The scoring environment has the same credit and other games; the turn is pickled, as between ranks."""
    environment, elsewhere = small_town(), small_town(seed=77)
    for _ in range(80):
        turn = environment.next_batch()[0]
        answers = [random_reply(turn, Random(turn.id)), reply("vote", "nobody"), reply("execute"), ""]
        carried = pickle.loads(pickle.dumps(turn))
        scored = environment.score(turn, answers)
        environment.commit(turn, answers[0])
        assert elsewhere.score(carried, answers) == scored == environment.score(turn, answers)


def test_a_turn_that_the_game_has_not_reached_cannot_be_committed():
    environment = small_town(games=1, roles=("citizen",) * 5 + ("godfather", "sheriff"))
    for turn in environment.next_batch():
        environment.commit(turn, reply("wait"))
    talking = environment.next_batch()
    assert [turn.phase for turn in talking] == [Phase.DISCUSSION]
    game = environment.snapshot()["games"][0]
    second = game["waiting"][1]
    early = replace(talking[0], seat=second, id=f"0.{second}.{game['seats'][second]['acted']}")
    with pytest.raises(ValueError, match="not open"):
        environment.commit(early, reply("wait"))


def test_a_turn_stays_closed_when_its_seat_acts_again():
    environment = small_town(games=1)
    first = environment.next_batch()[0]
    environment.commit(first, reply("roles"))
    assert first.seat in {turn.seat for turn in environment.next_batch()}
    with pytest.raises(ValueError, match="not open"):
        environment.commit(first, reply("wait"))


def test_next_batch_repeats_its_turns_until_a_commit():
    environment = small_town()
    assert environment.next_batch() == environment.next_batch()
    assert environment.next_batch()[:2] == environment.next_batch()[:2]


def test_a_malformed_reply_acts_as_waiting_and_is_reported_to_its_seat():
    environment = small_town(games=1)
    turn = environment.next_batch()[0]
    outcome = environment.commit(turn, "I vote for Ada")
    assert (outcome.reward, outcome.parts["parse_rate"]) == (-1.0, 0.0)
    while (again := environment.next_batch()[0]).seat != turn.seat:
        environment.commit(again, reply("wait"))
    assert "(Your reply did nothing. missing_think" in again.messages[1]["content"]


def test_a_look_up_returns_an_observation_and_leaves_the_turn_to_the_seat():
    environment = small_town(games=1, rules=Rules(tool_calls=2))
    first = environment.next_batch()[0]
    turn = first
    for done in (1, 2):
        environment.commit(turn, reply("get_role", "doctor"))
        turn = next(each for each in environment.next_batch() if each.seat == first.seat)
        assert (len(turn.messages), turn.game, turn.phase) == (2 + 2 * done, first.game, first.phase)
        assert turn.messages[-1]["content"].startswith("<observation>doctor (town; actions: protect)")
        assert turn.id != first.id
    assert environment.score(turn, [reply("roles")])[0].reward == 0.0


def test_games_are_determined_by_settings_and_commits():
    assert play(small_town(), 400) == play(small_town(), 400)
    assert play(small_town(), 50) != play(small_town(seed=5), 50)


@pytest.mark.parametrize("players", [("policy",), ("policy", "sensible", "random")])
@pytest.mark.parametrize("cut", [0, 37, 150])
def test_a_restored_environment_continues_exactly(cut, players):
    one, other = small_town(players=players), small_town(players=players, seed=99)
    play(one, cut)
    saved = json.loads(json.dumps(one.snapshot()))
    expected = (play(one, 200, seed=1), one.drain_returns(), one.stats.rates())
    other.settings = one.settings
    other.restore(saved)
    assert (play(other, 200, seed=1), other.drain_returns(), other.stats.rates()) == expected


def test_a_snapshot_does_not_change_with_later_commits():
    environment = small_town()
    play(environment, 20)
    saved = environment.snapshot()
    copy = json.dumps(saved)
    environment.restore(saved)
    play(environment, 50)
    assert json.dumps(saved) == copy


def test_a_snapshot_with_too_few_games_is_rejected():
    with pytest.raises(ValueError, match="games=3, but the snapshot holds 2"):
        small_town().restore(small_town(games=2).snapshot())


def test_scripted_seats_have_no_turns_and_only_policy_turns_are_trained_and_counted():
    environment = small_town(games=6, seats=9, players=("policy", "frozen", "sensible"))
    labels = [turn.player for _ in range(40) for turn in environment.next_batch() if environment.commit(turn, "x")]
    assert set(labels) == {"policy", "frozen"}
    trained = [turn for turn in environment.next_batch() if turn.trainable]
    assert all(turn.player == "policy" for turn in trained)
    assert environment.stats.rates()["turns"] == labels.count("policy")


def test_table_sizes_vary_within_their_bounds():
    environment = small_town(games=30, seats=(7, 15))
    sizes = {len(game["seats"]) for game in environment.snapshot()["games"]}
    assert min(sizes) >= 7
    assert max(sizes) <= 15
    assert len(sizes) > 4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"games": 0}, "games\n"),
        ({"seats": 6}, "seats=6: not within 7 to 15"),
        ({"seats": (9, 8)}, "not within 7 to 15"),
        ({"players": ("sensible", "random")}, "no seat is played by the policy"),
        ({"players": ("policy",) * 8}, "more than the 7 seats"),
        ({"roles": ("godfather", "godfather", *["citizen"] * 5)}, "godfather is unique"),
        ({"roles": ("wizard", *["citizen"] * 6)}, "'wizard' is unknown"),
        ({"roles": ("citizen",) * 6}, "6 given"),
        ({"roles": (*["citizen"] * 5, "jester", "jester")}, "none is hostile"),
        ({"prompts": "long"}, "'full' or 'brief'"),
    ],
)
def test_invalid_settings_are_rejected_by_name(settings, message):
    with pytest.raises(ValueError, match=message):
        TownSettings(**settings)


def test_rules_out_of_bounds_are_rejected_by_name():
    with pytest.raises(ValueError, match="max_days"):
        Rules(max_days=0)


def test_an_ended_game_leaves_a_record_with_cast_result_events_and_transcript():
    environment = small_town()
    turn = environment.next_batch()[0]
    environment.commit(turn, "<think>\ud800 I, too,\nwonder</think><wait/>")
    play(environment, 400)
    records = environment.drain_games()
    assert environment.drain_games() == []
    assert json.loads(json.dumps(records)) == records
    assert len({record["game"] for record in records}) == len(records) >= 3
    for record in records:
        assert len(record["seats"]) == 7
        assert record["winner"]
        assert {event["game"] for event in record["events"]} == {record["game"]}
        assert record["transcript"].startswith("Cast: ")
        assert "The game is over" in record["transcript"]
    assert any("I, too, wonder" in record["transcript"] for record in records)


def test_turns_of_added_games_follow_those_of_older_games_also_after_a_restore():
    environment = small_town(games=1)
    first = environment.next_batch()
    added = environment.add_game()
    assert added
    assert {turn.game for turn in added} == {1}
    assert environment.next_batch() == first + added
    copy = small_town(games=1)
    copy.restore(json.loads(json.dumps(environment.snapshot())))
    assert copy.next_batch() == first + added


def test_a_turn_taken_by_play_on_is_closed_and_not_counted():
    environment = small_town(games=1, credit=CREDITS["terminal"])
    turn = environment.next_batch()[0]
    environment.play_on(turn)
    assert turn.id not in {each.id for each in environment.next_batch()}
    while not environment.drain_games():
        environment.play_on(environment.next_batch()[0])
    assert environment.stats.rates()["turns"] == 0
    assert environment.drain_returns() == []


def test_brief_prompts_are_short_and_list_every_choice():
    environment = small_town(games=4, prompts="brief", memory=4, rules=Rules(tool_calls=0))
    for _ in range(200):
        turn = environment.next_batch()[0]
        [message] = turn.messages
        assert len(message["content"]) < 450
        for tag, spec in legal_of(turn).items():
            assert f"<{tag}" in message["content"]
            assert all(option in message["content"] for option in spec.options)
        environment.commit(turn, random_reply(turn, Random(turn.id)))


def executed(tree: ast.AST) -> Iterator[ast.AST]:
    """Return all nodes but those for type checkers."""
    for node in ast.iter_child_nodes(tree):
        if not (isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"):
            yield node
            yield from executed(node)


def test_scripted_games_run_at_hundreds_of_turns_a_second():
    """An idle machine plays thousands; the bound leaves room for a busy one."""
    began, turns = time.process_time(), 0
    for seed in range(6):
        turns += sum(each.acted for each in play_game(seed, 11).seats)
    assert turns > 500
    assert turns / (time.process_time() - began) > 300


def test_hundreds_of_turns_a_second_are_prompted_and_scored():
    environment = small_town(games=8, seats=9)
    began = time.process_time()
    committed = 0
    while committed < 600:
        for turn in environment.next_batch():
            answers = [random_reply(turn, Random(n)) for n in range(4)]
            environment.score(turn, answers)
            environment.commit(turn, answers[0])
            committed += 1
    assert committed / (time.process_time() - began) > 300


def test_simultaneous_turns_may_be_committed_in_any_order():
    forward, backward = small_town(games=1, seats=12), small_town(games=1, seats=12)
    tried = 0
    for _ in range(60):
        turns = forward.next_batch()
        assert turns == backward.next_batch()
        # Waiting only: thoughts are recorded in the order of the commits.
        for turn in turns:
            forward.commit(turn, random_reply(turn, Random(turn.id)) if len(turns) == 1 else reply("wait"))
        for turn in turns[::-1]:
            backward.commit(turn, random_reply(turn, Random(turn.id)) if len(turns) == 1 else reply("wait"))
        tried += len(turns) > 1
    assert tried
    assert forward.next_batch() == backward.next_batch()


def test_a_game_does_not_depend_on_its_neighbours():
    alone, together = small_town(games=1), small_town(games=3)
    for _ in range(80):
        turns = together.next_batch()
        if 0 not in {turn.game for turn in turns}:
            break
        mine = [turn for turn in turns if turn.game == 0]
        assert alone.next_batch() == mine
        for turn in turns:
            together.commit(turn, random_reply(turn, Random(turn.id)))
        for turn in mine:
            alone.commit(turn, random_reply(turn, Random(turn.id)))
