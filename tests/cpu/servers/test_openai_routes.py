"""The OpenAI routes, called by OpenAI's client."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from colocated_grpo.rollout.inbox import Driver, Inbox
from colocated_grpo.servers.rank_links import LoadBalancer
from colocated_grpo.servers.request_bodies import SamplingParameters
from colocated_grpo.servers.sampler import Sampler
from colocated_grpo.servers.text import TextCodec
from colocated_grpo.types import Completion
from tests.support.engine_server import CHAT, LIMITS, MAX_TOKENS, MODEL, LetterTokenizer
from tests.support.fakes import FakeEngine
from tests.support.servers import until


def test_models_are_listed(server):
    assert [model.id for model in server.openai().models.list()] == [MODEL]


def test_a_chat_is_completed(server):
    messages = [{"role": "user", "content": [{"type": "text", "text": "abc"}]}]
    response = server.openai().chat.completions.create(
        model=MODEL, messages=messages, n=2, max_tokens=6, logprobs=True, top_logprobs=1, seed=1
    )
    assert [choice.index for choice in response.choices] == [0, 1]
    first = response.choices[0]
    assert "".join(entry.token for entry in first.logprobs.content) == first.message.content
    assert response.usage.completion_tokens == sum(len(choice.logprobs.content) for choice in response.choices)
    assert server.requests()[0].token_ids == LetterTokenizer().encode("abc")


def test_prompts_are_completed(server):
    completions = server.openai().completions
    response = completions.create(model=MODEL, prompt=["abc", "de"], n=2, max_tokens=4, logprobs=0)
    assert [choice.index for choice in response.choices] == [0, 1, 2, 3]
    assert "".join(response.choices[0].logprobs.tokens) == response.choices[0].text
    assert completions.create(model=MODEL, prompt=[1, 2, 3], max_tokens=4).usage.prompt_tokens == 3


def test_a_streamed_chat_equals_the_whole_one(server):
    whole = server.openai().chat.completions.create(**CHAT, logprobs=True).choices[0]
    usage = {"stream_options": {"include_usage": True}}
    *chunks, last = server.openai().chat.completions.create(**CHAT, stream=True, logprobs=True, **usage)
    choices = [chunk.choices[0] for chunk in chunks]
    assert "".join(choice.delta.content for choice in choices) == whole.message.content
    assert [choice.finish_reason for choice in choices] == [None] * (len(choices) - 1) + [whole.finish_reason]
    assert [choice.delta.role for choice in choices] == ["assistant"] + [None] * (len(choices) - 1)
    entries = [entry for choice in choices for entry in choice.logprobs.content]
    assert entries == whole.logprobs.content
    assert last.choices == [] and last.usage.completion_tokens == len(entries)
    assert all(chunk.usage is None for chunk in chunks)
    assert len({chunk.id for chunk in [*chunks, last]}) == 1


def test_streamed_completions_of_several_prompts_equal_the_whole_ones(server):
    body = {"model": MODEL, "prompt": ["abc", "de"], "n": 2, "max_tokens": 9, "seed": 4, "logprobs": 0}
    whole = server.openai().completions.create(**body)
    texts, offsets = ["", "", "", ""], [[], [], [], []]
    for chunk in server.openai().completions.create(**body, stream=True):
        [choice] = chunk.choices
        texts[choice.index] += choice.text
        offsets[choice.index] += choice.logprobs.text_offset
        assert chunk.usage is None
    assert texts == [choice.text for choice in whole.choices]
    assert offsets == [choice.logprobs.text_offset for choice in whole.choices]


def test_a_stop_string_is_never_streamed(server):
    chat = {**CHAT, "max_tokens": 20}
    text = server.openai().chat.completions.create(**chat).choices[0].message.content
    stop = text[2:5]
    chunks = server.openai().chat.completions.create(**chat, stop=stop, stream=True)
    assert "".join(chunk.choices[0].delta.content for chunk in chunks) == text[: text.index(stop)]


def test_top_logprobs_are_at_the_sampling_temperature(server):
    chat = {**CHAT, "temperature": 0.5, "logprobs": True}
    [choice] = server.openai().chat.completions.create(**chat, top_logprobs=2).choices
    plain = server.openai().chat.completions.create(**chat).choices[0].logprobs.content
    for entry, alone in zip(choice.logprobs.content, plain, strict=True):
        own, *others = entry.top_logprobs
        assert (own.token, own.logprob) == (entry.token, entry.logprob) == (alone.token, alone.logprob)
        # At temperature 1 the fake engine gives -1 to each token of the completion, -2 and -3 to the others.
        assert [other.logprob for other in others] == pytest.approx([entry.logprob - 2, entry.logprob - 4])
        assert alone.top_logprobs == []
    response = server.openai().completions.create(model=MODEL, prompt="abc", max_tokens=4, logprobs=3)
    logprobs = response.choices[0].logprobs
    assert [len(entry) for entry in logprobs.top_logprobs] == [4] * len(logprobs.tokens)
    assert [next(iter(entry.items())) for entry in logprobs.top_logprobs] == list(
        zip(logprobs.tokens, logprobs.token_logprobs, strict=True)
    )


def test_top_logprobs_are_computed_before_the_engine_may_sleep():
    inbox, engine = Inbox(), FakeEngine(decode_steps=lambda request: 3)
    sampler = Sampler(LoadBalancer(inbox), TextCodec(LetterTokenizer(), LIMITS, {}), lambda line: None)

    async def sample() -> list[Any]:
        return await sampler.sample([[1, 2]], SamplingParameters(max_tokens=5), 2)

    driver = Driver(engine, inbox)
    with ThreadPoolExecutor(1) as pool:
        completions = pool.submit(asyncio.run, sample())
        until(lambda: inbox)
        driver.step()
        driver.drain()
        assert engine.events == ["top 2"]
        assert completions.result(10)[0].top_logprobs


def test_top_logprobs_of_a_stream_are_in_its_only_chunk(server):
    body = {**CHAT, "logprobs": True, "top_logprobs": 2}
    [whole] = server.openai().chat.completions.create(**body).choices
    [chunk] = server.openai().chat.completions.create(**body, stream=True)
    assert chunk.choices[0].logprobs.content == whole.logprobs.content


def test_the_last_token_of_a_sequence_of_maximum_length_has_no_top_logprobs(server):
    completion = Completion(token_ids=[3] * 4, sampling_logprobs=[-0.5] * 4, finish_reason="length", policy_version=0)
    future: Future = Future()
    future.set_result(completion)
    server.inboxes[0].put = lambda request, on_delta: future
    response = server.post("/v1/completions", {"prompt": [1] * (MAX_TOKENS - 4), "max_tokens": 4, "logprobs": 2})
    assert [len(entry) for entry in response["choices"][0]["logprobs"]["top_logprobs"]] == [3, 3, 3, 1]
