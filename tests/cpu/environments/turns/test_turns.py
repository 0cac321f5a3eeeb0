"""Games trained turn by turn: sampling of turns, scoring on any rank, commits, delayed rewards, exact resume."""

from __future__ import annotations

import json
import pickle
import re
from dataclasses import replace
from fractions import Fraction
from random import Random

import numpy as np
import pytest
from pydantic import ValidationError

from colocated_grpo.environments import EnvironmentSetupError
from colocated_grpo.environments.build import build_environments
from colocated_grpo.environments.streams import PromptSource
from colocated_grpo.environments.town.players import reply
from colocated_grpo.environments.turns.games import PendingGroups
from colocated_grpo.errors import RunError
from colocated_grpo.settings.schema import Config
from colocated_grpo.tools.make_model import build_char_tokenizer
from colocated_grpo.types import Completion, Group, Prompt
from tests.support.echo_games import RECORDS
from tests.support.paths import SUPPORT
from tests.support.small_policy import group_of, rollout_of
from tests.support.town_tables import random_reply

TOKENIZER = build_char_tokenizer()
ECHO = f"{SUPPORT / 'echo_games.py'}:Echo"
BRIEF = {"prompts": "brief", "memory": 4, "rules": {"tool_calls": 0, "max_days": 2}}
WORDS = ["a", "bbb", "ab"]


def built(*entries, max_prompt_tokens=400, seed=0, **settings):
    config = Config(
        model={"name": "none"},
        environments=entries,
        rollout={"max_prompt_tokens": max_prompt_tokens},
        seed=seed,
        **settings,
    )
    return build_environments(config, TOKENIZER)


def echo(entry=None, **args):
    return {"type": "turns", "name": ECHO, "args": args, **(entry or {})}


def town(entry=None, **args):
    return {"type": "turns", "name": "town", "args": {**BRIEF, **args}, **(entry or {})}


def scored_group(made, prompt: Prompt, texts: list[str]) -> Group:
    """Return the group as a rank sends it back, with a pickled and unpickled prompt."""
    prompt = pickle.loads(pickle.dumps(prompt))
    completion = Completion(token_ids=[5], sampling_logprobs=[-1.0], finish_reason="stop", policy_version=0)
    scores = made.scorers[prompt.source].score(prompt, [completion] * len(texts), texts)
    rollouts = [
        replace(rollout_of(prompt.token_ids, [5, 6]), text=text, score=score)
        for text, score in zip(texts, scores, strict=True)
    ]
    return Group(prompt=prompt, rollouts=rollouts)


def texts_for(prompt: Prompt) -> list[str]:
    """Return replies that depend on the prompt alone, some of them malformed."""
    if prompt.source != "town":
        return WORDS
    rng = Random(prompt.text)
    turn = prompt.item["turn"]
    return [random_reply(turn, rng), "nonsense", reply("vote", "nobody"), random_reply(turn, rng)]


def play(made, source: PromptSource, steps: int, n: int):
    """Return the prompt texts and the result of each step."""
    played = []
    for _ in range(steps):
        prompts = source.next(n)
        result = source.record([scored_group(made, prompt, texts_for(prompt)) for prompt in prompts])
        played.append(([prompt.text for prompt in prompts], result))
    return played


def environment_of(source: PromptSource):
    [stream] = [stream for name, stream in source.streams.items() if name != "sorting"]
    return stream._environment


def rewards_of(groups) -> list[list[float]]:
    return [[rollout.score.reward for rollout in group.rollouts] for group in groups]


@pytest.mark.parametrize("n", [1, 5, 40])
def test_a_step_gets_as_many_distinct_turns_as_requested(n):
    made = built(town(games=1))
    source = made.open_source()
    for _ in range(6):
        prompts = source.next(n)
        assert len({prompt.item["turn"].id for prompt in prompts}) == n
        source.record([scored_group(made, prompt, texts_for(prompt)) for prompt in prompts])


def test_no_turn_is_sampled_in_two_steps():
    made = built(town(games=2))
    source = made.open_source()
    sampled = []
    for _ in range(12):
        prompts = source.next(7)
        sampled += [prompt.item["turn"].id for prompt in prompts]
        source.record([scored_group(made, prompt, texts_for(prompt)) for prompt in prompts])
    assert len(set(sampled)) == len(sampled)


@pytest.mark.parametrize(("commit", "allowed"), [("first", {"a"}), ("best", {"bbb"}), ("random", set(WORDS))])
def test_one_completion_of_each_turn_is_committed(commit, allowed):
    made = built(echo({"commit": commit}, games=2))
    source = made.open_source()
    played = play(made, source, 5, 4)
    committed = environment_of(source).committed
    assert len(committed) == len({turn for turn, _ in committed}) == 20
    assert {word for _, word in committed} == allowed
    again = made.open_source()
    assert play(made, again, 5, 4) == played
    assert environment_of(again).committed == committed


