"""Where the tensors of a checkpoint lie in its files, as JSON. Reading it runs no code, whoever wrote it.

torch keeps the same facts in `.metadata`, a pickle. Checkpoints have it for torch's own tools; it is read only where
there is nothing else (former.py), and never by unpickling the objects that it names.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

LAYOUT_FILE = "tensors.json"

Layout = dict[str, Any]
"""Tensor name -> {dtype, size, chunks}; a chunk has offsets and sizes in the tensor, and file, start, length."""


def layout_of(metadata: Metadata, places: Mapping[MetadataIndex, _StorageInfo]) -> Layout:
    """Return the layout of a checkpoint that torch has written. All its entries are tensors. places: of the chunks."""
    layout = {}
    for name, entry in metadata.state_dict_metadata.items():
        assert isinstance(entry, TensorStorageMetadata)
        stored = [places[MetadataIndex(name, chunk.offsets)] for chunk in entry.chunks]
        layout[name] = {
            "dtype": str(entry.properties.dtype).removeprefix("torch."),
            "size": list(entry.size),
            "chunks": [
                {
                    "offsets": list(chunk.offsets),
                    "sizes": list(chunk.sizes),
                    "file": place.relative_path,
                    "start": place.offset,
                    "length": place.length,
                }
                for chunk, place in zip(entry.chunks, stored, strict=True)
            ],
        }
    return layout


def metadata_of(layout: Layout, folder: Path) -> Metadata:
    """Return torch's form of a layout. Raises ValueError, KeyError or TypeError where it is not one of this folder."""
    entries, places = {}, {}
    for name, entry in layout.items():
        dtype = getattr(torch, entry["dtype"])
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"{entry['dtype']!r} is not a dtype")
        chunks = []
        for stored in entry["chunks"]:
            chunk = ChunkStorageMetadata(torch.Size(stored["offsets"]), torch.Size(stored["sizes"]))
            chunks.append(chunk)
            places[MetadataIndex(name, chunk.offsets)] = _place(stored, folder)
        # Tensors only: torch unpickles entries of other kinds when it loads them.
        entries[name] = TensorStorageMetadata(TensorProperties(dtype), torch.Size(entry["size"]), chunks)
    return Metadata(entries, storage_data=places)


def _place(stored: dict[str, Any], folder: Path) -> _StorageInfo:
    file, start, length = stored["file"], stored["start"], stored["length"]
    if Path(file).name != file:
        raise ValueError(f"{file!r} is not a file of the checkpoint")
    if not 0 <= start <= start + length <= (folder / file).stat().st_size:
        raise ValueError(f"{file} is truncated")
    return _StorageInfo(file, start, length)


class LayoutReader(dcp.FileSystemReader):
    """Reads tensors at known places. torch reads each with `torch.load(weights_only=True)`, which runs no code."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self._metadata = metadata

    def read_metadata(self, *_arguments: Any, **_options: Any) -> Metadata:
        return self._metadata
