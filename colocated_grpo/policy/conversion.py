"""Checkpoints whose tensors differ from the module's parameters: other names, and experts stored one by one.

The table of conversions is transformers' `conversion_mapping`. The loader of transformers reads whole checkpoints;
`CheckpointReader` reads rows.

Shapes: E experts, R rows and C columns of one expert's matrix.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from torch import Tensor
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import Concatenate, MergeModulelist, PrefixChange, WeightConverter, WeightRenaming

from colocated_grpo.settings.config_json import config_json_in, text_part
from colocated_grpo.settings.errors import ConfigError

_MERGES = ([(MergeModulelist, 0)], [(MergeModulelist, 0), (Concatenate, 1)])
"""Supported operations and their dimensions: each expert's matrices are joined by rows, then experts are stacked."""
_SPECIAL = frozenset("\\^$*+?{}[]()|")
"""Special characters of regular expressions, which no tensor name contains. A dot in a pattern matches the dot of a
name."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """The part of a module's parameter that one stored tensor fills."""

    name: str
    """Name of the parameter."""
    expert: int | None = None
    """None: the whole parameter."""
    part: int = 0
    """Position among the matrices of one expert: gate 0, up 1."""


@dataclass(frozen=True, kw_only=True)
class Merge:
    """A parameter [E, R, C] whose experts' matrices are stored one by one."""

    parameter: str
    """Part of the parameter's name, such as 'mlp.experts.gate_up_proj'."""
    stored: tuple[str, ...]
    """Parts of the stored names, with * for the expert: 'mlp.experts.*.gate_proj.weight', then up_proj's."""

    def piece(self, stored_name: str) -> Piece | None:
        for part, pattern in enumerate(self.stored):
            if match := re.search(re.escape(pattern).replace(r"\*", r"(\d+)"), stored_name):
                name = stored_name[: match.start()] + self.parameter + stored_name[match.end() :]
                return Piece(name=name, expert=int(match[1]), part=part)
        return None

    def split(self, name: str, value_ERC: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the stored tensors of the parameter `name`."""
        for expert, value_RC in enumerate(value_ERC):
            for pattern, part in zip(self.stored, value_RC.chunk(len(self.stored)), strict=True):
                yield name.replace(self.parameter, pattern.replace("*", str(expert))), part


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """Checkpoint layout of a model type. Without fields: the module's own layout."""

    prefix: str = ""
    """Prefix of names, in place of 'model.', in checkpoints that store the model inside another model."""
    renames: tuple[tuple[str, str], ...] = ()
    """Renamed parts of names: (in the checkpoint, in the module)."""
    merges: tuple[Merge, ...] = ()

    def piece(self, stored_name: str) -> Piece:
        """Return the part of a parameter that a stored tensor fills."""
        if self.prefix and stored_name.startswith(self.prefix):
            stored_name = "model." + stored_name.removeprefix(self.prefix)
        for stored, own in self.renames:
            stored_name = stored_name.replace(stored, own)
        pieces = (merge.piece(stored_name) for merge in self.merges)
        return next(filter(None, pieces), Piece(name=stored_name))

    def stored(self, name: str, value: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the checkpoint tensors of a whole parameter, as views of `value`."""
        merge = next((merge for merge in self.merges if merge.parameter in name), None)
        for stored_name, part in [(name, value)] if merge is None else merge.split(name, value):
            for stored, own in reversed(self.renames):
                stored_name = stored_name.replace(own, stored)
            yield stored_name, part


def read_conversion(folder: Path) -> Conversion:
    """Return the conversion of the model in `folder`, or of its text part if only that trains. Raises ConfigError."""
    return conversion_of(text_part(config_json_in(folder)).get("model_type"))


@cache
def conversion_of(model_type: str | None) -> Conversion:
    """Return the conversion of a model type. Raises ConfigError for a layout that cannot be read row by row."""
    prefix, renames, merges = "", [], []
    for entry in (get_checkpoint_conversion_mapping(model_type) if model_type else None) or []:
        if isinstance(entry, WeightConverter) and _is_merge(entry):
            [parameter] = entry.target_patterns
            merges.append(Merge(parameter=parameter, stored=tuple(entry.source_patterns)))
        elif isinstance(entry, PrefixChange) and entry.prefix_to_remove and entry.model_prefix == "model":
            prefix = f"model.{entry.prefix_to_remove}."
        elif type(entry) is WeightRenaming and _is_rename(entry):
            renames.append((entry.source_patterns[0], entry.target_patterns[0]))
        else:
            raise ConfigError(f"model type {model_type!r}: its checkpoints store tensors in a layout that is not known")
    return Conversion(prefix=prefix, renames=tuple(renames), merges=tuple(merges))


def _is_merge(entry: WeightConverter) -> bool:
    operations = [(type(operation), getattr(operation, "dim", None)) for operation in entry.operations]
    return operations in _MERGES and all(
        pattern.count("*") == 1 and _is_plain(pattern.replace("*", "")) for pattern in entry.source_patterns
    )


def _is_rename(entry: WeightRenaming) -> bool:
    patterns = [*entry.source_patterns, *entry.target_patterns]
    return len(patterns) == 2 and all(map(_is_plain, patterns))


def _is_plain(pattern: str) -> bool:
    return _SPECIAL.isdisjoint(pattern)
