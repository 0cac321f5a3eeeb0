"""The source of training prompts: encoding, mixture, length limit, exact resume."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colocated_grpo.environments import EnvironmentSetupError
from colocated_grpo.environments.build import build_environments
from colocated_grpo.environments.prompts import PromptEncoder, checked_prompt
from colocated_grpo.settings.schema import Config
from colocated_grpo.tools.make_model import build_char_tokenizer

TOKENIZER = build_char_tokenizer()


def environments(*entries, tokenizer=TOKENIZER, seed=0, max_prompt_tokens=1024):
    config = Config(
        model={"name": "none"},
        environments=[{"type": "task"} | entry for entry in entries],
        rollout={"max_prompt_tokens": max_prompt_tokens},
        seed=seed,
    )
    return build_environments(config, tokenizer)


def user_task(folder, body):
    file = folder / "my_task.py"
    file.write_text(
        f"class Mine:\n    def score(self, item, completion): return 1.0\n    def prompts(self, seed, split):\n{body}"
    )
    return {"name": f"{file}:Mine"}


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    rows = tmp_path_factory.mktemp("data") / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": "x" * number}) + "\n" for number in range(1, 14)))
    dataset = {"type": "dataset", "name": str(rows), "rewards": ["format_think"], "held_out": 2, "weight": 2.0}
    return lambda: environments(
        {"name": "sorting"}, {"name": "arithmetic", "weight": 0.5, "args": {"template": "{question}"}}, dataset,
        max_prompt_tokens=13,
    )  # fmt: skip


@settings(max_examples=25, deadline=None)
@given(before=st.lists(st.integers(0, 9), max_size=5), after=st.lists(st.integers(0, 9), max_size=5))
def test_a_resumed_source_continues_exactly_as_an_uninterrupted_one(mixed, before, after):
    made = mixed()
    whole = made.open_source()
    expected = whole.next(sum(before) + sum(after))

    first = made.open_source()
    given_before = [prompt for n in before for prompt in first.next(n)]
    state = json.loads(json.dumps(first.state_dict()))
    first.next(3)

    resumed = mixed().open_source()
    resumed.next(2)
    resumed.load_state_dict(state)
    given_after = [prompt for n in after for prompt in resumed.next(n)]
    assert given_before + given_after == expected
    assert resumed.state_dict() == whole.state_dict()
    assert [prompt.index for prompt in expected] == list(range(len(expected)))


def test_environments_are_mixed_by_weight_and_every_prompt_has_a_scorer(mixed):
    made = mixed()
    source = made.open_source()
    prompts = source.next(70)
    counts = {name: sum(prompt.source == name for prompt in prompts) for name in made.scorers}
    assert sorted(counts.values()) == [10, 20, 40]
    assert source.num_dropped > 0
    assert all(len(prompt.token_ids) <= 13 for prompt in prompts)


def test_the_same_environment_twice_keeps_two_positions():
    made = environments({"name": "sorting"}, {"name": "sorting", "args": {"max_digits": 4}})
    assert list(made.scorers) == ["sorting", "sorting#2"]
    assert {prompt.source for prompt in made.open_source().next(4)} == {"sorting", "sorting#2"}


def test_held_out_prompts_are_mixed_by_weight_and_never_trained_on():
    made = environments({"name": "sorting", "weight": 3.0}, {"name": "reversal"})
    held_out = made.held_out(20)
    assert held_out == made.held_out(20)
    assert [prompt.index for prompt in held_out] == list(range(20))
    assert sum(prompt.source == "sorting" for prompt in held_out) == 15
    trained = {prompt.text for prompt in made.open_source().next(500)}
    assert not trained & {prompt.text for prompt in held_out}


def test_weights_changed_at_a_resume_apply_from_there_on():
    def mixture(weight: float):
        return environments({"name": "sorting", "weight": weight}, {"name": "reversal"}).open_source()

    before, after = mixture(1.0), mixture(3.0)
    before.next(400)
    after.load_state_dict(before.state_dict())
    assert sum(prompt.source == "sorting" for prompt in after.next(40)) == 30


def test_text_becomes_a_user_message_if_there_is_a_chat_template():
    [prompt] = environments({"name": "sorting"}).open_source().next(1)
    question = prompt.item["question"]
    assert prompt.item["prompt"] == f"sort {question}"
    assert prompt.text == f"<|user|>sort {question}<|end|><|assistant|>"
    assert prompt.token_ids == TOKENIZER.encode(prompt.text, add_special_tokens=False)
    assert type(prompt.token_ids) is list


def test_text_is_encoded_as_it_is_without_a_chat_template():
    plain = build_char_tokenizer()
    plain.chat_template = None
    [prompt] = environments({"name": "sorting"}, tokenizer=plain).open_source().next(1)
    assert prompt.text == prompt.item["prompt"]
    assert prompt.token_ids == plain.encode(prompt.text)


def test_text_rendered_by_a_template_is_not_put_into_a_message_again(tmp_path):
    rendered = "<|user|>sort 3 1<|end|><|assistant|>"
    [prompt] = environments(user_task(tmp_path, f"        yield {{'prompt': {rendered!r}}}\n")).open_source().next(1)
    assert prompt.text == rendered
    assert prompt.token_ids == TOKENIZER.encode(rendered, add_special_tokens=False)


def test_chat_messages_need_a_chat_template(tmp_path):
    entry = user_task(tmp_path, "        yield {'prompt': [{'role': 'user', 'content': 'hi'}]}\n")
    [prompt] = environments(entry).open_source().next(1)
    assert prompt.text == "<|user|>hi<|end|><|assistant|>"
    plain = build_char_tokenizer()
    plain.chat_template = None
    with pytest.raises(EnvironmentSetupError, match=r"set model\.chat_template"):
        environments(entry, tokenizer=plain).open_source().next(1)


def test_messages_that_the_chat_template_rejects_raise_one_line(tmp_path):
    entry = user_task(tmp_path, "        yield {'prompt': [{'role': 'user', 'content': 'hi'}]}\n")
    strict = build_char_tokenizer()
    strict.chat_template = "{{ raise_exception('roles must\\nalternate') }}"
    with pytest.raises(EnvironmentSetupError) as error:
        environments(entry, tokenizer=strict).open_source().next(1)
    assert str(error.value) == (
        "environments 'my_task.py:Mine': the chat template rejects a prompt that ends with "
        "{'role': 'user', 'content': 'hi'}: "
        "TemplateError: roles must alternate"
    )


def test_a_finite_train_sequence_restarts_and_resumes_exactly(tmp_path):
    entry = user_task(tmp_path, "        yield from ({'prompt': str(number)} for number in range(3))\n")
    source = environments(entry).open_source()
    assert [prompt.item["prompt"] for prompt in source.next(7)] == list("0120120")
    resumed = environments(entry).open_source()
    resumed.load_state_dict(source.state_dict())
    assert [prompt.item["prompt"] for prompt in resumed.next(4)] == list("1201")


def test_a_seekable_sequence_that_ends_raises_one_line(tmp_path):
    body = """\
        return iter(())
    def prompts_from(self, seed, split, start):
        return iter([{'prompt': 'only'}][start:])
