"""Agents: programs that sample over HTTP, whose sampled tokens are trained as they are."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import threading
import time
from contextlib import suppress
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import openai
import psutil
import pytest

from colocated_grpo.environments.agents.programs import STARTER, Access, Program, build_agent
from colocated_grpo.environments.agents.sequences import AgentConversation
from colocated_grpo.environments.base import AgentLimits, EnvironmentSetupError
from colocated_grpo.environments.chat import ChatCodec
from colocated_grpo.evaluation.metrics import set_metrics
from colocated_grpo.rollout.collect import Stopped
from colocated_grpo.summaries import held_out_metrics
from colocated_grpo.types import Completion, Group, Rollout, Score
from tests.support.agents import END, TOKENIZER, AgentRun, prompt_of, says, says_tokens
from tests.support.fakes import completion_of
from tests.support.paths import ROOT

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL = '<tool_call>{"name": "add",  "arguments": {"b": 2, "a": 1}}</tool_call>'

TOOL_PROGRAM = """
import json, sys
from openai import OpenAI

item = json.loads(sys.stdin.readline())
client = OpenAI()
messages = [{"role": "system", "content": "add"}, {"role": "user", "content": item["prompt"]}]
for turn in range(3):
    message = client.chat.completions.create(model="any", messages=messages, max_tokens=12).choices[0].message
    messages += [message, {"role": "user", "content": f"result {len(message.content)}"}]
print("progress that is no result")
print(json.dumps({"reward": item["number"] + 0.5, "length": len(messages)}))
"""

ASK_WITHOUT_OPENAI = """
import json, os, sys, urllib.request
item = json.load(sys.stdin)
url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
body = json.dumps({"messages": [{"role": "user", "content": "a"}]}).encode()
with urllib.request.urlopen(urllib.request.Request(url + "/chat/completions", body, headers)) as response:
    answer = json.load(response)["choices"][0]["message"]["content"]
"""


def client_of(access: Access) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=access.base_url, api_key=access.api_key, max_retries=0)


async def ask(access: Access, messages: list[Any], **settings: Any) -> Any:
    """Send the messages and return the first choice's message."""
    async with client_of(access) as client:
        response = await client.chat.completions.create(model="policy", messages=messages, **settings)
        return response.choices[0].message


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


async def three_turns(item: dict[str, Any], access: Access) -> float:
    messages = [user(item["prompt"])]
    for turn in range(3):
        answer = await ask(access, messages)
        messages += [{"role": "assistant", "content": answer.content}, user(f"go {turn}")]
    return 1.0


def sampled_of(rollout: Rollout) -> list[tuple[int, float]]:
    """Return the trained tokens of all sequences with their log-probabilities."""
    return [
        (token, logprob)
        for one in rollout.sequences
        for token, logprob, trained in zip(one.token_ids, one.sampling_logprobs, one.loss_mask, strict=True)
        if trained
    ]


def engine_samples(run: AgentRun, index: int = 0, sibling: int = 0) -> list[tuple[int, float]]:
    """Return the tokens that the engine sampled for one episode, in the order of its requests."""
    mine = sorted((r for r in run.engine.submitted if r.key[1:3] == (index, sibling)), key=lambda r: r.key[3])
    completions = [run.engine._complete(request, 0) for request in mine]
    return [pair for one in completions for pair in zip(one.token_ids, one.sampling_logprobs, strict=True)]


def play_alone(agent: Any, complete: Any, **settings: Any) -> tuple[Rollout, AgentRun]:
    with AgentRun(agent, complete, **settings) as run:
        [group] = run.collect()
        return group.rollouts[0], run


def program_of(folder: Path, text: str, *arguments: str) -> Program:
    file = folder / "agent.py"
    file.write_text(text)
    return Program(str(file), list(arguments))


def error_of(agent: Any, complete: Any = None, **settings: Any) -> str:
    """Return the error of an episode that must have no reward."""
    rollout, _ = play_alone(agent, complete or says("a"), **settings)
    assert rollout.score.reward is None
    assert rollout.score.error is not None
    return rollout.score.error


