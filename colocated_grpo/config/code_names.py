"""Names of the user's own code, 'module:object' and 'path/to/file.py:object': looked up in its text, not by running it.

The ranks import it, and what it imports takes them seconds; the launcher would take as long for each mistake.
"""

from __future__ import annotations

import os
import re
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
_UNSEEN = re.compile(
    rb"import[\s\\]*\*|__getattr__|__dict__|__path__|sys\.modules"
    rb"|\b(globals|locals|vars|exec|setattr|declare_namespace)\b"
)
"""Where one of these is in a file, only running it shows what it defines, or which modules are beneath it."""


def check_code_name(key: str, name: str) -> Iterator[str]:
    """One line where no object can be behind the name. A built-in or an installed one has no colon."""
    if name.partition(":")[0] in ADAPTED:
        return  # what stands behind the colon may have one too, as URLs do; and the rank names the package to install
    location, colon, wanted = name.rpartition(":")
    if not colon:
        return
    if location.endswith(".py"):
        file = Path(location).expanduser()
        problem = None if file.is_file() else "no such file"
    else:
        file, missing = _find_module(location)
        problem = None if missing is None else f"no module named {missing!r}, neither here nor installed"
    if problem is None and file is not None:
        problem = _problem_in(file, Path(location).name, wanted)
    if problem is not None:
        yield f"{key}={name!r}: {problem}"


def _find_module(name: str) -> tuple[Path | None, str | None]:
    """The module's file where it has one, and the first part of the dotted name that is nowhere."""
    folders = [os.getcwd(), *sys.path]
    for dotted in accumulate(name.split("."), "{}.{}".format):
        spec = _find_spec(dotted, folders)
        if spec is None:
            return None, dotted
        if not _is_plain_package(spec):
            break
        folders = list(spec.submodule_search_locations)
    return (_file_of(spec) if dotted == name else None), None


def _find_spec(name: str, folders: list[str]) -> ModuleSpec | None:
    """Asks every finder, as an import does: packages that are installed to be edited have one of their own."""
    last = name.rpartition(".")[2]
    if not last:
        return None
    # with the whole name, the finder of folders wants the package above it imported
    asked = ((finder, last if finder is PathFinder else name) for finder in sys.meta_path)
    return next(filter(None, (finder.find_spec(wanted, folders) for finder, wanted in asked)), None)


def _file_of(spec: ModuleSpec) -> Path | None:
    """Its text; None where it is compiled, or inside an archive."""
    file = Path(spec.origin) if spec.has_location else None
    return file if file is not None and file.suffix == ".py" and file.is_file() else None


def _is_plain_package(spec: ModuleSpec) -> bool:
    """Whether its modules are the files in its folders. `os` is no package, and puts os.path beneath itself."""
    if spec.submodule_search_locations is None:
        return False
    file = _file_of(spec)
    return not spec.has_location or (file is not None and not _UNSEEN.search(file.read_bytes()))


def _problem_in(file: Path, title: str, wanted: str) -> str | None:
    """title: what the file is called in the line."""
    try:
        source = file.read_bytes()
        with warnings.catch_warnings(action="ignore"):  # they are the ranks' to show
            scope = symtable(source, title, "exec")
    except (OSError, SyntaxError, ValueError) as error:
        return f"cannot be imported: {type(error).__name__}: {error}"
    names = set(_bound_by(scope))
    if wanted in names or _UNSEEN.search(source):
        return None
    near = get_close_matches(wanted, names, n=1)
    own = [symbol.get_name() for symbol in scope.get_symbols() if symbol.is_assigned()]
    hint = f"did you mean {near[0]!r}?" if near else f"it defines: {', '.join(own) or 'nothing'}"
    return f"{title} defines no {wanted!r}; {hint}"


def _bound_by(scope: SymbolTable) -> Iterator[str]:
    """Names that a module may have once it has run: its own, and those that its functions declare global."""
    for symbol in scope.get_symbols():
        bound = symbol.is_assigned() or symbol.is_imported()
        if bound and (scope.get_type() == "module" or symbol.is_declared_global()):
            yield symbol.get_name()
    for inner in scope.get_children():
        yield from _bound_by(inner)
