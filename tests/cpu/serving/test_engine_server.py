"""The engine over HTTP: what clients of Atropos, OpenAI and vLLM send and read, and what strangers may not do."""

from __future__ import annotations

import asyncio
import gc
import gzip
import itertools
import json
import logging
import resource
import threading
import zlib
from collections.abc import AsyncGenerator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from http.client import HTTPConnection
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import settings as effort
from hypothesis import strategies as some
from starlette.requests import ClientDisconnect

from colocated_grpo.rollout.inbox import Driver, Inbox
from colocated_grpo.runtime.descriptors import DESCRIPTORS
from colocated_grpo.serving.app import create_app
from colocated_grpo.serving.load_balancer import LeastBusy, Unserved
from colocated_grpo.serving.origins import Origin, Origins
from colocated_grpo.serving.request_bodies import ChatBody, CompletionBody, GenerateBody, SamplingWish, TokensBody
from colocated_grpo.serving.sampler import Bit, Limits, Sampler
from colocated_grpo.serving.streaming import Stream, as_lines, generate_chunks
from colocated_grpo.types import Completion
from colocated_grpo.web.server import ServerThread
from tests.support.fakes import VOCABULARY, FakeEngine
from tests.support.servers import until

JSON_TYPE = {"Content-Type": "application/json"}
LONGEST = 24
LIMITS = Limits(max_tokens=LONGEST, longest_token=2, vocab_size=VOCABULARY, stop_token_ids=(9,), seed=0)
MODEL = "tiny"
MAX_BODY = 50_000


class Letters:
    """A tokenizer of ten letters."""

    chat_template = "letters"

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [ord(letter) % VOCABULARY for letter in text]

    def decode(self, token_ids, *, skip_special_tokens: bool) -> str:
        return "".join("abcdefghij"[token] for token in token_ids)

    def apply_chat_template(self, messages: list[dict[str, Any]], **settings: Any) -> str:
        if any(message["role"] not in ("user", "assistant", "system") for message in messages):
            raise ValueError("roles are user, assistant and system")
        return "".join(message["content"] for message in messages)


class Served:
    """A server over a fake engine that a thread drives, as long as `awake` is set."""

    def __init__(self, *, engines: int = 1, **guards: Any) -> None:
        self.inboxes = [Inbox() for _ in range(engines)]
        self.engines = [FakeEngine() for _ in self.inboxes]
        self.origins = Origins(100)
        self.notes: list[str] = []
        self.awake, self.ended = threading.Event(), threading.Event()
        self.awake.set()
        sampler = Sampler(
            LeastBusy([lambda *request, i=inbox: i.put(*request) for inbox in self.inboxes]),
            lambda tokens, k: self.inboxes[0].call(lambda engine: engine.top_logprobs(tokens, k)),
            Letters(),
            self.origins,
            LIMITS,
            self.notes.append,
        )
        guards = {"api_key": None, "max_body_bytes": MAX_BODY, "max_requests": 64, **guards}
        self.server = ServerThread(create_app(sampler, MODEL, LONGEST, **guards), "127.0.0.1", [0, 0])
        self.url = f"http://127.0.0.1:{self.server.ports[0]}"
        self.threads = [
            threading.Thread(target=self._drive, args=(Driver(engine, inbox),), daemon=True)
            for engine, inbox in zip(self.engines, self.inboxes, strict=True)
        ]
        for thread in self.threads:
            thread.start()

    def _drive(self, driver: Driver) -> None:
        while not self.ended.is_set():
            if self.awake.wait(0.01):
                driver.step()
        driver.abort()

    def call(self, method: str, path: str, body: Any = None, port: int = 0, **headers: str) -> tuple[int, Any]:
        connection = HTTPConnection("127.0.0.1", self.server.ports[port], timeout=10)
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        connection.request(method, path, data, {"Content-Type": "application/json", **headers})
        answer = connection.getresponse()
        raw = answer.read()
        connection.close()
        is_json = "json" in answer.headers.get("Content-Type", "") and "nd" not in answer.headers["Content-Type"]
        return answer.status, json.loads(raw) if is_json else raw.decode()

    def post(self, path: str, body: Any) -> Any:
        status, answer = self.call("POST", path, body)
        assert status == 200, answer
        return answer

    def refused(self, path: str, body: Any, status: int = 400) -> str:
        code, answer = self.call("POST", path, body)
        assert code == status, answer
        return answer["error"]["message"]

    def requests(self) -> list[Any]:
        return [request for engine in self.engines for request in engine.submitted]

    def close(self) -> None:
        self.ended.set()
        for inbox in self.inboxes:
            inbox.wake()
        for thread in self.threads:
            thread.join()
        self.server.close()


