"""The models that the project makes for itself: tokenizer, random weights of each family, supervised warm start."""

from __future__ import annotations

from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from jinja2.exceptions import TemplateError
from transformers import AutoModelForCausalLM, AutoTokenizer

from colocated_grpo.tools.char_tokenizer import CHARACTERS, END, build_char_tokenizer
from colocated_grpo.tools.episode_lessons import EpisodeLessons
from colocated_grpo.tools.make_model import (
    ARCHITECTURES,
    build_model,
    main,
    make_model,
    model_config,
)
from colocated_grpo.tools.shapes import SHAPES, SMALL, TINY
from colocated_grpo.tools.warm_start import (
    CHECK_EVERY,
    IGNORED,
    TaskLessons,
    WarmStart,
    cut_at,
    supervised_batch,
    warm_start,
    with_slips,
)

TOKENIZER = build_char_tokenizer()


class AlwaysA:
    """A task that a random model fails and a taught one solves: the answer is always 'a'."""

    def prompts(self, seed, split):
        while True:
            yield {"prompt": "say it", "answer": "a"}

    def score(self, item, completion):
        return float(completion == item["answer"])


def without_special_tokens(text: str) -> bool:
    return not any(token in text for token in TOKENIZER.all_special_tokens)


@given(st.text(alphabet=CHARACTERS).filter(without_special_tokens))
def test_text_survives_encoding_and_decoding_with_one_token_a_character(text):
    ids = TOKENIZER.encode(text)
    assert len(ids) == len(text)
    assert TOKENIZER.decode(ids) == text


def test_a_character_outside_the_alphabet_is_one_unknown_token():
    assert TOKENIZER.encode("a\u00e9") == [*TOKENIZER.encode("a"), TOKENIZER.unk_token_id]


def test_the_chat_template_opens_and_closes_every_turn_and_leaves_the_assistants_open():
    messages = [{"role": role, "content": role[0]} for role in ("system", "user", "assistant", "user")]
    text = TOKENIZER.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == "<|system|>s<|end|><|user|>u<|end|><|assistant|>a<|end|><|user|>u<|end|><|assistant|>"
    ids = TOKENIZER.apply_chat_template(messages[1:2], add_generation_prompt=True, return_dict=False)
    assert len(ids) == 4
    assert ids[2] == TOKENIZER.eos_token_id == TOKENIZER.convert_tokens_to_ids(END)


def test_the_chat_template_refuses_a_role_it_does_not_know():
    with pytest.raises(TemplateError, match="unknown role tool"):
        TOKENIZER.apply_chat_template([{"role": "tool", "content": "x"}], tokenize=False)


def test_a_wider_vocabulary_gives_every_id_a_text():
    wide = build_char_tokenizer(vocab_size=300)
    assert len(wide) == 300
    assert all(wide.decode([index]) for index in range(300))
    assert wide.encode("sort 31") == TOKENIZER.encode("sort 31")


def test_a_vocabulary_smaller_than_the_alphabet_is_refused():
    with pytest.raises(ValueError, match="vocab_size=50"):
        build_char_tokenizer(vocab_size=50)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_family_loads_from_its_folder_with_the_weights_that_were_made(architecture, tmp_path):
    out = make_model(tmp_path / "model", architecture=architecture, init_std=0.1, seed=5)
    tokenizer = AutoTokenizer.from_pretrained(out)
    loaded = AutoModelForCausalLM.from_pretrained(out)
    assert loaded.config.model_type == ARCHITECTURES[architecture]
    assert loaded.config.eos_token_id == tokenizer.eos_token_id == loaded.generation_config.eos_token_id
    made = build_model(architecture, TINY, TOKENIZER, init_std=0.1, seed=5)
    ids = torch.tensor([tokenizer.encode("sort 3142")])
    torch.testing.assert_close(loaded(ids).logits, made.to(ids.device).eval()(ids).logits, rtol=0, atol=0)


def test_weights_depend_on_the_seed_and_on_nothing_else():
    def first_weights(seed):
        return build_model("qwen3", TINY, TOKENIZER, seed=seed).model.layers[0].self_attn.q_proj.weight

    assert torch.equal(first_weights(1), first_weights(1))
    assert not torch.equal(first_weights(1), first_weights(2))


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-1.7b", 1_720_574_976),
        ("qwen3-4b", 4_022_468_096),
        ("qwen3-8b", 8_190_735_360),
    ],
)
def test_named_shapes_have_the_parameter_count_of_the_released_model(name, parameters, wide_tokenizer):
    config = model_config("qwen3", SHAPES[name], wide_tokenizer)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert model.num_parameters() == parameters


@pytest.fixture(scope="module")
def wide_tokenizer():
    return build_char_tokenizer(SHAPES["qwen3-8b"].vocab)


def test_the_quickstart_model_has_one_to_three_million_parameters():
    assert 1e6 <= round(build_model("qwen3", SMALL, TOKENIZER).num_parameters(), -5) <= 3e6


def test_an_existing_folder_is_never_replaced_unasked_and_only_a_model_folder_on_request(tmp_path, capsys):
    out = tmp_path / "model"
    small = [str(out), "--shape", "tiny"]
    assert main(small) == 0
    assert main(small) == 2
    assert "--force" in capsys.readouterr().err
    assert main([*small, "--force", "--layers", "1"]) == 0
    assert AutoModelForCausalLM.from_pretrained(out).config.num_hidden_layers == 1

    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "thesis.tex").write_text("years of work")
    assert main([str(tmp_path / "notes"), "--shape", "tiny", "--force"]) == 2
    assert (tmp_path / "notes" / "thesis.tex").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "notes"]


