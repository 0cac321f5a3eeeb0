"""Rewards of town: form, shaping and outcome; returns of ended games, and the statistics."""

from __future__ import annotations

from random import Random

import pytest

from colocated_grpo.environments.town.phases import seat_result
from colocated_grpo.environments.town.players import reply
from colocated_grpo.environments.town.state import Phase
from colocated_grpo.environments.town.verdicts import CREDITS, Credit, judge, outcome_returns, shaping
from colocated_grpo.environments.turns.games import RATES, TurnStream
from colocated_grpo.settings.sources import TurnsSourceConfig
from tests.support.town_tables import play, play_game, random_reply, small_town, table


def test_every_turn_of_an_ended_game_gets_its_outcome_once():
    environment = small_town(games=2, credit=CREDITS["terminal"])
    committed = {turn_id for turn_id, *_ in play(environment, 600)}
    returns = environment.drain_returns()
    assert environment.drain_returns() == []
    assert len({each.turn_id for each in returns}) == len(returns)
    ended = {each.turn_id.split(".")[0] for each in returns}
    assert len(ended) == environment.stats.rates()["games"] >= 2
    assert {each.turn_id for each in returns} == {key for key in committed if key.split(".")[0] in ended}
    assert {abs(each.value) for each in returns} <= {0.0, 1.0}


def test_the_outcome_is_discounted_for_each_later_turn_of_the_seat():
    game = play_game(3, 7)
    game.turns = [(f"0.{who}.{n}", who) for n, who in enumerate((0, 1, 0, 0))]
    returns = outcome_returns(game, Credit(outcome=2.0, discount=0.5))
    first, second = seat_result(game, 0), seat_result(game, 1)
    assert abs(first) == abs(second) == 1.0
    assert [each.value for each in returns] == [0.5 * first, 2.0 * second, 1.0 * first, 2.0 * first]


def test_a_nomination_is_shaped_by_its_target_and_form_alone_scores_minus_one_to_one():
    game = table("sheriff", "godfather")
    game.phase = Phase.NOMINATION
    good, bad = (judge(game, 0, reply("nominate", name)) for name in ("Bram", "Cleo"))
    assert shaping(game, 0, good) == 0.25
    assert shaping(game, 0, bad) == -0.25
    environment = small_town(credit=CREDITS["immediate"])
    turn = environment.next_batch()[0]
    rewards = [each.reward for each in environment.score(turn, ["", reply("vote", "guilty"), reply("wait")])]
    assert rewards == [-1.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("name", "phase", "completion", "expected"),
    [
        ("Ada", Phase.JUDGEMENT, reply("vote", "guilty"), 0.5),
        ("Ada", Phase.JUDGEMENT, reply("vote", "innocent"), -0.5),
        ("Ada", Phase.JUDGEMENT, reply("vote", "abstain"), 0.0),
        ("Cleo", Phase.JUDGEMENT, reply("vote", "guilty"), -0.5),
        ("Cleo", Phase.NIGHT, reply("kill", "Ada"), 0.5),
        ("Dorn", Phase.NIGHT, reply("protect", "Ada"), 0.5),
        ("Dorn", Phase.NIGHT, reply("protect", "Bram"), -0.5),
        ("Ada", Phase.NIGHT, reply("investigate", "Bram"), 0.1),
        ("Elin", Phase.JUDGEMENT, reply("vote", "guilty"), 0.0),
        ("Ada", Phase.JUDGEMENT, reply("wait"), 0.0),
    ],
)
def test_shaping_follows_the_side_of_the_seat(name, phase, completion, expected):
    game = table("sheriff", "godfather", "mafioso", "doctor", "jester")
    game.phase, game.accused = phase, game.index("Bram")
    assert shaping(game, game.index(name), judge(game, game.index(name), completion)) == expected


def test_shaping_never_outweighs_form():
    environment = small_town(credit=CREDITS["phase"])
    for _ in range(300):
        turn = environment.next_batch()[0]
        answer = random_reply(turn, Random(turn.id))
        fine, illegal = environment.score(turn, [answer, reply("vote", "nobody at all")])
        assert fine.reward > illegal.reward > environment.score(turn, [""])[0].reward
        environment.commit(turn, answer)


def test_rates_count_committed_turns():
    environment = small_town(games=1)
    for answer in ("", reply("vote", "no such vote"), reply("wait"), reply("wait")):
        environment.commit(environment.next_batch()[0], answer)
    stats = environment.stats.rates()
    assert stats["turns"] == 4
    assert stats["error/missing_think"] == 0.25
    assert stats["action/wait"] == 0.5


def test_win_rates_sum_to_one_and_means_over_all_completions_are_left_out():
    environment = small_town(games=4)
    play(environment, 800)
    stats = environment.stats.rates()
    sides = [stats.get(f"win_rate/{side}", 0.0) for side in ("town", "mafia", "neutral", "draw")]
    assert sum(sides) == pytest.approx(1)
    assert not [name for name in stats if name in RATES or name.startswith("reward/")]


def test_early_stop_needs_consecutive_windows_at_the_threshold():
    config = TurnsSourceConfig(type="turns", name="town", stop_at_parse_rate=0.9, stop_after=2)
    stream = TurnStream("town", small_town(games=1), config, seed=0)
    assert [stream.reached_goal(rate) for rate in (0.95, 0.8, 0.95, None, 0.9)] == [False, False, False, False, True]


def test_draining_resets_the_counts_and_keeps_the_win_rates():
    environment = small_town(games=4)
    play(environment, 800)
    stats = environment.stats.rates()
    assert environment.drain_stats() == stats
    left = environment.drain_stats()
    remembered = {key: rate for key, rate in stats.items() if key.startswith("win_rate/")}
    assert left == remembered | {"turns": 0, "games": 0}


def test_the_win_rate_of_a_player_is_the_share_of_its_seats_that_won():
    environment = small_town(games=2, players=("policy", "sensible"))
    play(environment, 600)
    ended = environment.drain_games()
    for player in ("policy", "sensible"):
        shares = []
        for game in ended:
            results = [seat["result"] for seat in game["seats"] if seat["player"] == player]
            shares.append(sum(result > 0 for result in results) / len(results))
        assert environment.stats.rates()[f"win_rate/{player}"] == pytest.approx(sum(shares) / len(shares))
    assert len(ended) >= 3