@pytest.fixture
def served() -> Iterator[Served]:
    served = Served()
    yield served
    served.close()


@pytest.fixture(scope="module")
def shared() -> Iterator[Served]:
    served = Served()
    yield served
    served.close()


ATROPOS = {"prompt": {"prompt_token_ids": [1, 2, 3]}, "logprobs": 0, "n": 3, "max_tokens": 6, "temperature": 0.9}


def test_generate_answers_as_atropos_reads_it(served):
    reply = served.post("/generate", {**ATROPOS, "top_p": 1.0, "stop": ["\n"]})
    assert set(reply) == {"text", "prompt", "finish_reasons", "logprobs", "prompt_token_ids", "token_ids"}
    assert (reply["prompt"], reply["prompt_token_ids"]) == ("bcd", [1, 2, 3])
    assert len(reply["logprobs"]) == len(reply["finish_reasons"]) == len(reply["text"]) == 3
    for tokens, logprobs, text in zip(reply["token_ids"], reply["logprobs"], reply["text"], strict=True):
        assert [int(next(iter(position[0]))) for position in logprobs] == tokens
        assert all(value < 0 for position in logprobs for value in position[0].values())
        assert text == Letters().decode(tokens, skip_special_tokens=True)
    assert {request.sampling.temperature for request in served.requests()} == {0.9}
    assert {request.sampling.stop for request in served.requests()} == {("\n",)}


def test_the_documented_curl_gets_logprobs(served):
    reply = served.post("/generate", {"prompt": "Hello", "max_tokens": 5})
    assert len(reply["logprobs"][0]) == len(reply["token_ids"][0]) > 0


def test_completions_of_one_prompt_differ_and_a_seed_repeats_them(served):
    body = {**ATROPOS, "max_tokens": 20, "n": 4}
    first = served.post("/generate", body)["token_ids"]
    assert len({tuple(tokens) for tokens in first}) == 4
    assert served.post("/generate", body)["token_ids"] != first
    seeded = [served.post("/generate", {**body, "seed": 5})["token_ids"] for _ in range(2)]
    assert seeded[0] == seeded[1]


def test_how_tokens_were_sampled_is_remembered(served):
    served.engines[0].weights_changed(7)
    tokens = served.post("/generate", ATROPOS)["token_ids"][0]
    assert served.origins.find([1, 2, 3], tokens)[:2] == (0.9, 7)


@pytest.mark.parametrize(("asked", "remembered"), [(0, 1.0), (1e-9, 0.01), (1.3, 1.3)])
def test_the_remembered_temperature_is_the_one_that_was_used(served, asked, remembered):
    tokens = served.post("/generate", {**ATROPOS, "temperature": asked})["token_ids"][0]
    assert isinstance(served.origins.find([1, 2, 3], tokens), Origin)
    assert served.origins.find([1, 2, 3], tokens).temperature == remembered


def test_prompt_logprobs_have_the_token_itself_first(served):
    reply = served.post("/generate", {"prompt": {"prompt_token_ids": [1, 2, 3]}, "prompt_logprobs": 2, "max_tokens": 1})
    nothing, *entries = reply["prompt_logprobs"]
    assert nothing is None
    assert [list(entry) for entry in entries] == [["2", "0", "1"], ["3", "0", "1"]]
    assert entries[0]["2"] == -1.0


def test_a_stream_has_the_whole_texts_so_far_in_each_line(served):
    status, body = served.call("POST", "/generate", {**ATROPOS, "n": 2, "stream": True, "seed": 3})
    assert status == 200
    lines = [json.loads(line)["text"] for line in body.splitlines()]
    whole = ["bcd" + text for text in served.post("/generate", {**ATROPOS, "n": 2, "seed": 3})["text"]]
    assert lines[-1] == whole
    assert len(lines) == sum(map(len, whole)) - len("bcd") * 2, "a line for each letter"
    for before, after in itertools.pairwise(lines):
        assert all(new.startswith(old) for old, new in zip(before, after, strict=True))


