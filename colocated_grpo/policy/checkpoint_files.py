"""Download a Hugging Face checkpoint and read single tensors, or rows of them, from its files.

Tensors of a checkpoint may differ from the module's parameters: other names, and experts stored one by one. The table
of conversions is transformers' `conversion_mapping`. The loader of transformers reads whole checkpoints;
`CheckpointReader` reads rows.

Shapes: E experts, R rows and C columns of one expert's matrix.
"""

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HTTPError  # from httpx or httpx2, depending on the version
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import Concatenate, MergeModulelist, PrefixChange, WeightConverter, WeightRenaming

from colocated_grpo.errors import ConfigError, RunError, in_one_line
from colocated_grpo.runtime.checksums import CHECKSUMS_FILE, exported_damage
from colocated_grpo.runtime.distributed import World
from colocated_grpo.runtime.text_part import UNWANTED_FILES, OwnName, own_names, weight_files
from colocated_grpo.settings.config_json import config_json_in, text_part
from colocated_grpo.settings.generation import ModelConfig

_MERGES = ([(MergeModulelist, 0)], [(MergeModulelist, 0), (Concatenate, 1)])
"""Supported operations and their dimensions: each expert's matrices are joined by rows, then experts are stacked."""
_SPECIAL = frozenset("\\^$*+?{}[]()|")
"""Special characters of regular expressions, which no tensor name contains. A dot matches the dot of a name."""


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
        pattern.count("*") == 1 and _SPECIAL.isdisjoint(pattern.replace("*", "")) for pattern in entry.source_patterns
    )


def _is_rename(entry: WeightRenaming) -> bool:
    patterns = [*entry.source_patterns, *entry.target_patterns]
    return len(patterns) == 2 and all(map(_SPECIAL.isdisjoint, patterns))


SMALL_FILES = ["*.json", "*.jinja", "*.txt", "*.model", "*.py"]
"""Patterns of all files except the weights."""
WANTED_FILES = [*SMALL_FILES, "*.safetensors"]

ReadRows = Callable[[slice], Tensor]
"""Takes a slice of rows; returns a view of the memory-mapped file, in the stored dtype."""


def fetch_model(config: ModelConfig, world: World, key: str = "model.name") -> Path:
    """Return the model's folder. A Hub name is downloaded once per node, into the Hub cache. Collective.

    key: the setting that names the model. Raises ConfigError for a damaged export, and RunError if a download fails.
    """
    if Path(config.name).is_dir():
        folder = Path(config.name).absolute()  # a reward function may change the working directory of the process
        world.from_main(lambda: check_export(f"{key}={config.name!r}", folder))
        return folder

    if os.environ["LOCAL_RANK"] == "0":
        download_model(config, key)
    world.barrier()
    return download_model(config, key)


def fetch_tokenizer(config: ModelConfig) -> Path:
    """Return a folder with the model's tokenizer and config. For a Hub model, only small files are downloaded."""
    if Path(config.name).is_dir():
        return Path(config.name).absolute()  # the same path as `fetch_model` returns
    return _download(config, "model.name", SMALL_FILES)


def download_model(config: ModelConfig, key: str) -> Path:
    """Return the folder of a Hub model, downloaded unless it is in the cache. Raises RunError."""
    folder = _download(config, key, WANTED_FILES)
    return folder if any(folder.glob("*.safetensors")) else _download(config, key, ["pytorch_model*.bin"])


def _download(config: ModelConfig, key: str, wanted: list[str]) -> Path:
    """Download the matching files into the Hub cache and return the model's folder there. Raises RunError."""
    try:
        patterns = {"allow_patterns": wanted, "ignore_patterns": UNWANTED_FILES}
        return Path(snapshot_download(config.name, revision=config.revision, **patterns))
    except (HTTPError, OSError, RuntimeError) as error:  # broken connections in httpx, sockets and hf_xet
        advice = "check network, disk and HF_TOKEN, and start again: files that are complete are kept"
        problem = f"cannot be downloaded: {in_one_line(error)}"
        raise RunError(f"{key}={config.name!r}: {problem}; {advice}") from error


def check_export(setting: str, folder: Path) -> None:
    """Raise ConfigError if a folder with checksums, such as a run's export, is damaged. Other folders pass."""
    if (problem := exported_damage(folder)) is not None:
        raise ConfigError(
            f"{setting}: {problem}; export it again, or delete {CHECKSUMS_FILE} there if you made the change"
        )


