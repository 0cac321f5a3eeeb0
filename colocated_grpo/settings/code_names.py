"""Checks names of user code, 'module:object' and 'path/to/file.py:object', without importing it, and of programs.

Names are looked up in the parsed source. Importing user code can take seconds, because of the libraries it imports; a
misspelled name is reported before that.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import warnings
from collections.abc import Iterator
from difflib import get_close_matches
from importlib.machinery import ModuleSpec, PathFinder
from itertools import accumulate
from pathlib import Path
from symtable import SymbolTable, symtable

ADAPTED = ("gymnasium", "openenv", "reasoning_gym", "textarena", "verifiers")
"""Libraries whose environments are named 'library:environment'."""
_DYNAMIC = re.compile(
    rb"import[\s\\]*\*|__getattr__|__dict__|__path__|sys\.modules"
    rb"|\b(globals|locals|vars|exec|setattr|declare_namespace)\b"
)
"""Matches files that may create names or submodules at run time. Names in such files are not checked."""
EXTRAS = ("trl",)
"""Optional packages with functions that configs name."""


def check_code_name(key: str, name: str) -> Iterator[str]:
    """Yield one error line for `key` where `name` refers to no object. Names without a colon are not checked."""
    if name.partition(":")[0] in ADAPTED:
        return  # the library resolves the rest, such as a URL; the rank reports a missing package
    location, colon, wanted = name.rpartition(":")
    if not colon:
        return
    if location == "__main__":
        yield f"{key}={name!r}: an object of the program that began the run; continue it with that program"
        return
    if location.endswith(".py"):
        file = Path(location).expanduser()
        problem = None if file.is_file() else "no such file"
    else:
        file, missing = _find_module(location)
        problem = None if missing is None else f"no module named {missing!r} in the working folder or installed"
        if missing in EXTRAS:
            problem = f"{problem}; install it with: pip install 'colocated-grpo[{missing}]'"
    if problem is None and file is not None:
        problem = _problem_in(file, Path(location).name, wanted)
    if problem is not None:
        yield f"{key}={name!r}: {problem}"


def check_program(key: str, name: str) -> Iterator[str]:
    """Yield one error line for `key` where `name` is no Python file, executable or name of a function."""
    if ":" in name:
        yield from check_code_name(key, name)
    elif name.endswith(".py"):
        if not Path(name).is_file():
            yield f"{key}={name!r}: no such file"
    elif shutil.which(name) is None and not (Path(name).is_file() and os.access(name, os.X_OK)):
        yield f"{key}={name!r}: neither an executable file nor a command in PATH"


def _find_module(name: str) -> tuple[Path | None, str | None]:
    """Return (source file, None), (None, None) for a module without one, or (None, name of the missing module)."""
    folders = [os.getcwd(), *sys.path]
    for dotted in accumulate(name.split("."), "{}.{}".format):
        spec = _find_spec(dotted, folders)
        if spec is None:
            return None, dotted
        submodule_folders = _submodule_folders(spec)
        if submodule_folders is None:
            break
        folders = submodule_folders
    return (_source_file(spec) if dotted == name else None), None


def _find_spec(name: str, folders: list[str]) -> ModuleSpec | None:
    """Return the first spec that any finder returns, as in an import. Editable installs add finders."""
    last = name.rpartition(".")[2]
    if not last:
        return None
    # Given the full name, PathFinder would need the parent package to be imported.
    names = ((finder, last if finder is PathFinder else name) for finder in sys.meta_path)
    return next(filter(None, (finder.find_spec(wanted, folders) for finder, wanted in names)), None)


def _source_file(spec: ModuleSpec) -> Path | None:
    """Return the module's source file; None where it is compiled or inside an archive."""
    file = Path(spec.origin) if spec.has_location and spec.origin is not None else None
    return file if file is not None and file.suffix == ".py" and file.is_file() else None


def _submodule_folders(spec: ModuleSpec) -> list[str] | None:
    """Return the folders of a package whose submodules are exactly the files in them; None for any other module.

    An example of None is `os`, which is not a package but provides `os.path`.
    """
    if spec.submodule_search_locations is None:
        return None
    file = _source_file(spec)
    plain = not spec.has_location or (file is not None and not _DYNAMIC.search(file.read_bytes()))
    return list(spec.submodule_search_locations) if plain else None


def _problem_in(file: Path, title: str, wanted: str) -> str | None:
    """Return why `wanted` cannot be used, or None if `file` may define it. Messages refer to the file as `title`."""
    try:
        source = file.read_bytes()
        # Bytes, so that the file's encoding declaration applies; typeshed accepts only str.
        with warnings.catch_warnings(action="ignore"):  # the ranks show the warnings on import
            scope = symtable(source, title, "exec")  # pyrefly: ignore[bad-argument-type]
    except (OSError, SyntaxError, ValueError) as error:
        return f"cannot be imported: {type(error).__name__}: {error}"
    names = set(_bound_by(scope))
    if wanted in names or _DYNAMIC.search(source):
        return None
    near = get_close_matches(wanted, names, n=1)
    own = [symbol.get_name() for symbol in scope.get_symbols() if symbol.is_assigned()]
    hint = f"did you mean {near[0]!r}?" if near else f"it defines: {', '.join(own) or 'nothing'}"
    return f"{title} defines no {wanted!r}; {hint}"


def _bound_by(scope: SymbolTable) -> Iterator[str]:
    """Yield the names that a module may define: at its top level, and those that functions declare global."""
    for symbol in scope.get_symbols():
        bound = symbol.is_assigned() or symbol.is_imported()
        if bound and (scope.get_type() == "module" or symbol.is_declared_global()):
            yield symbol.get_name()
    for inner in scope.get_children():
        yield from _bound_by(inner)