def test_max_tokens_are_cut_to_what_fits(served):
    served.post("/generate", {"prompt": "a" * 20, "max_tokens": 1000})
    assert served.requests()[-1].sampling.max_tokens == LONGEST - 20
    served.post("/v1/chat/completions", {"model": "x", "messages": [{"role": "user", "content": "abcd"}]})
    assert served.requests()[-1].sampling.max_tokens == LONGEST - 4


def test_the_models_own_end_ends_a_completion_unless_it_is_ignored(served):
    served.post("/generate", {**ATROPOS, "n": 1, "stop_token_ids": [4]})
    assert served.requests()[-1].sampling.stop_token_ids == (4, 9)
    served.post("/generate", {**ATROPOS, "n": 1, "stop_token_ids": [4], "ignore_eos": True})
    assert served.requests()[-1].sampling.stop_token_ids == (4,)


def test_text_ends_before_the_stop_string(served):
    tokens = served.post("/generate", {**ATROPOS, "n": 1, "seed": 8, "max_tokens": 20})["text"][0]
    stop = tokens[2:4]
    cut = served.post("/generate", {**ATROPOS, "n": 1, "seed": 8, "max_tokens": 20, "stop": stop})["text"][0]
    assert cut == tokens[: tokens.index(stop)]


def test_sampling_that_changes_the_distribution_is_told_once(served):
    for _ in range(2):
        served.post("/generate", {**ATROPOS, "top_p": 0.5, "top_k": 3})
    assert served.notes == [
        "atropos: an environment samples with top_p=0.5, top_k=3: the engine's log-probabilities are renormalised over "
        "the tokens it keeps, the trainer's are not; expect a larger sampler/trainer KL"
    ]


def test_tokens_in_and_tokens_out_as_vllm_has_it(served):
    protocol = pytest.importorskip("vllm.entrypoints.scale_out.token_in_token_out.protocol")
    body = {"token_ids": [1, 2], "sampling_params": {"n": 2, "max_tokens": 5, "logprobs": 1}, "request_id": "r"}
    reply = served.post("/inference/v1/generate", body)
    parsed = protocol.GenerateTokensResponse.model_validate(reply)
    assert parsed.request_id == "r"
    for choice in parsed.choices:
        assert [entry.token_id for entry in choice.logprobs.content] == choice.token_ids


def client(served: Served, key: str = "x") -> openai.OpenAI:
    return openai.OpenAI(api_key=key, base_url=f"{served.url}/v1", max_retries=0)


def test_the_openai_client_lists_the_model(served):
    assert [model.id for model in client(served).models.list()] == [MODEL]


def test_the_openai_client_chats(served):
    messages = [{"role": "user", "content": [{"type": "text", "text": "abc"}]}]
    reply = client(served).chat.completions.create(
        model=MODEL, messages=messages, n=2, max_tokens=6, logprobs=True, top_logprobs=1, seed=1
    )
    assert [choice.index for choice in reply.choices] == [0, 1]
    first = reply.choices[0]
    assert "".join(entry.token for entry in first.logprobs.content) == first.message.content
    assert reply.usage.completion_tokens == sum(len(choice.logprobs.content) for choice in reply.choices)
    assert served.requests()[0].token_ids == Letters().encode("abc")


def test_the_openai_client_completes(served):
    reply = client(served).completions.create(model=MODEL, prompt=["abc", "de"], n=2, max_tokens=4, logprobs=0)
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    assert "".join(reply.choices[0].logprobs.tokens) == reply.choices[0].text
    tokens = client(served).completions.create(model=MODEL, prompt=[1, 2, 3], max_tokens=4)
    assert tokens.usage.prompt_tokens == 3


CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "abc"}], "max_tokens": 12, "seed": 4}


def test_the_openai_client_iterates_over_a_chat(served):
    whole = client(served).chat.completions.create(**CHAT, logprobs=True).choices[0]
    usage = {"stream_options": {"include_usage": True}}
    *chunks, last = client(served).chat.completions.create(**CHAT, stream=True, logprobs=True, **usage)
    choices = [chunk.choices[0] for chunk in chunks]
    assert len(choices) == len(whole.message.content) > 3
    assert "".join(choice.delta.content for choice in choices) == whole.message.content
    assert [choice.finish_reason for choice in choices] == [None] * (len(choices) - 1) + [whole.finish_reason]
    assert [choice.delta.role for choice in choices] == ["assistant"] + [None] * (len(choices) - 1)
    entries = [entry for choice in choices for entry in choice.logprobs.content]
    assert entries == whole.logprobs.content
    assert last.choices == [] and last.usage.completion_tokens == len(choices)
    assert all(chunk.usage is None for chunk in chunks)
    assert len({chunk.id for chunk in [*chunks, last]}) == 1


