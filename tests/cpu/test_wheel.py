"""An installed wheel trains without the checkout, and its modules import only what pyproject.toml declares."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from colocated_grpo.tracking.files import read_environment
from tests.support.paths import ROOT
from tests.support.training_runs import tiny_model

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WITH_CUDA = {"fla", "triton"}
"""Come with the CUDA builds of torch or are installed beside them. What imports them is imported on GPUs only."""


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> Path:
    """Return a fresh environment with the wheel. Of the packages here it finds all but this checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    source, venv = folder / "source", folder / "venv"
    for name in ("colocated_grpo", "training_configs"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source)
    offline = ["--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    run("-m", "pip", "wheel", *offline, "--wheel-dir", str(folder), str(source))
    run("-m", "venv", "--without-pip", str(venv))
    purelib = next(venv.glob("lib/python3*/site-packages"))
    # A path in a .pth file is searched, but its own .pth files are not read: neither is that of this checkout.
    (purelib / "base.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (wheel,) = folder.glob("*.whl")
    run("-m", "pip", "--python", str(venv / "bin/python"), "install", *offline, str(wheel))
    shutil.rmtree(source)
    return venv


def run(*arguments: str, python: Path | str = sys.executable, cwd: Path | None = None) -> str:
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run([python, *arguments], cwd=cwd, env=variables, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_an_installed_wheel_trains_with_the_config_of_the_quickstart(environment, tmp_path):
    settings = {
        "model.name": str(tiny_model()),
        "training_steps": "1",
        "rollout.prompts_per_step": "2",
        "rollout.group_size": "2",
        "evaluation.every": "0",
        "run_name": "run",
    }
    overrides = [word for key, value in settings.items() for word in (f"--{key}", value)]
    python = environment / "bin/python"
    config = ["--config", "training_configs/quickstart.yaml"]
    run("-m", "colocated_grpo", *config, *overrides, python=python, cwd=tmp_path)
    assert (tmp_path / "runs/run/final_model/config.json").is_file()
    [start] = read_environment(tmp_path / "runs/run")
    assert start["git"] is None, "the package of this checkout was imported"
    assert (environment / "bin/colocated-grpo").is_file()


def test_an_installed_wheel_takes_the_default_config_without_the_checkout(environment, tmp_path):
    flags = ["--gpus", "8", "--model.name", str(tiny_model()), "--dry-run"]
    output = run("-m", "colocated_grpo.launch.launcher", *flags, python=environment / "bin/python", cwd=tmp_path)
    assert "note: --config: not given; using training_configs/dr_grpo_config.yaml; " in output


def test_an_installed_wheel_writes_configs_that_name_settings_it_has(environment, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1 + 1", "answer": "2"}\n' * 4)
    python, flags = environment / "bin/python", ["rows.jsonl", "--model", str(tiny_model()), "--gpus", "0"]
    run("-m", "colocated_grpo.launch.launcher", "init", *flags, python=python, cwd=tmp_path)
    [page] = re.findall("# Settings: the docstrings in (.*)", (tmp_path / "rows.yaml").read_text())
    assert page.startswith(str(environment)) and (Path(page) / "schema.py").is_file()


def imports(file: Path) -> Iterator[tuple[str, bool]]:
    """Yield the packages that a file imports, and whether that happens when it is imported itself."""

    def visit(node: ast.AST, at_once: bool) -> Iterator[tuple[str, bool]]:
        for child in ast.iter_child_nodes(node):
            deferred = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            deferred |= isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test)
            if isinstance(child, ast.Import):
                yield from ((alias.name.partition(".")[0], at_once) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                yield str(child.module).partition(".")[0], at_once
            yield from visit(child, at_once and not deferred)

    return visit(ast.parse(file.read_text()), True)


def names(lines: list[str]) -> set[str]:
    return {canonicalize_name(Requirement(line).name) for line in lines}


def required_by(package: str) -> set[str]:
    """Return what an installed package requires itself, without its extras."""
    found = [Requirement(line) for line in requires(package) or []]
    return {canonicalize_name(each.name) for each in found if not re.search(r"extra *==", str(each.marker))}


def test_every_module_imports_only_declared_packages_and_what_these_require():
    providers = {package: {*map(canonicalize_name, found)} for package, found in packages_distributions().items()}
    declared = names(PROJECT["dependencies"]) | providers["vllm"]
    installed = set().union(*providers.values())
    always = declared | {each for package in declared & installed for each in required_by(package)}
    extras = names([line for lines in PROJECT["optional-dependencies"].values() for line in lines])
    wrong = []
    for file in sorted((ROOT / "colocated_grpo").rglob("*.py")):
        for package, at_once in imports(file):
            if package in sys.stdlib_module_names or package in {"colocated_grpo", *WITH_CUDA}:
                continue
            allowed = always if at_once else always | extras
            if not providers.get(package, {package}) & allowed:
                wrong.append(f"{file.relative_to(ROOT)} imports {package}")
    assert not wrong
