"""Self-play in textarena as a source of training prompts: complete, reproducible, resumable, and with clear errors."""

from __future__ import annotations

import json
import random
import re
from collections import Counter

import pytest

from colocated_grpo.environments import EnvironmentSetupError
from colocated_grpo.environments.build import build_environments
from colocated_grpo.errors import RunError
from colocated_grpo.settings import Config
from tests.support.arena_games import BROKEN, FICKLE
from tests.support.textarena_play import (
    MAFIA,
    POKER,
    TIC_TAC_TOE,
    TOKENIZER,
    arena,
    built,
    judged,
    per_game,
    play,
)


@per_game
def test_every_turn_is_prompted_once_and_trained_once(args):
    made = built(args)
    history = play(made, made.open_source(), 40)
    indices = [prompt.index for prompts, _ in history for prompt in prompts]
    turns = [prompt.item["turn"].id for prompts, _ in history for prompt in prompts]
    trained = [group.prompt.index for _, settled in history for group in settled.released]
    waiting = history[-1][1].metrics[f"{args['game']}/turns_waiting"]
    assert len(set(turns)) == len(indices) == 120
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


def test_structured_output_is_rejected_in_one_line():
    with pytest.raises(EnvironmentSetupError, match="textarena has no grammar"):
        built(TIC_TAC_TOE, structured=True).open_source().next(1)
