"""Gymnasium environments as text: the reward is the return, and siblings start from the same seed."""

from __future__ import annotations

import re
import sys

import gymnasium
import pytest
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv

from colocated_grpo.environments import EnvironmentSetupError
from colocated_grpo.environments.registry import build_episode
from tests.support.adapter_play import items, items_from, observations, played, saying

TOY = ["FrozenLake-v1", "CliffWalking-v1", "Taxi-v4", "Blackjack-v1"]
DRY = {"options": {"is_slippery": False}}


def gym(environment: str, **args):
    return build_episode(f"gymnasium:{environment}", args)


def acting(*names: str):
    return saying(*(f"<action>{name}</action>" for name in names))


def test_a_walk_over_the_lake_is_observed_step_by_step_and_rewarded_with_the_return():
    episode = gym("FrozenLake-v1", **DRY)
    item = items(episode, 1)[0]
    assert item["prompt"].endswith("Actions: left, down, right, up.\n"
                                   "Reply with one of them, such as <action>left</action>.\n\n"
                                   "P F F F\nF H F H\nF F F H\nH F F G")  # fmt: skip
    rollout = played(episode, item, acting("down", "down", "right", "right", "down", "right"))
    assert list(observations(rollout))[:2] == [
        "S F F F\nP H F H\nF F F H\nH F F G",
        "S F F F\nF H F H\nP F F H\nH F F G",
    ]
    assert rollout.score.reward == 1
    assert rollout.score.parts == {"return": 1, "invalid": 0, "finished": 1}
    assert sum(rollout.loss_mask) == sum(
        len(f"<action>{name}</action>") + 1 for name in ["down", "down", "right", "right", "down", "right"]
    )
    fallen = played(episode, item, acting("right", "down"))
    assert (fallen.score.reward, fallen.score.parts["finished"]) == (0, 1)


def test_a_step_off_the_cliff_costs_its_penalty():
    episode = gym("CliffWalking-v1", max_turns=2)
    rollout = played(episode, items(episode, 1)[0], acting("right", "up"))
    first = next(observations(rollout)).splitlines()
    assert first[-1] == "P C C C C C C C C C C G"
    assert rollout.score.reward == -101


def test_a_taxi_can_be_driven_from_its_observations_alone():
    """The driver reads nothing but the text, so every position must be in it."""
    row_of, column_of = re.compile(r"row (\d)"), re.compile(r"column (\d)")

    def driver(read: str) -> str:
        sentence = read[read.index("Taxi at") :]
        (row, *rows), (column, *columns) = (list(map(int, p.findall(sentence))) for p in (row_of, column_of))
        waiting = "Passenger at" in sentence
        goal = (rows[0], columns[0]) if waiting else (rows[-1], columns[-1])
        if (row, column) == goal:
            move = "pickup" if waiting else "dropoff"
        elif column != goal[1] and row == 2:  # the middle row has no walls
            move = "east" if goal[1] > column else "west"
        elif column != goal[1]:
            move = "south" if row < 2 else "north"
        else:
            move = "south" if goal[0] > row else "north"
        return f"<action>{move}</action>"

    episode = gym("Taxi-v4")
    for item in items(episode, 8):
        rollout = played(episode, item, driver)
        assert rollout.score.parts["finished"] == 1
        assert rollout.score.reward == 21 - len(rollout.text.split("<action>")[1:])


def test_actions_may_be_given_by_number():
    episode = gym("Blackjack-v1")
    rewards = [played(episode, item, acting("0")).score.reward for item in items(episode, 30)]
    assert {-1, 1} <= set(rewards) <= {-1, 0, 1}
    assert all(re.search(r"You have \d+.*\. The dealer shows \d+\.$", item["prompt"]) for item in items(episode, 9))


def test_a_reply_without_an_action_costs_a_turn_and_gets_a_hint():
    episode = gym("FrozenLake-v1", max_turns=4, invalid_reward=-0.5, **DRY)
    policy = saying("left", "<action>jump</action>", "<action>4</action>", "<think><action>up</action></think> hm")
    rollout = played(episode, items(episode, 1)[0], policy)
    assert set(observations(rollout)) == {"No action. Reply with one of them, such as <action>left</action>."}
    assert rollout.score.reward == -2
    assert rollout.score.parts == {"return": 0, "invalid": 1, "finished": 0}


