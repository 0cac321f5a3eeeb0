"""docs/settings.md is what the schema says."""

from __future__ import annotations

from pydantic import BaseModel

from colocated_grpo.settings.errors import sections
from colocated_grpo.settings.schema import Config
from docs.settings_page import PAGE, page


def test_the_page_of_settings_is_generated_from_the_schema():
    assert PAGE.read_text() == page(), "run python -m docs.settings_page"


def models_in(model: type[BaseModel]) -> set[type[BaseModel]]:
    inner = (part for field in model.model_fields.values() for part in sections(field.annotation))
    return {model}.union(*map(models_in, inner))


def test_the_page_has_a_row_for_every_setting():
    text = page()
    for model in models_in(Config):
        for name in model.model_fields:
            assert f"| `{name}` | " in text


def test_bounds_types_and_defaults_are_shown():
    lines = page().splitlines()
    assert any(line.startswith("| `prompts_per_step` | whole number >= 1, <= 100000 | `32` | ") for line in lines)
    assert any(line.startswith("| `schedule` | `constant`, `cosine`, `linear` | `constant` | ") for line in lines)
    assert any(line.startswith("| `max_num_seqs` | whole number > 0 or null | `null` | ") for line in lines)
