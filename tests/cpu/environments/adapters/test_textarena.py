"""Games of textarena as episodes of one seat: reproducible, silent, and limited to what the seat may read."""

from __future__ import annotations

import random
import re
import sys
from collections import Counter

import numpy
import pytest

from colocated_grpo.environments import EnvironmentSetupError
from colocated_grpo.environments.adapters.textarena import TextArenaGame, random_move
from colocated_grpo.environments.base import AnswerError
from colocated_grpo.environments.registry import build_episode
from colocated_grpo.environments.user_code.isolation import isolated
from tests.support.adapter_play import items, items_from, observations, played, saying
from tests.support.arena_games import BRITTLE, BROKEN, HASTY, UNORDERED
from tests.support.paths import ROOT

MAFIA = {"players": 6, "options": {"discussion_rounds": 1}}
GAMES = {"TicTacToe-v0": {}, "KuhnPoker-v0": {}, "SecretMafia-v0": MAFIA}
OPPONENTS = """
def first_cell(read, chance):
    return read.rpartition("Available Moves: '")[2].partition("'")[0]

def clown(read, chance):
    return "honk"
"""


def arena(game: str, **args):
    return build_episode(f"textarena:{game}", {**GAMES.get(game, {}), **args})


def legal(seed: int = 0):
    """Return a policy that plays a random move among those shown last."""
    rng = random.Random(seed)

    def reply(read: str) -> str:
        lines = [line for line in read.splitlines() if "[" in line and not line.startswith("[Player")]
        shown = re.findall(r"\[\d+\]|\[(?:check|bet|call|fold)\]", lines[-1] if lines else "")
        return rng.choice(shown) if shown else "I am a villager."

    return reply


@pytest.fixture
def opponents(tmp_path):
    path = tmp_path / "opponents.py"
    path.write_text(OPPONENTS)
    return lambda name: f"{path}:{name}"


@pytest.mark.parametrize("game", GAMES)
def test_a_finished_game_rewards_the_seat_with_the_games_result(game):
    episode = arena(game)
    rollouts = [played(episode, item, legal()) for item in items(episode, 12)]
    for rollout in rollouts:
        parts = rollout.score.parts
        assert (parts["finished"], parts["illegal"]) == (1, 0)
        assert rollout.score.reward in (-1, 0, 1)
        assert parts["won"] == (rollout.score.reward == 1)
    assert {-1, 1} <= {rollout.score.reward for rollout in rollouts}


@pytest.mark.parametrize("game", GAMES)
def test_equal_replies_give_equal_episodes_whatever_else_uses_random_numbers(game):
    episode, again = arena(game), arena(game)
    assert items(episode, 5) == items(again, 5)
    assert items(episode, 5) != items(episode, 5, seed=1)
    for item in items(episode, 5):
        one = played(episode, item, legal())
        random.seed(random.random())
        assert played(again, item, legal()) == one


@pytest.mark.parametrize("game", GAMES)
def test_prompts_from_starts_anywhere_without_dealing_earlier_games(game):
    episode = arena(game)
    assert items_from(episode, 3, 2) == items(episode, 5)[3:]
    assert len(items_from(episode, 10**9, 1)) == 1


def test_a_seat_without_any_turn_is_reported_after_100_games():
    with pytest.raises(
        EnvironmentSetupError, match=r"Hasty-v0: 100 games in a row ended before the first turn of args\.seat=1"
    ):
        items(arena(HASTY, seat=1), 1)
    assert len(items(arena(HASTY), 9)) == 9


@pytest.mark.parametrize("game", GAMES)
def test_no_game_is_both_trained_and_held_out(game):
    episode = arena(game)
    assert {item["seed"] % 2 for seed in range(3) for item in items(episode, 9, seed)} == {0}
    assert {item["seed"] % 2 for seed in range(3) for item in items(episode, 9, seed, "held_out")} == {1}


def test_the_policy_plays_every_seat_unless_one_is_given():
    assert set(Counter(item["seat"] for item in items(arena("SecretMafia-v0"), 60))) == set(range(6))
    assert {item["seat"] for item in items(arena("TicTacToe-v0", seat=1), 10)} == {1}


