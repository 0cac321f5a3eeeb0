"""Self-play in textarena: turns of every seat, pure scores, and returns by the result of the seat."""

from __future__ import annotations

import json
import pickle
import random
import re
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise

import pytest

from colocated_grpo.config import Config
from colocated_grpo.environments import EnvironmentSetupError, build_environments
from colocated_grpo.environments.adapters.textarena_turns import TextArenaTurns
from colocated_grpo.errors import RunError
from colocated_grpo.tools.char_tokenizer import build_char_tokenizer
from colocated_grpo.types import Completion, Group
from tests.support.arena_games import BRITTLE, BROKEN, FICKLE, RESTLESS
from tests.support.small_policy import rollout_of

TOKENIZER = build_char_tokenizer()
TIC_TAC_TOE = {"game": "TicTacToe-v0", "games": 2}
MAFIA = {"game": "SecretMafia-v0", "games": 2, "seats": 6, "options": {"discussion_rounds": 1}}
POKER = {"game": "KuhnPoker-v0", "games": 2, "players": ["policy", "random"]}
GAMES = [TIC_TAC_TOE, MAFIA, POKER]
WIN_OF_FIRST = ["[0]", "[3]", "[1]", "[4]", "[2]"]
DRAW = ["[0]", "[4]", "[8]", "[1]", "[7]", "[6]", "[2]", "[5]", "[3]"]

per_game = pytest.mark.parametrize("args", GAMES, ids=lambda args: args["game"])


def arena(seed: int = 0, **args) -> TextArenaTurns:
    return TextArenaTurns(seed, **{**TIC_TAC_TOE, "games": 1, **args})


def built(args: dict, seed: int = 0, max_prompt_tokens: int = 9000, **entry):
    game = {"type": "turns", "name": f"textarena:{args['game']}", "commit": "random"}
    entry = {**game, "args": {key: value for key, value in args.items() if key != "game"}, **entry}
    rollout = {"max_prompt_tokens": max_prompt_tokens}
    config = Config(model={"name": "none"}, environments=[entry], seed=seed, rollout=rollout)
    return build_environments(config, TOKENIZER)


def replies_to(prompt) -> list[str]:
    """Return replies that depend on the prompt alone: moves that the game has shown, and an invalid one."""
    rng = random.Random(prompt.text)
    shown = re.findall(r"\[\w+\]", prompt.text.split("Available Moves:")[-1])
    return [*(rng.choice(shown or ["[0]"]) for _ in range(3)), rng.choice(["I know.", "", "<think>[0] or"])]


def judged(made, prompt) -> Group:
    """Return the scored group of a prompt, as another rank sends it back."""
    prompt, texts = pickle.loads(pickle.dumps(prompt)), replies_to(prompt)
    completion = Completion(token_ids=[5], sampling_logprobs=[-1.0], finish_reason="stop", policy_version=0)
    scores = made.scorers[prompt.source].score(prompt, [completion] * len(texts), texts)
    rollouts = [replace(rollout_of([1], [5, 6]), text=t, score=s) for t, s in zip(texts, scores, strict=True)]
    return Group(prompt=prompt, rollouts=rollouts)


def play(made, source, steps: int, n: int = 3) -> list[tuple]:
    """Run steps of `n` prompts; return (prompts, result) of each."""
    history = []
    for _ in range(steps):
        groups = [judged(made, prompt) for prompt in source.next(n)]
        history.append(([group.prompt for group in groups], source.record(groups)))
    return history


def commit_all(environment: TextArenaTurns, moves: list[str]) -> list[tuple[int, str, float]]:
    """Play moves in the environment's only game; return (seat, turn id, immediate reward) of each."""
    history = []
    for move in moves:
        [turn] = environment.next_batch()
        [outcome] = environment.score(turn, [move])
        environment.commit(turn, move)
        history.append((turn.seat, turn.id, outcome.reward))
    return history


def totals(environment: TextArenaTurns, moves: list[str]) -> list[tuple[int, float]]:
    """Play a whole game; return (seat, immediate reward plus return) of each move."""
    history = commit_all(environment, moves)
    returns = {each.turn_id: each.value for each in environment.drain_returns()}
    assert returns.keys() == {turn for _, turn, _ in history}
    return [(seat, reward + returns[turn]) for seat, turn, reward in history]


@per_game
def test_every_turn_is_prompted_once_and_trained_once(args):
    made = built(args)
    history = play(made, made.open_source(), 40)
    asked = [prompt.index for prompts, _ in history for prompt in prompts]
    turns = [prompt.item["turn"].id for prompts, _ in history for prompt in prompts]
    trained = [group.prompt.index for _, settled in history for group in settled.released]
    waiting = history[-1][1].metrics[f"{args['game']}/turns_waiting"]
    assert len(set(turns)) == len(asked) == 120
    assert len(set(trained)) == len(trained) == 120 - waiting
    assert all(settled.trained_now == [] for _, settled in history)
    scores = [rollout.score for _, settled in history for group in settled.released for rollout in group.rollouts]
    assert all(score.error is None for score in scores)
    assert {-1.0, 0.0, 1.0} <= {score.reward for score in scores}


