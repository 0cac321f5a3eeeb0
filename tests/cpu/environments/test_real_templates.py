"""Prompts and conversations with real tokenizers and templates: each has a peculiarity that a naive encoder breaks.

SmolLM2's template adds a system message, and its end of a message is also its padding. Gemma's base model has no
template, and its tokenizer adds a BOS token, which a template has to write itself.
"""

from __future__ import annotations

import asyncio

import pytest
from transformers import AutoTokenizer

from colocated_grpo.environments import EnvironmentSetupError
from colocated_grpo.environments.chat import ChatCodec
from colocated_grpo.environments.prompts import PromptEncoder, PromptTemplate
from colocated_grpo.policy.model_files import stop_token_ids
from colocated_grpo.servers.text import Limits, TextCodec
from tests.support.real_models import real_model

SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
USER = "<|im_start|>user\nhi<|im_end|>\n"
OPENING = "<|im_start|>assistant\n"
HI = {"role": "user", "content": "hi"}
QUESTIONS = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}answer:"
"""A template for base models, with the BOS token that templates of Gemma and Llama have."""


@pytest.fixture(scope="module")
def smollm2():
    return AutoTokenizer.from_pretrained(real_model("smollm2"))


@pytest.fixture(scope="module")
def gemma3():
    return AutoTokenizer.from_pretrained(real_model("gemma3"))


@pytest.fixture(params=[True, False], ids=["tokenizer adds BOS", "template alone adds BOS"])
def templated(gemma3, monkeypatch, request):
    """Gemma's tokenizer with a template that writes the BOS token."""
    monkeypatch.setattr(gemma3, "add_bos_token", request.param)
    monkeypatch.setattr(gemma3, "chat_template", QUESTIONS)
    return gemma3


def prompt_of(tokenizer, prompt, **template):
    encoder = PromptEncoder(tokenizer, 100, {"mine": PromptTemplate(**template)})
    return encoder.encode({"prompt": prompt}, index=0, source="mine")


def served(tokenizer, messages):
    """Return the tokens that a chat request to the engine's server is answered from."""
    limits = Limits(max_tokens=100, longest_token=64, vocab_size=len(tokenizer), stop_token_ids=(), seed=0)
    return asyncio.run(TextCodec(tokenizer, limits, {}).encode_chat(messages, {"add_generation_prompt": True}))


@pytest.mark.parametrize("prompt", ["hi", [HI], SYSTEM + USER + OPENING], ids=["text", "messages", "rendered"])
def test_the_system_message_that_a_template_adds_is_in_the_prompt_once(smollm2, prompt):
    encoded = prompt_of(smollm2, prompt)
    assert encoded.text == smollm2.decode(encoded.token_ids) == SYSTEM + USER + OPENING
    assert encoded.token_ids == served(smollm2, [HI])


def test_a_system_message_of_the_user_replaces_the_one_that_the_template_adds(smollm2):
    own = "<|im_start|>system\nBe brief.<|im_end|>\n"
    assert prompt_of(smollm2, "hi", system_prompt="Be brief.").text == own + USER + OPENING
    messages = [{"role": "system", "content": "Be brief."}, HI]
    assert prompt_of(smollm2, messages).text == own + USER + OPENING


@pytest.mark.parametrize("stopped", [True, False])
def test_a_tool_message_within_a_conversation_has_no_system_message_and_ends_the_cut_message(smollm2, stopped):
    codec = ChatCodec(smollm2)
    said = smollm2.encode("call")
    last = smollm2.eos_token_id if stopped else said[-1]
    observed = codec.observation([{"role": "tool", "content": "7"}], last)
    end = "" if stopped else "<|im_end|>"
    assert smollm2.decode(observed) == f"{end}\n<|im_start|>tool\n7<|im_end|>\n{OPENING}"
    chat = [HI, {"role": "assistant", "content": "call"}, {"role": "tool", "content": "7"}]
    whole = [*prompt_of(smollm2, "hi").token_ids, *said, *[smollm2.eos_token_id] * stopped, *observed]
    assert whole == served(smollm2, chat)


def test_a_message_that_a_template_cannot_render_is_named(smollm2):
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    with pytest.raises(EnvironmentSetupError, match="the chat template rejects a prompt that ends with"):
        prompt_of(smollm2, [HI, call])


def test_a_token_that_ends_messages_and_pads_is_a_stop_token(smollm2):
    assert smollm2.eos_token_id == smollm2.pad_token_id
    assert stop_token_ids(smollm2, real_model("smollm2")) == (smollm2.eos_token_id,)


@pytest.mark.parametrize("prompt", ["hi", "<bos>hi"])
def test_a_base_model_without_a_template_reads_text_after_one_bos_token(gemma3, prompt):
    assert gemma3.chat_template is None
    assert prompt_of(gemma3, prompt).token_ids == [gemma3.bos_token_id, *gemma3.encode("hi", add_special_tokens=False)]


def test_a_base_model_without_a_template_rejects_messages_and_observes_text(gemma3):
    with pytest.raises(EnvironmentSetupError, match=r"no chat template; set model\.chat_template or use text prompts"):
        prompt_of(gemma3, [HI])
    observed = ChatCodec(gemma3).observation([{"role": "tool", "content": "7"}], gemma3.eos_token_id)
    assert gemma3.decode(observed) == "7"


@pytest.mark.parametrize("prompt", ["hi", [HI], "<bos>user: hi\nanswer:"], ids=["text", "messages", "rendered"])
def test_a_bos_token_that_a_template_writes_is_in_the_prompt_once(templated, prompt):
    encoded = prompt_of(templated, prompt)
    assert templated.decode(encoded.token_ids) == encoded.text == "<bos>user: hi\nanswer:"
    assert encoded.token_ids == served(templated, [HI])


def test_a_bos_token_that_a_template_writes_is_not_repeated_within_a_conversation(templated):
    observed = ChatCodec(templated).observation([{"role": "tool", "content": "7"}], templated.eos_token_id)
    assert templated.decode(observed) == "\ntool: 7\nanswer:"