def test_the_last_action_of_a_reply_counts_and_is_case_insensitive():
    episode = gym("FrozenLake-v1", **DRY)
    rollout = played(episode, items(episode, 1)[0], saying("<action>right</action> no: <action> DOWN </action>"))
    assert next(observations(rollout)).splitlines()[1].startswith("P")


def test_prompts_from_starts_anywhere_without_building_earlier_episodes():
    episode = gym("Blackjack-v1")
    assert items_from(episode, 3, 2) == items(episode, 5)[3:]
    assert len(items_from(episode, 10**9, 1)) == 1


@pytest.mark.parametrize("environment", TOY)
def test_the_same_seed_and_replies_give_the_same_episode_in_new_and_used_environments(environment):
    episode, again = gym(environment), gym(environment)
    six = items(episode, 6)
    assert six == items(again, 6)
    assert six != items(episode, 6, seed=1)
    assert {item["seed"] % 2 for item in six} == {0}
    assert {item["seed"] % 2 for item in items(episode, 6, split="held_out")} == {1}
    first, *rest = [played(episode, item, acting(*"1203210321"), room=900) for item in six]
    assert [first, *rest] == [played(again, item, acting(*"1203210321"), room=900) for item in six]
    assert played(episode, six[0], acting(*"1203210321"), room=900) == first


def test_an_episode_that_runs_out_of_tokens_keeps_its_rewards():
    episode = gym("CliffWalking-v1")
    rollout = played(episode, items(episode, 1)[0], acting("up"), room=200)
    assert rollout.score.parts["finished"] == 0
    assert rollout.finish_reason == "length"
    assert rollout.score.reward == -rollout.text.count("</action>")


def test_other_environments_show_numbers_unless_rules_and_action_names_are_given():
    assert items(gym("CartPole-v1"), 1)[0]["prompt"].startswith("Actions: 0, 1.\n")
    named = gym("CartPole-v1", actions=["left", "right"], rules="Balance the pole.", max_turns=500)
    prompt = items(named, 1)[0]["prompt"]
    assert prompt.startswith("Balance the pole.\nActions: left, right.\n")
    assert re.search(r"\n\n\[[-\d.e ]+\]$", prompt)
    assert played(named, items(named, 1)[0], acting("left")).score.reward == pytest.approx(9, abs=2)


class OwnLake(FrozenLakeEnv):
    """An environment without a view."""


def test_ansi_rendering_is_shown_without_colour_codes():
    gymnasium.register(id="OwnLake-v0", entry_point=OwnLake)
    episode = gym("OwnLake-v0", options={"render_mode": "ansi", "is_slippery": False})
    assert items(episode, 1)[0]["prompt"].endswith("\n\nSFFF\nFHFH\nFFFH\nHFFG")


def test_a_time_limit_of_gymnasium_ends_an_episode():
    episode = gym("FrozenLake-v1", options={"max_episode_steps": 3})
    rollout = played(episode, items(episode, 1)[0], acting("left"))
    assert rollout.text.count("</action>") == 3
    assert rollout.score.parts["finished"] == 1


@pytest.mark.parametrize(
    ("environment", "args", "message"),
    [
        ("Frozenlake-v1", {}, "Did you mean: `FrozenLake`"),
        ("Pendulum-v1", {}, "Pendulum-v1 has the action space Box"),
        ("Taxi-v4", {"actions": ["go"]}, "args.actions=['go']: Taxi-v4 has 6 actions"),
        ("FrozenLake-v1", {"options": {"map_name": None}}, "is not reproducible from its seed"),
        ("FrozenLake-v1", {"option": {}}, "unknown argument 'option'; did you mean 'options'"),
    ],
)
def test_what_cannot_be_played_is_rejected_in_one_line(environment, args, message):
    with pytest.raises(EnvironmentSetupError, match=re.escape(message)) as caught:
        gym(environment, **args)
    assert "\n" not in str(caught.value)


def test_a_missing_gymnasium_names_the_pip_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(EnvironmentSetupError, match="pip install gymnasium"):
        gym("FrozenLake-v1")