def test_the_openai_client_iterates_over_completions_of_several_prompts(served):
    asked = {"model": MODEL, "prompt": ["abc", "de"], "n": 2, "max_tokens": 9, "seed": 4, "logprobs": 0}
    whole = client(served).completions.create(**asked)
    texts, offsets = ["", "", "", ""], [[], [], [], []]
    for chunk in client(served).completions.create(**asked, stream=True):
        [choice] = chunk.choices
        texts[choice.index] += choice.text
        offsets[choice.index] += choice.logprobs.text_offset
        assert chunk.usage is None
    assert texts == [choice.text for choice in whole.choices]
    assert offsets == [choice.logprobs.text_offset for choice in whole.choices]


def test_a_stream_of_tokens_is_as_vllm_has_it(served):
    protocol = pytest.importorskip("vllm.entrypoints.scale_out.token_in_token_out.protocol")
    body = {"token_ids": [1, 2], "sampling_params": {"max_tokens": 9, "seed": 1, "logprobs": 0}}
    [whole] = served.post("/inference/v1/generate", body)["choices"]
    _, events = served.call("POST", "/inference/v1/generate", {**body, "stream": True})
    *events, done, _ = events.split("\n\n")
    assert done == "data: [DONE]"
    chunks = [protocol.GenerateTokensStreamResponse.model_validate_json(event[6:]) for event in events]
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert [token for choice in choices for token in choice.token_ids] == whole["token_ids"]
    assert all(entry.token_id in choice.token_ids for choice in choices for entry in choice.logprobs.content)
    assert choices[-1].finish_reason == whole["finish_reason"]


def test_a_stop_string_is_never_in_a_stream(served):
    text = client(served).chat.completions.create(**{**CHAT, "max_tokens": 20}).choices[0].message.content
    stop = text[2:5]
    chunks = client(served).chat.completions.create(**{**CHAT, "max_tokens": 20}, stop=stop, stream=True)
    assert "".join(chunk.choices[0].delta.content for chunk in chunks) == text[: text.index(stop)]


def test_what_fails_before_a_stream_begins_has_a_status(served):
    assert "24 tokens" in served.refused("/generate", {"prompt": "a" * LONGEST, "stream": True})
    served.ended.set()
    until(lambda: not any(thread.is_alive() for thread in served.threads))
    served.inboxes[0].put = lambda request, listen: _cancelled()
    assert served.refused("/v1/chat/completions", {**CHAT, "stream": True}, 503) == "the run is ending"


def _cancelled() -> Future:
    future: Future = Future()
    future.cancel()
    return future


class Steps:
    """Lets an engine make one step at a time."""

    def __init__(self) -> None:
        self._allowed = threading.Semaphore(0)

    def __call__(self) -> None:
        assert self._allowed.acquire(timeout=10)

    def allow(self, count: int) -> None:
        self._allowed.release(count)


def test_a_piece_is_sent_before_the_next_is_sampled_and_a_run_that_ends_is_an_event(served):
    served.engines[0]._on_step = steps = Steps()
    connection = HTTPConnection("127.0.0.1", served.server.ports[0], timeout=10)
    connection.request("POST", "/v1/chat/completions", json.dumps({**CHAT, "stream": True}), JSON_TYPE)
    steps.allow(1)
    answer = connection.getresponse()
    assert json.loads(answer.readline()[6:])["choices"][0]["delta"]["content"] != ""
    served.ended.set()
    steps.allow(1)
    rest = answer.read().decode()
    assert '"message": "the run is ending"' in rest and rest.endswith("data: [DONE]\n\n")
    connection.close()