@per_game
def test_games_follow_seed_and_replies_whatever_else_uses_random_numbers(args):
    made, again = built(args), built(args)
    history = play(made, made.open_source(), 12)
    random.seed(random.random())
    assert play(again, again.open_source(), 12) == history
    other = built(args, seed=1)
    seeds = {prompt.item["turn"].seed for prompts, _ in history for prompt in prompts}
    assert not seeds & {p.item["turn"].seed for prompts, _ in play(other, other.open_source(), 12) for p in prompts}


@per_game
@pytest.mark.parametrize("cut", [0, 7])
def test_a_resumed_run_continues_exactly(args, cut):
    made = built(args, max_wait=9)
    source = made.open_source()
    play(made, source, cut)
    state = json.loads(json.dumps(source.state_dict()))
    expected = play(made, source, 20)
    assert any(settled.games for _, settled in expected)
    other = built(args, max_wait=9)
    resumed = other.open_source()
    play(other, resumed, 2, 4)
    resumed.load_state_dict(state)
    assert play(other, resumed, 20) == expected
    assert resumed.state_dict() == source.state_dict()


def test_a_state_does_not_change_with_later_steps():
    made = built(MAFIA)
    source = made.open_source()
    play(made, source, 6)
    state = source.state_dict()
    before = json.dumps(state)
    play(made, source, 6)
    assert json.dumps(state) == before


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
        asked = [event for event in game["events"] if event["player"] == "policy"]
        last = {event["number"]: 0.0 for event in asked} | {
            event["number"]: game["seats"][event["seat"]]["reward"] for event in game["events"][-1:]
        }
        for event in asked:
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


def test_a_seat_reads_its_own_role_and_no_secrets_of_the_night():
    made = built(MAFIA)
    history = play(made, made.open_source(), 40)
    seen = Counter()
    for prompt in (prompt for prompts, _ in history for prompt in prompts):
        turn = prompt.item["turn"]
        assert turn.messages.startswith(f"Welcome to Secret Mafia! You are Player {turn.seat}.")
        assert turn.messages.count("Your role:") == 1
        assert f"Your role: {turn.phase.capitalize()}" in turn.messages
        assert ("agree on a victim" in turn.messages) == (turn.phase == "mafia")
        assert ("IS a Mafia member" in turn.messages or "IS NOT a Mafia" in turn.messages) <= (
            turn.phase == "detective"
        )
        seen[turn.phase] += 1
    assert set(seen) == {"mafia", "villager", "doctor", "detective"}
    assert f"{MAFIA['game']}/reward/mafia" in {key for _, settled in history for key in settled.metrics}


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


def test_scripted_players_change_seats_from_game_to_game(tmp_path):
    path = tmp_path / "players.py"
    path.write_text(
        'def first_cell(read, chance):\n    return read.rpartition("Available Moves: \'")[2].partition("\'")[0]\n'
    )
    for script in ("random", f"{path}:first_cell"):
        made = built({**TIC_TAC_TOE, "players": ["policy", script]})
        history = play(made, made.open_source(), 20)
        turns = [prompt.item["turn"] for prompts, _ in history for prompt in prompts]
        assert all(turn.trainable and turn.seat == turn.game % 2 for turn in turns)
        games = [game for _, settled in history for game in settled.games]
        for game in games:
            first = ["policy", script]
            assert [seat["player"] for seat in game["seats"]] == (first[::-1] if game["game"] % 2 else first)
            assert all(event["legal"] for event in game["events"] if event["player"] == script)
        assert {"win_rate/policy", f"win_rate/{script.rpartition(':')[2]}", "win_rate/draw"} <= {
            key.partition("/")[2] for key in history[-1][1].metrics
        }
    assert "[Player 1] [0]" in games[0]["transcript"]


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


def test_a_game_that_always_raises_ends_the_run():
    made = built({"game": BROKEN})
    with pytest.raises(RunError, match=r"every game raises an exception; the latest: IndexError: never worked"):
        play(made, made.open_source(), 100)
    scripted = {"game": BROKEN, "players": ["random", "policy"], "games": 1}
    assert [prompt.item["turn"].seat for prompt in built(scripted).open_source().next(1)] == [0]


def test_a_game_that_is_not_reproducible_is_neither_scored_nor_restored():
    environment = arena(game=FICKLE)
    made = built({"game": FICKLE})
    [group] = [judged(made, prompt) for prompt in made.open_source().next(1)]
    assert {rollout.score.error for rollout in group.rollouts} == {
        "RuntimeError: Fickle-v0 is not reproducible from its seed and its moves"
    }
    with pytest.raises(ValueError, match="is not reproducible from its seed and its moves"):
        environment.restore(environment.snapshot())
    source = made.open_source()
    with pytest.raises(EnvironmentSetupError, match="games of the checkpoint cannot be restored: ValueError: Fickle"):
        source.load_state_dict(source.state_dict())


