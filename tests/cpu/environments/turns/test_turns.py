"""Games trained turn by turn: every prompt a new turn, judged anywhere, one completion carried out, exact resume."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from fractions import Fraction
from random import Random

import pytest
from pydantic import ValidationError

from colocated_grpo.config import Config
from colocated_grpo.environments import EnvironmentSetupError, build_environments
from colocated_grpo.environments.source import PromptSource
from colocated_grpo.environments.town.players import reply
from colocated_grpo.errors import RunError
from colocated_grpo.tools.char_tokenizer import build_char_tokenizer
from colocated_grpo.types import Completion, Group, Prompt
from tests.support.paths import SUPPORT
from tests.support.small_policy import rollout_of
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


def judged(made, prompt: Prompt, texts: list[str]) -> Group:
    """The group that a rank sends back: prompt and scores went through pickle."""
    prompt = pickle.loads(pickle.dumps(prompt))
    completion = Completion(token_ids=[5], sampling_logprobs=[-1.0], finish_reason="stop", policy_version=0)
    scores = made.scorers[prompt.source].score(prompt, [completion] * len(texts), texts)
    rollouts = [
        replace(rollout_of(prompt.token_ids, [5, 6]), text=text, score=score)
        for text, score in zip(texts, scores, strict=True)
    ]
    return Group(prompt=prompt, rollouts=rollouts)


def texts_for(prompt: Prompt) -> list[str]:
    """Replies that depend on the prompt alone, some of them bad."""
    if prompt.source != "town":
        return WORDS
    rng = Random(prompt.text)
    turn = prompt.item["turn"]
    return [random_reply(turn, rng), "nonsense", reply("vote", "nobody"), random_reply(turn, rng)]


def play(made, source: PromptSource, steps: int, n: int):
    """What each step asked and what became of it, as comparable data."""
    told = []
    for _ in range(steps):
        prompts = source.next(n)
        settled = source.record([judged(made, prompt, texts_for(prompt)) for prompt in prompts])
        told.append(([prompt.text for prompt in prompts], settled))
    return told


def environment_of(source: PromptSource):
    [stream] = [stream for name, stream in source.streams.items() if name != "sorting"]
    return stream._environment


def rewards_of(groups) -> list[list[float]]:
    return [[rollout.score.reward for rollout in group.rollouts] for group in groups]


@pytest.mark.parametrize("n", [1, 5, 40])
def test_a_step_gets_as_many_different_turns_as_it_asks_for(n):
    made = built(town(games=1))
    source = made.open_source()
    for _ in range(6):
        prompts = source.next(n)
        assert len({prompt.item["turn"].id for prompt in prompts}) == n
        source.record([judged(made, prompt, texts_for(prompt)) for prompt in prompts])


def test_no_turn_is_asked_in_two_steps():
    made = built(town(games=2))
    source = made.open_source()
    asked = []
    for _ in range(12):
        prompts = source.next(7)
        asked += [prompt.item["turn"].id for prompt in prompts]
        source.record([judged(made, prompt, texts_for(prompt)) for prompt in prompts])
    assert len(set(asked)) == len(asked)


@pytest.mark.parametrize(("commit", "carried_out"), [("first", {"a"}), ("best", {"bbb"}), ("random", set(WORDS))])
def test_one_completion_of_each_turn_is_carried_out(commit, carried_out):
    made = built(echo({"commit": commit}, games=2))
    source = made.open_source()
    told = play(made, source, 5, 4)
    committed = environment_of(source).committed
    assert len(committed) == len({turn for turn, _ in committed}) == 20
    assert {word for _, word in committed} == carried_out
    again = made.open_source()
    assert play(made, again, 5, 4) == told
    assert environment_of(again).committed == committed


def test_commits_do_not_depend_on_the_order_in_which_groups_arrive():
    made = built(echo({"commit": "random"}, games=3))
    forward, backward = made.open_source(), made.open_source()
    for _ in range(4):
        groups = [judged(made, prompt, WORDS) for prompt in forward.next(5)]
        assert backward.next(5) == [group.prompt for group in groups]
        forward.record(groups)
        backward.record(groups[::-1])
    assert environment_of(forward).committed == environment_of(backward).committed


def test_any_rank_judges_a_turn_as_the_game_itself_would():
    here, elsewhere = built(town()), built(town())
    source = here.open_source()
    for _ in range(10):
        prompts = source.next(6)
        for prompt in prompts:
            turn, texts = prompt.item["turn"], texts_for(prompt)
            expected = [each.reward for each in environment_of(source).score(turn, texts)]
            assert rewards_of([judged(elsewhere, prompt, texts)]) == [expected]
        source.record([judged(elsewhere, prompt, texts_for(prompt)) for prompt in prompts])


def test_games_and_tasks_are_mixed_by_weight_and_each_keeps_its_groups():
    made = built({"type": "task", "name": "sorting"}, echo({"weight": 3.0}, games=9, pays=1.0))
    source = made.open_source()
    prompts = source.next(8)
    assert sum(prompt.source == "sorting" for prompt in prompts) == 2
    settled = source.record([judged(made, prompt, WORDS) for prompt in prompts])
    assert {prompts[place].source for place in settled.trained_now} == {"sorting"}
    assert len(settled.trained_now) == 2
    assert settled.released == []


def test_without_delayed_rewards_every_group_is_trained_at_once():
    made = built(town(credit="phase"))
    for _, settled in play(made, made.open_source(), 30, 5):
        assert (settled.trained_now, settled.released) == ([0, 1, 2, 3, 4], [])


def test_a_delayed_reward_is_added_to_the_completion_that_was_carried_out():
    made = built(echo({"commit": "best"}, length=2, pays=10.0))
    source = made.open_source()
    (_, first), (_, second) = play(made, source, 2, 1)
    assert (first.trained_now, first.released) == ([], [])
    assert second.trained_now == []
    assert rewards_of(second.released) == [[1.0, 13.0, 2.0]] * 2
    assert second.released[0].rollouts[1].score.parts["return"] == 10.0
    assert [group.prompt.index for group in second.released] == [0, 1]


def test_a_turn_that_waits_too_long_is_trained_once_and_without_its_return():
    made = built(echo({"max_wait": 2}, length=4, pays=10.0))
    late = [rewards_of(settled.released) for _, settled in play(made, made.open_source(), 6, 1)]
    plain, with_return = [1.0, 3.0, 2.0], [11.0, 3.0, 2.0]
    # The first turn is given up two steps after it was sampled; the game ends with the fourth.
    assert late == [[], [], [plain], [with_return] * 3, [], []]


@pytest.mark.parametrize("credit", ["terminal", "mix"])
def test_every_group_of_town_is_trained_exactly_once(credit):
    made = built(town({"max_wait": 30}, credit=credit, games=2))
    source = made.open_source()
    told = play(made, source, 60, 4)
    trained = [group.prompt.index for _, settled in told for group in settled.released]
    waiting = told[-1][1].metrics["town/turns_waiting"]
    assert len(set(trained)) == len(trained) == 240 - waiting
    returned = [r for _, s in told for g in s.released for r in g.rollouts if "return" in r.score.parts]
    assert len(returned) > 50
    assert {abs(r.score.parts["return"]) for r in returned if credit == "terminal"} <= {0.0, 1.0}


@pytest.mark.parametrize(
    ("entry", "steps"), [(echo(games=2, pays=1.0), 3), (town(credit="mix", players=["policy", "random"]), 9)]
)
@pytest.mark.parametrize("cut", [0, 1, 7])
def test_a_resumed_run_asks_and_trains_what_the_uninterrupted_one_does(entry, steps, cut):
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


def test_a_state_taken_before_a_step_is_not_changed_by_it():
    made = built(town(credit="mix"))
    source = made.open_source()
    play(made, source, 5, 6)
    state = source.state_dict()
    before = json.dumps(state)
    play(made, source, 5, 6)
    assert json.dumps(state) == before


def test_turns_that_are_too_long_to_ask_are_played_by_the_environment():
    made = built(echo(games=1, length=11), max_prompt_tokens=len("0.9 of 9") + 3)
    source = made.open_source()
    assert [prompt.item["turn"].id for prompt in source.next(2)] == ["0.9", "1.9"]
    assert environment_of(source).passed == ["0.11", "0.10", "1.11", "1.10"]
    short = built(town(games=2), max_prompt_tokens=180)
    source = short.open_source()
    for _ in range(20):
        prompts = source.next(3)
        assert all(len(prompt.token_ids) <= 180 for prompt in prompts)
        source.record([judged(short, prompt, texts_for(prompt)) for prompt in prompts])
    assert source.dropped > 10


def test_a_game_none_of_whose_turns_can_be_asked_is_named():
    with pytest.raises(EnvironmentSetupError, match=r"1000 prompts in a row .* rollout\.max_prompt_tokens=3"):
        built(echo(), max_prompt_tokens=3).open_source().next(1)


def test_games_that_ask_for_nothing_are_named():
    with pytest.raises(EnvironmentSetupError, match="1000 games gave no turn to train on"):
        built(echo(bad="silent")).open_source().next(1)


def test_a_seat_that_needs_another_model_is_refused():
    with pytest.raises(EnvironmentSetupError, match=r"turn 0\.4 is of a seat that is not trained.*opponent: {name"):
        built(echo(frozen_seat=True, length=4)).open_source().next(1)


@pytest.mark.parametrize("pays", [0.0, 1.0])
def test_turns_of_the_opponent_come_on_top_and_are_carried_out_but_not_trained(pays):
    made = built(echo({"opponent": {}}, games=3, frozen_seat=True, pays=pays))
    source, trained, by_opponent, last = made.open_source(), [], [], -1
    for _ in range(6):
        prompts = source.next(4)
        assert [prompt.index for prompt in prompts] == list(range(last + 1, last + 1 + len(prompts)))
        last = prompts[-1].index
        own = [prompt for prompt in prompts if not prompt.by_opponent]
        assert len(own) == 4
        by_opponent += [prompt.item["turn"] for prompt in prompts if prompt.by_opponent]
        groups = [judged(made, prompt, WORDS[:1] if prompt.by_opponent else WORDS) for prompt in prompts]
        settled = source.record(groups)
        assert settled.metrics["Echo/opponent_turns"] == len(prompts) - 4
        assert settled.metrics["Echo/reward/talk"] == sum(map(len, WORDS)) / len(WORDS), "of the policy's replies only"
        trained += [groups[place] for place in settled.trained_now] + settled.released
    assert by_opponent
    assert all(turn.left % 2 == 0 for turn in by_opponent)
    assert {turn for turn, _ in environment_of(source).committed} >= {turn.id for turn in by_opponent}
    assert trained
    assert not any(group.prompt.by_opponent for group in trained)


def test_a_step_in_which_every_game_waits_for_the_opponent_ends_too():
    made = built(echo({"opponent": {}}, length=4, frozen_seat=True))
    source = made.open_source()
    first = source.next(20)
    assert len(first) == 20
    assert all(prompt.by_opponent for prompt in first)
    settled = source.record([judged(made, prompt, WORDS[:1]) for prompt in first])
    assert settled.trained_now == []
    assert [prompt.by_opponent for prompt in source.next(20)] == [False] * 20


def test_held_out_turns_are_never_the_opponents():
    made = built(echo({"opponent": {}}, frozen_seat=True))
    assert all(prompt.item["turn"].trainable for prompt in made.held_out(5))


def test_held_out_turns_are_always_the_same_and_of_other_games():
    made = built(town())
    held_out = made.held_out(70)
    assert [prompt.text for prompt in held_out] == [prompt.text for prompt in made.held_out(70)]
    assert len({prompt.item["turn"].phase for prompt in held_out}) >= 5, "games go on, so that every phase is seen"
    for seed in (0, 1):
        other = built(town(), seed=seed)
        trained = {text for texts, _ in play(other, other.open_source(), 10, 20) for text in texts}
        assert not trained & {prompt.text for prompt in held_out}
    scores = [rewards_of([judged(made, prompt, texts_for(prompt))]) for prompt in held_out]
    assert all(max(reward for reward in group[0]) >= 0.5 for group in scores)


def test_rates_are_over_all_completions_and_rewards_are_told_by_phase():
    made = built(echo())
    [(_, settled)] = play(made, made.open_source(), 1, 2)
    assert settled.metrics["Echo/parse_rate"] == pytest.approx(2 / 3)
    assert settled.metrics["Echo/reward/talk"] == 2.0
    assert settled.metrics["Echo/committed"] == 2.0


def test_the_run_ends_when_the_parse_rate_has_stood_long_enough():
    entry = {"stop_at_parse_rate": 0.6, "stop_after": 3}
    made = built(echo(entry))
    source = made.open_source()
    assert [settled.finished for _, settled in play(made, source, 4, 1)] == [False, False, True, True]
    resumed = made.open_source()
    resumed.load_state_dict(source.state_dict())
    assert play(made, resumed, 1, 1)[0][1].finished
    strict = built(echo({"stop_at_parse_rate": 0.7, "stop_after": 1}))
    assert not any(settled.finished for _, settled in play(strict, strict.open_source(), 4, 1))


def test_ended_games_come_with_their_source():
    made = built(echo(length=1))
    [(_, settled)] = play(made, made.open_source(), 1, 2)
    assert [(game["source"], game["game"]) for game in settled.games] == [(ECHO, 0), (ECHO, 1)]


def test_a_judge_that_fails_costs_the_turn_its_reward_and_a_game_that_fails_ends_the_run():
    made = built(echo(bad="score"))
    group = judged(made, made.open_source().next(1)[0], WORDS)
    assert rewards_of([group]) == [[None] * 3]
    assert group.rollouts[0].score.error == "KeyError: 'no such word' (echo_games.py, line 78)"
    made = built(echo(bad="commit"))
    source = made.open_source()
    group = judged(made, source.next(1)[0], WORDS)
    with pytest.raises(RunError, match=r"commit\(\) failed: RuntimeError: the table fell over"):
        source.record([group])


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("return", r"drain_returns\(\) failed: ValueError: a reward must be None or a number up to 1e\+30"),
        ("record", r"drain_games\(\) failed: TypeError: Object of type Fraction is not JSON"),
        ("stats", r"drain_stats\(\) failed: ValueError: could not convert string to float"),
    ],
)
def test_what_a_game_tells_after_a_step_is_checked_and_blamed_on_it(bad, message):
    made = built(echo(bad=bad, length=1, pays=1.0))
    source = made.open_source()
    group = judged(made, source.next(1)[0], WORDS)
    with pytest.raises(RunError, match=message):
        source.record([group])


def test_games_that_cannot_be_saved_are_said_in_one_line():
    with pytest.raises(RunError, match=r"snapshot\(\) failed: RuntimeError: cannot be saved"):
        built(echo(bad="snapshot")).open_source().state_dict()


def test_numbers_of_other_kinds_are_plain_ones_before_they_reach_a_file():
    made = built(echo(bad="fractions", length=1, pays=Fraction(1, 2)))
    source = made.open_source()
    group = judged(made, source.next(1)[0], WORDS)
    assert [type(part) for part in group.rollouts[0].score.parts.values()] == [float]
    [late] = source.record([group]).released
    assert rewards_of([late]) == [[1.5, 3.0, 2.0]]
    assert type(late.rollouts[0].score.reward) is float
    json.dumps(source.state_dict())


def test_another_game_in_the_checkpoint_is_refused_in_one_line():
    state = built(town(games=2)).open_source().state_dict()
    with pytest.raises(EnvironmentSetupError, match="cannot be restored: ValueError: town: games=4"):
        built(town(games=4)).open_source().load_state_dict(state)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"type": "turns", "name": "twon"}, "unknown turn environment 'twon'; did you mean 'town'?"),
        (town(seats=6), "seats=6 is not within 7 to 15"),
        (town(seats="many"), "args.seats"),
        (town(game=3), "unknown setting 'game'; did you mean 'games'?"),
        (town(credit="late"), "unknown mode 'late'"),
        (town(credit={"outcom": 1}), "args.credit: unknown setting 'outcom'; did you mean 'outcome'?"),
        (town(rules={"max_day": 2}), "args.rules: unknown setting 'max_day'; did you mean 'max_days'?"),
        (town(rules={"max_days": 0}), "max_days=0 is below 1"),
        (town(players=["policy", "frozen-100"]), "unknown player 'frozen-100'; did you mean 'frozen'?"),
        (town(players=["sensible"]), "all scripted"),
        (town({"opponent": {}}, players=["frozen", "sensible"]), "the policy plays none, so there is no turn to train"),
        (town(seed=3), "args.seed is not yours to give"),
        (echo(size=3), "unexpected keyword argument 'size'"),
        ({"type": "turns", "name": "json:JSONDecoder", "args": {}}, "unexpected keyword argument 'seed'"),
        ({"type": "turns", "name": "types:SimpleNamespace"}, "not a turn environment, it has no add_game, commit"),
    ],
)
def test_settings_that_cannot_be_played_are_said_in_one_line(entry, message):
    with pytest.raises(EnvironmentSetupError) as caught:
        built(entry)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_delayed_rewards_without_importance_weights_are_refused():
    loss = {"type": "dapo", "correction": {"mode": "off"}}
    with pytest.raises(EnvironmentSetupError, match=r"loss\.correction\.mode=off would not correct for that"):
        built(town(credit="terminal"), loss=loss)
    built(town(credit="phase"), loss=loss)
    built(town(credit="terminal"), loss={**loss, "old_logprobs": "sampling"})


@pytest.mark.parametrize("field", [{"commit": "last"}, {"max_wait": 0}, {"stop_at_parse_rate": 1.5}, {"stop_after": 0}])
def test_fields_of_the_entry_are_bounded(field):
    with pytest.raises(ValidationError):
        built(town(field))
