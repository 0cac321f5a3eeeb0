"""Names and experts of a checkpoint become parameters of the module, and the other way round."""

from __future__ import annotations

import pytest
import torch
from transformers import conversion_mapping
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter, WeightRenaming

from colocated_grpo.policy.checkpoint_files import Conversion, Piece, conversion_of
from colocated_grpo.settings.errors import ConfigError

EXPERTS, ROWS, COLUMNS = 3, 2, 4
MIXTRAL = "model.layers.7.block_sparse_moe"


@pytest.fixture
def layout(request):
    """Return a function that registers a layout with transformers, as a model's own code does, under a new name."""
    name = request.node.name

    def register(*entries) -> str:
        conversion_mapping.register_checkpoint_conversion_mapping(name, list(entries))
        return name

    yield register
    conversion_mapping.USER_REGISTERED_MAPPINGS.discard(name)
    del conversion_mapping._checkpoint_conversion_mapping_cache[name]


def test_stored_tensors_fill_the_parameter_that_they_are_written_from():
    conversion = conversion_of("mixtral")
    whole = torch.arange(EXPERTS * 2 * ROWS * COLUMNS).view(EXPERTS, 2 * ROWS, COLUMNS)
    name = "model.layers.7.mlp.experts.gate_up_proj"
    stored = dict(conversion.stored(name, whole))
    assert list(stored) == [f"{MIXTRAL}.experts.{expert}.{part}.weight" for expert in range(3) for part in ("w1", "w3")]
    filled = torch.zeros_like(whole)
    for stored_name, value in stored.items():
        piece = conversion.piece(stored_name)
        assert (piece.name, value.shape) == (name, (ROWS, COLUMNS))
        filled[piece.expert].chunk(2)[piece.part].copy_(value)
    assert torch.equal(filled, whole)


def test_an_expert_is_a_number_of_any_length_and_other_tensors_fill_a_whole_parameter():
    conversion = conversion_of("mixtral")
    down = Piece(name="model.layers.7.mlp.experts.down_proj", expert=123)
    assert conversion.piece(f"{MIXTRAL}.experts.123.w2.weight") == down
    assert conversion.piece(f"{MIXTRAL}.gate.weight") == Piece(name="model.layers.7.mlp.gate.weight")
    [(name, _)] = conversion.stored("model.layers.7.mlp.gate.weight", torch.zeros(1))
    assert name == f"{MIXTRAL}.gate.weight"
    assert conversion.piece("model.norm.weight") == Piece(name="model.norm.weight")


def test_a_text_model_is_read_from_the_names_of_its_vision_model_and_stored_under_its_own():
    conversion = conversion_of("qwen3_5_text")
    name = "model.layers.0.mlp.up_proj.weight"
    for stored_name in (name, "model.language_model.layers.0.mlp.up_proj.weight"):
        assert conversion.piece(stored_name) == Piece(name=name)
    assert [stored for stored, _ in conversion.stored(name, torch.zeros(1))] == [name]


@pytest.mark.parametrize("model_type", [None, "qwen3"])
def test_a_model_without_an_entry_is_stored_as_in_the_module(model_type):
    conversion = conversion_of(model_type)
    assert conversion == Conversion()
    assert conversion.piece("a.b") == Piece(name="a.b")
    assert [name for name, _ in conversion.stored("a.b", torch.zeros(1))] == ["a.b"]


def test_dots_of_patterns_are_those_of_names(layout):
    conversion = conversion_of(layout(WeightRenaming("backbone.", "model.")))
    assert conversion.renames == (("backbone.", "model."),)
    assert conversion.piece("backbone.norm") == Piece(name="model.norm")


EXPRESSIONS = r"a\.b", "^a", "a$", "(a)", "a*", "a+", "ab?", "[ab]", "a{2}", "a|b"
MERGE = {"target_patterns": "experts.both", "operations": [MergeModulelist(dim=0), Concatenate(dim=1)]}


@pytest.mark.parametrize(
    "entry",
    [
        *(WeightRenaming(pattern, "new") for pattern in EXPRESSIONS),
        WeightRenaming(["a", "^b"], ["new"]),
        WeightRenaming(["a", "b"], ["new"]),
        WeightConverter(source_patterns=["experts.*.a.weight$", "experts.*.b.weight"], **MERGE),
        WeightConverter(source_patterns=["experts.*.a.weight", "experts.(w|v).*.b"], **MERGE),
        WeightConverter(source_patterns=["experts.all.weight"], **MERGE),
    ],
    ids=repr,
)
def test_patterns_that_are_no_plain_names_are_rejected(layout, entry):
    model_type = layout(entry)
    with pytest.raises(ConfigError, match="its checkpoints store tensors in a layout that is not known"):
        conversion_of(model_type)