def test_an_openai_program_in_a_process_is_trained_on_the_tokens_that_the_engine_sampled(tmp_path):
    with AgentRun(program_of(tmp_path, TOOL_PROGRAM), says("<calc>1</calc>", "12", "3")) as run:
        groups = run.collect(prompts=2)
        for index, group in enumerate(groups):
            for sibling, rollout in enumerate(group.rollouts):
                assert rollout.score.reward == index + 0.5
                assert rollout.score.parts == {"length": 8.0}
                assert rollout.further == []
                assert sampled_of(rollout) == engine_samples(run, index, sibling)
                prompt = TOKENIZER.encode(f"<|system|>add<|end|><|user|>p{index}<|end|><|assistant|>")
                assert rollout.token_ids[: rollout.prompt_length] == prompt
                assert "<|end|><|user|>result 12<|end|><|assistant|>12<|end|>" in rollout.text
    assert len({request.seed for request in run.engine.submitted}) == 2 * 3


def test_tool_calls_are_parsed_and_come_back_as_they_were_sampled():
    async def play(item, access):
        message = await ask(access, [user("1+2")], tools=TOOLS)
        assert message.content == "I add:"
        [call] = message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1, "b": 2})
        answer = await ask(access, [user("1+2"), message, user("3")], tools=TOOLS)
        return float(answer.content)

    rollout, run = play_alone(play, says(f"I add: {CALL}", "3"))
    assert rollout.score.reward == 3.0
    assert rollout.further == []
    assert sampled_of(rollout) == engine_samples(run)


def test_sampled_tokens_are_kept_where_encoding_their_text_gives_others():
    spelled = [TOKENIZER.convert_tokens_to_ids(character) for character in "<|end|>!"]
    assert TOKENIZER.encode("<|end|>!") != spelled

    rollout, run = play_alone(three_turns, says_tokens([*spelled, END]))
    assert rollout.further == []
    assert sampled_of(rollout) == engine_samples(run)
    assert run.engine.submitted[1].token_ids[: len(run.engine.submitted[0].token_ids) + 9] == [
        *run.engine.submitted[0].token_ids,
        *spelled,
        END,
    ]


def test_a_template_that_removes_thoughts_splits_the_episode_and_trains_every_token_once():
    tokenizer = TOKENIZER.__class__(tokenizer_object=TOKENIZER.backend_tokenizer, eos_token=TOKENIZER.eos_token)
    tokenizer.chat_template = TOKENIZER.chat_template.replace(
        "message['content'] ~ '<|end|>'", "(message['content'].split('/think ')|last) ~ '<|end|>'"
    )
    rollout, run = play_alone(three_turns, says("hm /think a", "so /think b", "c"), tokenizer=tokenizer)
    first, second = rollout.sequences[0], rollout.sequences[-1]
    assert len(rollout.sequences) == 3
    assert sampled_of(rollout) == engine_samples(run)
    assert first.loss_mask[first.prompt_length :] == [True] * len("hm /think a.")
    assert "hm" not in TOKENIZER.decode(second.token_ids)
    assert re.search("think a.*think b.*c", rollout.text, re.DOTALL), "maj@k finds the answer in the last sequence"
    assert [one.score.reward for one in rollout.sequences] == [1.0] * 3


def test_several_completions_and_overlapping_requests_are_all_trained():
    async def play(item, access):
        async with client_of(access) as client:
            create = client.chat.completions.create
            both = await create(model="policy", messages=[user("a")], n=2)
            assert [choice.index for choice in both.choices] == [0, 1]
            await asyncio.gather(*(create(model="policy", messages=[user(text)]) for text in ("b", "c")))
        return 1.0

    rollout, run = play_alone(play, completion_of)
    assert len(rollout.sequences) == 4
    assert sorted(sampled_of(rollout)) == sorted(engine_samples(run))