def test_a_client_that_leaves_within_a_stream_frees_its_place_in_the_engine(served, caplog):
    served.engines[0]._on_step = steps = Steps()
    connection = HTTPConnection("127.0.0.1", served.server.ports[0], timeout=10)
    connection.request("POST", "/v1/chat/completions", json.dumps({**CHAT, "n": 2, "stream": True}), JSON_TYPE)
    steps.allow(1)
    answer = connection.getresponse()
    answer.readline()
    assert len(served.engines[0].running) == 2
    answer.close()
    connection.close()
    until(lambda: len(served.inboxes[0]._cancelled) == 2)
    steps.allow(10)
    until(lambda: not served.engines[0].running)
    gc.collect()
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_a_stream_that_cannot_be_sent_closes_its_source():
    closed: list[bool] = []

    async def source() -> AsyncGenerator[Bit]:
        try:
            while True:
                yield Bit(index=0, text="a", token_ids=[1], logprobs=[-1.0])
        finally:
            closed.append(True)

    async def send(message: dict[str, Any]) -> None:
        if message.get("body"):
            raise OSError("the client has gone")

    async def respond() -> list[bool]:
        bits = source()
        lines = as_lines(generate_chunks("", 1, bits))
        with pytest.raises(ClientDisconnect):
            await Stream(lines, bits, "text/plain")({"type": "http", "asgi": {"spec_version": "2.4"}}, None, send)
        return list(closed)

    assert asyncio.run(respond()) == [True]


def test_alternatives_are_at_the_temperature_of_the_sampling(served):
    chat = {**CHAT, "temperature": 0.5, "logprobs": True}
    [choice] = client(served).chat.completions.create(**chat, top_logprobs=2).choices
    plain = client(served).chat.completions.create(**chat).choices[0].logprobs.content
    for entry, alone in zip(choice.logprobs.content, plain, strict=True):
        own, *others = entry.top_logprobs
        assert (own.token, own.logprob) == (entry.token, entry.logprob) == (alone.token, alone.logprob)
        # The engine names others with -2 and -3 at temperature 1, where each token of the completion has -1.
        assert [other.logprob for other in others] == pytest.approx([entry.logprob - 2, entry.logprob - 4])
        assert alone.top_logprobs == []
    reply = client(served).completions.create(model=MODEL, prompt="abc", max_tokens=4, logprobs=3)
    logprobs = reply.choices[0].logprobs
    assert [len(entry) for entry in logprobs.top_logprobs] == [4] * len(logprobs.tokens)
    assert [next(iter(entry.items())) for entry in logprobs.top_logprobs] == list(
        zip(logprobs.tokens, logprobs.token_logprobs, strict=True)
    )


def test_alternatives_are_scored_before_the_engine_may_sleep():
    inbox, engine = Inbox(), FakeEngine(decode_steps=lambda request: 3)
    sampler = Sampler(
        LeastBusy([inbox.put]),
        lambda tokens, k: inbox.call(lambda engine: engine.top_logprobs(tokens, k)),
        Letters(),
        Origins(10),
        LIMITS,
        lambda line: None,
    )

    async def ask() -> list[Any]:
        return await sampler.sample([[1, 2]], SamplingWish(max_tokens=5), 2)

    driver = Driver(engine, inbox)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(asyncio.run, ask())
        until(lambda: inbox)
        driver.step()
        driver.drain()
        assert engine.events == ["top 2"]
        assert answer.result(10)[0].alternatives


def test_a_run_that_ends_while_alternatives_are_scored_says_so_within_the_stream():
    """A stream that merely broke off would keep its client waiting until the server closes."""
    inbox, scored = Inbox(), [Future() for _ in range(2)]
    sampler = Sampler(
        LeastBusy([inbox.put]),
        lambda tokens, k: scored.pop(),
        Letters(),
        Origins(10),
        LIMITS,
        lambda line: None,
    )
    given_up, answered = scored
    answered.set_result([dict.fromkeys(range(VOCABULARY), -1.0)] * LONGEST)

    async def ask() -> list[Any]:
        bits = sampler.stream([[1, 2]], SamplingWish(max_tokens=5, n=2), 2)
        first = await anext(bits)
        given_up.cancel()
        with pytest.raises(Unserved):
            await anext(bits)
        return first.served.alternatives

    driver = Driver(FakeEngine(), inbox)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(asyncio.run, ask())
        until(lambda: inbox)
        driver.step()
        driver.drain()
        assert answer.result(10)


def test_alternatives_of_a_stream_come_with_its_only_piece(served):
    asked = {**CHAT, "logprobs": True, "top_logprobs": 2}
    [whole] = client(served).chat.completions.create(**asked).choices
    [chunk] = client(served).chat.completions.create(**asked, stream=True)
    assert chunk.choices[0].logprobs.content == whole.logprobs.content


def test_a_sequence_that_fills_the_engine_has_no_alternatives_for_its_last_token(served):
    completion = Completion(token_ids=[3] * 4, sampling_logprobs=[-0.5] * 4, finish_reason="length", policy_version=0)
    served.inboxes[0].put = lambda request, listen: _done(completion)
    reply = served.post("/v1/completions", {"prompt": [1] * (LONGEST - 4), "max_tokens": 4, "logprobs": 2})
    assert [len(entry) for entry in reply["choices"][0]["logprobs"]["top_logprobs"]] == [3, 3, 3, 1]


