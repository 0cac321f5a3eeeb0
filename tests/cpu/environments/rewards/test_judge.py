"""The built-in reward `judge` against real servers: answers, failures, cache, budget, many calls at a time."""

from __future__ import annotations

import threading
import time

import pytest

from colocated_grpo.environments.base import EnvironmentSetupError
from colocated_grpo.environments.rewards.functions import RewardScorer, build_rewards
from colocated_grpo.rollout.reward_calls import RewardCalls
from colocated_grpo.settings.sources import RewardConfig
from colocated_grpo.types import Completion, Prompt
from tests.support.judge_server import chat, judge_server
from tests.support.raw_server import raw_server, response
from tests.support.servers import free_port

QUESTION = {"model": "big", "prompt": "Is {completion} the answer to {prompt}? Known: {answer}. Use {{braces}}."}
QUICK = {"backoff": 0.001, "retries": 2}
COMPLETION = Completion(token_ids=[1], sampling_logprobs=[0.0], finish_reason="stop", policy_version=0)


def scorer(url, **args):
    return RewardScorer(build_rewards([RewardConfig(name="judge", args={"url": url, **args})], "k"), max_steps=1)


def prompt(text="1+1?", **columns):
    return Prompt(index=0, token_ids=[1], text="", item={"prompt": text, "answer": "2", **columns}, source="data")


def score(judge, texts, item=None):
    return judge.score(item or prompt(), [COMPLETION] * len(texts), texts)


def rewards(scores):
    return [one.reward for one in scores]


def test_a_chat_model_is_asked_about_each_completion(monkeypatch):
    monkeypatch.setenv("MY_KEY", "secret")
    with judge_server(lambda body: chat("Not 3 of 5. Score: 1, no: **score**: 0.5")) as server:
        judge = scorer(f"{server.url}/v1/", **QUESTION, system="Be strict.", api_key_variable="MY_KEY")
        [one] = score(judge, ["two"], prompt([{"role": "user", "content": "1+1?"}]))
    assert (one.reward, one.error) == (0.5, None)
    assert (server.paths, server.keys) == (["/v1/chat/completions"], ["Bearer secret"])
    assert server.bodies == [
        {
            "model": "big",
            "messages": [
                {"role": "system", "content": "Be strict."},
                {"role": "user", "content": "Is two the answer to 1+1?? Known: 2. Use {braces}."},
            ],
            "temperature": 0.0,
            "max_tokens": 512,
        }
    ]


def test_a_scoring_endpoint_gets_json_and_returns_a_score():
    with judge_server(lambda body: (200, {"score": len(body["completion"])})) as server:
        assert rewards(score(scorer(server.url, columns=["answer"]), ["a", "bbb"])) == [1.0, 3.0]
    assert {"prompt": "1+1?", "completion": "a", "answer": "2"} in server.bodies


@pytest.mark.parametrize("header", [b"X-Other: 1", b"Content-Type: text/html"])
def test_a_scoring_endpoint_need_not_name_its_content_type(header):
    with raw_server(response(b'{"score": 2}').replace(b"Content-Type: application/json", header)) as url:
        assert rewards(score(scorer(url), ["a"])) == [2.0]


def test_the_score_is_read_by_the_rule():
    with judge_server(lambda body: chat("<grade>7</grade> of 10")) as server:
        assert rewards(score(scorer(server.url, **QUESTION, parse=r"<grade>(\d+)</grade>"), ["a"])) == [7.0]


def test_each_completion_of_a_judge_that_is_down_has_no_reward():
    [first, second] = score(scorer(f"http://127.0.0.1:{free_port()}", **QUICK), ["a", "b"])
    assert first.failed and second.failed
    assert first.error.startswith("judge: the judge is unavailable, attempts: 3, the last: ")
    assert "refused" in first.error


def test_a_busy_judge_is_asked_again():
    refusals = iter([(429, {"error": {"message": "slow down"}}), (503, {}), (200, {"score": 1.0})])
    with judge_server(lambda body: next(refusals)) as server:
        assert rewards(score(scorer(server.url, **QUICK), ["a"])) == [1.0]
    assert len(server.bodies) == 3


def test_a_rejected_request_is_not_sent_again():
    with judge_server(lambda body: (401, {"error": {"message": "wrong key"}})) as server:
        [one] = score(scorer(server.url, **QUICK), ["a"])
    assert (one.reward, one.error) == (None, "judge: the judge rejects the request: 401 wrong key")
    assert len(server.bodies) == 1


@pytest.mark.parametrize(
    ("answer", "args", "error"),
    [
        ((200, b"<html>"), {}, "the judge is unavailable, attempts: 3, the last: Expecting value"),
        ((200, {"grade": 1}), {}, "the judge's response has no score"),
        ((200, [1]), {}, "the judge's response has no score"),
        ((200, {"score": "good"}), {}, "could not convert string to float: 'good'"),
        ((200, b'{"score": NaN}'), {}, "the judge's score nan is outside bounds=[-inf, inf]"),
        ((200, {"score": 1000}), {"bounds": [0, 10]}, "the judge's score 1000 is outside bounds=[0.0, 10.0]"),
        (chat("I like it"), QUESTION, "no score in the judge's answer 'I like it'"),
        ((200, {"choices": []}), QUESTION, "the judge's response has no answer"),
    ],
)
def test_an_unreadable_answer_gives_no_reward_and_one_line(answer, args, error):
    with judge_server(lambda body: answer) as server:
        [one] = score(scorer(server.url, **QUICK, **args), ["a"])
    assert one.reward is None
    assert one.error.startswith(f"judge: {error}")


