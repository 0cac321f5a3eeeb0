"""Tools, variables and system messages reach the chat template of every prompt, and of later messages of an episode."""

from __future__ import annotations

import asyncio
import json

import pytest
from transformers.utils import get_json_schema

from colocated_grpo.environments import EnvironmentSetupError
from colocated_grpo.environments.build import build_environments
from colocated_grpo.environments.chat import ChatCodec, Conversation
from colocated_grpo.servers.text import Limits, TextCodec
from colocated_grpo.settings.schema import Config
from colocated_grpo.tools.make_model import build_char_tokenizer
from colocated_grpo.types import Completion, Score
from tests.support.config_text import config_error, load
from tests.support.templates import CODE, TEMPLATE, WEATHER, tool_tokenizer

TOKENIZER = tool_tokenizer()
QUIET = {"enable_thinking": False}


def environments(*entries, model=None, tokenizer=TOKENIZER, **sections):
    config = Config(model={"name": "none", **(model or {})}, environments=list(entries), **sections)
    return build_environments(config, tokenizer)


def first(*entries, **settings):
    return environments(*entries, **settings).open_source().next(1)[0]


@pytest.fixture
def rows(tmp_path):
    """Write rows that add these columns to a prompt, and return an entry for them."""

    def entry(*added, suffix=".jsonl", **settings):
        path = tmp_path / f"rows{suffix}"
        data = [{"prompt": "hi", **columns} for columns in (added or [{}]) for _ in range(2)]
        if suffix == ".parquet":
            import pyarrow
            from pyarrow import parquet

            parquet.write_table(pyarrow.Table.from_pylist(data), path)
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in data))
        read = {"name": str(path), "rewards": ["format_think"], "held_out": 0, "shuffle": False}
        return {"type": "dataset", **read, **settings}

    return entry


@pytest.fixture
def code(tmp_path):
    path = tmp_path / "my_tools.py"
    path.write_text(CODE)
    return path


SORTING = {"type": "task", "name": "sorting"}
EPISODE = {"type": "episode", "name": "tool_use"}


@pytest.mark.parametrize("entry", [SORTING, EPISODE], ids=["task", "episode"])
def test_the_settings_of_an_entry_reach_the_template(entry):
    prompt = first({**entry, "tools": [WEATHER], "chat_template_kwargs": QUIET, "system_prompt": "Be brief."})
    assert prompt.text == (
        f"<|system|>weather <|end|><|system|>Be brief.<|end|><|user|>{prompt.item['prompt']}<|end|>"
        "<|assistant|><think></think>"
    )
    assert prompt.token_ids == TOKENIZER.encode(prompt.text, add_special_tokens=False)
    assert isinstance(prompt.item["prompt"], str), "the scorer gets the item as the task made it"


def test_a_column_takes_precedence_over_the_entry_and_the_entry_over_the_model(rows):
    model = {"chat_template_kwargs": {"enable_thinking": True}}
    both = {"tools": [WEATHER], "chat_template_kwargs": {"enable_thinking": True}}
    added = {}, both, {"tools": []}, {"tools": "[]"}, {"tools": ""}
    entry = rows(*added, tools=[{"name": "own"}], chat_template_kwargs=QUIET)
    texts = [prompt.text for prompt in environments(entry, model=model).open_source().next(10)[::2]]
    quiet = "<|user|>hi<|end|><|assistant|><think></think>"
    assert texts == [
        f"<|system|>own <|end|>{quiet}",
        "<|system|>weather <|end|><|user|>hi<|end|><|assistant|>",
        quiet,
        quiet,
        f"<|system|>own <|end|>{quiet}",
    ]
    assert first(rows(), model={"chat_template_kwargs": QUIET}).text == quiet
    assert first(SORTING, model={"chat_template_kwargs": QUIET}).text.endswith("<think></think>")


