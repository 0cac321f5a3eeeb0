"""Reward functions in TRL's signature: their arguments, results and failures."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
from math_verify import parse, verify
from pydantic import TypeAdapter
from trl import rewards as trl_rewards

from colocated_grpo.advantages import group_advantages
from colocated_grpo.environments.base import AnswerError, EnvironmentSetupError
from colocated_grpo.environments.rewards import builtin
from colocated_grpo.environments.rewards.builtin import REWARDS, equal_math
from colocated_grpo.environments.rewards.functions import RewardFunction, RewardScorer, build_rewards
from colocated_grpo.environments.rewards.scoring import MAX_REWARD, NoReward
from colocated_grpo.environments.rewards.workers import WorkerPool
from colocated_grpo.settings.losses import AdvantageConfig
from colocated_grpo.settings.sources import DatasetSourceConfig, RewardConfig
from colocated_grpo.types import Completion, Prompt, Score

CHAT = [{"role": "user", "content": "1+1?"}]


def prompt_of(prompt="1+1?", **columns):
    return Prompt(index=0, token_ids=[1], text="1+1?", item={"prompt": prompt, **columns}, source="data")


def completion_of(token_ids=(7, 8), policy_version=3):
    return Completion(
        token_ids=list(token_ids),
        sampling_logprobs=[-0.5] * len(token_ids),
        finish_reason="stop",
        policy_version=policy_version,
    )


def scorer_of(*functions, weights=None):
    weights = weights or [1.0] * len(functions)
    named = [(function.__name__, weight, function) for function, weight in zip(functions, weights, strict=True)]
    return RewardScorer([RewardFunction(*one) for one in named], max_steps=40)


def score(scorer, texts, prompt=None):
    return scorer.score(prompt or prompt_of(), [completion_of() for _ in texts], texts)


def test_a_function_gets_the_arguments_that_trl_passes():
    seen = {}

    def reward(prompts, completions, completion_ids, **kwargs):
        seen.update(kwargs, prompts=prompts, completions=completions, completion_ids=completion_ids)
        return [1.0, 0.0]

    score(scorer_of(reward), ["2", "3"], prompt_of(answer="2", completion="hidden"))
    assert seen["prompts"] == ["1+1?"] * 2
    assert seen["completions"] == ["2", "3"]
    assert seen["completion_ids"] == [[7, 8], [7, 8]]
    assert seen["answer"] == ["2", "2"]
    assert (seen["trainer_state"].global_step, seen["trainer_state"].max_steps) == (3, 40)
    assert seen.keys() == {
        *("prompts", "completions", "completion_ids", "answer"),
        *("trainer_state", "log_extra", "log_metric"),
    }

    score(scorer_of(reward), ["2", "3"], prompt_of(CHAT, answer="2"))
    assert seen["prompts"] == [CHAT] * 2
    assert seen["completions"] == [[{"role": "assistant", "content": "2"}], [{"role": "assistant", "content": "3"}]]


def test_a_function_without_kwargs_gets_only_the_arguments_it_names():
    def reward(completions, answer, log_metric):
        log_metric("length", 2)
        return [float(text == wanted) for text, wanted in zip(completions, answer, strict=True)]

    scores = score(scorer_of(reward), ["2", "3"], prompt_of(answer="2", level=5))
    assert [one.reward for one in scores] == [1.0, 0.0]
    assert scores[0].parts == {"length": 2.0, "reward": 1.0}


def test_a_function_that_changes_its_arguments_does_not_change_those_of_the_next():
    def careless(prompts, completions, completion_ids, tags, **kwargs):
        completions[0][0]["content"] = prompts[0][0]["content"] = "changed"
        prompts[0].append(completions[0][0])
        completion_ids[0].clear()
        tags[0]["inner"].append("changed")
        return [0.0] * len(completions)

    def reward(**arguments):
        seen.append({name: arguments[name] for name in ("prompts", "completions", "completion_ids", "tags", "lock")})
        return [0.0] * len(arguments["completions"])

    lock, seen = threading.Lock(), []
    prompt = prompt_of([dict(CHAT[0])], tags={"inner": ["one"]}, lock=lock)
    score(scorer_of(reward, careless, reward), ["2", "3"], prompt)
    score(scorer_of(careless, reward), ["2", "3"], prompt)
    assert seen[0]["lock"] == [lock, lock] and seen[0]["tags"] == [{"inner": ["one"]}] * 2
    assert seen[1] == seen[2] == seen[0]


def test_rewards_are_summed_by_weight_without_none():
    def first(completions, **kwargs):
        return [1.0, None, None]

    async def second(completions, **kwargs):
        await asyncio.sleep(0)
        return [3.0, 5.0, float("nan")]

    scores = score(scorer_of(first, second, weights=[1.0, 0.5]), ["a", "b", "c"])
    assert [one.reward for one in scores] == [2.5, 2.5, None]
    assert [one.parts for one in scores] == [{"first": 1.0, "second": 3.0}, {"second": 5.0}, {}]
    assert all(one.error is None for one in scores)


def test_async_functions_run_on_one_loop_from_all_threads():
    async def reward(completions, **kwargs):
        loops.add(asyncio.get_running_loop())
        return [1.0] * len(completions)

    loops = set()
    with ThreadPoolExecutor(4) as threads:
        results = list(threads.map(lambda _: score(scorer_of(reward), ["a", "b"]), range(8)))
    assert all(one.reward == 1.0 for scores in results for one in scores)
    assert len(loops) == 1


def test_an_exception_on_an_answer_gives_that_answer_alone_no_credit():
    calls = []

    def reward(completions, **kwargs):
        calls.append(list(completions))
        return [1.0 / int(text) for text in completions]

    def other(completions, **kwargs):
        return [1.0] * len(completions)

    scores = score(scorer_of(reward, other), ["1", "0", "x", "2"])
    assert [one.reward for one in scores] == [2.0, 1.0, 1.0, 1.5]
    assert [one.unscorable for one in scores] == [False, True, True, False]
    assert scores[1].error.startswith("reward: ZeroDivisionError: ")
    assert scores[2].error.startswith("reward: ValueError: invalid literal")
    assert scores[1].parts == {"other": 1.0, "reward": 0.0}
    assert calls == [["1", "0", "x", "2"], ["1"], ["0"], ["x"], ["2"]]


@pytest.mark.parametrize(
    ("weight", "texts", "others"),
    [
        (1.0, ["-1", "x", "-3"], [-1.0, -3.0]),
        (2.0, ["1", "x", "3"], [2.0, 6.0]),
        (-1.0, ["1", "x", "3"], [-1.0, -3.0]),
        (-2.0, ["-1", "x", "-3"], [2.0, 6.0]),
    ],
)
@pytest.mark.parametrize("error", [ValueError("x"), AnswerError("x"), AnswerError("x", reward=-1.0)])
def test_an_unreadable_answer_never_gets_more_than_the_worst_of_its_siblings(weight, texts, others, error):
    async def number(completions, **kwargs):
        if "x" in completions:
            raise error
        return [float(text) for text in completions]

    scores = score(scorer_of(number, weights=[weight]), texts)
    asked = weight * error.reward if isinstance(error, AnswerError) else 0.0
    assert [one.reward for one in scores] == [others[0], min(asked, *others), others[1]]
    assert scores[1].unscorable


@pytest.mark.parametrize("failure", ["one answer", "every answer", "no list", NoReward("judge is down"), None, 5.0])
@pytest.mark.parametrize("value", [2.0, None])
def test_a_reward_of_weight_zero_never_changes_the_total(failure, value):
    def logged(completions, **kwargs):
        if failure == "every answer" or (failure == "one answer" and "x" in completions):
            raise ValueError("cannot read it")
        return 1.0 if failure == "no list" else [failure if text == "x" else 1.0 for text in completions]

    def reward(completions, **kwargs):
        return [value] * len(completions)

    scores = score(scorer_of(logged, reward, weights=[0.0, 1.0]), ["a", "x"])
    assert [one.reward for one in scores] == [value, value]
    assert not any(one.failed for one in scores)
    if failure not in (None, 5.0) and value is not None:
        assert scores[1].error.startswith("logged: "), "the failure is shown"
    assert scores[0].parts.get("logged") == (1.0 if failure not in ("every answer", "no list") else None)


@pytest.mark.parametrize("error", [OSError("judge is down"), NameError("x"), RuntimeError("x"), ValueError("always")])
def test_a_failure_that_is_not_the_answers_fault_gives_no_reward(error):
    """A ValueError on every answer is a broken function; an OSError on one answer is a network."""

    def reward(completions, **kwargs):
        if isinstance(error, ValueError) or "x" in completions:
            raise error
        return [1.0] * len(completions)

    scores = score(scorer_of(reward), ["1", "x"])
    assert [one.reward for one in scores] == [None if isinstance(error, ValueError) else 1.0, None]
    assert scores[1].failed


def test_a_timeout_by_alarm_in_a_thread_is_no_fault_of_the_answer_and_names_the_remedy():
    def right(completions, answer, **columns):
        return [float("boxed" in text and verify(parse(answer[0]), parse(text))) for text in completions]

    with ThreadPoolExecutor(1) as thread:
        prompt = prompt_of(answer="$42$")
        scores = thread.submit(score, scorer_of(right), [r"\boxed{42}", "I do not know."], prompt).result()
    assert [one.reward for one in scores] == [None, 0.0]
    assert "signal.alarm() fails in threads" in scores[0].error
    assert "run_in: process" in scores[0].error


def test_a_function_that_compares_siblings_is_called_with_all_of_them_or_fails():
    calls = []

    def shortest(completions, **kwargs):
        calls.append(len(completions))
        lengths = [len(text) for text in completions if text.index("=")]
        return [float(len(text) == min(lengths)) for text in completions]

    [relative] = build_rewards([RewardConfig(name="exact_match", relative=True)], "rewards")
    assert relative.relative
    scorer = RewardScorer([RewardFunction("shortest", 1.0, shortest, relative=True)], max_steps=1)
    assert [one.reward for one in score(scorer, ["a=1", "a=12", "b=2"])] == [1.0, 0.0, 1.0]
    assert [one.reward for one in score(scorer, ["a=1", "nothing", "b=2"])] == [None] * 3
    assert calls == [3, 3]


class TimeLimit(BaseException):
    """As raised by libraries that limit the run time of a function."""


@pytest.mark.parametrize("error", [SystemExit(1), KeyboardInterrupt(), TimeLimit("5 s"), asyncio.CancelledError()])
def test_a_base_exception_in_an_async_function_does_not_affect_other_calls(error):
    gate, loops = threading.Event(), []

    async def reward(completions, **kwargs):
        loops.append(asyncio.get_running_loop())
        if completions == ["x"]:
            raise error
        await asyncio.to_thread(gate.wait, 120)
        return [1.0]

    with ThreadPoolExecutor(2) as threads:
        under_way = threads.submit(score, scorer_of(reward), ["a"])
        failed = threads.submit(score, scorer_of(reward), ["x"])
        assert failed.result(120)[0].reward is None
        gate.set()
        assert under_way.result(120)[0].reward == 1.0
    assert len(set(loops)) == 1


@pytest.mark.parametrize(
    ("result", "rewards", "error"),
    [
        ([1.0], [None, None], "reward: WrongNumberOfRewards: 1 reward for 2 completions"),
        (1.0, [None, None], "reward: WrongNumberOfRewards: returned 1.0 for 2 completions, not a list of 2 numbers"),
        (None, [None, None], "reward: WrongNumberOfRewards: returned None for 2 completions, not a list of 2 numbers"),
        ("ab", [None, None], "reward: WrongNumberOfRewards: returned 'ab' for 2 completions, not a list of 2 numbers"),
        (
            {0: 1.0, 1: 2.0},
            [None, None],
            "reward: WrongNumberOfRewards: returned {0: 1.0, 1: 2.0} for 2 completions, not a list of 2 numbers",
        ),
        (
            {1.0, 2.0},
            [None, None],
            "reward: WrongNumberOfRewards: returned {1.0, 2.0} for 2 completions, not a list of 2 numbers",
        ),
        (
            [True, "good"],
            [1.0, None],
            "reward: ValueError: a reward must be None or a number up to 1e+30 in size, got 'good'",
        ),
        ([1.0, 2.0, 3.0], [None, None], "reward: WrongNumberOfRewards: 3 rewards for 2 completions"),
        (
            [0.0, -1e99],
            [0.0, None],
            "reward: ValueError: a reward must be None or a number up to 1e+30 in size, got -1e+99",
        ),
        (
            [1.0, [1.0]],
            [1.0, None],
            "reward: ValueError: a reward must be None or a number up to 1e+30 in size, got [1.0]",
        ),
        ([1.0, 10**400], [1.0, None], "reward: OverflowError: int too large to convert to float"),
        (
            [1.0, float("inf")],
            [1.0, None],
            "reward: ValueError: a reward must be None or a number up to 1e+30 in size, got inf",
        ),
    ],
)
def test_a_result_that_is_not_a_list_of_rewards_is_one_error_line(result, rewards, error):
    def reward(**kwargs):
        return result

    scores = score(scorer_of(reward), ["a", "b"])
    assert [one.reward for one in scores] == rewards
    assert scores[1].error == error


def test_an_endless_generator_is_read_no_further_than_needed():
    def reward(**kwargs):
        yield from [1.0] * 10
        raise AssertionError("read to its end")

    [one, _] = score(scorer_of(reward), ["a", "b"])
    assert one.error == "reward: WrongNumberOfRewards: more than 2 rewards for 2 completions"


def test_without_functions_no_completion_has_a_reward():
    assert score(RewardScorer([], max_steps=1), ["a", "b"]) == [Score(reward=None)] * 2


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("leave_one_out", [True, False])
def test_the_largest_rewards_have_finite_advantages(scale, leave_one_out):
    def reward(completions, **kwargs):
        return [{"a": MAX_REWARD, "b": -MAX_REWARD}.get(text, 0.0) for text in completions]

    functions = [RewardFunction(name, 1e6, reward) for name in "xyz"]
    scores = score(RewardScorer(functions, max_steps=1), ["a", "b", "a", "c"])
    config = AdvantageConfig(scale=scale, leave_one_out=leave_one_out)
    [advantages] = group_advantages([[one.reward for one in scores]], config)
    assert np.isfinite(np.array(advantages, np.float32)).all()


@pytest.mark.parametrize("error", [SystemExit(1), KeyboardInterrupt(), TimeLimit("5 s")])
def test_an_exception_that_would_end_the_process_costs_only_its_rewards(error):
    def reward(**kwargs):
        raise error

    scores = score(scorer_of(reward), ["a", "b"])
    assert [one.reward for one in scores] == [None, None]
    assert scores[1].error.startswith(f"reward: {type(error).__name__}:")


def test_an_exception_without_a_printable_message_costs_only_its_rewards():
    class Mute(Exception):
        def __str__(self):
            return self.missing

    def reward(**kwargs):
        raise Mute

    scores = score(scorer_of(reward), ["a", "b"])
    assert [one.reward for one in scores] == [None, None]
    assert scores[1].error.startswith("reward: Mute: (its message cannot be shown: AttributeError) (test_rewards.py,")


def test_an_error_names_the_innermost_line_of_user_code(tmp_path):
    (tmp_path / "parts.py").write_text("import json\n\ndef number(text):\n    return json.loads(text)\n")
    file = tmp_path / "mine.py"
    file.write_text(
        "from parts import number\n\n"
        "def plain(completions, **kwargs):\n    return [number(text) for text in completions]\n\n"
        "async def later(completions, **kwargs):\n    return [number(text) for text in completions]\n\n"
        "def leaves(completions, **kwargs):\n    raise SystemExit(1)\n"
    )
    [one] = score(built(*({"name": f"{file}:{name}"} for name in ("plain", "later", "leaves"))), ["x"])
    plain, later, leaves = one.error.split("; ")
    assert plain.startswith("plain: JSONDecodeError: ") and plain.endswith(" (parts.py, line 4)")
    assert later.endswith(" (parts.py, line 4)")
    assert leaves == "leaves: SystemExit: 1 (mine.py, line 10)"
    file.with_name("typo.py").write_text("\n\nvalue = misspelt\n")
    with pytest.raises(EnvironmentSetupError, match=r"name 'misspelt' is not defined \(typo\.py, line 3\)"):
        built({"name": f"{tmp_path}/typo.py:value"})


def test_tensors_and_generators_are_accepted_as_lists_of_rewards():
    import torch

    def tensor(completions, **kwargs):
        return torch.tensor([0.5, 1.0])

    def lazy(completions, **kwargs):
        return (len(text) for text in completions)

    assert [one.reward for one in score(scorer_of(tensor, lazy), ["a", "bb"])] == [1.5, 3.0]


def test_a_missing_column_is_named_with_the_available_ones():
    def reward(completions, solution):
        return [1.0]

    [one] = score(scorer_of(reward), ["a"], prompt_of(answer="2"))
    assert "reward 'reward' needs the column 'solution'; available: answer" in one.error
    with pytest.raises(EnvironmentSetupError, match=r"column 'solution'.*called as in docs/guides/from_trl.md#rew"):
        scorer_of(reward).check_item({"prompt": "x", "answer": "2"})


def test_a_factory_without_arguments_is_told_from_a_reward_that_lacks_a_column():
    def punishment(max_len, cache):
        return lambda completions, **columns: [1.0] * len(completions)

    with pytest.raises(EnvironmentSetupError, match=r"column 'cache'.*\(if it is a factory, give its `args`"):
        scorer_of(punishment).check_item({"prompt": "x", "answer": "2"})


def test_a_function_of_verl_and_a_row_with_images_are_rejected_with_the_remedy():
    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        return 1.0

    rule = {"prompt": "x", "data_source": "sums", "reward_model": {"style": "rule", "ground_truth": "2"}}
    with pytest.raises(EnvironmentSetupError, match=r"called as in docs/guides/from_verl.md\)$"):
        scorer_of(compute_score).check_item(rule)
    scorer = scorer_of(lambda completions, **columns: [1.0])
    scorer.check_item(rule | {"images": []})
    with pytest.raises(EnvironmentSetupError, match=r"no images here; remove or rename the column 'images'"):
        scorer.check_item(rule | {"images": [{"bytes": b"x"}]})


@pytest.mark.parametrize("name", ["accuracy_reward", "reasoning_accuracy_reward", "think_format_reward"])
def test_a_reward_of_trl_that_reads_messages_is_rejected_for_text_prompts(name):
    pytest.importorskip("trl.rewards")
    scorer = RewardScorer(build_rewards([RewardConfig(name=f"trl.rewards:{name}")], "rewards"), max_steps=1)
    row = {"prompt": "1+1?", "solution": "$2$"}
    with pytest.raises(EnvironmentSetupError, match=f"reward '{name}': it reads messages, but completions are text"):
        scorer.check_item(row)
    scorer.check_item(row | {"prompt": [{"role": "user", "content": "1+1?"}]})


def test_a_function_that_reads_messages_of_text_completions_fails_with_the_remedy():
    def reward(completions):
        return [len(completion[0]["content"]) for completion in completions]

    [one] = score(scorer_of(reward), ["a"], prompt_of(answer="2"))
    assert "set system_prompt or give messages as prompts" in one.error


def test_a_long_error_is_cut_to_one_line():
    def reward(**kwargs):
        raise RuntimeError("first\n" + "x" * 10_000)

    [one] = score(scorer_of(reward), ["a"])
    assert len(one.error) < 250
    assert "\n" not in one.error


# --- trl.rewards, unchanged -----------------------------------------------------------------------------------------

TEXTS = [
    r"<think>sum</think> so \boxed{\frac{1}{2}}",
    r"<think>sum</think> so \boxed{0.5}",
    r"so \boxed{3}",
    "<think>never closed",
    "",
]


def built(*rewards):
    configs = TypeAdapter(list[RewardConfig]).validate_python(list(rewards))
    return RewardScorer(build_rewards(configs, "environments 'data': rewards"), max_steps=10)


def from_trl(function, **kwargs):
    completions = [[{"role": "assistant", "content": text}] for text in TEXTS]
    return function(completions=completions, completion_ids=[list(range(9)), [1] * 9, [1], [], [2] * 3], **kwargs)


def from_us(config, **columns):
    completions = [completion_of(ids) for ids in (range(9), [1] * 9, [1], [], [2] * 3)]
    scores = built(config).score(prompt_of(CHAT, **columns), completions, TEXTS)
    assert [one.error for one in scores] == [None] * len(TEXTS)
    return [one.reward for one in scores]


@pytest.mark.parametrize("solution", [r"\frac{1}{2}", "3", "no mathematics"])
@pytest.mark.parametrize("name", ["accuracy_reward", "reasoning_accuracy_reward"])
def test_trl_accuracy_rewards_return_the_values_of_trl(name, solution):
    function = getattr(trl_rewards, name)
    expected = from_trl(function, solution=[solution] * len(TEXTS))
    assert from_us({"name": f"trl.rewards:{name}"}, solution=solution) == expected
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(from_us, {"name": f"trl.rewards:{name}"}, solution=solution).result() == expected


def test_trl_format_reward_returns_the_values_of_trl():
    expected = from_trl(trl_rewards.think_format_reward)
    assert expected == [1.0, 1.0, 0.0, 0.0, 0.0]
    assert from_us({"name": "trl.rewards:think_format_reward"}) == expected


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("get_soft_overlong_punishment", {"max_completion_len": 8, "soft_punish_cache": 6}),
        ("get_repetition_penalty_reward", {"ngram_size": 2}),
        ("get_repetition_penalty_reward", {}),
    ],
)
def test_trl_factories_are_called_with_args_and_return_the_values_of_trl(name, args):
    expected = from_trl(getattr(trl_rewards, name)(**args))
    assert len(set(expected)) > 1
    assert from_us({"name": f"trl.rewards:{name}", "args": args}) == expected


# --- built-in rewards -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize(
    ("name", "columns", "text", "reward"),
    [
        ("exact_match", {"answer": "Paris"}, " Paris\n", 1.0),
        ("exact_match", {"answer": "Paris"}, "<think>Rome?</think>Paris", 1.0),
        ("exact_match", {"answer": 7}, "<answer>7</answer>", 1.0),
        ("exact_match", {"answer": "Paris"}, "It is Paris", 0.0),
        ("gsm8k", {"answer": "3 * 24 = 72\n#### 1,072"}, "So 1072.00\n#### $1,072.", 1.0),
        ("gsm8k", {"answer": "#### 72"}, "she has 3 and then 72 clips.", 1.0),
        ("gsm8k", {"answer": "#### 72"}, "72, but\n#### 71", 0.0),
        ("gsm8k", {"answer": "#### -3"}, "#### -3", 1.0),
        ("gsm8k", {"answer": "#### 3"}, "no idea", 0.0),
        ("gsm8k", {"answer": "none"}, "3", None),
        ("math_verify", {"answer": r"\frac{1}{2}"}, r"thus $\boxed{0.5}$", 1.0),
        ("math_verify", {"solution": "$x^2+1$"}, r"\boxed{1+x^2}", 1.0),
        ("math_verify", {"solution": "4"}, r"\boxed{5}", 0.0),
        ("math_verify", {"solution": ""}, r"\boxed{5}", None),
        ("format_think", {}, "<think>a</think>b", 1.0),
        ("format_think", {}, " <think>\n</think>\n\nb", 1.0),
        ("format_think", {}, "<think>a</think>  ", 0.0),
        ("format_think", {}, "<think>a<think></think>b", 0.0),
        ("format_think", {}, "b <think>a</think>b", 0.0),
        ("format_think", {}, "</think>a<think>b", 0.0),
    ],
)
def test_built_in_rewards(chat, name, columns, text, reward):
    [one] = score(built({"name": name}), [text], prompt_of(CHAT if chat else "1+1?", **columns))
    assert one.error is None
    assert one.reward == reward


@pytest.mark.parametrize("name", sorted(set(REWARDS) - {"math_verify"}))
@pytest.mark.parametrize("text", ["9" * 200_000, "<think></think>" + " " * 200_000, "1," * 100_000, "#" * 200_000])
def test_a_hostile_completion_costs_no_time(name, text):
    start = time.process_time()
    columns = {"answer": "#### 72", "tool_calls": [{"name": "add", "arguments": {"a": 1}}]}
    [one] = score(built({"name": name}), [text], prompt_of(**columns))
    assert time.process_time() - start < 5.0  # quadratic time takes minutes
    assert (one.reward, one.error) == (0.0, None)


def test_math_verify_times_out_on_endless_answers_while_other_threads_continue(monkeypatch):
    monkeypatch.setattr(builtin, "MATH_SECONDS", 5.0)
    answers = [r"\boxed{9^{9^{9^{9}}}}", r"\boxed{2^{1000000000}}", r"\boxed{4}", r"\boxed{5}"]
    assert threading.current_thread() is threading.main_thread()
    start = time.perf_counter()
    with ThreadPoolExecutor(4) as threads:
        verdicts = list(threads.map(lambda answer: equal_math("4", answer), answers))
    assert verdicts == [False, False, True, False]
    assert time.perf_counter() - start < 120
    assert equal_math("4", "$4$") is True


def test_a_math_process_that_exits_costs_one_completion_and_is_reported(monkeypatch):
    monkeypatch.setattr(builtin, "_math", WorkerPool(partial(os._exit, 3)))
    [one] = score(built({"name": "math_verify"}), ["4"], prompt_of(answer="4"))
    assert (one.reward, one.error) == (
        None,
        "math_verify: RuntimeError: the worker process ended with exit code 3",
    )


# --- names ----------------------------------------------------------------------------------------------------------


def test_a_reward_is_configured_by_name_or_with_args_and_weight():
    source = DatasetSourceConfig(type="dataset", name="x.jsonl", rewards=["gsm8k", {"name": "m:f", "weight": 0.5}])
    assert source.rewards == [RewardConfig(name="gsm8k"), RewardConfig(name="m:f", weight=0.5)]


def test_a_reward_class_is_instantiated_and_repeated_names_are_numbered(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "class Length:\n"
        "    def __init__(self, scale=1.0): self.scale = scale\n"
        "    def __call__(self, completions, **kwargs): return [self.scale * len(text) for text in completions]\n"
    )
    scorer = built({"name": f"{file}:Length"}, {"name": f"{file}:Length", "args": {"scale": 2.0}, "weight": 10})
    [one] = score(scorer, ["abc"])
    assert one.parts == {"Length": 3.0, "Length_2": 6.0}
    assert one.reward == 63.0


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ({"name": "gsm"}, "unknown reward 'gsm'; did you mean 'gsm8k'? valid: exact_match, format_think, gsm8k"),
        ({"name": "trl.rewards:accuracy"}, "did you mean 'accuracy_reward'?"),
        ({"name": "trl.rewards:get_soft_overlong_punishment", "args": {}}, "missing 2 required positional arguments"),
        ({"name": "math:pi"}, "'math:pi' is of type float, not a function"),
        ({"name": "no_such_module:f"}, "cannot import 'no_such_module'"),
    ],
)
def test_a_reward_that_cannot_be_built_raises_one_line(reward, message):
    with pytest.raises(EnvironmentSetupError) as error:
        built(reward)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