def _done(completion: Completion) -> Future:
    future: Future = Future()
    future.set_result(completion)
    return future


def test_requests_wait_while_the_engine_sleeps_and_health_stays_good(served):
    served.awake.clear()
    replies: list[Any] = []
    thread = threading.Thread(target=lambda: replies.append(served.call("POST", "/generate", ATROPOS)))
    thread.start()
    until(lambda: served.inboxes[0])
    assert served.call("GET", "/health") == (200, "")
    assert replies == []
    served.awake.set()
    thread.join(10)
    assert replies[0][0] == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_place_in_the_engine(served, stream):
    served.engines[0]._decode_steps = lambda request: 10**9
    connection = HTTPConnection("127.0.0.1", served.server.ports[0])
    connection.request("POST", "/generate", json.dumps({**ATROPOS, "stream": stream}), JSON_TYPE)
    until(lambda: len(served.engines[0].running) == 3)
    connection.close()
    until(lambda: not served.engines[0].running)
    assert all(event.startswith("abort") for event in served.engines[0].events)


def test_where_one_prompt_is_bad_none_is_sampled(served):
    asked: list[Any] = []
    served.inboxes[0].put = lambda request, listen: asked.append(request) or Future()
    served.refused("/v1/completions", {"prompt": [[1, 2], [VOCABULARY]]})
    assert asked == []


@pytest.mark.parametrize("stream", [False, True])
def test_where_one_completion_fails_the_others_leave_the_engine(served, stream):
    failed, others = Future(), [Future(), Future()]
    futures = iter([*others, failed])
    served.inboxes[0].put = lambda request, listen: next(futures)
    failed.set_exception(ValueError("the engine refuses it"))
    body = {"prompt": ["ab", "cd", "ef"], "stream": stream}
    assert served.refused("/v1/completions", body) == "the engine refuses it"
    until(lambda: all(future.cancelled() for future in others))


def test_a_run_that_ends_says_so_to_who_waits(served):
    served.engines[0]._decode_steps = lambda request: 10**9
    replies: list[Any] = []
    thread = threading.Thread(target=lambda: replies.append(served.call("POST", "/generate", ATROPOS)))
    thread.start()
    until(lambda: len(served.engines[0].running) == 3)
    served.ended.set()
    thread.join(10)
    assert replies == [(503, {"error": {"message": "the run is ending", "type": "server_error", "code": 503}})]


def test_requests_go_where_the_fewest_are_under_way():
    served = Served(engines=3)
    served.awake.clear()
    threads = [threading.Thread(target=served.call, args=("POST", "/generate", {**ATROPOS, "n": 2})) for _ in range(3)]
    for thread in threads:
        thread.start()
    until(lambda: sum(len(inbox._requests) for inbox in served.inboxes) == 6)
    assert [len(inbox._requests) for inbox in served.inboxes] == [2, 2, 2]
    served.awake.set()
    for thread in threads:
        thread.join(10)
    served.close()


def test_every_port_has_the_same_server(served):
    assert [served.call("GET", "/v1/models", port=port)[0] for port in (0, 1)] == [200, 200]


def test_a_port_in_use_is_named(served):
    with pytest.raises(OSError, match=rf"127.0.0.1:{served.server.ports[0]}"):
        ServerThread(SimpleNamespace(), "127.0.0.1", [served.server.ports[0]])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"nonsense": 1}, "nonsense: Extra inputs are not permitted"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": {"prompt_token_ids": [VOCABULARY]}}, "token 10 is not in the vocabulary of 10"),
        ({"prompt": {"prompt_token_ids": [-1]}}, "greater than or equal to 0"),
        ({"prompt": {"prompt_token_ids": [1] * LONGEST}}, "the prompt has 24 tokens"),
        ({"prompt": "a" * 48}, "the prompt has 48 tokens"),
        ({"prompt": "a" * 49}, "a prompt of 49 characters cannot fit into 24 tokens (rollout.max_prompt_tokens + "),
        ({"stop_token_ids": [1, VOCABULARY]}, "stop_token_ids: token 10 is not in the vocabulary of 10"),
        ({"n": 0}, "n: Input should be greater than or equal to 1"),
        ({"temperature": -1}, "temperature"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"stop": [""]}, "stop strings"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