def test_prompts_are_those_of_trl(rows):
    trl = pytest.importorskip("trl.data_utils")
    added = {"tools": [WEATHER], "chat_template_kwargs": QUIET}
    theirs = trl.apply_chat_template(
        {"prompt": [{"role": "user", "content": "hi"}], "chat_template_kwargs": QUIET}, TOKENIZER, tools=[WEATHER]
    )
    assert first(rows(added)).text == theirs["prompt"]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_columns_may_be_json_text_or_nested_values_with_the_nulls_of_a_columnar_format(rows, suffix):
    other = {"type": "function", "function": {"name": "timer", "strict": True}}
    added = {"tools": [WEATHER, other], "chat_template_kwargs": QUIET}
    as_text = {name: json.dumps(value) for name, value in added.items()}
    nested, text = first(rows(added, suffix=suffix)), first(rows(as_text, suffix=suffix))
    assert nested.text == text.text
    assert nested.template == text.template == {"tools": [WEATHER, other], **QUIET}
    assert text.item["tools"] == as_text["tools"], "rewards get the column as it is"


def test_a_python_function_is_described_by_its_signature_and_docstring(rows, code):
    prompt = first(rows(tools=[f"{code}:clock", WEATHER]))
    [schema, _] = prompt.template["tools"]
    namespace: dict[str, object] = {}
    exec(CODE, namespace)
    assert schema == get_json_schema(namespace["clock"])
    assert prompt.text.startswith("<|system|>clock weather <|end|>")
    with pytest.raises(EnvironmentSetupError, match=r"tools\.0=.*undocumented': no JSON schema can be made of it"):
        first(rows(tools=[f"{code}:undocumented"]))


def test_a_renamed_column_is_no_longer_read(rows):
    added = {"tools": ["hammer"], "schemas": [WEATHER]}
    assert "weather" in first(rows(added, columns={"tools": "drawer", "schemas": "tools"})).text


@pytest.mark.parametrize(
    ("added", "message"),
    [
        ({"tools": ["hammer"]}, "row 2': tools must be a list of JSON schemas, which the chat template reads, got"),
        ({"tools": "{"}, "row 2': tools is text that is not JSON: Expecting property name"),
        ({"chat_template_kwargs": [1]}, r"row 2': chat_template_kwargs must be a mapping, got \[1\]; rename or remove"),
        ({"chat_template_kwargs": {"tokenize": True}}, "row 2': chat_template_kwargs: tokenize cannot be set here"),
    ],
)
def test_a_malformed_column_is_named_before_training_starts(rows, tmp_path, added, message):
    with pytest.raises(EnvironmentSetupError, match=message):
        environments(rows({}, added)).open_source()
    if all(isinstance(value, str) for value in added.values()):
        (tmp_path / "hub").mkdir()
        (tmp_path / "rows.jsonl").rename(tmp_path / "hub/train.jsonl")
        with pytest.raises(EnvironmentSetupError, match=message):
            environments({"type": "dataset", "name": str(tmp_path / "hub"), "rewards": ["format_think"]}).open_source()


def test_a_setting_that_the_template_does_not_read_is_rejected(rows):
    plain = build_char_tokenizer()
    for entry, model, message in (
        (rows(tools=[WEATHER]), {}, r"rows\.jsonl': tools: the model's chat template does not read 'tools'"),
        (rows(chat_template_kwargs=QUIET), {}, "chat_template_kwargs.enable_thinking: the model's chat template does"),
        (SORTING, {"chat_template_kwargs": QUIET}, r"^model\.chat_template_kwargs\.enable_thinking: the model's"),
    ):
        with pytest.raises(EnvironmentSetupError, match=message):
            environments(entry, model=model, tokenizer=plain)
    with pytest.raises(EnvironmentSetupError, match=r"rows\.jsonl': tools: the model's chat template does not read"):
        first(rows({"tools": [WEATHER]}), tokenizer=plain)
    plain.chat_template = None
    for settings in ({"tools": [WEATHER]}, {"system_prompt": "Be brief."}):
        with pytest.raises(EnvironmentSetupError, match="the tokenizer has no chat template"):
            environments({**SORTING, **settings}, tokenizer=plain)
    several = build_char_tokenizer()
    several.chat_template = {"default": "{{ messages[0].content }}", "tool_use": TEMPLATE}
    assert first(rows(tools=[WEATHER]), tokenizer=several).text.startswith("<|system|>weather <|end|>")


