"""Names of user code are checked without running it."""

from __future__ import annotations

from importlib.machinery import PathFinder
from pathlib import Path
from zipfile import ZipFile

import pytest

from colocated_grpo.environments.registry import KINDS
from colocated_grpo.settings.code_names import ADAPTED, check_code_name

REWARDS = """\
import heavy_library_that_is_not_here
from elsewhere import imported as renamed

raise SystemExit("the launcher ran this file")

def short(completions): return [0.0]
class Judge:
    def method(self): inside = 1
judge = Judge()
one, [two] = judge, judge
if judge:
    for looped in judge: pass
    with judge as opened: assigned: object = judge
def make():
    global made
    made = judge
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    """The working folder, with rewards.py and a package with modules."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_package/part").mkdir(parents=True)
    for file in ("rewards.py", "own_package/__init__.py", "own_package/rewards.py", "own_package/part/rewards.py"):
        (tmp_path / file).write_text(REWARDS)
    return tmp_path


def error_of(name: str) -> str | None:
    """Check `name` under the key `k`. Return the error without key and name, None without an error."""
    lines = list(check_code_name("k", name))
    assert len(lines) < 2
    return lines[0].removeprefix(f"k={name!r}: ") if lines else None


NAMES = ["short", "Judge", "judge", "renamed", "one", "two", "looped", "opened", "assigned", "made"]


@pytest.mark.parametrize("name", NAMES)
def test_everything_that_a_file_defines_or_imports_is_accepted_without_running_it(name):
    assert error_of(f"rewards.py:{name}") is None


@pytest.mark.parametrize("module", ["rewards.py", "own_package", "own_package.rewards", "own_package.part.rewards"])
def test_a_missing_object_is_reported_with_the_nearest_name(module):
    assert error_of(f"{module}:short") is None
    assert error_of(f"{module}:shrot") == f"{module} defines no 'shrot'; did you mean 'short'?"


@pytest.mark.parametrize("name", ["inside", "method"])
def test_names_inside_a_function_or_a_class_are_rejected(name):
    own = "short, Judge, judge, one, two, looped, opened, assigned, make"
    assert error_of(f"rewards.py:{name}") == f"rewards.py defines no {name!r}; it defines: {own}"


def test_a_file_that_defines_nothing_is_reported_as_such(folder):
    (folder / "empty.py").touch()
    assert error_of("empty.py:short") == "empty.py defines no 'short'; it defines: nothing"


@pytest.mark.parametrize(
    "line",
    [
        "from elsewhere import *",
        "from elsewhere import \\\n *",
        "def __getattr__(name): return short",
        "globals()['sh' + 'rot'] = 1",
        "import sys; sys.modules[__name__] = object()",
        "exec('shrot = 1')",
    ],
)
def test_dynamic_files_are_not_checked(folder, line):
    (folder / "rewards.py").write_text(line)
    assert error_of("rewards.py:shrot") is None


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        (b"def short(:\n", "SyntaxError: invalid syntax (rewards.py, line 1)"),
        (b"x = 1\n\n  y = 2\n", "IndentationError: unexpected indent (rewards.py, line 3)"),
        ("# coding: latin-1\ndef short(): return '\xfc'\n".encode("latin-1"), None),
    ],
)
def test_a_syntax_error_is_reported_with_its_line(folder, source, problem):
    (folder / "rewards.py").write_bytes(source)
    assert error_of("rewards.py:short") == (problem and f"cannot be imported: {problem}")


@pytest.mark.filterwarnings("error")
def test_warnings_about_a_file_are_suppressed(folder):
    (folder / "rewards.py").write_text(r"short = '\d'")
    assert error_of("rewards.py:short") is None


def test_a_missing_file_is_reported():
    assert error_of("gone.py:short") == "no such file"


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        (":task", ""),
        ("no_such_module_here:task", "no_such_module_here"),
        ("no_such_package.part:task", "no_such_package"),
        ("own_package.gone.rewards:task", "own_package.gone"),
        ("own_package.part.gone:task", "own_package.part.gone"),
    ],
)
def test_a_missing_module_is_reported(name, missing):
    assert error_of(name) == f"no module named {missing!r} in the working folder or installed"


@pytest.mark.parametrize(
    "name", ["os.path:join", "math:sqrt", "trl.rewards:accuracy_reward", "colocated_grpo.types:Group"]
)
def test_installed_modules_of_every_kind_are_found(name):
    assert error_of(name) is None


@pytest.mark.parametrize(
    "line",
    [
        "import sys; sys.modules['own_package.made'] = sys",
        "__path__ = __import__('pkgutil').extend_path(__path__, __name__)",
        "__import__('pkg_resources').declare_namespace(__name__)",
    ],
)
def test_submodules_of_a_dynamic_package_are_not_checked(folder, line):
    (folder / "own_package/__init__.py").write_text(line)
    assert error_of("own_package.made:short") is None


def test_modules_in_an_archive_are_not_checked(folder, monkeypatch):
    with ZipFile(folder / "archive.zip", "w") as archive:
        for file in ("zipped/__init__.py", "zipped/rewards.py"):
            archive.writestr(file, REWARDS)
    monkeypatch.syspath_prepend(folder / "archive.zip")
    assert error_of("zipped:short") is None
    assert error_of("zipped.rewards:short") is None


@pytest.mark.parametrize("name", ["edited", "own_package.edited"])
def test_an_editable_install_is_found_by_its_own_finder(folder, monkeypatch, name):
    """pip installs editable packages this way, also below a namespace package."""

    class Finder:
        @staticmethod
        def find_spec(wanted, path=None, target=None):
            return PathFinder.find_spec("part", [str(folder / "own_package")]) if wanted == name else None

    monkeypatch.setattr("sys.meta_path", [Finder, PathFinder])
    (folder / "own_package/__init__.py").unlink()
    assert error_of(f"{name}.rewards:short") is None
    assert error_of(f"{name}.gone:short") == f"no module named '{name}.gone' in the working folder or installed"


@pytest.mark.parametrize("name", ["sorting", "openenv:http://127.0.0.1", "textarena:TicTacToe-v0"])
def test_names_of_built_in_and_adapted_environments_are_not_checked(name):
    assert error_of(name) is None


def test_the_adapted_libraries_are_those_with_an_adapter():
    assert {library for kind in KINDS.values() for library in kind.adapters} == set(ADAPTED)
