"""Checkpoints on disk: tensor files, their layout and checksums, and the search for the newest undamaged checkpoint.

torch's writer gets a checksum for every file, and the tensor layout is JSON. Reading the layout runs no code, even
from an untrusted source. torch stores the same data in `.metadata`, a pickle, which is written for torch's own tools
and never read.
"""

import errno
import json
import os
import shutil
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from io import IOBase
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystem, _StorageInfo
from torch.futures import Future
from xxhash import xxh3_128

from colocated_grpo.errors import RunError, in_one_line
from colocated_grpo.runtime.checksums import checksum, damage
from colocated_grpo.runtime.run_folder import FILES, FORMAT, STATE_FILE, read_record, saved_checkpoints
from colocated_grpo.types import JsonObject

METADATA_FILE = ".metadata"
LAYOUT_FILE = "tensors.json"
SMALL = 1 << 16
"""Bytes below which computing a checksum is faster than passing the bytes to another thread."""

Layout = JsonObject
"""Tensor name -> {dtype, size, chunks}; a chunk has offsets and sizes in the tensor, and file, start, length."""


def layout_of(metadata: dcp.metadata.Metadata, places: Mapping[dcp.metadata.MetadataIndex, _StorageInfo]) -> Layout:
    """Return the layout of a checkpoint written by torch. All entries must be tensors. places: chunks' locations."""
    layout = {}
    for name, entry in metadata.state_dict_metadata.items():
        assert isinstance(entry, dcp.metadata.TensorStorageMetadata)
        stored = [places[dcp.metadata.MetadataIndex(name, chunk.offsets)] for chunk in entry.chunks]
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


def metadata_of(layout: Layout, folder: Path) -> dcp.metadata.Metadata:
    """Convert a layout to torch's metadata. Raises ValueError, KeyError or TypeError if it is invalid for `folder`."""
    entries, places = {}, {}
    for name, entry in layout.items():
        dtype = getattr(torch, entry["dtype"])
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"{entry['dtype']!r} is not a dtype")
        chunks = []
        for stored in entry["chunks"]:
            chunk = dcp.metadata.ChunkStorageMetadata(torch.Size(stored["offsets"]), torch.Size(stored["sizes"]))
            chunks.append(chunk)
            places[dcp.metadata.MetadataIndex(name, chunk.offsets)] = _place(stored, folder)
        # Tensors only, because torch unpickles entries of other kinds on loading.
        entries[name] = dcp.metadata.TensorStorageMetadata(
            dcp.metadata.TensorProperties(dtype), torch.Size(entry["size"]), chunks
        )
    return dcp.metadata.Metadata(entries, storage_data=places)


def _place(stored: JsonObject, folder: Path) -> _StorageInfo:
    file, start, length = stored["file"], stored["start"], stored["length"]
    if Path(file).name != file:
        raise ValueError(f"{file!r} is not a file of the checkpoint")
    if not 0 <= start <= start + length <= (folder / file).stat().st_size:
        raise ValueError(f"{file} is truncated")
    return _StorageInfo(file, start, length)


class LayoutReader(dcp.FileSystemReader):
    """Reads tensors at given file locations. torch uses `torch.load(weights_only=True)`, which runs no code."""

    def __init__(self, folder: Path, metadata: dcp.metadata.Metadata) -> None:
        super().__init__(folder)
        self._metadata = metadata

    def read_metadata(self, *_arguments: object, **_options: object) -> dcp.metadata.Metadata:
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

    def finish(self, metadata: dcp.metadata.Metadata, results: list[Any]) -> None:
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
                    yield cast(IOBase, checksummed)
                except RuntimeError as error:  # raised by torch.save, which only reports that the file is too short
                    raise checksummed.failure or error from error
            self.checksums[Path(path).name] = checksummed.digest.hexdigest()


class _ChecksummedStream:
    """A file that is written sequentially. Other methods are the file's own."""

    def __init__(self, stream: IOBase, thread: ThreadPoolExecutor) -> None:
        self._stream: Any = stream
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

    def flush(self) -> None:
        if not self._stream.closed:  # else freeing torch's wrapper after an error prints another in Python 3.13
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def write_durably(file: Path, text: str) -> None:
    """Write and fsync a file, so that it is not empty after a power failure."""
    with file.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


SET_ASIDE = ".damaged"
READ_ERRORS = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EIO}
"""Errors caused by damage. Other errors, such as a lost network share, may be temporary and end the resume."""


@dataclass(frozen=True, kw_only=True)
class SavedCheckpoint:
    """A checkpoint whose files match their checksums."""

    folder: Path
    step: int
    policy_version: int
    world_size: int
    state: JsonObject
    layout: Layout


class DamagedCheckpoint(Exception):
    """A checkpoint is damaged. The message describes the damage."""


def newest_whole(folder: Path, note: Callable[[str], None]) -> SavedCheckpoint | None:
    """Return the newest intact checkpoint in `folder`; None if there is no checkpoint at all.

    Damaged checkpoints that are newer are renamed, so that no run resumes from them and checkpoint.keep_last does not
    count them. If all checkpoints are damaged, raises RunError and renames nothing.
    """
    damaged: dict[Path, str] = {}
    for checkpoint in reversed(saved_checkpoints(folder)):
        try:
            found = read_whole(checkpoint)
        except DamagedCheckpoint as error:
            damaged[checkpoint] = str(error)
            continue
        if damaged:
            names = ", ".join(path.name for path in damaged)
            note(f"resuming from {checkpoint.name}: damaged and renamed to *.damaged: {names} ({_first(damaged)})")
            for path in damaged:
                target = path.with_suffix(SET_ASIDE)
                shutil.rmtree(target, ignore_errors=True)
                path.rename(target)
        return found
    if damaged:
        problem = f"checkpoints {folder}: none of {len(damaged)} is whole ({_first(damaged)})"
        raise RunError(f"{problem}; put back a copy of one, or start a new run")
    return None


def read_whole(folder: Path) -> SavedCheckpoint:
    """Return a checkpoint without its tensors. Raises DamagedCheckpoint, and RunError for another version's format."""
    try:
        record = read_record(folder)
        if (version := record.get("format")) != FORMAT:
            other = f"has format {version}, but this version of colocated_grpo reads format {FORMAT}"
            advice = "resume with the version that wrote it, or start a new run"
            raise RunError(f"checkpoint {folder}: {other}; {advice}")
        if (problem := damage(folder, record[FILES])) is not None:
            raise DamagedCheckpoint(problem)
        layout = json.loads((folder / LAYOUT_FILE).read_text(encoding="utf-8"))
        metadata_of(layout, folder)
        saved = SavedCheckpoint(
            folder=folder,
            step=int(record["step"]),
            policy_version=int(record["policy_version"]),
            world_size=int(record["world_size"]),
            state=dict(record["state"]),
            layout=layout,
        )
        if folder.name != f"step_{saved.step:06d}" or saved.policy_version < 0:
            raise DamagedCheckpoint(f"{STATE_FILE} has step {saved.step} and policy_version {saved.policy_version}")
        return saved
    except (DamagedCheckpoint, RunError):
        raise
    except OSError as error:
        if error.errno not in READ_ERRORS:
            raise
        missing = error.errno == errno.ENOENT and error.filename is not None
        raise DamagedCheckpoint(f"{Path(error.filename).name} is missing" if missing else in_one_line(error)) from error
    except Exception as error:  # a damaged layout raises many kinds of errors
        raise DamagedCheckpoint(in_one_line(error)) from error


def _first(damaged: dict[Path, str]) -> str:
    path, problem = next(iter(damaged.items()))
    return f"{path.name}: {problem}"
