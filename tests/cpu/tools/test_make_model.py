"""Models made without a download: character tokenizer, random weights of each family, supervised warm start."""

from __future__ import annotations

import re
from dataclasses import replace
from random import Random
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from jinja2.exceptions import TemplateError
from transformers import AutoModelForCausalLM, AutoTokenizer

from colocated_grpo.tools.make_model import (
    ARCHITECTURES,
    CHARACTERS,
    END,
    build_char_tokenizer,
    build_model,
    main,
    model_config,
)
from colocated_grpo.tools.shapes import SHAPES, SMALL, TINY
from colocated_grpo.tools.warm_start import (
    CHECK_EVERY,
    IGNORE_INDEX,
    TaskTeacher,
    WarmStart,
    sample,
    supervised_batch,
    warm_start,
    with_slips,
)
from tests.support.random_models import make_model

TOKENIZER = build_char_tokenizer()


class AlwaysA:
    """A task that a random model fails and a trained one solves: the answer is always 'a'."""

    def prompts(self, seed, split):
        while True:
            yield {"prompt": "say it", "answer": "a"}

    def score(self, item, completion):
        return float(completion == item["answer"])


def without_special_tokens(text: str) -> bool:
    return not any(token in text for token in TOKENIZER.all_special_tokens)


@given(st.text(alphabet=CHARACTERS).filter(without_special_tokens))
def test_encoding_gives_one_token_per_character_and_decoding_the_same_text(text):
    ids = TOKENIZER.encode(text)
    assert len(ids) == len(text)
    assert TOKENIZER.decode(ids) == text


def test_a_character_outside_the_alphabet_is_one_unknown_token():
    assert TOKENIZER.encode("a\u00e9") == [*TOKENIZER.encode("a"), TOKENIZER.unk_token_id]


def test_the_chat_template_closes_every_turn_and_opens_the_assistants():
    messages = [{"role": role, "content": role[0]} for role in ("system", "user", "assistant", "user")]
    text = TOKENIZER.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == "<|system|>s<|end|><|user|>u<|end|><|assistant|>a<|end|><|user|>u<|end|><|assistant|>"
    ids = TOKENIZER.apply_chat_template(messages[1:2], add_generation_prompt=True, return_dict=False)
    assert len(ids) == 4
    assert ids[2] == TOKENIZER.eos_token_id == TOKENIZER.convert_tokens_to_ids(END)


def test_the_chat_template_rejects_an_unknown_role():
    with pytest.raises(TemplateError, match="unknown role tool"):
        TOKENIZER.apply_chat_template([{"role": "tool", "content": "x"}], tokenize=False)


def test_every_id_of_a_padded_vocabulary_can_be_decoded():
    wide = build_char_tokenizer(vocab_size=300)
    assert len(wide) == 300
    assert all(wide.decode([index]) for index in range(300))
    assert wide.encode("sort 31") == TOKENIZER.encode("sort 31")


def test_a_vocabulary_smaller_than_the_alphabet_is_rejected():
    with pytest.raises(ValueError, match="vocab_size=50"):
        build_char_tokenizer(vocab_size=50)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_loads_from_its_folder_with_the_same_weights(architecture, tmp_path):
    out = make_model(tmp_path / "model", architecture=architecture, init_std=0.1, seed=5)
    tokenizer = AutoTokenizer.from_pretrained(out)
    loaded = AutoModelForCausalLM.from_pretrained(out)
    assert loaded.config.model_type == ARCHITECTURES[architecture]
    assert loaded.config.eos_token_id == tokenizer.eos_token_id == loaded.generation_config.eos_token_id
    made = build_model(replace(TINY, architecture=architecture, settings={"initializer_range": 0.1}), TOKENIZER, seed=5)
    ids = torch.tensor([tokenizer.encode("sort 3142")])
    # Without a cache, which transformers refuses to models whose few layers are all linear attention.
    logits = [model(ids, use_cache=False).logits for model in (loaded, made.to(ids.device).eval())]
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-5)  # last bits depend on where a file's tensors begin
    torch.testing.assert_close(loaded.state_dict(), made.state_dict(), rtol=0, atol=0)


def test_weights_depend_only_on_the_seed():
    def first_weights(seed):
        return build_model(TINY, TOKENIZER, seed=seed).model.layers[0].self_attn.q_proj.weight

    assert torch.equal(first_weights(1), first_weights(1))
    assert not torch.equal(first_weights(1), first_weights(2))


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-1.7b", 1_720_574_976),
        ("qwen3-4b", 4_022_468_096),
        ("qwen3-8b", 8_190_735_360),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("olmoe-7b-a1b", 6_919_161_856),
    ],
)
def test_named_shapes_have_the_parameter_count_of_the_released_model(name, parameters):
    shape = SHAPES[name]
    config = model_config(replace(shape, settings={**shape.settings, "vocab_size": shape.vocab}), TOKENIZER)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert model.num_parameters() == parameters


def test_the_quickstart_model_has_one_to_three_million_parameters():
    assert 1e6 <= round(build_model(SMALL, TOKENIZER).num_parameters(), -5) <= 3e6