def test_a_game_without_end_is_cut_short_and_lost_by_all_seats():
    environment = arena(game=RESTLESS, max_turns=3)
    assert totals(environment, ["[4]", "[4]", "[4]"]) == [(0, -1), (1, -1), (0, -1)]
    stats = environment.drain_stats()
    assert (stats["unfinished"], stats["turns_per_game"], stats["win_rate/draw"]) == (1, 3, 0)
    kinder = arena(game=RESTLESS, max_turns=2, unfinished_reward=0.5)
    assert totals(kinder, ["[4]", "[9]"]) == [(0, 0.5), (1, -0.5)]
    assert kinder.drain_games()[0]["winner"] == "unfinished"


def test_turns_with_too_long_prompts_are_played_by_a_script_and_get_no_return():
    made = built(TIC_TAC_TOE, max_prompt_tokens=750)
    source = made.open_source()
    history = play(made, source, 20)
    assert source.num_dropped > 10
    games = [game for _, settled in history for game in settled.games]
    assert any(len(game["events"]) >= 7 for game in games)
    assert all(len(prompt.token_ids) <= 750 for prompts, _ in history for prompt in prompts)
    environment = arena()
    turns = []
    while not environment.drain_games():
        [turn] = environment.next_batch()
        turns.append(turn)
        if turn.seat == 0:
            environment.commit(turn, "honk")
        else:
            environment.play_on(turn)
    assert {each.turn_id for each in environment.drain_returns()} == {turn.id for turn in turns if turn.seat == 0}


def test_held_out_turns_come_from_other_games_and_are_reproducible():
    made = built(POKER)
    held_out = made.held_out(30)
    assert [prompt.text for prompt in held_out] == [prompt.text for prompt in made.held_out(30)]
    assert {prompt.item["turn"].seed % 2 for prompt in held_out} == {1}
    trained = [p for prompts, _ in play(made, made.open_source(), 10) for p in prompts]
    assert {prompt.item["turn"].seed % 2 for prompt in trained} == {0}
    assert all(rollout.score.error is None for prompt in held_out for rollout in judged(made, prompt).rollouts)


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


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("textarena:TicTacTo-v0", {}, "unknown game 'TicTacTo-v0'; did you mean 'TicTacToe-v0'"),
        ("textarena:TicTacToe-v0", {"seats": 3}, "The number of players has to be 2, received 3"),
        ("textarena:TicTacToe-v0", {"game": "Nim-v0"}, "args.game='Nim-v0': the name gives this argument already"),
        ("textarena:TicTacToe-v0", {"opponent": "random"}, "unknown argument 'opponent'"),
        ("textarena:TicTacToe-v0", {"seed": 1}, "args.seed is set by the run; remove it"),
        ("textarena:TicTacToe-v0", {"players": ["random"]}, "no seat is played by the policy"),
        ("textarena:TicTacToe-v0", {"players": ["policy"] * 3}, "more than seats=2"),
        (
            "textarena:TicTacToe-v0",
            {"players": ["policy", "clever"]},
            "'clever' is unknown; valid: policy, frozen, random",
        ),
        ("textarena:TicTacToe-v0", {"players": ["policy", "nowhere:clever"]}, "No module named 'nowhere'"),
        ("textarena:TicTacToe-v0", {"credit": "late"}, "unknown mode 'late'"),
        ("textarena:TicTacToe-v0", {"credit": {"outcome": 1, "shaping": 1}}, "args.credit.shaping"),
        ("textarena:TicTacToe-v0", {"credit": {"discount": 0}}, "discount=0.0 is not in (0, 1]"),
        ("textarena", {}, "args.game"),
        ("gymnasium:CartPole-v1", {}, "it is a type: episode"),
        ("textaren", {}, "did you mean 'textarena:<game>'"),
    ],
)
def test_what_cannot_be_played_is_rejected_in_one_line(name, args, message):
    entry = {"type": "turns", "name": name, "args": args}
    with pytest.raises(EnvironmentSetupError, match=re.escape(message)) as caught:
        build_environments(Config(model={"name": "none"}, environments=[entry]), TOKENIZER)
    assert "\n" not in str(caught.value)


def test_a_snapshot_with_too_few_games_is_rejected():
    with pytest.raises(ValueError, match="games=4, but the snapshot holds 2"):
        arena(games=4).restore(arena(games=2).snapshot())


def test_structured_output_is_rejected_in_one_line():
    with pytest.raises(EnvironmentSetupError, match="textarena has no grammar"):
        built(TIC_TAC_TOE, structured=True).open_source().next(1)


def test_a_missing_textarena_names_the_pip_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "textarena", None)
    with pytest.raises(EnvironmentSetupError, match="pip install textarena"):
        arena()
