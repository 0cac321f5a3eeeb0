"""The shape of the code: imports point down, seams hold, and nothing grows too long to read."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.paths import ROOT

PACKAGE = "colocated_grpo"
FILES = sorted((ROOT / PACKAGE).rglob("*.py"))

LAYERS = [
    {"errors", "types"},
    {"settings"},
    {"runtime"},
    {"metrics", "web"},
    {"advantages", "losses"},
    {"batching", "summaries"},
    {"policy", "environments", "tracking"},
    {"rollout"},
    {"weights", "freshness", "checkpoint", "evaluation"},
    {"phases", "callbacks", "servers"},
    {"atropos"},
    {"run"},
    {"assembly"},
    {"trainer"},
    {"launch"},
    {"__main__", "api"},
    {"tools"},
]
"""From the bottom up. A part imports itself and what lies below it; parts of one layer do not know each other."""

VLLM_FOLDER = "rollout/vllm"
VLLM_ELSEWHERE = {
    "weights/plan.py",  # the layer classes whose parameters a plan looks into
    "policy/exact.py",  # the operators with which the engine computes
    "runtime/rows.py",  # attention of the engine on CPUs
    "policy/flash_attention.py",  # FlashAttention 4, which vLLM only ships
}
NOT_IN_CONFIG = {"torch", "vllm", "transformers"}
PURE = {"advantages", "batching", "losses"}
NOT_IN_PURE = {"torch.distributed", "vllm", "transformers"}
# Lower them with what is deleted; what comes in must be worth what it costs to read.
MOST_FILES, MOST_LINES = 250, 43_663
MOST_LOADED_FILES, MOST_LOADED_LINES = 81, 12_771
"""What `import colocated_grpo.trainer` loads."""
MOST_WITH_CONFIG = 38
"""Functions that take the whole `Config` instead of what they use."""
LONGEST_FILE, LONGEST_FUNCTION, MOST_LOOSE_FILES = 350, 80, 12


def relative(file: Path) -> str:
    return file.relative_to(ROOT / PACKAGE).as_posix()


def part_of(file: Path) -> str:
    """The first name below the package: 'policy' for policy/model.py, 'trainer' for trainer.py."""
    return file.relative_to(ROOT / PACKAGE).parts[0].removesuffix(".py")


def imports(file: Path) -> Iterator[str]:
    """Dotted names that the file imports, at any depth."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def own_parts(file: Path) -> set[str]:
    """Parts of this package that the file imports."""
    names = [name.split(".") for name in imports(file)]
    return {name[1] for name in names if name[0] == PACKAGE and len(name) > 1 and not name[1].startswith("__version")}


def starts_with_any(name: str, packages: set[str]) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


LEVEL = {part: level for level, parts in enumerate(LAYERS) for part in parts}


@pytest.mark.parametrize("file", FILES, ids=relative)
def test_imports_point_down(file):
    part = part_of(file)
    if part == "__init__":
        assert own_parts(file) == {"api"}  # imported on first use
        return
    for other in own_parts(file) - {part}:
        assert LEVEL[other] < LEVEL[part], f"{part} imports {other}"


def test_policy_and_rollout_never_import_each_other():
    met = {part: set().union(*(own_parts(file) for file in FILES if part_of(file) == part)) for part in LEVEL}
    assert "rollout" not in met["policy"]
    assert "policy" not in met["rollout"]


def test_vllm_is_imported_in_one_folder_and_five_named_files():
    users = {relative(file) for file in FILES for name in imports(file) if starts_with_any(name, {"vllm"})}
    assert {file for file in users if not file.startswith(VLLM_FOLDER)} == VLLM_ELSEWHERE


def test_settings_import_neither_torch_nor_an_engine():
    for file in FILES:
        if part_of(file) in {"settings", "types", "errors"}:
            assert not [name for name in imports(file) if starts_with_any(name, NOT_IN_CONFIG)], file


def test_the_arithmetic_is_pure():
    for file in FILES:
        if part_of(file) in PURE:
            assert not [name for name in imports(file) if starts_with_any(name, NOT_IN_PURE)], file


def test_the_config_json_of_a_model_is_read_in_one_file():
    readers = {relative(file) for file in FILES if '"config.json").read_text(' in file.read_text()}
    assert readers == {"settings/config_json.py"}


@pytest.mark.parametrize("file", FILES, ids=relative)
def test_nothing_is_too_long_to_read(file):
    text = file.read_text()

    assert len(text.splitlines()) <= LONGEST_FILE
    assert text.isascii()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = node.end_lineno - node.lineno + 1
            assert length <= LONGEST_FUNCTION, f"{node.name} has {length} lines"


def loaded_at_start(file: Path) -> Iterator[Path]:
    """Files of this package that run when `file` is imported, those of its folders included."""
    pending = list(ast.parse(file.read_text()).body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            continue
        pending += [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]
        if isinstance(node, ast.ImportFrom):
            for name in (f"{node.module}.{alias.name}" for alias in node.names):
                yield from files_of(name)


def files_of(name: str) -> Iterator[Path]:
    """The file of a dotted name, or of the module that defines it, and the `__init__.py` of its folders."""
    path = ROOT
    for part in name.split("."):
        path = path / part
        yield from (file for file in (path / "__init__.py", path.with_suffix(".py")) if file in KNOWN)


KNOWN = set(FILES)


def test_the_house_stays_small():
    sizes = {file: len(file.read_text().splitlines()) for file in FILES}
    loaded, pending = set(), [ROOT / PACKAGE / "trainer.py", ROOT / PACKAGE / "__init__.py"]
    while pending:
        file = pending.pop()
        if file not in loaded:
            loaded.add(file)
            pending += loaded_at_start(file)
    with_config = [
        f"{relative(file)}: {node.name}"
        for file in FILES
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for argument in (*node.args.args, *node.args.kwonlyargs)
        if argument.annotation is not None and ast.unparse(argument.annotation) == "Config"
    ]
    assert len(FILES) <= MOST_FILES and sum(sizes.values()) <= MOST_LINES
    assert len(loaded) <= MOST_LOADED_FILES and sum(sizes[file] for file in loaded) <= MOST_LOADED_LINES
    assert len(with_config) <= MOST_WITH_CONFIG, with_config


def test_the_root_of_the_package_holds_little_more_than_the_loop():
    assert len([file for file in FILES if len(file.relative_to(ROOT / PACKAGE).parts) == 1]) <= MOST_LOOSE_FILES