def test_commits_do_not_depend_on_the_order_in_which_groups_arrive():
    made = built(echo({"commit": "random"}, games=3))
    forward, backward = made.open_source(), made.open_source()
    for _ in range(4):
        groups = [scored_group(made, prompt, WORDS) for prompt in forward.next(5)]
        assert backward.next(5) == [group.prompt for group in groups]
        forward.record(groups)
        backward.record(groups[::-1])
    assert environment_of(forward).committed == environment_of(backward).committed


def test_any_rank_scores_a_turn_as_the_game_itself_does():
    here, elsewhere = built(town()), built(town())
    source = here.open_source()
    for _ in range(10):
        prompts = source.next(6)
        for prompt in prompts:
            turn, texts = prompt.item["turn"], texts_for(prompt)
            expected = [each.reward for each in environment_of(source).score(turn, texts)]
            assert rewards_of([scored_group(elsewhere, prompt, texts)]) == [expected]
        source.record([scored_group(elsewhere, prompt, texts_for(prompt)) for prompt in prompts])


def test_a_game_may_score_with_plain_numbers(monkeypatch):
    made = built(echo())
    source = made.open_source()
    monkeypatch.setattr(type(environment_of(source)), "score", lambda _self, _turn, texts: [1, None, 0.5])
    assert rewards_of([scored_group(made, source.next(1)[0], WORDS)]) == [[1.0, None, 0.5]]


def test_games_and_tasks_are_mixed_by_weight_and_each_keeps_its_groups():
    made = built({"type": "task", "name": "sorting"}, echo({"weight": 3.0}, games=9, pays=1.0))
    source = made.open_source()
    prompts = source.next(8)
    assert sum(prompt.source == "sorting" for prompt in prompts) == 2
    result = source.record([scored_group(made, prompt, WORDS) for prompt in prompts])
    assert {prompts[place].source for place in result.trained_now} == {"sorting"}
    assert len(result.trained_now) == 2
    assert result.released == []


def test_without_delayed_rewards_every_group_is_trained_at_once():
    made = built(town(credit="phase"))
    for _, result in play(made, made.open_source(), 30, 5):
        assert (result.trained_now, result.released) == ([0, 1, 2, 3, 4], [])


def test_a_return_is_added_to_the_committed_completion():
    made = built(echo({"commit": "best"}, length=2, pays=10.0))
    source = made.open_source()
    (_, first), (_, second) = play(made, source, 2, 1)
    assert (first.trained_now, first.released) == ([], [])
    assert second.trained_now == []
    assert rewards_of(second.released) == [[1.0, 13.0, 2.0]] * 2
    assert second.released[0].rollouts[1].score.parts["return"] == 10.0
    assert [group.prompt.index for group in second.released] == [0, 1]


def test_several_returns_of_a_turn_are_added(monkeypatch):
    made = built(echo(length=1, pays=10.0))
    source = made.open_source()
    returns = environment_of(source).drain_returns
    monkeypatch.setattr(environment_of(source), "drain_returns", lambda: [*returns(), *returns()])
    [(_, result)] = play(made, source, 1, 1)
    assert rewards_of(result.released) == [[21.0, 3.0, 2.0]]


def test_turns_that_wait_for_a_later_step_keep_no_routes():
    pending = PendingGroups(max_wait=3)
    rollout = replace(rollout_of([1], [2, 3]), routes=np.zeros((2, 1, 1), np.uint8))
    for turn in ("at once", "later"):
        pending.add(turn, group_of(0, [rollout]), 0)
    ([now], _) = pending.end_step({"at once": 1.0})
    assert now.rollouts[0].routes is not None
    resumed = PendingGroups(max_wait=3)
    resumed.load_state_dict(json.loads(json.dumps(pending.state_dict())))
    for waiting in (pending, resumed):
        ([then], _) = waiting.end_step({"later": 1.0})
        assert then.rollouts[0].routes is None


def test_an_overdue_turn_is_trained_once_without_its_return():
    made = built(echo({"max_wait": 2}, length=4, pays=10.0))
    released = [rewards_of(result.released) for _, result in play(made, made.open_source(), 6, 1)]
    plain, with_return = [1.0, 3.0, 2.0], [11.0, 3.0, 2.0]
    # The first turn is released two steps after it was sampled; the game ends with the fourth.
    assert released == [[], [], [plain], [with_return] * 3, [], []]


