"""A chat template with tools and a switch for thoughts, written like that of Qwen3, for the character tokenizer."""

from __future__ import annotations

from transformers import PreTrainedTokenizerFast

from colocated_grpo.tools.make_model import build_char_tokenizer

TEMPLATE = (
    "{% if tools %}<|system|>"
    "{% for tool in tools %}{{ (tool.function or tool).name ~ ' ' }}{% endfor %}<|end|>"
    "{% endif %}"
    "{% for message in messages %}"
    "{{ '<|' ~ message.role ~ '|>' ~ message.content ~ '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    "{% endif %}"
)
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
CODE = '''
def clock(zone: str) -> str:
    """
    Tell the time.

    Args:
        zone: A time zone.
    """


def undocumented(zone):
    return zone


def short(row):
    return len(row["prompt"]) < 6


def graded(row):
    return row["level"] in (1, 2, "1", "2")  # text in a .csv


def graded_and_short(row):
    return graded(row) and short(row)


def all_rows(row):
    return True


def no_rows(row):
    return False


def forgets(row):
    len(row["prompt"]) < 6


def says_no(row):
    return "no"


def leaves(row):
    raise SystemExit(4)


def fails(row):
    return row["missing"]


class Unclear:
    def __bool__(self):
        raise ValueError("ambiguous")


def is_unclear(row):
    return Unclear()
'''
"""A module of a user: tools, and filters of rows."""


def tool_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = build_char_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer
