"""The tool-use episode and its tools: exact, bounded, and solvable by the teacher of the warm start."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from itertools import islice
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colocated_grpo.environments.base import EnvironmentSetupError, Episode
from colocated_grpo.environments.chat import ChatCodec, Conversation
from colocated_grpo.environments.prompts import PromptEncoder
from colocated_grpo.environments.registry import build_episode
from colocated_grpo.environments.rewards.scoring import as_score
from colocated_grpo.environments.tasks.tool_use import ToolError, calculate, search
from colocated_grpo.tools.make_model import build_char_tokenizer
from colocated_grpo.tools.warm_start import IGNORE_INDEX, EpisodeTeacher, WarmStart
from colocated_grpo.types import Completion, Rollout, Score

TOKENIZER = build_char_tokenizer()
ROOM = 400


# Tools


@given(st.integers(-999, 999), st.integers(-999, 999), st.sampled_from("+-*"))
def test_the_calculator_agrees_with_python(left, right, symbol):
    assert calculate(f" {left} {symbol} {right}") == str(eval(f"({left}){symbol}({right})"))


@given(st.text(max_size=220) | st.sampled_from(["", "2+", "7/2", "1+2+3", "__import__('os')", "1" * 10 + "+1"]))
def test_no_other_expression_is_calculated(text):
    with suppress(ToolError):
        assert len(calculate(text)) < 20


def test_a_search_returns_the_line_of_a_name():
    text = "ann: 4\nanna: 5"
    assert (search(text, " Ann "), search(text, "anna")) == ("ann: 4", "anna: 5")
    for nothing in ("", "an", "4"):
        with pytest.raises(ToolError, match="nothing found"):
            search(text, nothing)


# Episodes


class Script:
    """Policy that returns the given messages in turn."""

    def __init__(self, *turns: str) -> None:
        self.turns = list(turns)

    async def __call__(self, token_ids: list[int], max_tokens: int) -> Completion:
        said = [*TOKENIZER.encode(self.turns.pop(0)), TOKENIZER.eos_token_id]
        ended = len(said) <= max_tokens
        return Completion(
            token_ids=said[:max_tokens],
            sampling_logprobs=[-0.5] * len(said[:max_tokens]),
            finish_reason="stop" if ended else "length",
            policy_version=0,
        )


def item_of(episode: Episode, **wanted: Any) -> dict[str, Any]:
    return {**next(iter(episode.prompts(0, "train"))), **wanted}


def played(episode: Episode, item: dict[str, Any], *turns: str, room: int = ROOM) -> tuple[Score, Rollout]:
    prompt = PromptEncoder(TOKENIZER, 400).encode(item, index=0, source="tool_use")
    conversation = Conversation(prompt, ChatCodec(TOKENIZER), room, Script(*turns))
    score = as_score(asyncio.run(episode.run(item, conversation)))
    return score, conversation.rollout(score, 1.0)


TWO_LOOK_UPS = {"question": "ann+bob", "text": "ann: 12\nbob: 30", "names": ["ann", "bob"], "answer": "42"}


def test_searches_a_calculation_and_the_right_answer_earn_one():
    episode = build_episode("tool_use", {"template": "{question}"})
    turns = ["<search>ann</search>", "<search>bob</search>", "<calc>12+30</calc>", "<answer> 42 </answer>"]
    score, rollout = played(episode, item_of(episode, **TWO_LOOK_UPS), *turns)
    assert (score.reward, score.parts) == (1.0, {"correct": 1.0, "answered": 1.0, "format": 1.0})
    assert rollout.text == (
        "<search>ann</search><|end|><|user|>ann: 12<|end|><|assistant|>"
        "<search>bob</search><|end|><|user|>bob: 30<|end|><|assistant|>"
        "<calc>12+30</calc><|end|><|user|>42<|end|><|assistant|>"
        "<answer> 42 </answer><|end|>"
    )
    sampled = [token for token, own in zip(rollout.token_ids, rollout.loss_mask, strict=True) if own]
    assert TOKENIZER.decode(sampled) == "".join(f"{turn}<|end|>" for turn in turns)


@pytest.mark.parametrize(
    ("turns", "reward", "format_share"),
    [
        (["<calc>1/0</calc>", "<answer>7</answer>"], 0.1, 1.0),
        (["hello", "<answer>7</answer>"], 0.05, 0.5),
        (["<calc>1</calc><calc>2</calc>", "<answer>42</answer>"], 1.0, 0.5),
        (["<answer>1</answer><answer>42</answer>", "<answer>42</answer>"], 1.0, 0.5),
        (["<search>zed</search>"] * 3, 0.0, 1.0),
        (["<think><answer>7</answer></think><answer>42</answer>"], 1.0, 1.0),
    ],
)
def test_wrong_answers_earn_a_little_for_well_formed_turns(turns, reward, format_share):
    episode = build_episode("tool_use", {"max_turns": 3})
    score, _ = played(episode, item_of(episode, **TWO_LOOK_UPS), *turns)
    assert score.reward == pytest.approx(reward)
    assert score.parts["format"] == format_share


def test_tool_errors_come_back_as_observations():
    episode = build_episode("tool_use", {})
    turns = ["<calc>1/0</calc>", "<search>zed</search>", "nothing", "<answer>1</answer>"]
    _, rollout = played(episode, item_of(episode, **TWO_LOOK_UPS), *turns)
    for line in (
        "error: write two whole numbers, with + - or * between them",
        "error: nothing found",
        "error: make one call in each turn",
    ):
        assert f"<|user|>{line}<|end|><|assistant|>" in rollout.text


def test_an_episode_cut_by_its_token_limits_earns_nothing_and_keeps_its_parts():
    episode = build_episode("tool_use", {"max_turn_tokens": 30})
    item = item_of(episode, **TWO_LOOK_UPS)
    score, rollout = played(episode, item, *["<search>ann</search>"] * 6, room=50)
    assert (score.reward, score.parts["correct"]) == (0.0, 0.0)
    assert rollout.finish_reason == "length"
    score, _ = played(episode, item, "x" * 99, "<answer>42</answer>")
    assert score.parts["format"] == 0.5


@pytest.mark.parametrize("calls", [1, 2, 3])
def test_questions_take_the_configured_number_of_calls_and_the_teacher_solves_them(calls):
    episode = build_episode("tool_use", {"min_calls": calls, "max_calls": calls, "operators": ["+", "-", "*"]})
    for item in islice(episode.prompts(3, "train"), 30):
        turns = [episode.teach(item, turn) for turn in range(calls + 1)]
        score, rollout = played(episode, item, *turns)
        assert score.reward == 1.0
        found, _, last = rollout.text.rpartition("<answer>")
        assert f"{item['answer']}<|end|>" in found, "the tools have returned the answer"
        assert last == f"{item['answer']}</answer><|end|>"
        assert "error" not in found


def test_training_and_held_out_questions_are_disjoint_and_determined_by_the_seed():
    episode = build_episode("tool_use", {})
    trained = {item["identity"] for item in islice(episode.prompts(0, "train"), 500)}
    held_out = [item["identity"] for item in islice(episode.prompts(0, "held_out"), 50)]
    assert not trained & set(held_out)
    assert len(set(held_out)) == 50
    assert list(islice(episode.prompts(4, "train"), 9)) == list(islice(episode.prompts(4, "train"), 9))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"min_calls": 3, "max_calls": 2}, "min_calls=3 is above max_calls=2"),
        ({"calls": 2}, "unknown argument 'calls'"),
        ({"template": "solve"}, "args.template='solve'"),
    ],
)
def test_invalid_arguments_raise_one_line(args, message):
    with pytest.raises(EnvironmentSetupError, match=message) as error:
        build_episode("tool_use", args)
    assert "\n" not in str(error.value)


# Conversations of the teacher


def test_a_lesson_labels_only_the_messages_of_the_teacher():
    episode = build_episode("tool_use", {"template": "{question}"})
    settings = WarmStart(max_completion_tokens=ROOM, slips=0.0)
    for token_ids, labels in EpisodeTeacher(episode, TOKENIZER, settings).examples(8):
        assert len(token_ids) == len(labels)
        taught = TOKENIZER.decode([label for label in labels if label != IGNORE_INDEX])
        assert all(label in (IGNORE_INDEX, token) for token, label in zip(token_ids, labels, strict=True))
        assert taught.endswith("</answer><|end|>")
        assert "<|user|>" not in taught and ":" not in taught


def test_slips_of_the_teacher_change_labels_and_never_inputs():
    episode = build_episode("tool_use", {"template": "{question}"})
    careful, careless = (
        EpisodeTeacher(episode, TOKENIZER, WarmStart(max_completion_tokens=ROOM, slips=slips)).examples(40)
        for slips in (0.0, 0.3)
    )
    assert [token_ids for token_ids, _ in careful] == [token_ids for token_ids, _ in careless]
    pairs = [
        (right, given)
        for (_, labels), (_, slipped) in zip(careful, careless, strict=True)
        for right, given in zip(labels, slipped, strict=True)
        if right not in (IGNORE_INDEX, TOKENIZER.eos_token_id)
    ]
    assert 0.2 < sum(right != given for right, given in pairs) / len(pairs) < 0.35


# Names


USER_EPISODE = """
class Guess:
    def __init__(self, limit=3):
        self.limit = limit

    def prompts(self, seed, split):
        yield {"prompt": "guess"}

    async def run(self, item, model):
        await model.generate()
        return 1.0

class Silent:
    def prompts(self, seed, split): ...

class Blocking(Guess):
    def run(self, item, model): ...

class Narrow(Guess):
    async def run(self, item): ...
"""


def test_an_episode_is_loaded_from_a_file_and_its_mistakes_raise_one_line(tmp_path):
    file = tmp_path / "guess.py"
    file.write_text(USER_EPISODE)
    assert build_episode(f"{file}:Guess", {"limit": 5}).limit == 5
    with pytest.raises(EnvironmentSetupError, match=r"not an episode, it has no run\(\)"):
        build_episode(f"{file}:Silent", {})
    with pytest.raises(EnvironmentSetupError, match="write `async def run`"):
        build_episode(f"{file}:Blocking", {})
    with pytest.raises(EnvironmentSetupError, match=r"run\(self, item, model\)"):
        build_episode(f"{file}:Narrow", {})
    with pytest.raises(EnvironmentSetupError, match="unknown episode 'tool_us'; did you mean 'tool_use'"):
        build_episode("tool_us", {})