@pytest.mark.parametrize("credit", ["terminal", "mix"])
def test_every_group_of_town_is_trained_exactly_once(credit):
    made = built(town({"max_wait": 30}, credit=credit, games=2))
    source = made.open_source()
    played = play(made, source, 60, 4)
    trained = [group.prompt.index for _, result in played for group in result.released]
    waiting = played[-1][1].metrics["town/turns_waiting"]
    assert len(set(trained)) == len(trained) == 240 - waiting
    returned = [r for _, s in played for g in s.released for r in g.rollouts if "return" in r.score.parts]
    assert len(returned) > 50
    assert {abs(r.score.parts["return"]) for r in returned if credit == "terminal"} <= {0.0, 1.0}


@pytest.mark.parametrize(
    ("entry", "steps"), [(echo(games=2, pays=1.0), 3), (town(credit="mix", players=["policy", "random"]), 9)]
)
@pytest.mark.parametrize("cut", [0, 1, 7])
def test_a_resumed_run_samples_and_trains_the_same_turns_as_an_uninterrupted_one(entry, steps, cut):
    entry = {**entry, "max_wait": 5, "commit": "random"}
    made = built({"type": "task", "name": "sorting"}, entry)
    source = made.open_source()
    play(made, source, cut, 6)
    state = json.loads(json.dumps(source.state_dict()))
    expected = play(made, source, steps, 6)
    other = built({"type": "task", "name": "sorting"}, entry)
    resumed = other.open_source()
    play(other, resumed, 2, 3)
    resumed.load_state_dict(state)
    assert play(other, resumed, steps, 6) == expected
    assert resumed.state_dict() == source.state_dict()


@pytest.mark.parametrize("entry", [town(credit="mix"), echo(bad="shared", pays=1.0)])
def test_a_saved_state_is_not_changed_by_later_steps(entry):
    made = built(entry)
    source = made.open_source()
    play(made, source, 5, 6)
    state = source.state_dict()
    before = json.dumps(state)
    play(made, source, 5, 6)
    assert json.dumps(state) == before


def test_turns_with_too_long_prompts_are_played_by_the_environment():
    made = built(echo(games=1, length=11), max_prompt_tokens=len("0.9 of 9") + 3)
    source = made.open_source()
    assert [prompt.item["turn"].id for prompt in source.next(2)] == ["0.9", "1.9"]
    assert environment_of(source).passed == ["0.11", "0.10", "1.11", "1.10"]
    short = built(town(games=2), max_prompt_tokens=180)
    source, dropped = short.open_source(), 0.0
    for _ in range(20):
        prompts = source.next(3)
        assert all(len(prompt.token_ids) <= 180 for prompt in prompts)
        result = source.record([scored_group(short, prompt, texts_for(prompt)) for prompt in prompts])
        dropped += result.metrics["prompts_dropped"]
    assert dropped > 10


def test_a_game_whose_prompts_are_all_too_long_raises_one_line():
    with pytest.raises(EnvironmentSetupError, match=r"1000 consecutive prompts .* rollout\.max_prompt_tokens=3"):
        built(echo(), max_prompt_tokens=3).open_source().next(1)


def test_games_without_open_turns_raise_one_line():
    with pytest.raises(EnvironmentSetupError, match="no open turn after 1000 calls"):
        built(echo(bad="silent")).open_source().next(1)


def test_an_untrained_seat_without_an_opponent_raises_one_line():
    with pytest.raises(EnvironmentSetupError, match=r"turn 0\.4 belongs to a seat that is not trained.*opponent: {"):
        built(echo(frozen_seat=True, length=4)).open_source().next(1)


@pytest.mark.parametrize("pays", [0.0, 1.0])
def test_turns_of_the_opponent_are_extra_and_committed_but_not_trained(pays):
    made = built(echo({"opponent": {}}, games=3, frozen_seat=True, pays=pays))
    source, trained, by_opponent, last = made.open_source(), [], [], -1
    for _ in range(6):
        prompts = source.next(4)
        assert [prompt.index for prompt in prompts] == list(range(last + 1, last + 1 + len(prompts)))
        last = prompts[-1].index
        own = [prompt for prompt in prompts if not prompt.by_opponent]
        assert len(own) == 4
        by_opponent += [prompt.item["turn"] for prompt in prompts if prompt.by_opponent]
        groups = [scored_group(made, prompt, WORDS[:1] if prompt.by_opponent else WORDS) for prompt in prompts]
        result = source.record(groups)
        assert result.metrics["Echo/opponent_turns"] == len(prompts) - 4
        assert result.metrics["Echo/reward/talk"] == sum(map(len, WORDS)) / len(WORDS), "without the opponent's replies"
        trained += [groups[place] for place in result.trained_now] + result.released
    assert by_opponent
    assert all(turn.left % 2 == 0 for turn in by_opponent)
    assert {turn for turn, _ in environment_of(source).committed} >= {turn.id for turn in by_opponent}
    assert trained
    assert not any(group.prompt.by_opponent for group in trained)


