"""The text part of a vision-language model trains alone, and computes what the whole model computes for text."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import mistral_common
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from colocated_grpo.batching.micro_batch import MicroBatch
from colocated_grpo.policy.export import ModelExport
from colocated_grpo.policy.model import read_model_config
from colocated_grpo.policy.model_files import load_tokenizer, read_model_files, stop_token_ids
from colocated_grpo.policy.model_loader import check_model
from colocated_grpo.runtime.distributed import World
from colocated_grpo.settings.config_json import text_part
from colocated_grpo.settings.errors import ConfigError
from colocated_grpo.settings.model_support import refusals
from tests.support.composites import TEXT_PARTS, make_composite, rename_tensors, whole_model
from tests.support.ranks import run_on_ranks
from tests.support.small_policy import (
    assert_same,
    config_of,
    logprobs_one_by_one,
    pack_for,
    policy_of,
    random_groups,
    train,
    weights_of,
)


@pytest.fixture(scope="module")
def composite(tmp_path_factory) -> Callable[[str], Path]:
    """Return the folder of a kind of whole model, made once."""
    made: dict[str, Path] = {}

    def folder(kind: str) -> Path:
        if kind not in made:
            made[kind] = make_composite(tmp_path_factory.mktemp("whole") / kind.split()[0], kind)
        return made[kind]

    return folder


def micro_batch_of(world: World, folder: Path) -> MicroBatch:
    (micro_batch,) = pack_for(world, random_groups(3, 3), config_of(folder)).minibatches[0].micro_batches
    return micro_batch


@torch.no_grad()
def logprobs_of_whole(folder: Path, micro_batch: MicroBatch) -> torch.Tensor:
    return logprobs_one_by_one(whole_model(folder), micro_batch)


@pytest.mark.parametrize("kind", TEXT_PARTS)
def test_the_policy_computes_what_the_whole_model_computes_for_text(world, composite, kind):
    folder = composite(kind)
    micro_batch = micro_batch_of(world, folder)
    expected = logprobs_of_whole(folder, micro_batch)
    assert expected.std() > 0.1, "tokens must differ in probability"
    actual = policy_of(config_of(folder), world).score(micro_batch)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def with_other_names(folder: Path, source: Path) -> Path:
    """Write Gemma 3 with the names of its modules, as Gemma 4 is stored, in place of those that transformers writes."""
    make_composite(folder, "gemma3")
    assert weights_of_file(folder).keys() == weights_of_file(source).keys()
    rename_tensors(folder, "language_model.model.", "model.language_model.")
    return folder


def weights_of_file(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def test_both_layouts_and_several_files_give_the_same_weights(world, composite, tmp_path):
    older = composite("gemma3")
    assert "language_model.model.norm.weight" in weights_of_file(older)
    newer = with_other_names(tmp_path / "newer", older)
    assert "model.language_model.norm.weight" in weights_of_file(newer)
    sharded = make_composite(tmp_path / "sharded", "gemma3", file_size="20KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    expected = weights_of(policy_of(config_of(older), world))
    for folder in (newer, sharded):
        assert_same(weights_of(policy_of(config_of(folder), world)), expected, rtol=0, atol=0)


def train_and_export(world: World, folder: Path, target: Path) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Train two steps and export; return the weights and the log-probabilities of a micro-batch."""
    config = config_of(folder, policy={"lr": 1e-2})
    policy = policy_of(config, world)
    batch = pack_for(world, random_groups(2, 3), config)
    train(policy, batch, steps=2)
    files = read_model_files(config.model, world)
    ModelExport(policy=policy, files=files, dtype=torch.float32, world=world).write(target)
    return weights_of(policy), policy.score(batch.minibatches[0].micro_batches[0])


@pytest.mark.parametrize("kind", TEXT_PARTS)
def test_the_export_is_a_text_model_that_computes_what_the_policy_computes(world, composite, tmp_path, kind):
    folder, target = composite(kind), tmp_path / "final_model"
    weights, expected = train_and_export(world, folder, target)
    config_json = json.loads((target / "config.json").read_text())
    assert refusals(config_json) == []
    assert config_json["model_type"] == text_part(json.loads((folder / "config.json").read_text()))["model_type"]
    model = AutoModelForCausalLM.from_pretrained(target).eval()
    assert config_json["architectures"] == [type(model).__name__]
    assert_same({name: p.detach() for name, p in model.named_parameters()}, weights, rtol=0, atol=0)
    batch = pack_for(world, random_groups(2, 3), config_of(folder))
    with torch.no_grad():
        actual = logprobs_one_by_one(model, batch.minibatches[0].micro_batches[0])
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_two_ranks_train_the_text_part_as_one_does(composite, tmp_path):
    folder = composite("gemma3")
    [(one, _)] = run_on_ranks(train_and_export, 1, folder, tmp_path / "one")
    [(two, _), _] = run_on_ranks(train_and_export, 2, folder, tmp_path / "two")
    assert_same(two, one, rtol=1e-3, atol=2e-4)


def test_the_number_of_parameters_is_that_of_the_text_part(world, composite):
    text = AutoModelForCausalLM.from_config(
        read_model_config(config_of(composite("gemma3")).model, composite("gemma3"))
    )
    assert policy_of(config_of(composite("gemma3")), world).num_parameters() == text.num_parameters()