def test_a_request_sent_before_the_tokens_that_it_repeats_were_known_is_a_sequence_of_its_own():
    spelled = [TOKENIZER.convert_tokens_to_ids(character) for character in "<|end|>"]
    answers: list[asyncio.Future[Completion]] = []
    limits = AgentLimits(max_tokens=64, max_requests=4, max_running=1)

    async def play() -> Rollout:
        def sample(*_: object) -> asyncio.Future[Completion]:
            answers.append(asyncio.get_running_loop().create_future())
            return answers[-1]

        conversation = AgentConversation(prompt_of({"prompt": "a", "number": 0}), ChatCodec(TOKENIZER), limits, sample)
        prompt = TOKENIZER.encode("<|user|>a<|end|><|assistant|>")
        requests = [
            asyncio.ensure_future(conversation.complete(tokens))
            for tokens in (prompt, [*prompt, END, *TOKENIZER.encode("b")])
        ]
        await asyncio.sleep(0)
        for answer, tokens in zip(answers, (spelled, [END]), strict=True):
            answer.set_result(
                Completion(
                    token_ids=tokens, sampling_logprobs=[-1.0] * len(tokens), finish_reason="stop", policy_version=0
                )
            )
            await asyncio.sleep(0)
        await asyncio.gather(*requests)
        return conversation.rollout(Score(reward=1.0), 0.7)

    sequences = asyncio.run(play()).sequences
    assert [one.token_ids[one.prompt_length :] for one in sequences] == [spelled, [END]]
    for one in sequences:
        assert len(one.token_ids) == len(one.loss_mask) == len(one.sampling_logprobs)


def test_a_request_that_the_agent_gives_up_is_aborted_in_the_engine():
    submitted = threading.Event()

    def decode_steps(request):
        submitted.set()
        return 1 if request.key[3] else 10**9

    async def play(item, access):
        request = asyncio.ensure_future(ask(access, [user("a")]))
        await asyncio.to_thread(submitted.wait)
        request.cancel()
        with suppress(asyncio.CancelledError):
            await request
        await ask(access, [user("b")])
        return 1.0

    rollout, run = play_alone(play, says("never", "b"), decode_steps=decode_steps)
    assert rollout.score.reward == 1.0
    assert TOKENIZER.decode(rollout.token_ids).count("<|assistant|>") == 1
    assert "abort [('train/0', 0, 0, 0)]" in run.engine.events


def test_a_streamed_response_is_the_same_message():
    async def play(item, access):
        async with client_of(access) as client:
            stream = await client.chat.completions.create(
                model="policy", messages=[user("a")], tools=TOOLS, stream=True, stream_options={"include_usage": True}
            )
            chunks = [chunk async for chunk in stream]
        [call] = [call for chunk in chunks for choice in chunk.choices for call in choice.delta.tool_calls or []]
        assert json.loads(call.function.arguments) == {"a": 1, "b": 2}
        assert [choice.finish_reason for chunk in chunks for choice in chunk.choices] == [None, "tool_calls"]
        assert chunks[-1].usage.completion_tokens == len(CALL) + 1
        return 1.0

    assert play_alone(play, says(CALL))[0].score.error is None


def test_the_settings_of_the_run_apply_and_not_those_of_the_program():
    async def play(item, access):
        ignored = {"stop_token_ids": [1], "ignore_eos": True}
        settings = {"temperature": 0.0, "top_p": 0.1, "seed": 1, "extra_body": ignored}
        await ask(access, [user("a")], stop=["x", "y"], max_tokens=5, **settings)
        with pytest.raises(openai.BadRequestError, match="temperature"):
            await ask(access, [user("a")], temperature=-1.0)
        return 1.0

    rollout, run = play_alone(play, says("a"))
    [request] = run.engine.submitted
    assert rollout.score.error is None
    assert (request.sampling.temperature, request.sampling.top_p, request.sampling.stop_token_ids) == (0.7, 1.0, ())
    assert (request.sampling.max_tokens, request.sampling.stop) == (5, ("x", "y"))


def status_of(base_url: str, api_key: bytes) -> int:
    """Post a chat request and return its status."""
    parts = urlsplit(base_url)
    connection = HTTPConnection(parts.hostname, parts.port, timeout=120)
    headers = {"Authorization": b"Bearer " + api_key, "Content-Type": "application/json"}
    connection.request("POST", f"{parts.path}/chat/completions", json.dumps({"messages": [user("a")]}), headers)
    status = connection.getresponse().status
    connection.close()
    return status


def test_a_forced_tool_call_is_rejected_with_what_the_run_can_do():
    async def agent(item, access):
        await ask(access, [user("a")], tools=TOOLS, tool_choice="required")

    assert "tool_choice: is not supported; describe tools with `tools`" in error_of(agent)


