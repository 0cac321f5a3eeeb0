"""Every key of OpenAI's and vLLM's request bodies is supported, rejected or known to have no effect."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from colocated_grpo.servers.request_bodies import REJECTED, SAMPLED, ChatBody, CompletionBody
from tests.support.engine_server import CHAT, MODEL

IGNORED = frozenset(
    {
        *("cache_salt", "metadata", "priority", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
        *("request_id", "safety_identifier", "service_tier", "session_id", "store", "user"),  # bookkeeping
        *("ec_transfer_params", "kv_transfer_params", "prediction", "stream_interval"),  # speed
        *("include_reasoning", "parallel_tool_calls"),  # responses have no reasoning and no parsed calls
    }
)
"""Keys of OpenAI and vLLM without effect on tokens and text."""
BODIES = {"ChatCompletionRequest": ChatBody, "CompletionRequest": CompletionBody}
OPENAI = {
    "ChatCompletionRequest": chat_create_params.CompletionCreateParamsBase,
    "CompletionRequest": completion_create_params.CompletionCreateParamsBase,
}


def vllm_keys(name: str) -> set[str]:
    """Return the fields of a class of vLLM, read from its source: importing it takes seconds."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.submodule_search_locations is not None
    folder = Path(spec.submodule_search_locations[0]) / "entrypoints"
    classes = [
        node
        for file in folder.rglob("protocol.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ClassDef) and node.name == name
    ]
    assert classes, f"vLLM has moved {name}"
    fields = {
        statement.target.id
        for node in classes
        for statement in node.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    }
    return {field for field in fields if not field.startswith("_")}


@pytest.mark.parametrize("name", BODIES)
def test_every_known_key_has_a_rule(name):
    rules = BODIES[name].model_fields.keys() | SAMPLED | REJECTED.keys() | IGNORED
    assert vllm_keys(name) - rules == set()
    assert OPENAI[name].__annotations__.keys() - rules == set()


def test_no_key_has_two_rules():
    assert not REJECTED.keys() & IGNORED
    assert not IGNORED & (SAMPLED | ChatBody.model_fields.keys() | CompletionBody.model_fields.keys())


@pytest.mark.parametrize(
    ("key", "value", "harmless"),
    [
        ("min_tokens", 4, 0),
        ("best_of", 2, 1),
        ("length_penalty", 1.5, 1.0),
        ("use_beam_search", True, False),
        ("response_format", {"type": "json_object"}, {"type": "text"}),
        ("tool_choice", "required", "auto"),
        ("structured_outputs", {"regex": "a"}, None),
        ("min_tokens", True, None),
        ("n", 0, 1),
    ],
)
def test_a_key_with_an_effect_is_rejected_by_name_unless_its_value_has_none(module_server, key, value, harmless):
    assert module_server.rejected("/v1/chat/completions", {**CHAT, key: value}).startswith(f"{key}: ")
    module_server.post("/v1/chat/completions", {**CHAT, key: harmless})


def test_keys_without_effect_are_ignored(module_server):
    plain = module_server.post("/v1/chat/completions", {**CHAT, "seed": 7})
    body = {**CHAT, "seed": 7, **dict.fromkeys(IGNORED, "x"), "unknown": 1}
    assert module_server.post("/v1/chat/completions", body)["choices"] == plain["choices"]


def test_stop_strings_are_returned_if_asked_for(module_server):
    body = {"model": MODEL, "prompt": "abc", "max_tokens": 12, "seed": 4}
    text = module_server.post("/v1/completions", body)["choices"][0]["text"]
    stop = {**body, "stop": text[1:3]}
    (with_stop,) = module_server.post("/v1/completions", {**stop, "include_stop_str_in_output": True})["choices"]
    (without,) = module_server.post("/v1/completions", stop)["choices"]
    assert without["text"] == text[:1]
    assert with_stop["text"].startswith(text[:3])