def test_a_seat_reads_its_own_role_only():
    episode = arena("SecretMafia-v0")
    seen = Counter()
    for item in items(episode, 40):
        assert item["prompt"].startswith(f"Welcome to Secret Mafia! You are Player {item['seat']}.")
        assert item["prompt"].count("Your role:") == 1
        mafia = "Your role: Mafia" in item["prompt"]
        seen[mafia] += 1
        read = "\n".join([item["prompt"], *observations(played(episode, item, legal()))])
        assert read.count("Welcome to") == 1
        assert ("agree on a victim" in read) == mafia
        assert ("IS a Mafia member" in read or "IS NOT a Mafia" in read) <= ("Your role: Detective" in read)
    assert seen[True] > 3 and seen[False] > 15


def test_an_observation_contains_new_messages_only_and_none_of_the_policy():
    episode = arena("TicTacToe-v0", seat=0)
    rollout = played(episode, items(episode, 1)[0], saying("[4]", "[4]"))
    first, second = list(observations(rollout))[:2]
    assert "placed their symbol (O) in cell 4" in first
    assert "[Player 0]" not in first and "[Player 1]" in first and "Your goal" not in first
    assert "cell 4 is already occupied" in second
    assert (rollout.score.reward, rollout.score.parts["illegal"], rollout.score.parts["finished"]) == (-1, 1, 1)


def test_a_reply_on_which_the_game_raises_loses_and_a_game_that_always_raises_shows():
    episode = arena(BRITTLE, seat=0, unfinished_reward=-0.5)
    with pytest.raises(AnswerError, match="IndexError: the table fell over") as caught:
        played(episode, items(episode, 1)[0], saying("[4]", "crash"))
    assert caught.value.reward == -0.5
    with pytest.raises(IndexError, match="never worked"):
        episode = arena(BROKEN, seat=0)
        played(episode, items(episode, 1)[0], saying("[4]"))


def test_a_game_that_records_replies_in_the_wrong_order_can_be_played():
    episode = arena(UNORDERED, seat=0)
    rollout = played(episode, items(episode, 1)[0], saying("[4]", "nothing"))
    assert (rollout.score.reward, rollout.score.parts["illegal"]) == (-1, 1)
    assert all("nothing" not in read for read in observations(rollout))


def test_thoughts_are_not_part_of_a_move():
    episode = arena("TicTacToe-v0", seat=0)
    rollout = played(episode, items(episode, 1)[0], saying("<think>[3] or [4]?</think>[4]"))
    assert "in cell 4" in next(observations(rollout))


def test_a_game_cut_short_by_turns_or_tokens_counts_as_lost():
    episode = arena("TicTacToe-v0", max_turns=2)
    item = items(episode, 1)[0]
    for rollout in (played(episode, item, legal()), played(arena("TicTacToe-v0"), item, legal(), room=60)):
        assert (rollout.score.reward, rollout.score.parts["finished"]) == (-1, 0)


@pytest.mark.parametrize("game", GAMES)
def test_the_random_player_makes_legal_moves_only(game):
    episode = arena(game)
    for seed in range(20):
        deal, rng = TextArenaGame(game, episode.options, episode.players, seed), random.Random(seed)
        illegal = 0
        while not deal.over:
            deal.read_new()
            move = random_move(deal, rng)
            illegal += not deal.try_move(move)
            deal.play(move)
        assert illegal == 0


def test_accepts_predicts_illegal_moves_also_those_that_end_the_game():
    deal = TextArenaGame("TicTacToe-v0", {}, 2, 0)
    deal.play("[4]")
    for _ in range(2):  # The game forgives the first invalid move in a row and ends with the second.
        deal.read_new()
        assert [deal.try_move(move) for move in ("[4]", "[0]", "[9]", "honk")] == [False, True, False, False]
        deal.play("[4]")
    assert deal.over