def test_only_the_key_of_a_running_episode_opens_its_path():
    opened: list[Access] = []
    both, done = asyncio.Event(), asyncio.Event()
    statuses: list[int] = []

    async def play(item, access):
        opened.append(access)
        if len(opened) == 1:
            await both.wait()
            mine, other = access.base_url, opened[1]
            key = access.api_key.encode()
            for base_url, given in [
                (mine, key),
                (mine, other.api_key.encode()),
                (mine, b""),
                (mine, b"\xff\xfe"),
                (other.base_url, key),
                (mine.replace("/episodes/", "/episodes/x"), key),
                (mine.replace("/episodes/", "/episodes/../"), key),
                (mine.partition("/episodes")[0] + "/v1", key),
                (mine.replace("/v1", "/v2"), key),
            ]:
                statuses.append(await asyncio.to_thread(status_of, base_url, given))
            done.set()
            return 1.0
        both.set()
        await ask(access, [user("a")])
        await done.wait()
        return 1.0

    with AgentRun(play, says("a")) as run:
        groups = run.collect(prompts=2)
        assert [group.rollouts[0].score.error for group in groups] == [None, None]
        assert statuses == [200] + [401] * 7 + [404]
        assert status_of(opened[0].base_url, opened[0].api_key.encode()) == 401  # it has ended


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import sys; sys.exit('no tools found')", "agent.py: exit code 1: no tools found"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "agent.py: killed by SIGSEGV"),
        ("print(1)", "the agent has ended without a request"),
        ("print('nearly done')", "must be a number or a JSON object with 'reward', got 'nearly done'"),
        ("", "must be a number or a JSON object with 'reward', got ''"),
    ],
)
def test_a_program_that_fails_costs_its_reward_with_a_line_that_says_why(tmp_path, text, expected):
    assert expected in error_of(program_of(tmp_path, text))


def test_a_result_without_a_reward_is_an_error():
    async def play(item, access):
        await ask(access, [user("a")])
        return {"score": 1.0}

    assert "parts without 'reward'" in error_of(play)


def test_a_program_that_hangs_is_killed_with_all_that_it_started(tmp_path):
    pids = tmp_path / "pids"
    hangs = f"""
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open({str(pids)!r} + ".part", "w").write(f"{{os.getpid()}} {{child.pid}}")
os.rename({str(pids)!r} + ".part", {str(pids)!r})
time.sleep(600)
"""
    error = error_of(program_of(tmp_path, hangs), tool_timeout=5.0)
    assert "no turn and no result within rollout.tool_timeout=5 s" in error
    assert_gone([int(pid) for pid in pids.read_text().split()])


def assert_gone(pids: list[int]) -> None:
    """Wait until these processes have ended. Those killed an instant ago may still be there."""
    _, alive = psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=120)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def test_a_stop_request_kills_the_programs(tmp_path):
    pid = tmp_path / "pid"
    text = f"""
import os, time
open({str(pid)!r} + ".part", "w").write(str(os.getpid()))
os.rename({str(pid)!r} + ".part", {str(pid)!r})
time.sleep(600)
"""
    with AgentRun(program_of(tmp_path, text), says("a"), stop_requested=pid.exists) as run, pytest.raises(Stopped):
        run.collect()
    assert_gone([int(pid.read_text())])


def test_a_conversation_that_outgrows_the_context_has_reward_zero():
    async def play(item, access):
        messages = [user("a")]
        while True:
            messages += [await ask(access, messages), user("go on")]

    rollout, run = play_alone(play, says("abc"), max_tokens=64)
    assert (rollout.score.reward, rollout.finish_reason) == (0.0, "length")
    assert sampled_of(rollout) == engine_samples(run)
    assert len(run.engine.submitted) > 2


