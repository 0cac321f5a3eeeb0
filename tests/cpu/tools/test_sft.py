"""Supervised fine-tuning: rows as tokens, and small models that learn them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PretrainedConfig

from colocated_grpo.errors import ConfigError
from colocated_grpo.policy.model_files import ModelFiles
from colocated_grpo.runtime.distributed import World
from colocated_grpo.tools import evaluate, make_model, sft
from colocated_grpo.tools.make_model import build_char_tokenizer
from tests.support.ranks import run_on_ranks
from tests.support.training_runs import tiny_model

TOKENIZER = build_char_tokenizer()
ANSWERS = {"sort 312": "123", "sort 54": "45", "sort 8967": "6789", "say hello": "hello!", "sort 2": "2"}
ROWS = [{"prompt": prompt, "completion": text} for prompt, text in ANSWERS.items()]
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "3+4="},
    {"role": "assistant", "content": "7"},
    {"role": "user", "content": "And 5+5?"},
    {"role": "assistant", "content": "10"},
]


def texts(row: dict, limit: int = 200, variables: dict | None = None) -> list[tuple[str, str]]:
    """Return the tokens without and with a loss of each rollout of a row, decoded."""
    end = (TOKENIZER.eos_token_id,)
    model = ModelFiles(
        folder=Path(),
        hf_config=PretrainedConfig(vocab_size=len(TOKENIZER)),
        tokenizer=TOKENIZER,
        stop_token_ids=end,
        shape={},
    )
    parts = []
    for rollout in (each for group in sft.encode([row], model, variables or {}, limit) for each in group.rollouts):
        given, sampled = rollout.token_ids[: rollout.prompt_length], rollout.token_ids[rollout.prompt_length :]
        assert rollout.loss_mask == [False] * len(given) + [True] * len(sampled)
        parts.append((TOKENIZER.decode(given), TOKENIZER.decode(sampled)))
    return parts


def test_a_completion_follows_the_rendered_prompt_and_ends_as_a_message_does():
    expected = [("<|user|>3+4=<|end|><|assistant|>", "7<|end|>")]
    assert texts({"prompt": "3+4=", "completion": "7"}) == expected
    chat = [{"role": "user", "content": "3+4="}], [{"role": "assistant", "content": "7"}]
    assert texts({"prompt": chat[0], "completion": chat[1]}) == expected


def test_each_message_of_the_assistant_is_a_completion_of_the_chat_before_it():
    begin = "<|system|>Be brief.<|end|><|user|>3+4=<|end|><|assistant|>"
    rest = "7<|end|><|user|>And 5+5?<|end|><|assistant|>"
    assert texts({"messages": CHAT}) == [(begin, "7<|end|>"), (begin + rest, "10<|end|>")]


def test_a_completion_of_several_messages_is_the_end_of_a_chat():
    begin, rest = CHAT[:2], CHAT[2:]
    assert texts({"prompt": begin, "completion": rest}) == texts({"messages": CHAT})
    assert texts({"prompt": "3+4=", "completion": rest}) == texts({"messages": CHAT[1:]})


def test_null_fields_of_columnar_files_are_not_rendered(monkeypatch):
    template = "{% for m in messages %}{{ m.role }}{{ m.name if 'name' in m }}: {{ m.content }}\n{% endfor %}"
    monkeypatch.setattr(TOKENIZER, "chat_template", template)
    chat = [{**message, "name": None} for message in CHAT[1:3]]
    for row in ({"messages": chat}, {"prompt": chat[:1], "completion": chat[1:]}):
        [(given, _)] = texts(row)
        assert given == "user: 3+4=\n"


@pytest.mark.parametrize(("own", "seen"), [(None, "ab"), ({"b": "c"}, "ac")])
def test_variables_of_a_row_are_added_to_those_of_the_model(monkeypatch, own, seen):
    monkeypatch.setattr(TOKENIZER, "chat_template", "{{ a }}{{ b }}")
    row = {"prompt": "3+4=", "completion": "7", "chat_template_kwargs": own}
    assert [given for given, _ in texts(row, variables={"a": "a", "b": "b"})] == [seen]


def test_a_prompt_with_its_completion_above_the_limit_is_left_out():
    row = {"prompt": "3+4=", "completion": "7"}
    assert len(texts(row, limit=9)) == 1
    assert texts(row, limit=8) == texts({"prompt": " ", "completion": "7"}) == []


@pytest.mark.parametrize(
    "row",
    [
        *({"prompt": "3+4="}, {"prompt": "3+4=", "completion": 7}, {"messages": CHAT[:2]}, {"messages": "3+4="}),
        *({"prompt": "3+4=", "completion": said} for said in (["7"], [], CHAT[:2])),
        {"completion": CHAT[2:]},
    ],
)
def test_a_row_without_a_completion_is_one_line(row):
    with pytest.raises(ConfigError, match="row 0: needs a `prompt` and a `completion` with text, or `messages`"):
        texts(row)


def test_a_row_without_a_completion_names_its_columns():
    with pytest.raises(ConfigError, match=r"row 0: needs .* with both; it has prompt, answer$"):
        texts({"prompt": "3+4=", "answer": "7"})


def test_a_message_of_the_assistant_without_text_is_named():
    call = {"role": "assistant", "content": None, "tool_calls": []}
    with pytest.raises(ConfigError, match=r"`messages` with both; an assistant's content is None$"):
        texts({"messages": [*CHAT[:2], call]})


def test_a_completion_that_cannot_be_encoded_is_one_line():
    with pytest.raises(ConfigError, match="row 0: a completion contains a lone surrogate"):
        texts({"prompt": "3+4=", "completion": "7\ud83d"})


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("open.csv", "line 2: unexpected end of data"),
        ("latin.csv", "'utf-8' codec can't decode byte 0xe9.*; save the file as UTF-8"),
        ("gone.csv", "no such file"),
        ("g" * 300 + ".csv", r"\[Errno 36\] File name too long"),
        ("rows.txt", "must be a file of one of these types: .jsonl, "),
    ],
)
def test_a_file_that_cannot_be_read_is_one_line(tmp_path, name, problem):
    (tmp_path / "open.csv").write_text('prompt,completion\n"3+4=,7\n')
    (tmp_path / "latin.csv").write_bytes(b"prompt,completion\ncaf\xe9,7\n")
    with pytest.raises(ConfigError, match=f"^'.*{name}': {problem}"):
        sft.read_file(tmp_path / name)


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--model m --output o --epoch 2", "--epoch: unknown flag; did you mean --epochs?"),
        ("--modell m --output o", "--modell: unknown flag; did you mean --model?"),
        ("--model m --output o --batch_size 4", "--batch_size: unknown flag; did you mean --batch-size?"),
        (
            "--model m --output o --gpus 1",
            "--gpus: a flag of the launcher, colocated-grpo; colocated-grpo sft uses the GPU that it sees",
        ),
        ("--model m --output o --batch-size 0", "--batch-size: '0': must be a positive whole number"),
    ],
)
def test_a_wrong_flag_is_one_line_that_names_it_as_it_was_written(capsys, flags, line):
    with pytest.raises(SystemExit, match="2"):
        sft.parser().parse_known_args(["rows.jsonl", *flags.split()])
    assert capsys.readouterr().err == f"error: {line}\n"


def tuned(world: World, folder: Path, *flags: str) -> list[float]:
    """Fine-tune as the command line does, and return the losses."""
    options, overrides = sft.parser().parse_known_args([str(folder / "rows.jsonl"), "--batch-size", "3", *flags])
    return sft.fine_tune(sft.read_settings(options, overrides), sft.read_file(options.rows), options, world)


def tune(folder: Path, ranks: int, *flags: str, model: Path | None = None) -> tuple[list[float], Path]:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    output = folder / f"tuned-{ranks}-{len(os.listdir(folder))}"
    named = ("--model", str(model or tiny_model()), "--output", str(output))
    losses = run_on_ranks(tuned, ranks, folder, *named, *flags)
    assert all(each == losses[0] for each in losses)
    return losses[0], output


def answers(model: Path) -> dict[str, str]:
    """Return the most likely completion of each prompt."""
    tokenizer, lm = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model)
    said = {}
    for prompt in ANSWERS:
        chat = [{"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=False)
        tokens = lm.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12)
        said[prompt] = tokenizer.decode(tokens[0, ids.shape[1] :], skip_special_tokens=True)
    return said


@pytest.mark.parametrize(
    "flags",
    [("--epochs", "30"), ("--epochs", "40", "--policy.lora.rank", "16", "--checkpoint.export_merged", "true")],
    ids=["all weights", "an adapter"],
)
def test_a_model_learns_the_rows(tmp_path, flags):
    losses, output = tune(tmp_path, 1, "--lr", "1e-2", *flags)
    assert losses[-1] < 0.3 < 3 < losses[0]  # frozen embeddings this small cannot be more certain
    assert answers(output) == ANSWERS


def test_without_export_merged_an_adapter_is_exported(tmp_path):
    _, output = tune(tmp_path, 1, "--epochs", "1", "--policy.lora.rank", "4")
    assert (output / "adapter_model.safetensors").is_file()


def test_two_ranks_have_the_losses_of_one(tmp_path):
    one, two = (tune(tmp_path, ranks, "--lr", "1e-3", "--epochs", "3")[0] for ranks in (1, 2))
    assert len(one) == 6 and one[-1] < one[0]
    assert one == pytest.approx(two, abs=1e-5)


@pytest.mark.parametrize("flag", ["--batch.minibatches", "--batch.epochs", "--training_steps", "--loss.kl.coef"])
def test_a_setting_that_the_rows_decide_is_rejected(tmp_path, flag):
    options = sft.parser().parse_args(["rows.jsonl", "--model", "m", "--output", str(tmp_path / "tuned")])
    with pytest.raises(ConfigError, match=f"^{flag}: sft sets it; use --epochs, --batch-size and --lr$"):
        sft.read_settings(options, [flag, "2"])


def test_a_mapping_with_a_setting_that_the_rows_decide_is_rejected(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    flags = ["rows.jsonl", "--model", str(tiny_model()), "--output", str(tmp_path / "tuned")]
    options = sft.parser().parse_args(flags)
    with pytest.raises(ConfigError, match=r"^--batch.minibatches: sft sets it; use --epochs"):
        sft.read_settings(options, ["--batch", "{minibatches: 2}"])
    kept = sft.read_settings(options, ["--batch", "{max_tokens_per_micro_batch: 8192}"])
    assert kept.batch.max_tokens_per_micro_batch == 8192


def test_a_warmup_is_compared_with_the_steps_that_the_rows_give(tmp_path, monkeypatch, world):
    monkeypatch.setenv("WORLD_SIZE", "1")
    flags = ["rows.jsonl", "--model", str(tiny_model()), "--output", str(tmp_path / "tuned"), "--epochs", "1"]
    options = sft.parser().parse_args(flags)
    config = sft.read_settings(options, ["--policy.warmup_steps", "150"])
    with pytest.raises(ConfigError, match=r"policy\.warmup_steps=150: must be at most the run's 1 optimizer steps"):
        sft.fine_tune(config, ROWS, options, world)


def test_an_output_that_exists_is_not_replaced(tmp_path):
    with pytest.raises(ConfigError, match="already exists; choose another folder"):
        sft.read_settings(sft.parser().parse_args(["rows.jsonl", "--model", "m", "--output", str(tmp_path)]), [])


@pytest.mark.parametrize(
    ("tool", "arguments"),
    [
        (sft.main, ["rows.jsonl", "--model", "m", "--output"]),
        (make_model.main, ["--shape", "tiny", "--task", "sorting"]),
        (evaluate.main, ["m", "--config", "absent.yaml", "--output"]),
    ],
)
def test_an_output_that_cannot_be_written_is_found_before_the_work(tmp_path, monkeypatch, capsys, tool, arguments):
    monkeypatch.setattr(os, "environ", dict(os.environ))  # a tool sets the variables of a rank
    (tmp_path / "file").touch()
    result = str(tmp_path / "file" / "folder" / "result")
    assert tool([*arguments, result]) == 2
    assert f"={result!r}: cannot write (Not a directory)\n" in capsys.readouterr().err


def test_the_results_of_an_evaluation_are_not_written_to_a_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(os, "environ", dict(os.environ))
    assert evaluate.main(["m", "--config", "absent.yaml", "--output", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"error: --output={str(tmp_path)!r}: cannot write (Is a directory)\n"