class CheckpointReader:
    """Tensors of a checkpoint by the names of the module's parameters. `read_into` reads only the requested rows.

    Tensors outside the trained text part are left out. Experts stored one by one are read as one tensor, a row each.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._stored: dict[str, ReadRows] = {}
        self._experts: dict[str, list[list[ReadRows]]] = {}
        """For experts that are stored one by one: the matrices of each expert, which are joined by rows."""
        self.shapes: dict[str, torch.Size] = {}
        """Shape of each tensor, by parameter name."""
        for file in weight_files(folder) or sorted(folder.glob("pytorch_model*.bin")):
            try:
                self._add_safetensors(file) if file.suffix == ".safetensors" else self._add_torch(file)
            except (OSError, EOFError, RuntimeError, SafetensorError, UnpicklingError) as error:
                problem = f"cannot read {file.name} ({in_one_line(error)})"
                raise ConfigError(f"model.name={str(folder)!r}: {problem}; download it again") from error
        if not self._stored:
            raise ConfigError(f"model.name={str(folder)!r}: the folder has no *.safetensors or pytorch_model*.bin")
        self._convert(own_names(folder), read_conversion(folder))

    def _convert(self, own_name: OwnName, conversion: Conversion) -> None:
        """Replace stored names by the parameters' names, and leave out the tensors of untrained parts."""
        stored, shapes = self._stored, self.shapes
        self._stored, self.shapes = {}, {}
        experts: dict[str, dict[int, dict[int, str]]] = {}
        for name in stored:
            if (own := own_name(name)) is None:
                continue
            piece = conversion.piece(own)
            if piece.expert is None:
                self._stored[piece.name], self.shapes[piece.name] = stored[name], shapes[name]
            else:
                experts.setdefault(piece.name, {}).setdefault(piece.expert, {})[piece.part] = name
        for name, matrices in experts.items():
            table = [[parts[part] for part in sorted(parts)] for _, parts in sorted(matrices.items())]
            first = [shapes[part] for part in table[0]]
            if any([shapes[part] for part in parts] != first for parts in table):
                raise ConfigError(f"model.name={str(self.folder)!r}: the checkpoint lacks matrices of {name!r}")
            self.shapes[name] = torch.Size([len(table), sum(shape[0] for shape in first), *first[0][1:]])
            self._experts[name] = [[stored[part] for part in parts] for parts in table]

    def _add_safetensors(self, file: Path) -> None:
        handle = safe_open(file, framework="pt")
        for name in handle.keys():  # noqa: SIM118 (a safetensors handle is not a dict)
            self._stored[name] = lambda rows, name=name: _rows(handle.get_slice(name), rows)
            self.shapes[name] = torch.Size(handle.get_slice(name).get_shape())

    def _add_torch(self, file: Path) -> None:
        for name, tensor in torch.load(file, map_location="cpu", mmap=True, weights_only=True).items():
            self._stored[name] = lambda rows, tensor=tensor: tensor[rows]
            self.shapes[name] = tensor.shape

    def read_into(self, target: Tensor, name: str, first: int) -> None:
        """Fill `target` with the rows of `name` that start at `first`, with the dtype and device of `target`."""
        rows = slice(first, first + len(target))
        if name not in self._experts:
            _copy(target, self._stored[name](rows))
            return
        # Copy each matrix directly into its rows: concatenating in host memory would spend the time on page faults.
        for joined, matrices in zip(target, self._experts[name][rows], strict=True):
            begin = 0
            for read in matrices:
                matrix = read(slice(None))
                _copy(joined[begin : begin + len(matrix)], matrix)
                begin += len(matrix)


def _copy(target: Tensor, source: Tensor) -> None:
    """Copy, casting on the side where fewer bytes move. `copy_` alone casts on the host, even to a larger dtype."""
    target.copy_(source.to(target.device) if source.itemsize < target.itemsize else source)


def _rows(tensor_slice: Any, rows: slice) -> Tensor:
    """Return rows of a PySafeSlice (a type that safetensors does not export); a scalar is returned whole."""
    return tensor_slice[rows] if tensor_slice.get_shape() else tensor_slice[...]
