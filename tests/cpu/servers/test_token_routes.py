"""POST /generate and POST /inference/v1/generate: prompt tokens in, sampled tokens and log-probabilities out."""

from __future__ import annotations

import json
from typing import Any

import pytest

from colocated_grpo.atropos.reader import Origin
from tests.support.engine_server import GENERATE, MAX_TOKENS, LetterTokenizer


def test_generate_responds_in_the_format_that_atropos_parses(server):
    response = server.post("/generate", {**GENERATE, "top_p": 1.0, "stop": ["\n"]})
    assert set(response) == {"text", "prompt", "finish_reasons", "logprobs", "prompt_token_ids", "token_ids"}
    assert (response["prompt"], response["prompt_token_ids"]) == ("bcd", [1, 2, 3])
    assert len(response["logprobs"]) == len(response["finish_reasons"]) == len(response["text"]) == 3
    for tokens, logprobs, text in zip(response["token_ids"], response["logprobs"], response["text"], strict=True):
        assert [int(next(iter(position[0]))) for position in logprobs] == tokens
        assert all(value < 0 for position in logprobs for value in position[0].values())
        assert text == LetterTokenizer().decode(tokens, skip_special_tokens=True)
    assert {request.sampling.temperature for request in server.requests()} == {0.9}
    assert {request.sampling.stop for request in server.requests()} == {("\n",)}


def test_logprobs_are_returned_by_default(server):
    response = server.post("/generate", {"prompt": "Hello", "max_tokens": 5})
    assert len(response["logprobs"][0]) == len(response["token_ids"][0]) > 0


def test_completions_of_one_prompt_differ_and_a_seed_repeats_them(server):
    body = {**GENERATE, "max_tokens": 20, "n": 4}
    first = server.post("/generate", body)["token_ids"]
    assert len({tuple(tokens) for tokens in first}) == 4
    assert server.post("/generate", body)["token_ids"] != first
    seeded = [server.post("/generate", {**body, "seed": 5})["token_ids"] for _ in range(2)]
    assert seeded[0] == seeded[1]


def test_the_origin_of_every_completion_is_remembered(server):
    server.engines[0].weights_changed(7)
    tokens = server.post("/generate", GENERATE)["token_ids"][0]
    assert server.origins.find([1, 2, 3], tokens)[:2] == (0.9, 7)


@pytest.mark.parametrize(("requested", "remembered"), [(0, 1.0), (1e-9, 0.01), (1.3, 1.3)])
def test_the_remembered_temperature_is_the_one_that_vllm_uses(server, requested, remembered):
    tokens = server.post("/generate", {**GENERATE, "temperature": requested})["token_ids"][0]
    assert isinstance(server.origins.find([1, 2, 3], tokens), Origin)
    assert server.origins.find([1, 2, 3], tokens).temperature == remembered


def test_prompt_logprobs_have_the_token_itself_first(server):
    body = {"prompt": {"prompt_token_ids": [1, 2, 3]}, "prompt_logprobs": 2, "max_tokens": 1}
    nothing, *entries = server.post("/generate", body)["prompt_logprobs"]
    assert nothing is None
    assert [list(entry) for entry in entries] == [["2", "0", "1"], ["3", "0", "1"]]
    assert entries[0]["2"] == -1.0


def test_a_stream_has_the_text_and_tokens_of_the_whole_response_once(server):
    """Before, as in vLLM's example server, each line repeated the texts so far of all completions."""
    body = {**GENERATE, "n": 2, "seed": 3}
    whole = server.post("/generate", body)
    status, lines = server.call("POST", "/generate", {**body, "stream": True})
    assert status == 200
    parts: list[list[dict[str, Any]]] = [[], []]
    for line in map(json.loads, lines.splitlines()):
        parts[line["index"]].append(line)
    assert ["".join(part["text"] for part in one) for one in parts] == whole["text"]
    for name in ("token_ids", "logprobs"):
        assert [[entry for part in one for entry in part[name]] for one in parts] == whole[name]
    assert [[part["finish_reason"] for part in one][-1] for one in parts] == whole["finish_reasons"]