def test_what_cannot_be_served_is_refused_in_one_line(shared, changes, message):
    assert message in shared.refused("/generate", {**ATROPOS, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "only text content is served"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "the chat template refuses these messages: roles are"),
        ({"messages": [{"role": "user", "content": "a" * 60}]}, "characters cannot fit into 24 tokens"),
        ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "cannot be set"),
        ({"logit_bias": {"5": 10}}, "logit_bias"),
    ],
)
def test_chats_that_cannot_be_served_are_refused_in_one_line(shared, changes, message):
    body = {"model": MODEL, "messages": [{"role": "user", "content": "abc"}], **changes}
    assert message in shared.refused("/v1/chat/completions", body)


def test_large_bodies_are_refused(shared):
    assert shared.call("POST", "/generate", {"prompt": "a" * MAX_BODY})[0] == 413


def test_unknown_paths_and_methods_are_refused_without_a_trace(shared):
    assert shared.call("GET", "/nowhere")[0] == 404
    assert shared.call("GET", "/generate")[0] == 405


def test_only_who_has_the_key_is_served():
    served = Served(api_key="secret-\u00e9")
    as_sent = "secret-\u00e9".encode().decode("latin-1")
    for wrong in ({}, {"Authorization": "Bearer secret"}, {"Authorization": as_sent}):
        assert served.call("POST", "/generate", ATROPOS, **wrong)[0] == 401
    assert served.call("GET", "/health")[0] == 200
    assert served.call("POST", "/generate", ATROPOS, Authorization=f"Bearer {as_sent}")[0] == 200
    assert len(served.requests()) == 3
    served.close()


def test_a_body_that_does_not_come_gives_its_place_back(monkeypatch):
    monkeypatch.setattr("colocated_grpo.web.bodies.BODY_SECONDS", 0.05)
    served = Served(max_requests=1)
    connection = HTTPConnection("127.0.0.1", served.server.ports[0], timeout=3)
    connection.putrequest("POST", "/generate")
    connection.putheader("Content-Length", "100")
    connection.endheaders(b"{")
    assert connection.getresponse().status == 408
    assert served.call("GET", "/v1/models")[0] == 200
    connection.close()
    served.close()


def test_more_requests_than_allowed_are_turned_away():
    served = Served(max_requests=1)
    served.awake.clear()
    thread = threading.Thread(target=served.call, args=("POST", "/generate", ATROPOS))
    thread.start()
    until(lambda: served.inboxes[0])
    connection = HTTPConnection("127.0.0.1", served.server.ports[0], timeout=10)
    connection.request("POST", "/generate", json.dumps(ATROPOS), JSON_TYPE)
    answer = connection.getresponse()
    assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
    connection.close()
    assert served.call("GET", "/health")[0] == 200
    served.awake.set()
    thread.join(10)
    served.close()