def test_an_unknown_task_is_one_line_and_leaves_no_folder(tmp_path, capsys):
    assert main([str(tmp_path / "model"), "--shape", "tiny", "--task", "srting"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "sorting" in error
    assert not list(tmp_path.iterdir())


def test_a_short_warm_start_prints_its_size_and_held_out_reward(tmp_path, capsys):
    arguments = ["--shape", "tiny", "--task", "sorting", "--task-args", "{max_digits: 5}", "--steps", "2"]
    assert main([str(tmp_path / "model"), *arguments]) == 0
    printed = capsys.readouterr().out
    assert "taught sorting for 2 steps" in printed
    assert "held-out sampled reward 0.0" in printed
    assert "parameters" in printed


def test_a_lesson_labels_the_answer_and_the_end_of_turn_only():
    [(token_ids, labels)] = TaskLessons(AlwaysA(), TOKENIZER, WarmStart(slips=0.0)).take(1)
    answer = [*TOKENIZER.encode("a"), TOKENIZER.eos_token_id]
    assert TOKENIZER.decode(token_ids) == "<|user|>say it<|end|><|assistant|>a<|end|>"
    assert labels == [IGNORED] * (len(token_ids) - 2) + answer


def test_lessons_of_different_lengths_are_padded_on_the_right_without_labels():
    pad = TOKENIZER.pad_token_id
    lessons = [([4, 9, 9, 20, 2], [IGNORED, IGNORED, IGNORED, 20, 2]), ([4, 30, 2], [IGNORED, 30, 2])]
    batch = supervised_batch(lessons, pad, torch.device("cpu"))
    assert batch["input_ids"].tolist() == [[4, 9, 9, 20, 2], [4, 30, 2, pad, pad]]
    assert batch["labels"].tolist() == [[IGNORED] * 3 + [20, 2], [IGNORED, 30, 2, IGNORED, IGNORED]]
    assert batch["attention_mask"].tolist() == [[1] * 5, [1, 1, 1, 0, 0]]


def test_what_follows_the_end_of_a_turn_is_cut():
    assert cut_at([7, 2, 0, 2], 2) == [7, 2]
    assert cut_at([7, 8], 2) == [7, 8]


def test_a_careless_teacher_gets_about_the_given_share_of_characters_wrong():
    answer = "0123456789" * 100
    taught = with_slips(answer, 0.3, Random(0))
    wrong = sum(given != right for given, right in zip(taught, answer, strict=True))
    assert 0.22 < wrong / len(answer) < 0.32  # a slip hits the right character one time in ten
    assert with_slips(answer, 0.0, Random(0)) == answer


def test_a_warm_start_teaches_until_the_target_and_then_stops():
    model = build_model("qwen3", TINY, TOKENIZER)
    settings = WarmStart(target=0.5, max_steps=200, batch_size=8, max_completion_tokens=4)
    lessons = TaskLessons(AlwaysA(), TOKENIZER, settings)
    assert lessons.sampled_reward(model, "held_out", 16) < 0.5
    seen = []
    steps = warm_start(model, TOKENIZER, lessons, settings, lambda *row: seen.append(row))
    assert steps < 200
    assert [row[0] for row in seen] == list(range(CHECK_EVERY, steps + 1, CHECK_EVERY))
    assert (seen[-1][2] + (seen[-2][2] if len(seen) > 1 else 0.0)) / 2 >= 0.5
    assert lessons.sampled_reward(model, "held_out", 16) > 0.5


class Echo:
    """An episode that a random model fails: say 'a', and 'b' after the answer; long and short ones."""

    def prompts(self, seed, split):
        for number in range(10**6):
            yield {"prompt": "say it", "turns": 1 + number % 2}

    async def run(self, item, model):
        said = [(await model.generate(4)).text]
        if item["turns"] == 2:
            model.observe("next")
            said.append((await model.generate(4)).text)
        return float(said == ["a", "b"][: item["turns"]])

    def teach(self, item, observations):
        return "ab"[len(observations)]


def test_a_warm_start_teaches_episodes_of_different_lengths():
    model = build_model("qwen3", TINY, TOKENIZER)
    settings = WarmStart(target=0.7, max_steps=200, batch_size=8, max_completion_tokens=40, slips=0.0)
    lessons = EpisodeLessons(Echo(), TOKENIZER, settings)
    assert lessons.sampled_reward(model, "held_out", 16) < 0.5
    assert warm_start(model, TOKENIZER, lessons, settings, lambda *row: None) < 200
    assert lessons.sampled_reward(model, "held_out", 16) > 0.5


def test_the_tool_use_episode_can_be_warm_started_from_the_command_line(tmp_path, capsys):
    arguments = ["--shape", "tiny", "--task", "tool_use", "--task-args", "{max_calls: 1, template: '{question}'}"]
    how = ["--max-completion-tokens", "120", "--steps", "1", "--lr", "0.25"]
    assert main([str(tmp_path / "model"), *arguments, *how]) == 0
    assert "taught tool_use for 1 steps" in capsys.readouterr().out
    taught = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    moved = (taught.model.norm.weight - build_model("qwen3", TINY, TOKENIZER).model.norm.weight).abs()
    assert moved.max().item() == pytest.approx(0.25, rel=0.05), "the first step of AdamW is the learning rate"
