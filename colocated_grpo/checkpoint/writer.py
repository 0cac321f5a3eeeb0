"""torch's checkpoint writer, with a checksum of every file and a layout that can be read without unpickling."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from io import IOBase
from pathlib import Path
from typing import Any, BinaryIO

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata
from torch.futures import Future
from xxhash import xxh3_128

from colocated_grpo.checkpoint.former import METADATA_FILE
from colocated_grpo.checkpoint.layout import LAYOUT_FILE, layout_of
from colocated_grpo.runtime.checksums import checksum

SMALL = 1 << 16
"""Bytes below which a checksum takes less time than passing the bytes to another thread."""


class ChecksummedWriter(dcp.FileSystemWriter):
    """Writes one rank's files. `checksums` of all ranks' files are complete on rank 0 once the save is."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._files = _ChecksummedFiles()
        self.fs = self._files
        self.folder = folder
        self.checksums: dict[str, str] = {}

    def write_data(self, plan: Any, planner: Any) -> Future[Any]:
        """The result has this rank's checksums beside torch's own results; torch passes it on to `finish`."""
        written = super().write_data(plan, planner).wait()
        result: Future[Any] = Future()
        result.set_result((written, self._files.checksums))
        return result

    def finish(self, metadata: Metadata, results: list[Any]) -> None:
        """On rank 0: write the metadata of all ranks' files."""
        super().finish(metadata, [written for written, _ in results])
        for _, checksums in results:
            self.checksums |= checksums
        # Not `metadata.storage_data`: torch 2.11 sets it in a copy.
        places = {item.index: item.storage_data for written, _ in results for item in written}
        write_durably(self.folder / LAYOUT_FILE, json.dumps(layout_of(metadata, places)))
        for name in (METADATA_FILE, LAYOUT_FILE):
            self.checksums[name] = checksum(self.folder / name)


class _ChecksummedFiles(FileSystem):
    """Files whose checksums are computed from the bytes in memory, so that a faulty disk does not change them too."""

    def __init__(self) -> None:
        self.checksums: dict[str, str] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[IOBase]:
        with super().create_stream(path, mode) as stream:
            if mode != "wb" or Path(path).suffix != ".distcp":
                yield stream
                return
            with ThreadPoolExecutor(1) as thread:
                checksummed = _ChecksummedStream(stream, thread)
                try:
                    yield checksummed
                except RuntimeError as error:  # of torch.save, which only says that the file is too short
                    raise checksummed.failure or error from error
            self.checksums[Path(path).name] = checksummed.digest.hexdigest()


class _ChecksummedStream(IOBase):
    """A file that is written from the beginning to the end."""

    def __init__(self, stream: Any, thread: ThreadPoolExecutor) -> None:
        self._stream: BinaryIO = stream
        self._thread = thread
        self.digest = xxh3_128()
        self.failure: OSError | None = None
        """The first failed write, such as one to a full disk."""

    def write(self, data: Any) -> int:
        if len(data) < SMALL:
            self.digest.update(data)
            return self._write(data)
        # At the same time, and both before returning: the memory is valid for this call only.
        digested = self._thread.submit(self.digest.update, data)
        written = self._write(data)
        digested.result()
        return written

    def _write(self, data: Any) -> int:
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
    """Write and fsync, so that after a power failure the file is not empty."""
    with file.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