"""
    source = environments(user_task(tmp_path, body)).open_source()
    with pytest.raises(EnvironmentSetupError, match=r"prompts_from\(\) ended after 1 items; it must be endless"):
        source.next(2)


def test_a_seekable_task_resumes_without_generating_earlier_items(tmp_path):
    body = """\
        return self.prompts_from(seed, split, 0)
    def prompts_from(self, seed, split, start):
        from itertools import count
        return ({'prompt': f'{split} {number}'} for number in count(start))
"""
    source = environments(user_task(tmp_path, body)).open_source()
    assert [prompt.item["prompt"] for prompt in source.next(2)] == ["train 0", "train 1"]
    state = source.state_dict()
    [name] = state["streams"]
    distant = {**state, "streams": {name: {"taken": 10**12}}}
    for start, entered in ((2, state), (10**12, distant)):
        source.load_state_dict(entered)
        assert [prompt.item["prompt"] for prompt in source.next(1)] == [f"train {start}"]
        assert source.state_dict()["streams"][name] == {"taken": start + 1}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("        return iter(())\n", r"prompts\(seed, 'train'\) yielded no item"),
        ("        yield 'text'\n", "an item must be a dict with 'prompt', got a str"),
        ("        yield {'question': 'x'}\n", "an item must be a dict with 'prompt', got the keys question"),
        ("        yield {'prompt': []}\n", r"a prompt must be text or a list of messages with a role, got \[\]"),
        ("        yield {'prompt': 'cut \\ud83d'}\n", r"a lone surrogate, which cannot be encoded: 'cut \\ud83d'"),
        ("        return None\n", r"prompts\(seed, 'train'\): TypeError: 'NoneType' object is not iterable"),
        (
            "        raise ValueError('of two\\nlines')\n",
            r"prompts\(seed, 'train'\): ValueError: of two lines \(.*, line ",
        ),
        ("        yield {'prompt': 'long' * 300}\n", "1000 consecutive prompts are empty or longer than"),
    ],
)
def test_a_task_without_usable_items_raises_one_line(tmp_path, body, message):
    with pytest.raises(EnvironmentSetupError, match=message):
        environments(user_task(tmp_path, body)).open_source().next(1)


def test_a_task_that_fails_at_its_held_out_prompts_raises_one_line(tmp_path):
    made = environments(user_task(tmp_path, "        yield {'prompt': split}\n        seed[0]\n"))
    with pytest.raises(EnvironmentSetupError, match=r"prompts\(seed, 'held_out'\): TypeError: 'int' object .*, line "):
        made.held_out(2)


def test_a_length_limit_below_every_prompt_is_named_in_the_error():
    made = environments({"name": "sorting"}, max_prompt_tokens=5)
    line = r"rollout\.max_prompt_tokens=5 \(the last has \d+\); raise the limit"
    for give in (lambda: made.open_source().next(1), lambda: made.held_out(4)):
        with pytest.raises(EnvironmentSetupError, match=line):
            give()


def test_a_resume_with_other_environments_is_rejected():
    state = environments({"name": "sorting"}).open_source().state_dict()
    other = environments({"name": "reversal"}).open_source()
    with pytest.raises(EnvironmentSetupError, match="the checkpoint has sorting and the config has reversal"):
        other.load_state_dict(state)


def test_each_step_counts_the_prompts_dropped_in_it(mixed):
    source = mixed().open_source()
    dropped = []
    for _ in range(8):
        source.next(6)
        dropped.append(source.num_dropped)
        assert source.record([]).metrics["prompts_dropped"] == dropped[-1]
        assert source.num_dropped == 0
    assert sum(dropped) > 0 and 0 in dropped


SAYS_NOTHING = [
    "",
    " \n",
    [{"role": "user", "content": ""}],
    [{"role": "system", "content": "be brief"}, {"role": "user", "content": " "}],
    [{"role": "user", "content": [{"type": "text", "text": ""}]}],
]


@pytest.mark.parametrize("prompt", SAYS_NOTHING)
def test_a_prompt_that_says_nothing_is_dropped_although_the_chat_template_has_tokens(prompt):
    encoder = PromptEncoder(TOKENIZER, 1024)
    assert encoder.encode({"prompt": prompt}, index=0, source="mine") is None
    assert encoder.encode({"prompt": [{"role": "system", "content": "begin"}]}, index=0, source="mine") is not None


def test_a_tool_call_needs_no_content():
    chat = [
        {"role": "user", "content": "2+2"},
        {"role": "assistant", "tool_calls": [{"name": "calc"}], "content": None},
    ]
    assert checked_prompt({"prompt": chat}, "mine") == chat


@pytest.mark.parametrize("prompt", ["a" * 20_000, [{"role": "user", "content": "a" * 20_000}]])
def test_a_text_too_long_for_any_tokenization_is_dropped_without_tokenizing_it(monkeypatch, prompt):
    encoder = PromptEncoder(TOKENIZER, 1024)
    monkeypatch.setattr(encoder, "_render", None)
    assert encoder.encode({"prompt": prompt}, index=0, source="mine") is None


def test_a_text_of_the_longest_tokens_is_tokenized():
    token = max(TOKENIZER.get_vocab(), key=len)
    encoder = PromptEncoder(TOKENIZER, 100)
    prompt = encoder.encode({"prompt": token * 50}, index=0, source="mine")
    assert prompt.token_ids.count(TOKENIZER.get_vocab()[token]) == 50


def test_dataset_columns_named_like_internal_keys_stay_plain_columns(tmp_path):
    row = {"prompt": "abc", "reply_pattern": 7, "by_opponent": True, "turn": 3, "index": 9, "source": "there"}
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(row)}\n" * 4)
    dataset = {"type": "dataset", "name": str(tmp_path / "rows.jsonl"), "rewards": ["format_think"], "held_out": 1}
    [prompt] = environments(dataset).open_source().next(1)
    assert (prompt.pattern, prompt.by_opponent, prompt.index, prompt.item["reply_pattern"]) == (None, False, 0, 7)
