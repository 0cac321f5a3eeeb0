"""The episode of the TRL guide plays tools and environments as TRL's trainer does, and trains."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import random
import signal
from itertools import islice

import pytest

from colocated_grpo import Trainer
from colocated_grpo.environments import AssistantMessage, ContextExhausted
from tests.support.paths import ROOT
from tests.support.programs import without_launcher
from tests.support.ranks import Ranks
from tests.support.training_runs import settings, tiny_model

FILE = ROOT / "docs/examples/trl_episode.py"
TIMEOUT = 300.0


def episode(*arguments, **options):
    spec = importlib.util.spec_from_file_location("trl_episode", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.TRLEpisode(*arguments, **options)


class Adder:
    """An environment in the form that TRL expects."""

    def reset(self, **row):
        self.sum, self.target = 0, row.get("target", random.randint(1, 6))
        return f" Reach {self.target}."

    def get_reward(self):
        return float(self.sum == self.target)

    def add(self, amount: int) -> int:
        """
        Add to the sum.

        Args:
            amount: The number to add.
        """
        self.sum += amount
        return self.sum


async def multiply(a: int, b: int) -> int:
    """
    Multiply two integers.

    Args:
        a: The first.
        b: The second.
    """
    return a * b


class Scripted:
    """A policy that says the given texts."""

    def __init__(self, *texts):
        self.texts, self.observed = list(texts), []

    async def generate(self):
        if not self.texts:
            raise ContextExhausted
        return AssistantMessage(text=self.texts.pop(0), token_ids=[1], finish_reason="stop")

    def observe(self, messages):
        self.observed += messages


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def test_an_environment_gets_the_row_its_calls_and_its_own_reward():
    made = episode([{"prompt": [{"role": "user", "content": "Count."}], "target": 3}] * 9, environment_factory=Adder)
    [item] = made.prompts(0, "train")
    assert item["prompt"] == [{"role": "user", "content": "Count. Reach 3."}]
    assert [tool["function"]["name"] for tool in item["tools"]] == ["add"]
    model = Scripted(call("add", amount=2) + call("add", amount=1), "done")
    assert asyncio.run(made.run(item, model)) == {"reward": 1.0, "get_reward": 1.0}
    assert [message["content"] for message in model.observed] == ["2", "3"]
    assert len([*made.prompts(0, "held_out")]) == 8


def test_a_text_prompt_becomes_a_message_to_which_an_environment_adds_its_text():
    made = episode([{"prompt": "Count.", "target": 3}], environment_factory=Adder, held_out=0)
    [item] = made.prompts(0, "train")
    assert item["prompt"] == [{"role": "user", "content": "Count. Reach 3."}]


def test_an_environment_that_draws_its_task_draws_the_same_for_a_whole_group():
    made = episode(environment_factory=Adder)
    items = [*islice(made.prompts(0, "train"), 8)]
    assert len({item["text"] for item in items}) > 1
    for item in items:
        target = int(item["text"].split()[-1].strip("."))
        reward = asyncio.run(made.run(item, Scripted(call("add", amount=target), "done")))
        assert reward == {"reward": 1.0, "get_reward": 1.0}


def test_a_reset_that_fails_leaves_the_state_of_random():
    class Broken:
        def reset(self, **row):
            raise ValueError("no task")

    state = random.getstate()
    with pytest.raises(ValueError, match="no task"):
        next(episode(environment_factory=Broken).prompts(0, "train"))
    assert random.getstate() == state


def test_more_held_out_rows_than_there_are_is_an_error():
    with pytest.raises(ValueError, match="held_out=8: must be below the number of rows, 5"):
        episode([{"prompt": []}] * 5)


def test_rewards_see_the_messages_as_in_trl():
    def used(completions, answer, **columns):
        [[first, result, last]] = completions
        assert first["tool_calls"] == [
            {"type": "function", "function": {"name": "multiply", "arguments": {"a": 2, "b": 3}}}
        ]
        return [float(result == {"role": "tool", "name": "multiply", "content": "6"} and last["content"] == answer[0])]

    async def nothing(completions, **columns):
        return [None]

    made = episode(
        [{"prompt": [], "answer": "6"}], [used, nothing], tools=[multiply], reward_weights=[0.5, 1], held_out=0
    )
    [item] = made.prompts(0, "train")
    assert asyncio.run(made.run(item, Scripted(call("multiply", a=2, b=3), "6"))) == {"reward": 0.5, "used": 1.0}


def test_the_policy_observes_a_failed_call_and_calls_may_be_limited():
    made = episode([{"prompt": []}], lambda completions, **columns: [len(completions[0])], held_out=0)
    [item] = made.prompts(0, "train")
    model = Scripted(call("gone"))
    assert asyncio.run(made.run(item, model))["reward"] == 2
    assert model.observed[0]["content"] == "{'error': 'Tool gone not found.'}"
    made.most_calls = 1
    assert asyncio.run(made.run(item, Scripted(*[call("gone")] * 9)))["reward"] == 3


def test_a_tool_that_sets_an_alarm_fails_the_episode_because_each_call_would_fail():
    def search(text: str) -> str:
        """Search.

        Args:
            text: Text.
        """
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        return text

    made = episode([{"prompt": []}], lambda completions, **columns: [1.0], tools=[search], held_out=0)
    [item] = made.prompts(0, "train")
    with pytest.raises(ValueError, match="signal only works in main thread"):
        asyncio.run(made.run(item, Scripted(call("search", text="x"), "6")))


def trained(model, output):
    rows = [{"prompt": [{"role": "user", "content": f"{number}"}], "target": 3} for number in range(20)]
    reads_tools = "{{ tools | length }}{% for message in messages %} {{ message.content }}{% endfor %}"
    given = settings(model, output_dir=str(output), training_steps=2)
    given["model"]["chat_template"] = reads_tools
    given["environments"] = [{"type": "episode", "name": episode(rows, environment_factory=Adder)}]
    with without_launcher():
        return Trainer(**given).train()


def test_it_trains(tmp_path):
    with Ranks(trained, 1, tiny_model(), tmp_path) as process:
        result = process.results(TIMEOUT)[0]
    assert (result.outcome, result.steps) == ("finished", 2)
    assert "reward/get_reward" in result.metrics
