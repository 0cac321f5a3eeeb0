"""Writes the tables of models into docs/models.md: `python -m docs.models_page`."""

from __future__ import annotations

import sys
from pathlib import Path

from colocated_grpo.settings.config_json import MODULES, TRAINED_AS
from colocated_grpo.settings.families import FAMILIES, Family, family_of
from colocated_grpo.settings.model_support import RULES

PAGE = Path(__file__).resolve().parent / "models.md"
COLUMNS = (
    "Family",
    "`model_type`",
    "Full",
    "LoRA",
    "Weight path",
    "FlashAttention 4",
    "Engine shortcuts",
    "transformers, vLLM from",
)


def main() -> int:
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


def with_tables(text: str) -> str:
    """Return the page's text with new tables between its markers. Raises ValueError if a marker is missing."""
    tables = {"families": family_table(), "refused": refused_table(), "text parts": text_part_table()}
    for name, rows in tables.items():
        begin, end = (
            f"<!-- {name}: written by python -m docs.models_page -->",
            f"<!-- end of {name} -->",
        )
        before, found, rest = text.partition(begin)
        _, ended, after = rest.partition(end)
        if not (found and ended):
            raise ValueError(f"{PAGE}: no lines {begin} and {end}")
        text = "\n".join([before + begin, "", *rows, "", end + after])
    return text


def family_table() -> list[str]:
    return [_row(COLUMNS), _row(["---"] * len(COLUMNS)), *(_row(_cells(family)) for family in FAMILIES)]


def refused_table() -> list[str]:
    return [_row(["Feature", "Examples"]), _row(["---"] * 2), *(_row([rule.feature, rule.examples]) for rule in RULES)]


def text_part_table() -> list[str]:
    head = ["`model_type`", "of its `text_config`", "Trains as", "Class of vLLM"]
    rows = [
        [f"`{whole}`", f"`{text}`", name_of(TRAINED_AS.get(text, text)), f"`{module}`"]
        for (whole, text), module in MODULES.items()
    ]
    return [_row(head), _row(["---"] * len(head)), *map(_row, rows)]


def name_of(model_type: str) -> str:
    """Return the name of a tested family, or the type of another model."""
    family = family_of(model_type)
    return f"`{model_type}`" if family is None else family.name


def _cells(family: Family) -> list[str]:
    return [
        family.name,
        f"`{family.model_type}`",
        "yes",
        "yes, experts stay frozen" if family.experts else "yes",
        {"views": "views", "load_weights": "vLLM's loader"}[family.path],
        flash_attention_4(family),
        ", ".join(shortcuts(family)) or "none",
        f"{family.transformers}, {family.vllm}",
    ]


def flash_attention_4(family: Family) -> str:
    from colocated_grpo.policy.flash_attention import FA4_HEAD_SIZES

    if family.latent:
        return "no: values have smaller heads than keys"
    if family.scores != "plain":
        return {"sinks": "no: attention sinks", "capped": "no: capped scores"}[family.scores]
    usable = [size for size in family.heads if size in FA4_HEAD_SIZES]
    if not usable:
        return f"no: heads of {_sizes(family.heads)}"
    where = "yes" if len(usable) == len(family.heads) else f"heads of {_sizes(usable)}"
    return f"{where}, in layers without a window" if family.windows else where


def shortcuts(family: Family) -> list[str]:
    """Return the engine's own code paths that the family's released models use on a GPU."""
    from colocated_grpo.rollout.vllm.decode_attention import HEAD_SIZES

    if family.latent:
        return []
    names = [] if family.windows or family.states else ["steady decode"]
    usable = [size for size in family.heads if size in HEAD_SIZES and family.scores == "plain"]
    if usable:
        names.append("decode kernel" + ("" if len(usable) == len(family.heads) else f" (heads of {_sizes(usable)})"))
    if family.model_type in ("qwen3", "qwen3_moe"):
        names.append("QKV kernel")
    return names


def _sizes(sizes: list[int] | tuple[int, ...]) -> str:
    return " and ".join(map(str, sizes))


def _row(cells: list[str] | tuple[str, ...]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())
