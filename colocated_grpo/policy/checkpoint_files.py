"""Download a Hugging Face checkpoint and read single tensors, or rows of them, from its files."""

import os
from collections.abc import Callable
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HTTPError  # from httpx or httpx2, depending on the version
from safetensors import SafetensorError, safe_open
from torch import Tensor

from colocated_grpo.errors import RunError, in_one_line
from colocated_grpo.policy.conversion import Conversion, read_conversion
from colocated_grpo.runtime.checksums import CHECKSUMS_FILE, exported_damage
from colocated_grpo.runtime.distributed import World
from colocated_grpo.runtime.text_part import UNWANTED_FILES, OwnName, own_names, weight_files
from colocated_grpo.settings.errors import ConfigError
from colocated_grpo.settings.generation import ModelConfig

SMALL_FILES = ["*.json", "*.jinja", "*.txt", "*.model", "*.py"]
"""Patterns of all files except the weights."""
WANTED_FILES = [*SMALL_FILES, "*.safetensors"]

Rows = Callable[[slice], Tensor]
"""Takes a slice of rows; returns a view of the memory-mapped file, in the stored dtype."""


def fetch_model(config: ModelConfig, world: World, key: str = "model.name") -> Path:
    """Return the model's folder. A Hub name is downloaded once per node, into the Hub cache. Collective.

    key: the setting that names the model. Raises ConfigError if the folder is a damaged export of a run, and RunError
    if a download fails.
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
        return Path(
            snapshot_download(
                config.name, revision=config.revision, allow_patterns=wanted, ignore_patterns=UNWANTED_FILES
            )
        )
    except (HTTPError, OSError, RuntimeError) as error:  # broken connections in httpx, sockets and hf_xet
        raise RunError(
            f"{key}={config.name!r}: cannot be downloaded: {in_one_line(error)}; check network, disk and "
            "HF_TOKEN, and start again: files that are complete are kept"
        ) from error


def check_export(setting: str, folder: Path) -> None:
    """Raise ConfigError if a folder with checksums, such as a run's export, is damaged. Other folders pass."""
    problem = exported_damage(folder)
    if problem is not None:
        raise ConfigError(
            f"{setting}: {problem}; export it again, or delete {CHECKSUMS_FILE} there if you made the change"
        )


class CheckpointReader:
    """Tensors of a checkpoint by the names of the module's parameters. `read_into` reads only the requested rows.

    Tensors outside the trained text part are left out. Experts that are stored one by one are read as one tensor with
    one row per expert.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._stored: dict[str, Rows] = {}
        self._experts: dict[str, list[list[Rows]]] = {}
        """For experts that are stored one by one: the matrices of each expert, which are joined by rows."""
        self.shapes: dict[str, torch.Size] = {}
        """Shape of each tensor, by parameter name."""
        files = weight_files(folder)
        for file in files:
            self._add(file, self._add_safetensors)
        if not files:
            for file in sorted(folder.glob("pytorch_model*.bin")):
                self._add(file, self._add_torch)
        if not self._stored:
            raise ConfigError(f"model.name={str(folder)!r}: the folder has no *.safetensors or pytorch_model*.bin")
        self._keep(own_names(folder))
        self._convert(read_conversion(folder))

    def _keep(self, own_name: OwnName) -> None:
        own = {name: new for name in self._stored if (new := own_name(name)) is not None}
        self._stored = {new: self._stored[name] for name, new in own.items()}
        self.shapes = {new: self.shapes[name] for name, new in own.items()}

    def _convert(self, conversion: Conversion) -> None:
        stored, shapes = self._stored, self.shapes
        self._stored, self.shapes = {}, {}
        experts: dict[str, dict[int, dict[int, str]]] = {}
        for name in stored:
            piece = conversion.piece(name)
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

    def _add(self, file: Path, add: Callable[[Path], None]) -> None:
        try:
            add(file)
        except (OSError, EOFError, RuntimeError, SafetensorError, UnpicklingError) as error:
            raise ConfigError(
                f"model.name={str(self.folder)!r}: cannot read {file.name} ({in_one_line(error)}); download it again"
            ) from error

    def _add_safetensors(self, file: Path) -> None:
        handle = safe_open(file, framework="pt")
        for name in handle.keys():  # noqa: SIM118 (a safetensors handle is not a dict)
            self._stored[name] = lambda rows, name=name: _rows(handle.get_slice(name), rows)
            self.shapes[name] = torch.Size(handle.get_slice(name).get_shape())

    def _add_torch(self, file: Path) -> None:
        for name, tensor in torch.load(file, map_location="cpu", mmap=True, weights_only=True).items():
            self._stored[name] = lambda rows, tensor=tensor: tensor[rows]
            self.shapes[name] = tensor.shape

    def names(self) -> set[str]:
        return set(self.shapes)

    def read_into(self, target: Tensor, name: str, first: int) -> None:
        """Fill `target` with the rows of `name` that start at `first`, with the dtype and device of `target`."""
        rows = slice(first, first + len(target))
        if name not in self._experts:
            _copy(target, self._stored[name](rows))
            return
        # Copy each matrix directly into its rows: concatenating in host memory first would spend most of the time on
        # page faults.
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