def test_max_tokens_is_reduced_to_the_rest_of_the_context(server):
    server.post("/generate", {"prompt": "a" * 20, "max_tokens": 1000})
    assert server.requests()[-1].sampling.max_tokens == MAX_TOKENS - 20
    server.post("/v1/chat/completions", {"model": "x", "messages": [{"role": "user", "content": "abcd"}]})
    assert server.requests()[-1].sampling.max_tokens == MAX_TOKENS - 4


def test_the_models_stop_tokens_apply_unless_eos_is_ignored(server):
    server.post("/generate", {**GENERATE, "n": 1, "stop_token_ids": [4]})
    assert server.requests()[-1].sampling.stop_token_ids == (4, 9)
    server.post("/generate", {**GENERATE, "n": 1, "stop_token_ids": [4], "ignore_eos": True})
    assert server.requests()[-1].sampling.stop_token_ids == (4,)


@pytest.mark.parametrize(("stop", "strings"), [(None, ()), ("x", ("x",)), (["x", "y"], ("x", "y"))])
def test_stop_is_null_a_string_or_a_list(server, stop, strings):
    for path, body in (("/generate", GENERATE), ("/v1/completions", {"prompt": "ab"})):
        server.post(path, {**body, "stop": stop})
        assert server.requests()[-1].sampling.stop == strings


def test_text_ends_before_the_stop_string(server):
    body = {**GENERATE, "n": 1, "seed": 8, "max_tokens": 20}
    text = server.post("/generate", body)["text"][0]
    stop = text[2:4]
    assert server.post("/generate", {**body, "stop": stop})["text"][0] == text[: text.index(stop)]


def test_sampling_that_renormalizes_logprobs_is_logged_once(server):
    for _ in range(2):
        server.post("/generate", {**GENERATE, "top_p": 0.5, "top_k": 3})
    assert server.notes == [
        "serving: a client samples with top_p=0.5, top_k=3: its log-probabilities are renormalized over the tokens "
        "kept; training on them increases the sampler-trainer KL"
    ]


def test_a_rejected_request_is_logged_at_most_every_ten_seconds(server):
    for _ in range(2):
        server.rejected("/generate", {**GENERATE, "n": 0})
    [line] = server.notes
    assert line.startswith("rejected POST /generate with 400: n: ")


def test_inference_v1_generate_responds_in_vllms_format(server):
    protocol = pytest.importorskip("vllm.entrypoints.scale_out.token_in_token_out.protocol")
    body = {"token_ids": [1, 2], "sampling_params": {"n": 2, "max_tokens": 5, "logprobs": 1}, "request_id": "r"}
    parsed = protocol.GenerateTokensResponse.model_validate(server.post("/inference/v1/generate", body))
    assert parsed.request_id == "r"
    for choice in parsed.choices:
        assert [entry.token_id for entry in choice.logprobs.content] == choice.token_ids


def test_inference_v1_generate_streams_in_vllms_format(server):
    protocol = pytest.importorskip("vllm.entrypoints.scale_out.token_in_token_out.protocol")
    body = {"token_ids": [1, 2], "sampling_params": {"max_tokens": 9, "seed": 1, "logprobs": 0}}
    [whole] = server.post("/inference/v1/generate", body)["choices"]
    _, events = server.call("POST", "/inference/v1/generate", {**body, "stream": True})
    *events, done, _ = events.split("\n\n")
    assert done == "data: [DONE]"
    chunks = [protocol.GenerateTokensStreamResponse.model_validate_json(event[6:]) for event in events]
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert [token for choice in choices for token in choice.token_ids] == whole["token_ids"]
    assert all(entry.token_id in choice.token_ids for choice in choices for entry in choice.logprobs.content)
    assert choices[-1].finish_reason == whole["finish_reason"]
