"""Observations between two assistant messages are exactly the tokens that the chat template renders there."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from colocated_grpo.environments.chat import ChatCodec
from colocated_grpo.tools.make_model import CHARACTERS, build_char_tokenizer

CHATML = (
    "{% for message in messages %}"
    "{{ '<|user|>' ~ message.role ~ '\\n' ~ message.content | trim ~ '<|end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|user|>assistant\\n' }}{% endif %}"
)
"""A newline follows each closing token, so the end of a message is longer than the sampled closing token."""
DATED = "{{ '<|begin|>today is Monday' ~ messages | length }}" + CHATML
"""A prefix that changes with the conversation."""
THINKING = CHATML.replace(
    "message.content | trim",
    "('<think></think>' if message.role == 'assistant' and loop.last else '') ~ message.content | trim",
).replace("assistant\\n' }}{% endif %}", "assistant\\n<think>' }}{% endif %}")
"""Thoughts of earlier messages are removed, and a new message opens with one."""
PLAIN = (
    "{% for message in messages %}{{ message.role ~ ': ' ~ message.content ~ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
"""No special tokens at all."""
TEMPLATES = {"own": None, "chatml": CHATML, "dated": DATED, "thinking": THINKING, "plain": PLAIN}

text = st.text(alphabet=[one for one in CHARACTERS if one not in "<|>"], max_size=12)


def tokenizer_of(template: str | None) -> PreTrainedTokenizerFast:
    tokenizer = build_char_tokenizer()
    if template is not None:
        tokenizer.chat_template = template
    return tokenizer


TOKENIZERS = {name: tokenizer_of(template) for name, template in TEMPLATES.items()}


@pytest.mark.parametrize("name", TEMPLATES)
@given(said=text, observed=st.lists(text, min_size=1, max_size=3))
def test_a_message_and_its_observation_are_what_the_template_renders(name, said, observed):
    tokenizer = TOKENIZERS[name]
    said = said.strip() or "x"
    roles = ["user", "system", "user"]
    responses = [{"role": role, "content": one} for role, one in zip(roles, observed, strict=False)]
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": said}, *responses]
    whole = list(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False))
    codec = ChatCodec(tokenizer)
    cut = codec.observation(responses, last_token=tokenizer.encode(said)[-1])
    rest = whole[len(whole) - len(cut) :]
    assert cut == rest
    before = whole[: len(whole) - len(cut)]
    assert before[-len(said) :] == tokenizer.encode(said)
    if name != "plain":
        # A message that was not cut ends with its sampled closing token.
        ended = codec.observation(responses, last_token=tokenizer.eos_token_id)
        assert [tokenizer.eos_token_id, *ended] == cut


def test_text_is_one_user_message():
    codec = ChatCodec(TOKENIZERS["own"])
    assert codec.observation("4", 2) == codec.observation([{"role": "user", "content": "4"}], 2)
    assert codec.transcript(codec.observation("4", 2)) == "<|user|>4<|end|><|assistant|>"


def test_without_a_template_the_plain_text_is_appended():
    tokenizer = build_char_tokenizer()
    tokenizer.chat_template = None
    codec = ChatCodec(tokenizer)
    assert codec.observation("\nresult: 4\n", 2) == tokenizer.encode("\nresult: 4\n")
    messages = [{"role": "tool", "content": "4"}, {"role": "user", "content": "go on"}]
    assert tokenizer.decode(codec.observation(messages, 2)) == "4\ngo on"


def test_message_text_drops_special_tokens_and_a_transcript_keeps_them():
    codec = ChatCodec(TOKENIZERS["own"])
    tokens = TOKENIZERS["own"].encode("ok<|end|>")
    assert codec.message_text(tokens) == "ok"
    assert codec.transcript(tokens) == "ok<|end|>"
