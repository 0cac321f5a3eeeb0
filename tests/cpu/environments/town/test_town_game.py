"""Whole games: phases, trials, endings, results, and determinism."""

from __future__ import annotations

import json
from collections import Counter
from random import Random

import pytest

from colocated_grpo.environments.town.phases import eliminate, end_turn, enter, seat_result, to_act, winning_side
from colocated_grpo.environments.town.players import reply
from colocated_grpo.environments.town.roles import ROLES, Faction
from colocated_grpo.environments.town.state import (
    MAX_SEATS,
    Game,
    Phase,
    Rules,
    cast_problem,
    draw_cast,
    faction_sizes,
    restore_game,
    snapshot_game,
)
from colocated_grpo.environments.town.verdicts import Status, apply_verdict, judge
from tests.support.town_tables import dead, events_of, kinds, play_game, private_texts, random_games, seat, table


def do(game: Game, name: str, tag: str, argument: str = "") -> None:
    completion = reply(tag, argument)
    verdict = judge(game, game.index(name), completion)
    assert verdict.status is Status.OK, verdict
    assert game.index(name) in to_act(game), f"{name} has no turn in {game.phase}"
    apply_verdict(game, game.index(name), verdict, completion)


def all_wait(game: Game) -> None:
    """Let all seats wait until the phase ends."""
    phase = game.phase
    while game.phase is phase:
        end_turn(game, to_act(game)[0])


def bring_to_trial(game: Game, name: str) -> None:
    enter(game, Phase.NOMINATION)
    while game.phase is Phase.NOMINATION:
        speaker = game.seats[to_act(game)[0]].name
        if speaker == name:
            do(game, speaker, "wait")
        else:
            do(game, speaker, "nominate", name)
    assert game.seats[game.accused].name == name


def vote_all(game: Game, votes: dict[str, str], otherwise: str) -> None:
    for name in game.names(list(game.waiting)):
        do(game, name, "vote", votes.get(name, otherwise))


@pytest.mark.parametrize("seats", range(7, MAX_SEATS + 1))
def test_every_number_of_seats_gets_a_playable_cast(seats):
    for seed in range(50):
        roles = draw_cast(seats, Random(seed))
        assert cast_problem(roles) is None
        assert Counter(ROLES[role].faction for role in roles) == Counter(faction_sizes(seats))
        assert {"godfather", "mafioso"} & set(roles)
        assert roles.count("slayer") <= 1


def test_drawn_casts_cover_all_roles():
    assert {role for seed in range(300) for role in draw_cast(15, Random(seed))} == set(ROLES)


def test_random_games_reach_every_phase():
    assert {game.phase for game in random_games(9)} == set(Phase) - {Phase.OVER}


def test_a_game_starts_before_night_with_the_jailor():
    game = table("jailor", "godfather")
    enter(game)
    assert (game.phase, to_act(game)) == (Phase.PRE_NIGHT, [0])


def test_without_a_jailor_and_a_second_mafia_member_the_first_turns_are_at_night():
    game = table("sheriff", "godfather")
    enter(game)
    assert (game.phase, to_act(game)) == (Phase.NIGHT, [0, 1])


def test_the_mafia_talks_in_its_channel_before_it_acts():
    game = table("godfather", "informer")
    enter(game)
    assert (game.phase, game.waiting) == (Phase.NIGHT_TALK, [0, 1])
    do(game, "Ada", "speak", "Cleo it is")
    do(game, "Bram", "wait")
    assert game.phase is Phase.NIGHT
    assert private_texts(game, "Bram") == ["Cleo it is"]


def test_jailor_and_prisoner_talk_and_the_prisoner_does_not_learn_the_name():
    game = table("jailor", "godfather", "informer")
    enter(game)
    do(game, "Ada", "jail", "Bram")
    assert game.waiting == [0, 1]
    do(game, "Ada", "speak", "who are you")
    do(game, "Bram", "speak", "a poor citizen")
    assert events_of(game, "jailor_says")[0].actor == -1
    assert private_texts(game, "Bram") == ["", "who are you", "a poor citizen"]
    assert private_texts(game, "Cleo") == []
    assert game.phase is Phase.NIGHT
    assert game.index("Bram") not in game.waiting


@pytest.mark.parametrize(("one_in", "needed"), [(2, 4), (3, 3), (7, 1)])
def test_nominations_by_a_share_of_the_living_start_a_trial(one_in, needed):
    game = table("godfather", "informer", one_names_in=one_in)
    bring_to_trial(game, "Ada")
    assert len(events_of(game, "nominated")) == needed
    assert (game.phase, to_act(game)) == (Phase.DEFENCE, [0])


def test_the_accused_defends_does_not_vote_and_has_last_words_when_condemned():
    game = table("godfather", "informer")
    bring_to_trial(game, "Ada")
    do(game, "Ada", "speak", "not me")
    assert game.phase is Phase.JUDGEMENT
    assert game.index("Ada") not in game.waiting
    vote_all(game, {"Bram": "innocent", "Cleo": "abstain"}, otherwise="guilty")
    assert (game.phase, to_act(game)) == (Phase.LAST_WORDS, [0])
    assert not dead(game)
    do(game, "Ada", "speak", "farewell")
    assert dead(game) == {"Ada"}
    assert events_of(game, "hanged")[0].text == "godfather"
    assert events_of(game, "condemned")[0].text == "4 guilty, 1 innocent"


def test_a_tie_acquits_and_the_acquitted_cannot_be_nominated_again_that_day():
    game = table("godfather", "informer")
    bring_to_trial(game, "Ada")
    all_wait(game)
    vote_all(game, {"Bram": "guilty", "Cleo": "guilty", "Dorn": "guilty"}, otherwise="innocent")
    assert game.phase is Phase.NOMINATION
    voter = to_act(game)[0]
    assert judge(game, voter, reply("nominate", "Ada")).code in ("target_not_allowed", "target_self")