def test_an_existing_folder_is_never_replaced(tmp_path, capsys):
    small = [str(tmp_path / "model"), "--shape", "tiny"]
    assert main(small) == 0
    assert main([*small, "--layers", "1"]) == 2
    assert "already exists" in capsys.readouterr().err
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model").config.num_hidden_layers == 2
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_an_unknown_task_is_a_one_line_error_and_leaves_no_folder(tmp_path, capsys):
    assert main([str(tmp_path / "model"), "--shape", "tiny", "--task", "srting"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "sorting" in error
    assert not list(tmp_path.iterdir())


def test_a_warm_start_prints_the_model_size_and_the_held_out_reward(tmp_path, capsys):
    arguments = ["--shape", "tiny", "--task", "sorting", "--task-args", "{max_digits: 5}", "--steps", "2"]
    assert main([str(tmp_path / "model"), *arguments]) == 0
    printed = capsys.readouterr().out
    assert "warm start on sorting: 2 steps" in printed
    assert "held-out sampled reward 0.0" in printed
    assert "parameters" in printed


def test_only_the_answer_and_the_end_of_turn_have_labels():
    [(token_ids, labels)] = TaskTeacher(AlwaysA(), TOKENIZER, WarmStart(slips=0.0)).examples(1)
    answer = [*TOKENIZER.encode("a"), TOKENIZER.eos_token_id]
    assert TOKENIZER.decode(token_ids) == "<|user|>say it<|end|><|assistant|>a<|end|>"
    assert labels == [IGNORE_INDEX] * (len(token_ids) - 2) + answer


def test_examples_of_different_lengths_are_padded_on_the_right_without_labels():
    pad = TOKENIZER.pad_token_id
    examples = [
        ([4, 9, 9, 20, 2], [IGNORE_INDEX, IGNORE_INDEX, IGNORE_INDEX, 20, 2]),
        ([4, 30, 2], [IGNORE_INDEX, 30, 2]),
    ]
    batch = supervised_batch(examples, pad, torch.device("cpu"))
    assert batch["input_ids"].tolist() == [[4, 9, 9, 20, 2], [4, 30, 2, pad, pad]]
    assert batch["labels"].tolist() == [[IGNORE_INDEX] * 3 + [20, 2], [IGNORE_INDEX, 30, 2, IGNORE_INDEX, IGNORE_INDEX]]
    assert batch["attention_mask"].tolist() == [[1] * 5, [1, 1, 1, 0, 0]]


def test_sampled_texts_end_with_their_turn():
    def generate(input_ids: torch.Tensor, **_options: object) -> torch.Tensor:
        said = [[*TOKENIZER.encode("7"), TOKENIZER.eos_token_id, TOKENIZER.pad_token_id], TOKENIZER.encode("812")]
        return torch.cat([input_ids, torch.tensor(said)], dim=1)

    model = SimpleNamespace(generate=generate, device=torch.device("cpu"))
    assert sample(model, TOKENIZER, [TOKENIZER.encode("3+4="), TOKENIZER.encode("=")], 3) == ["7", "812"]


def test_slips_change_about_the_given_fraction_of_characters():
    answer = "0123456789" * 100
    changed = with_slips(answer, 0.3, Random(0))
    wrong = sum(given != right for given, right in zip(changed, answer, strict=True))
    assert 0.22 < wrong / len(answer) < 0.32  # one slip in ten picks the correct character
    assert with_slips(answer, 0.0, Random(0)) == answer


def test_a_warm_start_stops_at_the_target_reward():
    model = build_model(TINY, TOKENIZER)
    settings = WarmStart(target=0.5, max_steps=200, batch_size=8, max_completion_tokens=4)
    teacher = TaskTeacher(AlwaysA(), TOKENIZER, settings)
    assert teacher.sampled_reward(model, "held_out", 16) < 0.5
    reports = []
    steps = warm_start(model, teacher, lambda *report: reports.append(report))
    assert steps < 200
    assert [step for step, _, _ in reports] == list(range(CHECK_EVERY, steps + 1, CHECK_EVERY))
    assert (reports[-1][2] + (reports[-2][2] if len(reports) > 1 else 0.0)) / 2 >= 0.5
    assert teacher.sampled_reward(model, "held_out", 16) > 0.5


def test_a_task_without_answers_cannot_be_warm_started(tmp_path, capsys):
    (tmp_path / "unanswered.py").write_text(
        "class Unanswered:\n"
        "    def prompts(self, seed, split):\n"
        "        while True:\n"
        "            yield {'prompt': 'say it'}\n"
        "    def score(self, item, completion):\n"
        "        return 0.0\n"
    )
    task = f"{tmp_path / 'unanswered.py'}:Unanswered"
    assert main([str(tmp_path / "model"), "--shape", "tiny", "--task", task]) == 2
    assert capsys.readouterr().err == "error: Unanswered: its items have no 'answer' to learn from\n"
    assert not (tmp_path / "model").exists()


def test_the_tool_use_episode_can_be_warm_started_from_the_command_line(tmp_path, capsys):
    arguments = ["--shape", "tiny", "--task", "tool_use", "--task-args", "{max_calls: 1, template: '{question}'}"]
    options = ["--max-completion-tokens", "120", "--steps", "1", "--lr", "0.25"]
    assert main([str(tmp_path / "model"), *arguments, *options]) == 0
    assert re.search(r"warm start on tool_use: 1 steps in \d+ s\n", capsys.readouterr().out)
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    change = (trained.model.norm.weight - build_model(TINY, TOKENIZER).model.norm.weight).abs()
    assert change.max().item() == pytest.approx(0.25, rel=0.05), "the first step of AdamW is the learning rate"