def test_the_chat_template_of_a_processor_is_used_if_the_tokenizer_has_none(composite, tmp_path):
    folder = tmp_path / "whole"
    shutil.copytree(composite("gemma3"), folder)
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "of the processor"}))
    own = (folder / "chat_template.jinja").read_text()
    assert load_tokenizer(config_of(folder).model, folder).chat_template == own
    (folder / "chat_template.jinja").unlink()
    assert load_tokenizer(config_of(folder).model, folder).chat_template == "of the processor"
    given = config_of(folder, model={"name": str(folder), "chat_template": "{{ given }}"})
    assert load_tokenizer(given.model, folder).chat_template == "{{ given }}"
    broken = config_of(folder, model={"name": str(folder), "chat_template": "\n{{ messages[0] '"})
    with pytest.raises(ConfigError, match=r"^model.chat_template: line 2 is not valid Jinja: unexpected [^\n]*$"):
        load_tokenizer(broken.model, folder)
    (folder / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(ConfigError, match=r"^model.name='.*': its chat template: line 1 is not valid Jinja: Expected "):
        load_tokenizer(config_of(folder).model, folder)


@pytest.mark.parametrize("file", ["tokenizer_config.json", "tokenizer.json"])
@pytest.mark.parametrize("text", ["{", "[" * 100_000 + "]" * 100_000], ids=["cut", "deep"])
def test_a_damaged_tokenizer_is_one_line(composite, tmp_path, file, text):
    folder = tmp_path / "whole"
    shutil.copytree(composite("gemma3"), folder)
    (folder / file).write_text(text)
    with pytest.raises(ConfigError, match=r"^model.name='.*': no usable tokenizer; copy [^\n]*$"):
        load_tokenizer(config_of(folder).model, folder)


def test_missing_files_of_the_tokenizer_are_one_line(model_folder, tmp_path):
    folder = shutil.copytree(model_folder(), tmp_path / "model")
    for file in folder.glob("tokenizer*"):
        file.unlink()
    assert len(AutoTokenizer.from_pretrained(folder)) < 2, "transformers makes an empty tokenizer"
    with pytest.raises(ConfigError, match=r"^model.name='.*': no usable tokenizer; .*: no tokenizer files in [^\n]*$"):
        load_tokenizer(config_of(folder).model, folder)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"eos_token_id": 1000000}', r"eos_token_id=1000000 \(tokenizer or generation_config.json\) is not one of"),
        ('{"eos_token_id": [1, -1]}', "eos_token_id=-1 "),
        ('{"eos_token_id": "</s>"}', "eos_token_id='</s>' "),
        ('{"eos_token_id": [[1]]}', "cannot read generation_config.json: TypeError: "),
        ("[]", "cannot read generation_config.json: AttributeError: "),
        ("[" * 100_000, "cannot read generation_config.json: RecursionError: "),
    ],
)
def test_a_token_that_ends_completions_must_be_in_the_vocabulary(model_folder, tmp_path, text, problem):
    folder = tmp_path / "model"
    shutil.copytree(model_folder(), folder)
    tokenizer = load_tokenizer(config_of(folder).model, folder)
    (folder / "generation_config.json").write_text(text)
    with pytest.raises(ConfigError, match=rf"^model.name='.*': {problem}[^\n]*$"):
        stop_token_ids(tokenizer, folder)


@pytest.mark.parametrize("settings", [{"num_attention_heads": 0}, {"vocab_size": 1 << 50}, {"rope_parameters": 3}])
def test_a_model_that_cannot_be_built_is_one_line(model_folder, tmp_path, settings):
    folder = tmp_path / "model"
    shutil.copytree(model_folder(), folder)
    entries = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(entries | settings))
    with pytest.raises(ConfigError, match=r"^model.name='.*': (cannot be built|transformers cannot read it): [^\n]*$"):
        check_model(config_of(folder).model, folder)


def test_a_mistral_with_a_tokenizer_of_its_own_format_keeps_its_chat_template(composite, tmp_path):
    folder = tmp_path / "whole"
    shutil.copytree(composite("mistral3"), folder)
    own = AutoTokenizer.from_pretrained(folder)
    shutil.copy(Path(mistral_common.__file__).parent / "data/tekken_240911.json", folder / "tekken.json")
    assert AutoTokenizer.from_pretrained(folder).chat_template is None, "transformers prefers tekken.json"
    tokenizer = load_tokenizer(config_of(folder).model, folder)
    assert tokenizer.chat_template == own.chat_template
    assert tokenizer.encode("12+3") == own.encode("12+3")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"^model.name='.*': its only tokenizer is Mistral's tekken.json, .*; add "):
        load_tokenizer(config_of(folder).model, folder)


@pytest.mark.parametrize(("stored", "tied"), [(True, False), (False, True)])
def test_an_output_layer_in_the_checkpoint_decides_where_the_settings_contradict_each_other(
    world, composite, tmp_path, stored, tied
):
    """Mistral-Small states neither: transformers' default is tied for the whole model, and untied for its text part."""
    folder = make_composite(tmp_path / "whole", "mistral3", tied=not stored)
    config_json = json.loads((folder / "config.json").read_text())
    for section in (config_json, config_json["text_config"]):
        del section["tie_word_embeddings"]
    (folder / "config.json").write_text(json.dumps(config_json))
    assert ("language_model.lm_head.weight" in weights_of_file(folder)) == stored
    assert read_model_config(config_of(folder).model, folder).tie_word_embeddings == tied
    micro_batch = micro_batch_of(world, folder)
    torch.testing.assert_close(
        policy_of(config_of(folder), world).score(micro_batch),
        logprobs_of_whole(folder, micro_batch),
        rtol=1e-5,
        atol=1e-5,
    )