def test_night_falls_after_three_trials():
    game = table("godfather", "informer")
    for name in ("Ada", "Bram", "Cleo"):
        bring_to_trial(game, name)
        all_wait(game)
        vote_all(game, {}, otherwise="innocent")
    assert game.phase in (Phase.PRE_NIGHT, Phase.NIGHT_TALK)


def test_the_vote_of_a_revealed_mayor_counts_three_times():
    game = table("mayor", "godfather", "informer")
    enter(game, Phase.DISCUSSION)
    while game.names(to_act(game)) != ("Ada",):
        end_turn(game, to_act(game)[0])
    do(game, "Ada", "reveal")
    assert events_of(game, "revealed")
    bring_to_trial(game, "Bram")
    all_wait(game)
    vote_all(game, {"Ada": "guilty", "Cleo": "innocent", "Dorn": "innocent"}, otherwise="abstain")
    assert game.phase is Phase.LAST_WORDS


def test_simultaneous_choices_are_accepted_in_any_order_and_talk_in_turn():
    forward, backward = table("sheriff", "godfather", "doctor"), table("sheriff", "godfather", "doctor")
    moves = {"Ada": ("investigate", "Bram"), "Bram": ("kill", "Dorn"), "Cleo": ("protect", "Elin")}
    for game, names in ((forward, list(moves)), (backward, list(moves)[::-1])):
        enter(game)
        for name in names:
            do(game, name, *moves[name])
        assert game.phase is Phase.DISCUSSION
        assert len(to_act(game)) == 1
    # Thoughts are recorded in the order of the replies; these replies have none.
    assert snapshot_game(forward) == snapshot_game(backward)


def test_the_town_wins_when_all_killers_are_dead():
    game = table("godfather", "jester")
    assert winning_side(game) is None
    eliminate(game, 0, "hanged")
    assert winning_side(game) == Faction.TOWN


def test_the_mafia_wins_with_half_of_the_living():
    game = table("godfather", "informer")
    for victim in (2, 3):
        eliminate(game, victim, "killed")
    assert winning_side(game) is None
    eliminate(game, 4, "killed")
    assert winning_side(game) == Faction.MAFIA


def test_a_neutral_killer_blocks_every_other_win_and_wins_one_on_one():
    game = table("slayer", "godfather")
    for victim in (2, 3, 4, 5):
        eliminate(game, victim, "killed")
    assert winning_side(game) is None
    eliminate(game, 1, "hanged")
    assert winning_side(game) == Faction.NEUTRAL


def test_one_on_one_between_a_neutral_killer_and_the_mafia_stays_open():
    game = table("slayer", "godfather")
    for victim in (2, 3, 4, 5, 6):
        eliminate(game, victim, "killed")
    assert winning_side(game) is None


def test_a_game_without_survivors_is_a_draw():
    game = table("godfather")
    for victim in range(7):
        eliminate(game, victim, "killed")
    assert winning_side(game) == "draw"


def test_a_mafia_without_a_killer_promotes_a_member():
    game = table("informer", "informer")
    enter(game)
    assert seat(game, "Ada").role_name == "mafioso"
    assert private_texts(game, "Bram") == ["mafioso"]


@pytest.mark.parametrize(("how", "outcome"), [("hanged", 1.0), ("killed", -1.0)])
def test_a_jester_wins_by_being_hanged_only(how, outcome):
    game = table("jester", "godfather")
    eliminate(game, 0, how)
    game.phase, game.winner = Phase.OVER, Faction.TOWN
    assert seat_result(game, 0) == outcome


def test_results_follow_the_faction():
    game = table("godfather", "sheriff", "slayer")
    game.phase, game.winner = Phase.OVER, Faction.MAFIA
    assert [seat_result(game, index) for index in range(3)] == [1.0, -1.0, -1.0]
    game.winner = "draw"
    assert [seat_result(game, index) for index in range(3)] == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("player", ["random", "sensible"])
@pytest.mark.parametrize("seats", [7, 11, 15])
def test_every_game_ends(seats, player):
    for seed in range(15):
        game = play_game(seed, seats, (player,), Rules(max_days=4))
        assert game.phase is Phase.OVER
        assert game.winner in {*Faction, "draw"}
        assert game.day <= 5
        assert kinds(game)[-1] == "over"


def test_a_game_of_waiting_seats_ends_in_a_draw_at_the_day_limit():
    game = table("godfather", "informer", max_days=3)
    enter(game)
    while game.phase is not Phase.OVER:
        end_turn(game, to_act(game)[0])
    assert (game.winner, game.day) == ("draw", 4)


def test_the_order_of_speakers_changes_from_day_to_day():
    game = table("godfather", "informer")
    orders = []
    for _ in range(4):
        enter(game, Phase.DISCUSSION)
        orders.append(tuple(game.waiting))
    assert len(set(orders)) > 1


def test_the_seed_determines_the_game():
    assert snapshot_game(play_game(5, 9)) == snapshot_game(play_game(5, 9))
    assert snapshot_game(play_game(5, 9)) != snapshot_game(play_game(6, 9))


def test_a_game_survives_a_json_round_trip():
    for step, game in enumerate(random_games(3)):
        if step % 10 == 0:
            assert restore_game(json.loads(json.dumps(snapshot_game(game)))) == game


def test_every_side_wins_some_games_of_sensible_players():
    wins = Counter(str(play_game(seed, 9).winner) for seed in range(80))
    assert wins["town"] >= 8
    assert wins["mafia"] >= 8
    assert wins["neutral"] >= 1
    assert wins["draw"] <= 24