def test_an_unread_complaint_about_an_earlier_move_does_not_make_a_legal_move_illegal():
    deal = TextArenaGame("TicTacToe-v0", {}, 2, 0)
    assert [deal.play(move) for move in ("honk", "[4]", "[4]", "[0]")] == [False, True, False, True]


def test_trying_a_move_does_not_change_the_game():
    deal, other = (TextArenaGame("SecretMafia-v0", {}, 6, 3) for _ in range(2))
    for turn in range(8):
        new = deal.read_new()
        assert new == other.read_new()
        moves = [move for moves in deal.shown_moves() for move in moves]
        assert [deal.try_move(move) for move in [*moves, "honk"]] == [deal.try_move(move) for move in [*moves, "honk"]]
        deal.play(moves[turn % len(moves)] if moves else "hm")
        other.play(moves[turn % len(moves)] if moves else "hm")


def test_the_other_seats_may_be_played_by_a_user_function(opponents):
    episode = arena("TicTacToe-v0", seat=0, opponent=opponents("first_cell"))
    rollout = played(episode, items(episode, 1)[0], saying("[4]", "[8]", "[3]", "[5]"))
    assert [re.findall(r"\[Player 1\] (\S+)", text) for text in observations(rollout)] == [["[0]"], ["[1]"]]
    assert rollout.score.reward == -1
    clowned = arena("TicTacToe-v0", seat=0, opponent=opponents("clown"))
    assert played(clowned, items(clowned, 1)[0], saying("[4]")).score.reward == 1


def test_the_opponent_of_the_guide_takes_the_middle(tmp_path):
    guide = (ROOT / "docs/guides/libraries.md").read_text()
    (tmp_path / "my_players.py").write_text(guide.split("```python\n", 1)[1].split("```", 1)[0])
    episode = arena("TicTacToe-v0", seat=0, opponent=f"{tmp_path / 'my_players.py'}:clever")
    rollout = played(episode, items(episode, 1)[0], saying("[0]", "[8]"))
    assert "[Player 1] [4]" in next(observations(rollout))
    assert rollout.score.parts["finished"] == 1


def test_isolated_code_has_its_own_random_stream_and_prints_nothing(capsys):
    random.seed(5)
    before = random.getstate()
    drawn = []
    for further in (0, 0, 1):
        rng = random.Random(1)
        with isolated(rng):
            print("noise")
            drawn.append(random.random())
            for _ in range(further):
                random.random()
        with isolated(rng):
            drawn.append((random.random(), numpy.random.random()))
        numpy.random.random()
    assert drawn[:2] == drawn[2:4]
    assert drawn[4] == drawn[2] and drawn[5] != drawn[3]
    assert random.getstate() == before
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("textarena:TicTacTo-v0", {}, "unknown game 'TicTacTo-v0'; did you mean 'TicTacToe-v0'"),
        ("textarena:SecretMafia-v0", {}, "Player count must be between"),
        ("textarena:TicTacToe-v0", {"seat": 2}, "args.seat=2 must be below args.players=2"),
        (
            "textarena:TicTacToe-v0",
            {"game": "KuhnPoker-v0"},
            "args.game='KuhnPoker-v0': the name gives this argument already",
        ),
        ("textarena:TicTacToe-v0", {"max_turn": 2}, "unknown argument 'max_turn'; did you mean 'max_turns'"),
        ("textarena:TicTacToe-v0", {"options": {"size": 4}}, "unexpected keyword argument 'size'"),
        ("textarena:TicTacToe-v0", {"opponent": "best"}, "'best' is not of the form module:object"),
        ("textarena", {}, "args.game"),
        ("textaren:TicTacToe-v0", {}, "No module named 'textaren'"),
    ],
)
def test_what_cannot_be_played_is_rejected_in_one_line(name, args, message):
    with pytest.raises(EnvironmentSetupError, match=re.escape(message)) as caught:
        build_episode(name, args)
    assert "\n" not in str(caught.value)


def test_a_missing_textarena_names_the_pip_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "textarena", None)
    with pytest.raises(EnvironmentSetupError, match="pip install textarena"):
        arena("TicTacToe-v0")
