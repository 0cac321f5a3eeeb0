"""A checkpoint's tensor files: torch's writer with a checksum for every file, and the tensor layout as JSON.

Reading the layout runs no code, even from an untrusted source. torch stores the same data in `.metadata`, a pickle,
which is written for torch's own tools and never read.
"""

import json
import os
from collections.abc import Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from io import IOBase
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystem, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.futures import Future
from xxhash import xxh3_128

from colocated_grpo.runtime.checksums import checksum
from colocated_grpo.types import JsonObject

METADATA_FILE = ".metadata"
LAYOUT_FILE = "tensors.json"
SMALL = 1 << 16
"""Bytes below which computing a checksum is faster than passing the bytes to another thread."""

Layout = JsonObject
"""Tensor name -> {dtype, size, chunks}; a chunk has offsets and sizes in the tensor, and file, start, length."""


def layout_of(metadata: Metadata, places: Mapping[MetadataIndex, _StorageInfo]) -> Layout:
    """Return the layout of a checkpoint written by torch. All entries must be tensors. places: location of each
    chunk."""
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
    """Convert a layout to torch's metadata. Raises ValueError, KeyError or TypeError if it is invalid for `folder`."""
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
        # Tensors only, because torch unpickles entries of other kinds on loading.
        entries[name] = TensorStorageMetadata(TensorProperties(dtype), torch.Size(entry["size"]), chunks)
    return Metadata(entries, storage_data=places)


def _place(stored: JsonObject, folder: Path) -> _StorageInfo:
    file, start, length = stored["file"], stored["start"], stored["length"]
    if Path(file).name != file:
        raise ValueError(f"{file!r} is not a file of the checkpoint")
    if not 0 <= start <= start + length <= (folder / file).stat().st_size:
        raise ValueError(f"{file} is truncated")
    return _StorageInfo(file, start, length)


class LayoutReader(dcp.FileSystemReader):
    """Reads tensors at given file locations. torch uses `torch.load(weights_only=True)`, which runs no code."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self._metadata = metadata

    def read_metadata(self, *_arguments: object, **_options: object) -> Metadata:
        return self._metadata


class ChecksummedWriter(dcp.FileSystemWriter):
    """Writes one rank's files. After the save, `checksums` on rank 0 contains all ranks' files."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._files = _ChecksummedFiles()
        self.fs = self._files
        self.folder = folder
        self.checksums: dict[str, str] = {}

    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> Future[Any]:
        """Return torch's results together with this rank's checksums. torch passes all of them to `finish`."""
        written = super().write_data(plan, planner).wait()
        result = Future()
        result.set_result((written, self._files.checksums))
        return result

    def finish(self, metadata: Metadata, results: list[Any]) -> None:
        """Write the metadata of all ranks' files. Called on rank 0."""
        super().finish(metadata, [written for written, _ in results])
        for _, checksums in results:
            self.checksums |= checksums
        # `metadata.storage_data` is not usable, because torch 2.11 sets it only in a copy.
        places = {item.index: item.storage_data for written, _ in results for item in written}
        write_durably(self.folder / LAYOUT_FILE, json.dumps(layout_of(metadata, places)))
        for name in (METADATA_FILE, LAYOUT_FILE):
            self.checksums[name] = checksum(self.folder / name)


class _ChecksummedFiles(FileSystem):
    """Files whose checksums are computed from memory, so that a faulty disk cannot affect the checksums."""

    def __init__(self) -> None:
        self.checksums: dict[str, str] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[IOBase]:
        with super().create_stream(path, mode) as stream:
            if mode != "wb" or Path(path).suffix != ".distcp":
                yield stream
                return
            with ThreadPoolExecutor(1) as thread:
                checksummed = _ChecksummedStream(stream, thread)
                try:
                    yield checksummed
                except RuntimeError as error:  # raised by torch.save, which only reports that the file is too short
                    raise checksummed.failure or error from error
            self.checksums[Path(path).name] = checksummed.digest.hexdigest()


class _ChecksummedStream(IOBase):
    """A file that is written sequentially."""

    def __init__(self, stream: Any, thread: ThreadPoolExecutor) -> None:
        self._stream: BinaryIO = stream
        self._thread = thread
        self.digest = xxh3_128()
        self.failure: OSError | None = None
        """Error of the first failed write, such as a write to a full disk."""

    def write(self, data: bytes | memoryview) -> int:
        if len(data) < SMALL:
            self.digest.update(data)
            return self._write(data)
        # Digest and write in parallel, and finish both before returning: the memory is valid only during this call.
        digested = self._thread.submit(self.digest.update, data)
        written = self._write(data)
        digested.result()
        return written

    def _write(self, data: bytes | memoryview) -> int:
        try:
            return self._stream.write(data)
        except OSError as error:
            self.failure = self.failure or error
            raise

    def tell(self) -> int:
        return self._stream.tell()

    def flush(self) -> None:
        if not self._stream.closed:
            self._stream.flush()

    def fileno(self) -> int:
        return self._stream.fileno()

    def close(self) -> None:
        self._stream.close()


def write_durably(file: Path, text: str) -> None:
    """Write and fsync a file, so that it is not empty after a power failure."""
    with file.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