def test_a_step_ends_even_if_every_game_awaits_the_opponent():
    made = built(echo({"opponent": {}}, length=4, frozen_seat=True))
    source = made.open_source()
    first = source.next(20)
    assert len(first) == 20
    assert all(prompt.by_opponent for prompt in first)
    result = source.record([scored_group(made, prompt, WORDS[:1]) for prompt in first])
    assert result.trained_now == []
    assert [prompt.by_opponent for prompt in source.next(20)] == [False] * 20


def test_held_out_turns_never_belong_to_the_opponent():
    made = built(echo({"opponent": {}}, frozen_seat=True))
    assert all(prompt.item["turn"].trainable for prompt in made.held_out(5))


def test_held_out_turns_are_fixed_and_from_separate_games():
    made = built(town())
    held_out = made.held_out(70)
    assert [prompt.text for prompt in held_out] == [prompt.text for prompt in made.held_out(70)]
    assert len({prompt.item["turn"].phase for prompt in held_out}) >= 5, "games are played on through every phase"
    for seed in (0, 1):
        other = built(town(), seed=seed)
        trained = {text for texts, _ in play(other, other.open_source(), 10, 20) for text in texts}
        assert not trained & {prompt.text for prompt in held_out}
    scores = [rewards_of([scored_group(made, prompt, texts_for(prompt))]) for prompt in held_out]
    assert all(max(reward for reward in group[0]) >= 0.5 for group in scores)


def test_rates_are_means_over_all_completions_and_rewards_are_split_by_phase():
    made = built(echo())
    [(_, result)] = play(made, made.open_source(), 1, 2)
    assert result.metrics["Echo/parse_rate"] == pytest.approx(2 / 3)
    assert result.metrics["Echo/reward/talk"] == 2.0
    assert result.metrics["Echo/committed"] == 2.0


def test_the_run_ends_after_enough_steps_at_the_target_parse_rate():
    entry = {"stop_at_parse_rate": 0.6, "stop_after": 3}
    made = built(echo(entry))
    source = made.open_source()
    assert [result.finished for _, result in play(made, source, 4, 1)] == [False, False, True, True]
    resumed = made.open_source()
    resumed.load_state_dict(source.state_dict())
    assert play(made, resumed, 1, 1)[0][1].finished
    strict = built(echo({"stop_at_parse_rate": 0.7, "stop_after": 1}))
    assert not any(result.finished for _, result in play(strict, strict.open_source(), 4, 1))


def test_records_of_games_name_their_source():
    made = built(echo(length=1))
    [(_, result)] = play(made, made.open_source(), 1, 2)
    assert [(game["source"], game["game"]) for game in result.games] == [
        ("echo_games.py:Echo", 0),
        ("echo_games.py:Echo", 1),
    ]


def test_a_failing_score_costs_the_turn_its_reward_and_a_failing_commit_ends_the_run():
    made = built(echo(bad="score"))
    group = scored_group(made, made.open_source().next(1)[0], WORDS)
    assert rewards_of([group]) == [[None] * 3]
    assert re.fullmatch(r"KeyError: 'no such word' \(echo_games.py, line \d+\)", group.rollouts[0].score.error)
    made = built(echo(bad="commit"))
    source = made.open_source()
    group = scored_group(made, source.next(1)[0], WORDS)
    with pytest.raises(RunError, match=r"commit\(\) failed: RuntimeError: the game is broken"):
        source.record([group])


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("return", r"drain_returns\(\) failed: ValueError: a reward must be None or a number up to 1e\+30"),
        ("record", r"drain_games\(\) failed: TypeError: Object of type Fraction is not JSON"),
        *((bad, r"drain_games\(\) failed: TypeError: a record has a number 'game', a 'winner'") for bad in RECORDS),
        ("stats", r"drain_stats\(\) failed: ValueError: could not convert string to float"),
        ("undue", r"drain_returns\(\) failed: ValueError: .*, so `delayed` must be True"),
    ],
)
def test_invalid_data_of_a_game_ends_the_run_with_the_method_named(bad, message):
    made = built(echo(bad=bad, length=1, pays=bad != "undue"))
    source = made.open_source()
    group = scored_group(made, source.next(1)[0], WORDS)
    with pytest.raises(RunError, match=message):
        source.record([group])


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("no turns", "TypeError: 'NoneType' object is not iterable"),
        ("text", "AttributeError: 'str' object has no attribute 'id'"),
        ("numbers", "ValueError: turn 3: an id must be text"),
        ("repeated", "ValueError: two turns have the same id, of 0"),
        ("open again", r"ValueError: turn '0\.3': .* not that of a turn that was committed"),
    ],
)
def test_invalid_turns_end_the_run_with_one_line(bad, message):
    made = built(echo(bad=bad, games=2, pays=1.0))
    with pytest.raises(RunError, match=rf"next_batch\(\) failed: {message}"):
        play(made, made.open_source(), 2, 1)