@pytest.mark.parametrize("too_long", ["b" * 80, "b" * 64 * 14], ids=["encoded", "too long to be encoded"])
def test_only_the_sequence_that_could_not_be_continued_counts_as_cut(too_long):
    async def play(item, access):
        answer = await ask(access, [user("a")])
        await ask(access, [user("b")])
        await ask(access, [user("a"), answer, user(too_long)])

    rollout, _ = play_alone(play, says("c"), max_tokens=64)
    assert [one.finish_reason for one in rollout.sequences] == ["length", "stop"]
    assert (rollout.score.reward, rollout.score.error) == (0.0, None)
    group = Group(prompt=prompt_of({"prompt": "a", "number": 0}), rollouts=[rollout])
    assert held_out_metrics([group])["held_out/truncated"] == 0.5
    assert set_metrics("eval/a", [group], [1], 1.0, None)["eval/a/truncated"] == 0.5


def test_a_message_too_large_for_the_server_does_not_fit_the_context():
    async def play(item, access):
        answer = await ask(access, [user("a")])
        await ask(access, [user("a"), answer, user("b" * (9 << 20))])

    rollout, _ = play_alone(play, says("c"), max_tokens=64)
    assert (rollout.score.reward, rollout.score.error) == (0.0, None)


def test_a_sequence_that_is_continued_with_a_shorter_message_is_not_cut():
    async def play(item, access):
        answer = await ask(access, [user("a")])
        with suppress(openai.BadRequestError):
            await ask(access, [user("a"), answer, user("b" * 80)])
        await ask(access, [user("a"), answer, user("b")])
        return 1.0

    rollout, _ = play_alone(play, says("c"), max_tokens=64)
    assert [one.finish_reason for one in rollout.sequences] == ["stop"]


@pytest.mark.parametrize(
    "request_of",
    [
        {"messages": [user("b" * 64 * 14)]},
        {"messages": [user("a")], "n": 17},
        {"messages": [user("a")], "response_format": {"type": "json_object"}},
        {"messages": [user("b" * (9 << 20))]},
    ],
    ids=["too long", "too many", "rejected key", "too large"],
)
def test_an_agent_whose_only_request_was_rejected_may_return_a_reward(request_of):
    async def play(item, access):
        with pytest.raises(openai.APIStatusError):
            await ask(access, **request_of)
        return 0.5

    rollout, _ = play_alone(play, says("a"), max_tokens=64)
    assert (rollout.score.reward, rollout.score.error) == (0.5, None)
    assert True not in rollout.loss_mask


def test_an_agent_has_a_limited_number_of_requests():
    statuses = []

    async def play(item, access):
        for n in (3, 1, 2, 1, 1):
            try:
                await ask(access, [user("a")], n=n)
            except openai.BadRequestError as error:
                statuses.append(str(error))
        return 1.0

    rollout, run = play_alone(play, says("a"), max_requests=2)
    assert rollout.score.reward == 1.0
    assert len(run.engine.submitted) == 2
    assert len(statuses) == 3 and all("max_requests=2" in status for status in statuses)


def test_an_agent_that_fails_for_want_of_requests_has_reward_zero():
    async def play(item, access):
        while True:
            await ask(access, [user("a")])

    rollout, _ = play_alone(play, says("a"), max_requests=2)
    assert (rollout.score.reward, rollout.score.error) == (0.0, None)
    assert {one.finish_reason for one in rollout.sequences} == {"stop"}


def test_an_agent_that_fails_over_a_request_that_is_never_served_has_no_reward():
    async def play(item, access):
        await ask(access, [user("a")], n=3)

    assert "max_requests=2: n=3" in error_of(play, max_requests=2)


def test_no_more_than_max_running_agents_run_at_a_time():
    running, most = set(), 0

    async def play(item, access):
        nonlocal most
        running.add(access)
        most = max(most, len(running))
        await ask(access, [user("a")])
        running.remove(access)
        return 1.0

    with AgentRun(play, says("a"), max_running=3, tool_timeout=120.0) as run:
        groups = run.collect(prompts=4, group_size=2)
    assert most == 3
    assert [rollout.score.reward for group in groups for rollout in group.rollouts] == [1.0] * 8


def test_waiting_agents_do_not_use_up_their_time():
    """Sampling, which does not use it up either, takes longer for all of them together than an agent has."""

    async def play(item, access):
        await ask(access, [user("a")])
        return 1.0

    def complete(request, policy_version):
        time.sleep(0.6)
        return says("a")(request, policy_version)

    with AgentRun(play, complete, max_running=1, tool_timeout=2.0) as run:
        groups = run.collect(prompts=4)
    assert [group.rollouts[0].score.error for group in groups] == [None] * 4