ODD = [
    10**400,
    -(10**30),
    2**63,
    1e308,
    float("nan"),
    float("inf"),
    "\ud800",
    "\0",
    "\U0001f600",
    [[[[[]]]]],
    {"": {"": {}}},
]
JSON = some.recursive(
    some.none()
    | some.booleans()
    | some.integers()
    | some.floats()
    | some.text(max_size=8)
    | some.sampled_from(ODD)
    | some.integers(-1, 5),
    lambda inner: some.lists(inner, max_size=4) | some.dictionaries(some.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
BASES = {
    "/generate": (ATROPOS, GenerateBody),
    "/v1/completions": ({"prompt": "abc"}, CompletionBody),
    "/v1/chat/completions": ({"messages": [{"role": "user", "content": "a"}]}, ChatBody),
    "/inference/v1/generate": ({"token_ids": [1]}, TokensBody),
}
NESTED = {
    "sampling_params": SamplingWish.model_fields,
    "stream_options": ("include_usage",),
    "prompt": ("prompt", "prompt_token_ids"),
    "messages": ("role", "content", "tool_calls"),
}


def fields_of(names: Iterable[str]) -> some.SearchStrategy:
    return some.dictionaries(some.sampled_from(sorted(names)), JSON, max_size=3)


@some.composite
def bodies(draw: some.DrawFn) -> tuple[str, dict[str, Any]]:
    """A route, and a body of which some fields, or fields within fields, are anything."""
    path = draw(some.sampled_from(sorted(BASES)))
    base, model = BASES[path]
    body = {
        **base,
        **draw(fields_of(model.model_fields)),
        **draw(some.dictionaries(some.text(max_size=4), JSON, max_size=1)),
    }
    name = draw(some.sampled_from(["", *NESTED]))
    if name in model.model_fields:
        inner = draw(fields_of(NESTED[name]))
        body[name] = draw(some.sampled_from([inner, [inner], [{"role": "user", "content": "a", **inner}]]))
    return path, body


def test_no_body_makes_the_server_fail(shared, caplog):
    @given(bodies())
    @effort(max_examples=400)
    def try_one(one: tuple[str, dict[str, Any]]) -> None:
        status, answer = shared.call("POST", *one)
        assert status in (200, 400), answer
        if status == 400:
            message = answer["error"]["message"]
            assert "\n" not in message.split("template refuses")[0]
            assert "Traceback" not in message

    try_one()
    shared.post("/generate", ATROPOS)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


@given(path=some.sampled_from(sorted(BASES)), raw=some.binary(max_size=60))
@effort(max_examples=100)
def test_no_bytes_make_the_server_fail(shared, path, raw):
    assert shared.call("POST", path, raw)[0] == 400


def nested(depth: int) -> bytes:
    return (
        b'{"prompt": "a", "messages": [{"role": "user", "content": "a", "x": '
        + b'{"a":' * depth
        + b"1"
        + b"}" * depth
        + b"}]}"
    )


GZIP = {"Content-Encoding": "gzip"}
PROMPT = b'{"prompt": "a", "max_tokens": 2}'


@pytest.mark.parametrize(
    ("path", "body", "headers", "status"),
    [
        ("/v1/completions", b'{"prompt": "a", "model": "\\ud800"}', {}, 400),
        ("/v1/completions", b'{"prompt": "a", "model": "\xed\xa0\x80"}', {}, 400),
        ("/v1/completions", b'{"prompt": "a", "model": "\\ud83d\\ude00"}', {}, 200),
        ("/v1/completions", PROMPT.decode().encode("utf-16-le"), {}, 400),
        ("/v1/chat/completions", nested(900), {}, 200),
        ("/v1/chat/completions", nested(20_000 // 6), {}, 400),
        ("/generate", b'{"prompt": ' + b"[" * 20_000 + b"]" * 20_000 + b"}", {}, 400),
        ("/generate", b'{"prompt": "a", "seed": ' + b"9" * 40_000 + b"}", {}, 400),
        ("/generate", b'{"prompt": "a", "temperature": 1e999}', {}, 400),
        ("/generate", PROMPT, {"Content-Type": "text/plain"}, 400),
        ("/generate", b"prompt=a", {"Content-Type": "application/x-www-form-urlencoded"}, 400),
        ("/generate", PROMPT, {"Content-Type": "multipart/form-data; boundary=x"}, 400),
        ("/generate", PROMPT, {"Content-Type": "\xff;;=\xfe"}, 400),
        ("/generate", gzip.compress(PROMPT), GZIP, 200),
        ("/generate", gzip.compress(PROMPT)[:-6], GZIP, 400),
        ("/generate", PROMPT, GZIP, 400),
        ("/generate", gzip.compress(b"a" * 100 * MAX_BODY), GZIP, 413),
        ("/generate", zlib.compress(PROMPT), {"Content-Encoding": "deflate"}, 400),
        ("/generate", iter([b"a" * 4096] * 100), {}, 413),
        ("/generate", iter([PROMPT[:9], PROMPT[9:]]), {}, 200),
        # Without a body: one that the server has not read when it hangs up may cost the client the answer.
        ("/generate", b"", {"Content-Length": "-5"}, 400),
        ("/generate", b"", {"Content-Length": "9" * 5000}, 400),
    ],
)
def test_odd_bodies_are_answered(shared, caplog, path, body, headers, status):
    connection = HTTPConnection("127.0.0.1", shared.server.ports[0], timeout=10)
    connection.request("POST", path, body, JSON_TYPE | headers)
    answer = connection.getresponse()
    text = answer.read()
    connection.close()
    assert answer.status == status, text
    assert b"Traceback" not in text
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(shared.post("/generate", ATROPOS)["text"]) == 3


def test_held_connections_leave_the_run_files_of_its_own():
    before = soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, soft), hard))
    try:
        ServerThread(SimpleNamespace(), "127.0.0.1", [0]).close()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(hard, DESCRIPTORS), hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
