"""Batchers with ToSSim's interface: scored on copies, one commit for each turn, silent, and isolated failures."""

from __future__ import annotations

import json
import logging
import pickle
import random
from base64 import b64encode

import pytest

from colocated_grpo.environments import EnvironmentSetupError
from colocated_grpo.environments.adapters import tossim
from colocated_grpo.environments.adapters.tossim import ToSSim
from colocated_grpo.environments.build import build_environments
from colocated_grpo.errors import RunError
from colocated_grpo.settings.schema import Config
from colocated_grpo.tools.make_model import build_char_tokenizer
from colocated_grpo.types import Completion, Group
from tests.support.paths import SUPPORT
from tests.support.saved_runs import Attack
from tests.support.small_policy import rollout_of

FILE = SUPPORT / "social_batchers.py"
KINDS = ["WithMeta", "Pairs", "Bare"]
GOOD, BAD, MALFORMED = "<think>x</think><wait/>", "<think>x</think><kill>me</kill>", "I wait"


@pytest.fixture(autouse=True)
def own_key(tmp_path_factory, monkeypatch) -> None:
    """A key of these tests, not in the user's home."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.getbasetemp() / "config"))


def batcher(kind: str = "WithMeta", seed: int = 0, **args) -> ToSSim:
    return ToSSim(seed, f"{FILE}:{kind}", **args)


def state(environment: ToSSim) -> list:
    """Return the state of all games of the batchers."""
    return [
        (game.day, list(game.speeches), [(player.name, player.turns) for player in players])
        for table in environment._tables
        for game, players in table.batcher.games
    ]


def play(environment: ToSSim, batches: int) -> list[str]:
    prompts = []
    for _ in range(batches):
        for turn in environment.next_batch():
            prompts.append(turn.messages)
            environment.commit(turn, GOOD)
    return prompts


@pytest.mark.parametrize("kind", KINDS)
def test_completions_are_scored_on_copies(kind):
    environment, elsewhere = batcher(kind, num_games=2), batcher(kind, seed=9)
    play(environment, 2)
    before = state(environment)
    for turn in environment.next_batch():
        outcomes = elsewhere.score(pickle.loads(pickle.dumps(turn)), [GOOD, BAD, MALFORMED, GOOD])
        assert [each.reward for each in outcomes] == [1.0, 0.0, -1.0, 1.0]
        assert [each.parts["parse_rate"] for each in outcomes] == [1, 1, 0, 1]
        assert [each.parts["legal_rate"] for each in outcomes] == [1, 0, 0, 1]
    assert state(environment) == before


@pytest.mark.parametrize("kind", KINDS)
def test_each_reply_reaches_the_seat_of_its_turn(kind):
    environment = batcher(kind)
    turns = environment.next_batch()
    names = [turn.messages.split(",")[0] for turn in turns]
    for place, reply in ((1, MALFORMED), (2, GOOD), (0, GOOD)):
        environment.commit(turns[place], reply)
    [(day, said, players)] = state(environment)
    assert day == 1
    assert [line.split()[0] for line in said] == [names[0], names[2]]
    assert players == [(name, 1) for name in names]
    assert environment.drain_stats() == {
        "resets": 0,
        "total_games": 1,
        "total_actions": 3,
        "malformed_actions": 1,
        "illegal_actions": 0,
        "legal_actions": 2,
    }


def test_stats_count_since_the_last_call():
    environment = batcher(breaks_on_day=3)
    environment.add_game()
    steps = [environment.drain_stats()]
    for batches in (2, 1, 4):
        play(environment, batches)
        steps.append(environment.drain_stats())
    resumed = batcher(breaks_on_day=3)
    resumed.restore(environment.snapshot())
    play(resumed, 1)
    steps.append(resumed.drain_stats())
    assert [step["total_games"] for step in steps] == [2] * 5
    assert [step["total_actions"] for step in steps] == [0, 12, 6, 18, 6]
    assert [step["resets"] for step in steps] == [0, 0, 0, 2, 0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_may_be_committed_over_several_steps(kind):
    environment = batcher(kind)
    first, *others = environment.next_batch()
    environment.commit(first, GOOD)
    again = environment.next_batch()
    assert [turn.id for turn in again] == [turn.id for turn in others]
    with pytest.raises(ValueError, match="exactly one commit"):
        environment.commit(first, GOOD)
    environment.play_on(again[0])
    environment.commit(again[1], BAD)
    assert len(environment.next_batch()) == 3
    assert not {turn.id for turn in environment.next_batch()} & {turn.id for turn in (first, *others)}


def test_a_table_whose_batcher_raises_is_replaced_and_the_others_continue():
    environment = batcher(breaks_on_day=3)
    environment.add_game()
    ids = []
    for _ in range(12):
        ids += [turn.id for turn in environment.next_batch()]
        play(environment, 1)
    assert environment.drain_stats()["resets"] >= 2
    assert len(set(ids)) == len(ids) == 72


def test_games_follow_the_seed_and_tables_differ():
    def names(seed: int) -> list[str]:
        environment = batcher(seed=seed)
        return [turn.messages for turn in [*environment.next_batch(), *environment.add_game()]]

    assert names(1) == names(1)
    assert not set(names(1)) & set(names(2))
    assert len(set(names(1))) == 6


def test_every_call_has_its_own_random_stream():
    environment = batcher("Lucky")
    for _ in range(5):
        play(environment, 2)
        environment.drain_stats()
        environment.drain_stats()
    drawn = environment._tables[0].batcher.drawn
    assert len(set(drawn)) == len(drawn) == 5 * (2 + 2 + 2)


def test_a_commit_does_not_copy_the_table(monkeypatch):
    environment = batcher()
    turns = environment.next_batch()
    monkeypatch.setattr(tossim.cloudpickle, "dumps", lambda table: pytest.fail("the table was copied"))
    for turn in turns:
        environment.commit(turn, GOOD)
    [(_, said, players)] = state(environment)
    assert len(said) == 3
    assert [turns for _, turns in players] == [1, 1, 1]


def test_stats_that_are_not_numbers_are_left_out():
    environment = batcher("Chatty")
    play(environment, 2)
    stats = environment.drain_stats()
    assert stats["total_actions"] == 6
    assert not {"mood", "by_role"} & stats.keys()
    assert environment.drain_stats()["resets"] == 0


def test_an_exception_while_scoring_gives_no_reward():
    environment = batcher("Pairs")
    turn = environment.next_batch()[0]
    first, second = environment.score(turn, [None, GOOD])
    assert (first.reward, first.parts, second.reward) == (None, {"failed": 1.0}, 1.0)
    with pytest.raises(AttributeError):
        environment.score(turn, [None, None])


def test_batchers_print_nothing_and_leave_the_global_random_state_alone(capsys):
    random.seed(1)
    expected = random.Random(1).random()
    environment = batcher()
    play(environment, 3)
    environment.score(environment.next_batch()[0], [GOOD])
    assert random.random() == expected
    assert capsys.readouterr().out == ""


def test_log_files_have_each_committed_action_once_and_nothing_is_printed(tmp_path, capfd):
    """Two environments, as on rank 0: one scores, one plays. Its games end and are replaced."""
    environment, scorer = (batcher("Logged", folder=str(tmp_path / name), last_day=2) for name in ("play", "score"))
    environment.add_game()
    committed = []
    for step in range(8):
        for number, turn in enumerate(environment.next_batch()):
            assert [each.reward for each in scorer.score(turn, [GOOD, BAD, MALFORMED])] == [1.0, 0.0, -1.0]
            committed.append(f"<think>{step}.{number}</think><wait/>")
            environment.commit(turn, committed[-1])
        if step == 4:
            environment.restore(json.loads(json.dumps(environment.snapshot())))
    games = [file.read_text().splitlines() for file in sorted(tmp_path.glob("play/*/actions.log"))]
    assert sorted(line for game in games for line in game if line != "game") == sorted(f"act {t}" for t in committed)
    assert len(games) == 4 and min(map(len, games)) > 1
    assert [file.read_text() for file in tmp_path.glob("score/*/actions.log")] == ["game\n"]
    assert capfd.readouterr() == ("", "")
    assert not logging.getLogger("social_batchers.actions").handlers


def test_a_snapshot_that_this_users_key_has_not_signed_is_not_unpickled(tmp_path, monkeypatch):
    environment = batcher()
    attack = b64encode(pickle.dumps(Attack(tmp_path / "attacked"))).decode()
    own = environment.snapshot()
    for signature in (own["signature"], None, "\u00e9"):
        snapshot = {**own, "tables": attack, "signature": signature}
        with pytest.raises(ValueError, match=r"not signed with \S*/signing_key, and reading it can run code"):
            environment.restore(snapshot)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "another user"))
    with pytest.raises(ValueError, match=r"another user/colocated_grpo/signing_key"):
        batcher().restore(own)
    other = batcher().snapshot()
    assert other["signature"] not in (None, own["signature"])
    assert not (tmp_path / "attacked").exists()
    monkeypatch.setenv(tossim.TRUST_VARIABLE, "1")
    batcher().restore(own)


def test_the_key_is_readable_by_its_user_alone_and_a_run_without_one_saves_without_a_signature(tmp_path, monkeypatch):
    batcher().snapshot()
    assert tossim.key_file().stat().st_mode & 0o777 == 0o600
    assert [file.name for file in tossim.key_file().parent.iterdir()] == ["signing_key"]
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "file"))  # a folder cannot be created there
    snapshot = batcher().snapshot()
    assert snapshot["signature"] is None
    with pytest.raises(ValueError, match="not signed"):
        batcher().restore(snapshot)


@pytest.mark.parametrize("kind", KINDS)
def test_a_restored_batcher_continues_exactly(kind):
    environment, other = batcher(kind, num_games=2, breaks_on_day=4), batcher(kind, num_games=2, breaks_on_day=4)
    play(environment, 3)
    environment.add_game()
    environment.commit(environment.next_batch()[1], GOOD)
    saved = json.loads(json.dumps(environment.snapshot()))
    expected = play(environment, 12)
    other.restore(saved)
    assert play(other, 12) == expected
    assert state(other) == state(environment)


def test_a_batcher_trains_as_an_entry_of_the_config():
    entry = {"type": "turns", "name": "tossim", "args": {"environment": f"{FILE}:WithMeta", "num_games": 2}}
    made = build_environments(Config(model={"name": "none"}, environments=[entry]), build_char_tokenizer())
    source = made.open_source()
    completion = Completion(token_ids=[5], sampling_logprobs=[-1.0], finish_reason="stop", policy_version=0)
    for _ in range(5):
        prompts = source.next(8)
        scores = [made.scorers["tossim"].score(prompt, [completion] * 2, [GOOD, MALFORMED]) for prompt in prompts]
        assert [[score.reward for score in each] for each in scores] == [[1.0, -1.0]] * 8
        settled = source.record([Group(prompt=prompt, rollouts=[rollout_of([1], [2])] * 2) for prompt in prompts])
        assert settled.trained_now == list(range(8))
    assert len(made.held_out(10)) == 10


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"environment": f"{FILE}:Nothing"}, "unknown object of"),
        ({"environment": f"{FILE}:WithMeta", "games": 2}, "unexpected keyword argument 'games'"),
        ({"environment": f"{FILE}:Locked"}, "cannot be pickled, but completions are scored on copies"),
        ({}, "missing 1 required positional argument: 'environment'"),
    ],
)
def test_an_unusable_batcher_is_rejected_in_one_line(args, message):
    config = Config(model={"name": "none"}, environments=[{"type": "turns", "name": "tossim", "args": args}])
    with pytest.raises(EnvironmentSetupError) as caught:
        build_environments(config, build_char_tokenizer())
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (None, r"next_batch\(\) failed: TypeError: 'NoneType' object is not iterable"),
        (("abc", "ab"), r"failed: ValueError: next_batch\(\) returned 3 prompts with 2 meta entries"),
    ],
)
def test_a_batcher_without_a_valid_batch_ends_the_run_with_the_reason(monkeypatch, batch, message):
    entry = {"type": "turns", "name": "tossim", "args": {"environment": f"{FILE}:WithMeta"}}
    made = build_environments(Config(model={"name": "none"}, environments=[entry]), build_char_tokenizer())
    source = made.open_source()
    monkeypatch.setattr(type(source.streams["tossim"]._environment._tables[0].batcher), "next_batch", lambda _: batch)
    with pytest.raises(RunError, match=message):
        source.next(1)


def test_missing_rewards_are_an_error_of_the_batcher(monkeypatch):
    environment = batcher()
    [turn, *_] = environment.next_batch()
    monkeypatch.setattr(type(environment._tables[0].batcher), "apply_actions", lambda *_: [])
    with pytest.raises(
        ValueError, match=r"apply_actions\(\) returned 0 rewards for 1 actions; return a list with one "
    ):
        environment.score(turn, [GOOD, BAD])


def test_a_batcher_without_turns_is_rejected():
    entry = {"type": "turns", "name": "tossim", "args": {"environment": f"{FILE}:Empty"}}
    made = build_environments(Config(model={"name": "none"}, environments=[entry]), build_char_tokenizer())
    with pytest.raises(EnvironmentSetupError, match="no open turn after 1000 calls"):
        made.open_source().next(1)