def test_settings_that_cannot_reach_a_rendered_prompt_are_rejected(tmp_path):
    path = tmp_path / "my_task.py"
    path.write_text(
        "class Mine:\n"
        "    def score(self, item, completion): return 1.0\n"
        "    def prompts(self, seed, split):\n"
        "        yield {'prompt': '<|user|>hi<|end|><|assistant|>'}\n"
    )
    entry = {"type": "task", "name": f"{path}:Mine"}
    assert first(entry, model={"chat_template_kwargs": QUIET}).text == "<|user|>hi<|end|><|assistant|>"
    for name, value in (("tools", [WEATHER]), ("system_prompt", "Be brief.")):
        with pytest.raises(EnvironmentSetupError, match=f"{name}: a prompt contains special tokens, so no chat temp"):
            first({**entry, name: value})


def test_evaluation_sets_have_settings_of_their_own(rows):
    source = rows(tools=[WEATHER], chat_template_kwargs=QUIET)
    del source["held_out"], source["shuffle"]
    config = Config(
        model={"name": "none"}, environments=[SORTING], evaluation={"sets": [{"name": "own", "source": source}]}
    )
    made = build_environments(config, TOKENIZER)
    [prompt, _], dropped = made.evaluated(made.sets[0], None, 0)
    assert (prompt.text, dropped) == ("<|system|>weather <|end|><|user|>hi<|end|><|assistant|><think></think>", 0)


async def _says_a(_token_ids, _max_tokens):
    said = [*TOKENIZER.encode("a"), TOKENIZER.eos_token_id]
    return Completion(token_ids=said, sampling_logprobs=[0.0] * len(said), finish_reason="stop", policy_version=0)


def test_later_messages_of_an_episode_are_rendered_with_the_same_settings():
    prompt = first({**EPISODE, "tools": [WEATHER], "chat_template_kwargs": QUIET})
    conversation = Conversation(prompt, ChatCodec(TOKENIZER), 100, _says_a)
    asyncio.run(conversation.generate())
    conversation.observe("x")
    rollout = conversation.rollout(Score(reward=0.0), temperature=1.0)
    chat = [{"role": "user", "content": prompt.item["prompt"]}, {"role": "assistant", "content": "a"}]
    whole = TOKENIZER.apply_chat_template(
        [*chat, {"role": "user", "content": "x"}],
        add_generation_prompt=True,
        return_dict=False,
        tools=[WEATHER],
        **QUIET,
    )
    observed = TOKENIZER.encode("<|user|>x<|end|><|assistant|><think></think>")
    assert rollout.token_ids[-len(observed) :] == list(whole)[-len(observed) :] == observed


def test_a_chat_request_is_rendered_like_a_prompt_and_may_change_the_variables():
    """The tokens that the server samples from are those that a prompt of the run has."""
    limits = Limits(max_tokens=200, longest_token=15, vocab_size=999, stop_token_ids=(), seed=0)
    codec = TextCodec(TOKENIZER, limits, QUIET)
    prompt = first({**SORTING, "tools": [WEATHER]}, model={"chat_template_kwargs": QUIET})
    messages = [{"role": "user", "content": prompt.item["prompt"]}]
    request = {"tools": [WEATHER], "add_generation_prompt": True}
    assert asyncio.run(codec.encode_chat(messages, request)) == prompt.token_ids
    loud = asyncio.run(codec.encode_chat(messages, {**request, "enable_thinking": True}))
    assert TOKENIZER.decode(loud) == prompt.text.removesuffix("<think></think>")


def test_the_setting_of_trl_is_that_of_the_model_and_may_be_json_text():
    for value in ("{enable_thinking: false}", "'{\"enable_thinking\": false}'"):
        assert load(f"chat_template_kwargs: {value}").model.chat_template_kwargs == QUIET
    assert load("", "--model.chat_template_kwargs.enable_thinking", "false").model.chat_template_kwargs == QUIET
    assert "tools cannot be set here; see tools of an environment" in config_error("chat_template_kwargs: {tools: []}")
