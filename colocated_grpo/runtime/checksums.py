"""Checksums of files. Checksums detect damage, not tampering: anyone with write access can change the checksum too."""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from xxhash import xxh3_128

CHECKSUMS_FILE = "checksums.json"
"""File in an exported folder with the checksums of its other files, by name."""
_READERS = 4
"""Number of files to read in parallel. One reader does not saturate a fast disk."""
_SEAL = re.compile(r', "checksum": "([0-9a-f]{32})"\}\n?\Z')


def checksum(file: Path) -> str:
    with file.open("rb", buffering=0) as stream:
        return hashlib.file_digest(stream, xxh3_128).hexdigest()


def checksums_of(files: Iterable[Path]) -> list[str]:
    with ThreadPoolExecutor(_READERS) as pool:
        return list(pool.map(checksum, files))


def damage(folder: Path, expected: Mapping[str, str]) -> str | None:
    """Describe the first file that is missing or differs from its checksum; return None if all files are intact.

    expected: checksums by file name. Other files of the folder are ignored.
    """
    for name in expected:
        if not (folder / name).is_file():
            return f"{name} is missing"
    found = checksums_of(folder / name for name in expected)
    differing = [name for name, now in zip(expected, found, strict=True) if now != expected[name]]
    return f"{differing[0]} differs from its checksum" if differing else None


def forget_cached(folder: Path, names: Iterable[str]) -> None:
    """Drop the files' pages from the page cache, so that the next read comes from the disk."""
    for name in names:
        descriptor = os.open(folder / name, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def write_checksums(folder: Path) -> None:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    names = [path.relative_to(folder).as_posix() for path in files]
    listed = dict(zip(names, checksums_of(files), strict=True))
    (folder / CHECKSUMS_FILE).write_text(json.dumps({"xxh3_128": listed}, indent=2) + "\n")


def exported_damage(folder: Path) -> str | None:
    """Describe the damage to an exported folder; return None if it is intact, or has no CHECKSUMS_FILE."""
    file = folder / CHECKSUMS_FILE
    if not file.is_file():
        return None
    try:
        listed = dict(json.loads(file.read_text())["xxh3_128"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return f"{CHECKSUMS_FILE} cannot be read"
    return damage(folder, listed)


def exported_digest(folder: Path) -> str | None:
    """Return one checksum of all files in an exported folder; None without a CHECKSUMS_FILE."""
    file = folder / CHECKSUMS_FILE
    return checksum(file) if file.is_file() else None


def sealed(text: str) -> str:
    """Return the JSON object `text` with the checksum of `text` added as the last entry."""
    return f'{text[:-1]}, "checksum": "{xxh3_128(text.encode()).hexdigest()}"}}'


def seal_is_broken(text: str) -> bool:
    """Return True unless `text` was returned by `sealed`."""
    found = _SEAL.search(text)
    return found is None or xxh3_128(f"{text[: found.start()]}}}".encode()).hexdigest() != found[1]