def test_one_failure_leaves_the_other_completions_their_rewards_and_is_not_repeated():
    with judge_server(lambda body: (400, {}) if body["completion"] == "b" else (200, {"score": 1})) as server:
        assert rewards(score(scorer(server.url), ["a", "b", "c"])) == [1.0, None, 1.0]
    assert len(server.bodies) == 3


def test_a_slow_judge_is_given_up_after_its_timeout():
    released = threading.Event()
    with judge_server(lambda body: (200, {"score": released.wait(120)})) as server:
        [one] = score(scorer(server.url, timeout=0.05, retries=0), ["a"])
        released.set()
    assert one.error == "judge: the judge is unavailable, attempts: 1, the last: timed out"


def test_a_response_that_breaks_off_is_asked_for_again():
    whole = response(b'{"score": 2}')
    with raw_server(whole[:-3], whole) as url:
        assert rewards(score(scorer(url, **QUICK), ["a"])) == [2.0]


def test_equal_requests_are_sent_once_also_over_runs(tmp_path):
    file = tmp_path / "scores.jsonl"
    with judge_server(lambda body: (200, {"score": len(body["completion"])})) as server:
        judge = scorer(server.url, cache_file=str(file))
        first = score(judge, ["a", "a", "bb"])
        assert rewards(first) == [1.0, 1.0, 2.0]
        assert first[0].parts["judge/cached"] == pytest.approx(1 / 3)
        assert rewards(score(judge, ["bb"])) == [2.0]
        with file.open("a") as stream:
            stream.write('["torn')
        later = score(scorer(server.url, cache_file=str(file)), ["a", "bb"])
    assert (rewards(later), later[0].parts["judge/cached"]) == ([1.0, 2.0], 1.0)
    assert len(server.bodies) == 2


def test_the_cache_in_memory_is_bounded():
    with judge_server(lambda body: (200, {"score": 1})) as server:
        judge = scorer(server.url, cache_size=1)
        for text in ("a", "b", "b", "a"):
            score(judge, [text])
    assert [body["completion"] for body in server.bodies] == ["a", "b", "a"]


@pytest.mark.parametrize("limit", [{"max_requests": 2}, {"max_tokens": 15}])
def test_beyond_the_budget_completions_have_no_reward_and_no_error(limit):
    with judge_server(lambda body: chat("score: 1", tokens=10)) as server:
        judge = scorer(server.url, **QUESTION, **limit)
        assert rewards(score(judge, ["a"]) + score(judge, ["b"])) == [1.0, 1.0]
        last = score(judge, ["c", "a"])
    assert (rewards(last), last[0].error) == ([None, 1.0], None)
    assert last[0].parts["judge/over_budget"] == 0.5
    assert len(server.bodies) == 2


def test_all_256_completions_of_a_step_are_judged_at_the_same_time():
    together = threading.Barrier(256)

    def answer(body):
        together.wait(120)  # no request is answered before all of them have arrived
        return 200, {"score": 1}

    with judge_server(answer) as server:
        judge = scorer(server.url, timeout=300)
        calls = RewardCalls(lambda item, _: ([], score(judge, list("abcdefgh"), item)), workers=32, timeout=300)
        started = [calls.submit(prompt(f"question {index}"), []) for index in range(32)]
        assert calls.wait(started, since=time.monotonic())
        calls.close()
    assert [rewards(call.judged()[1]) for call in started] == [[1.0] * 8] * 32


def test_no_more_threads_send_requests_than_allowed():
    together = threading.Barrier(4)
    with judge_server(lambda body: (200, {"score": together.wait(120)})) as server:
        judge = scorer(server.url, concurrency=4, timeout=300)
        assert None not in rewards(score(judge, [str(number) for number in range(32)]))
    assert len(judge.functions[0].function._threads._threads) == 4


@pytest.mark.parametrize(
    ("args", "error"),
    [
        ({"model": "big"}, "args: a chat model needs both model and prompt, a scoring endpoint neither"),
        ({"model": "big", "prompt": "hm"}, "args: prompt lacks {completion}"),
        ({"parse": r"\d"}, r"args.parse='\\d': must have one group, around the number; it has 0"),
        ({"parse": "("}, "args.parse='(': not a regular expression"),
        ({"api_key_variable": "NO_SUCH"}, "args: api_key_variable='NO_SUCH': this environment variable is not set"),
        ({"retry": 3}, "unknown argument 'retry'; did you mean 'retries'?"),
    ],
)
def test_wrong_arguments_are_one_line(args, error):
    with pytest.raises(EnvironmentSetupError) as caught:
        scorer("http://localhost:1", **args)
    assert str(caught.value).startswith(f"k: judge: {error}")


def test_the_columns_of_the_question_must_be_in_the_rows():
    with pytest.raises(EnvironmentSetupError, match="reward 'judge' needs the column 'answer'"):
        scorer("http://localhost:1", **QUESTION).check_item({"prompt": "1+1?"})