def test_a_program_sees_its_item_its_arguments_and_no_rank(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MY_TOOL_KEY", "k")
    text = """
assert item["number"] == 0 and sys.argv[1:] == ["--depth", "2"], (item, sys.argv)
assert not {"RANK", "MASTER_ADDR"} & os.environ.keys() and os.environ["MY_TOOL_KEY"] == "k"
print(0.25)
"""
    rollout, _ = play_alone(program_of(tmp_path, ASK_WITHOUT_OPENAI + text, "--depth", "2"), says("a"))
    assert (rollout.score.reward, rollout.score.error) == (0.25, None)


@pytest.mark.parametrize("no_proxy", ["", "internal.example", "*"])
def test_requests_to_the_run_do_not_go_through_a_proxy(tmp_path, monkeypatch, no_proxy):
    monkeypatch.setenv("http_proxy", "http://proxy.invalid:3128")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, no_proxy)
    program = program_of(tmp_path, ASK_WITHOUT_OPENAI + "print(float(urllib.request.proxy_bypass('internal.example')))")
    rollout, _ = play_alone(program, says("a"))
    assert (rollout.score.error, rollout.score.reward) == (None, float(bool(no_proxy)))
    assert play_alone(three_turns, says("a"))[0].score.error is None
    hosts = "*" if no_proxy == "*" else f"{no_proxy},127.0.0.1".strip(",")
    assert [os.environ[name] for name in ("no_proxy", "NO_PROXY")] == [hosts, hosts]


def test_the_program_of_the_guide_rewards_an_agent_that_prints_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    guide = (ROOT / "docs/guides/agents.md").read_text()
    example = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)[1]
    agent = tmp_path / "their_agent.sh"
    agent.write_text(f"#!/bin/sh\nexec {sys.executable} {tmp_path}/theirs.py\n")
    os.chmod(agent, 0o755)
    (tmp_path / "theirs.py").write_text(ASK_WITHOUT_OPENAI + "print('it is', answer)\n")
    for said, reward in (("p", 0.0), ("p0!", 1.0)):
        rollout, _ = play_alone(program_of(tmp_path, example), says(said))
        assert (rollout.score.reward, rollout.score.error) == (reward, None)


@pytest.mark.parametrize(
    ("program", "arguments", "expected"),
    [
        ("{folder}/agents.py:plian", [], "agents.py' 'plian'; did you mean 'plain'?"),
        ("{folder}/agents.py:plain", [], "must be a coroutine function: write `async def`"),
        ("{folder}/agents.py:alone", [], "must be called as `f(item, base_url, api_key)`: too many"),
        ("{folder}/agents.py:play", ["--x"], "a function has none; use a program"),
    ],
)
def test_a_program_that_cannot_be_started_is_one_line_before_the_run(tmp_path, program, arguments, expected):
    code = "def plain(item, base_url, api_key): ...\nasync def alone(item): ...\nasync def play(*_): ...\n"
    (tmp_path / "agents.py").write_text(code)
    with pytest.raises(EnvironmentSetupError, match="environments 'rows'") as error:
        build_agent(program.format(folder=tmp_path), arguments, "environments 'rows'")
    assert expected in str(error.value)


def test_any_executable_can_be_the_program(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "agent.sh"
    script.write_text(f"#!/bin/sh\nexec {sys.executable} -c 'print(1)'\n")
    os.chmod(script, 0o755)
    assert "without a request" in error_of(build_agent("agent.sh", [], "key"))


def test_a_program_ends_with_the_rank_that_started_it():
    rank = """
import os, subprocess, sys
from pathlib import Path
process = subprocess.Popen([sys.executable, "-I", "-S", sys.argv[1], str(os.getpid()), "sleep", "600"])
while not Path(f"/proc/{process.pid}/cmdline").read_bytes().startswith(b"sleep"):
    pass
print(process.pid, flush=True)
os.kill(os.getpid(), 9)
"""
    ended = subprocess.run([sys.executable, "-c", rank, STARTER], capture_output=True, text=True, timeout=300)
    assert_gone([int(ended.stdout)])