@pytest.mark.parametrize(
    ("bad", "message"),
    [("snapshot", "RuntimeError: cannot be saved"), ("state", "TypeError: Object of type set is not")],
)
def test_games_that_cannot_be_saved_raise_one_line(bad, message):
    with pytest.raises(RunError, match=rf"snapshot\(\) failed: {message}"):
        built(echo(bad=bad)).open_source().state_dict()


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("play_on", "RuntimeError: no script"),
        ("stays", r"ValueError: turn 0\.11000 is still open after"),
        ("absent", "ValueError: 10001 turns without one of the policy"),
    ],
)
def test_held_out_games_that_fail_raise_one_line(bad, message):
    with pytest.raises(RunError, match=rf"next_batch\(\), pattern\(\) or play_on\(\) failed: {message}"):
        built(echo(bad=bad, length=11_000)).held_out(2)


def test_numbers_of_other_types_are_converted_to_float():
    made = built(echo(bad="fractions", length=1, pays=Fraction(1, 2)))
    source = made.open_source()
    group = scored_group(made, source.next(1)[0], WORDS)
    assert [type(part) for part in group.rollouts[0].score.parts.values()] == [float]
    [released] = source.record([group]).released
    assert rewards_of([released]) == [[1.5, 3.0, 2.0]]
    assert type(released.rollouts[0].score.reward) is float
    json.dumps(source.state_dict())


def test_a_checkpoint_of_other_games_raises_one_line():
    state = built(town(games=2)).open_source().state_dict()
    with pytest.raises(EnvironmentSetupError, match="cannot be restored: ValueError: town: games=4"):
        built(town(games=4)).open_source().load_state_dict(state)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"type": "turns", "name": "twon"}, "unknown turn environment 'twon'; did you mean 'town'?"),
        (town(seats=6), "seats=6: not within 7 to 15"),
        (town(seats="many"), "args.seats"),
        (town(game=3), "unknown argument 'game'; did you mean 'games'?"),
        (town(credit="late"), "unknown mode 'late'"),
        (town(credit={"outcom": 1}), "unknown argument 'credit.outcom'"),
        (town(rules={"max_day": 2}), "unknown argument 'rules.max_day'"),
        (town(rules={"max_days": 0}), "rules.max_days=0: Input should be greater than or equal to 1"),
        (town(players=["policy", "frozen-100"]), "players: 'frozen-100' is unknown; valid: policy, frozen"),
        (town(players=["sensible"]), "no seat is played by the policy"),
        (town({"opponent": {}}, players=["frozen", "sensible"]), "no seat is played by the policy"),
        (town(seed=3), "args.seed is set by the run; remove it"),
        (echo(size=3), "unexpected keyword argument 'size'"),
        ({"type": "turns", "name": "json:JSONDecoder", "args": {}}, "unexpected keyword argument 'seed'"),
        ({"type": "turns", "name": "types:SimpleNamespace"}, "not a turn environment, it has no add_game, commit"),
    ],
)
def test_invalid_settings_raise_one_line(entry, message):
    with pytest.raises(EnvironmentSetupError) as caught:
        built(entry)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_delayed_rewards_without_importance_weights_are_rejected():
    loss = {"type": "dapo", "correction": {"mode": "off"}}
    with pytest.raises(EnvironmentSetupError, match=r"loss\.correction\.mode=off: turns of 'town' train after"):
        built(town(credit="terminal"), loss=loss)
    built(town(credit="phase"), loss=loss)
    built(town(credit="terminal"), loss={**loss, "old_logprobs": "sampling"})


@pytest.mark.parametrize("field", [{"commit": "last"}, {"max_wait": 0}, {"stop_at_parse_rate": 1.5}, {"stop_after": 0}])
def test_fields_of_the_entry_have_bounds(field):
    with pytest.raises(ValidationError):
        built(town(field))
