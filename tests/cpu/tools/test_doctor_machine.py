"""The doctor's checks of GPUs, driver, shared memory, variables, names and collectives."""

from __future__ import annotations

from pathlib import Path

import pytest

from colocated_grpo.runtime.processes import Gpu, GpuListing, list_gpus, parse_listing, visible
from colocated_grpo.tools.doctor.machine import (
    check_collective,
    check_gpu_memory,
    check_gpus,
    check_hostnames,
    check_shared_memory,
    check_variables,
    collective_fix,
    driver_fix,
    missing_interfaces,
)
from tests.support.doctor import TWO_H200, fake_nvidia_smi, python_on_small_disk, subject_of

NO_DRIVER = (
    "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the latest NVIDIA "
    "driver is installed and running."
)
MISMATCH = "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 550.54"


@pytest.fixture
def smi(tmp_path, monkeypatch):
    return lambda *output, **answers: fake_nvidia_smi(tmp_path, monkeypatch, *output, **answers)


def test_a_machine_with_enough_gpus_passes(smi):
    smi(TWO_H200)
    subject = subject_of(gpus=2)
    assert check_gpus(subject).detail == "2 x NVIDIA H200"
    assert check_gpu_memory(subject).detail == "140 GiB each, unused"


def test_more_ranks_than_visible_gpus_fail(smi):
    smi(TWO_H200)
    found = check_gpus(subject_of(gpus=2, environment={"CUDA_VISIBLE_DEVICES": "1"}))
    assert (found.status, found.detail) == ("failed", "--gpus=2: nvidia-smi and CUDA_VISIBLE_DEVICES show 1")
    assert "--gpus 1" in found.fix


@pytest.mark.parametrize(("output", "code"), [(NO_DRIVER, 9), (MISMATCH, 18)])
def test_the_message_of_an_nvidia_smi_that_fails_is_shown(smi, output, code):
    smi(output, code)
    found = check_gpus(subject_of())
    assert found.status == "failed"
    assert " ".join(output.split()) in found.detail


def test_an_nvidia_smi_that_says_nothing_is_reported_with_its_exit_code():
    assert parse_listing(15, "").error == "nvidia-smi exited with code 15"
    assert parse_listing(0, "") == GpuListing()


def test_without_nvidia_smi_the_run_uses_the_cpu(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert list_gpus().gpus == ()
    assert check_gpus(subject_of()).detail == "training runs on the CPU"


def test_memory_that_nvidia_smi_may_not_read_is_unknown():
    listing = parse_listing(
        0, "0, NVIDIA A100-SXM4-80GB, [Insufficient Permissions], [Insufficient Permissions], 535.161.08"
    )
    assert listing.gpus == (Gpu(index=0, name="NVIDIA A100-SXM4-80GB", total=None, used=None, driver="535.161.08"),)


def test_gpus_are_selected_as_cuda_does_by_number():
    gpus = parse_listing(0, TWO_H200).gpus
    assert visible(gpus, {"CUDA_VISIBLE_DEVICES": "1"}) == gpus[1:]
    assert visible(gpus, {"CUDA_VISIBLE_DEVICES": "1,0"}) == gpus[::-1]
    assert (
        visible(gpus, {"CUDA_VISIBLE_DEVICES": "0,-1,1"})
        == visible(gpus, {"CUDA_VISIBLE_DEVICES": "GPU-72"})
        == gpus[:1]
    )
    assert visible(gpus, {"CUDA_VISIBLE_DEVICES": ""}) == ()
    assert visible(gpus, {}) == gpus


def test_a_gpu_that_another_process_uses_is_noticed(smi):
    smi(TWO_H200.replace("143771, 0, 580.159.03\n1", "143771, 61035, 580.159.03\n1"))
    found = check_gpu_memory(subject_of(gpus=2))
    assert (found.status, found.detail) == ("warning", "in use by other processes: GPU 0: 59.6 GiB of 140 GiB")


@pytest.mark.parametrize(
    ("driver", "cuda", "oldest"),
    [
        ("580.159.03", "13.0", ""),
        ("570.124.06", "13.0", "580"),
        ("535.247.01", "12.8", ""),
        ("470.182.03", "12.6", "525"),
        ("unknown", "13.0", ""),
    ],
)
def test_a_driver_that_is_too_old_for_the_cuda_of_torch_is_named(driver, cuda, oldest):
    fix = driver_fix(driver, cuda)
    assert fix.startswith(f"driver {driver}: CUDA {cuda} needs {oldest} or newer") if oldest else fix == ""


def test_docker_s_default_shared_memory_is_too_small(tmp_path):
    code = (
        "from pathlib import Path; from types import SimpleNamespace as Subject\n"
        "from colocated_grpo.tools.doctor.machine import check_shared_memory as check\n"
        "subjects = [Subject(launch=Subject(ranks=ranks)) for ranks in (1, 2)]\n"
        f"print([check(subject, Path({str(tmp_path)!r})).status for subject in subjects])"
    )
    assert python_on_small_disk(code, tmp_path, "64m").strip() == "['warning', 'failed']"
    assert python_on_small_disk(code, tmp_path, "2g").strip() == "['ok', 'ok']"
    assert check_shared_memory(subject_of(), Path("/nowhere")).status == "skipped"


@pytest.mark.parametrize(
    ("name", "value", "status"),
    [
        ("VLLM_ENABLE_V1_MULTIPROCESSING", "1", "failed"),
        ("VLLM_ENABLE_V1_MULTIPROCESSING", "0", "ok"),
        ("NCCL_P2P_DISABLE", "1", "warning"),
        ("NCCL_P2P_DISABLE", "0", "ok"),
        ("PYTHONDONTWRITEBYTECODE", "1", "warning"),
        ("NCCL_SOCKET_IFNAME", "nosuchinterface", "failed"),
        ("GLOO_SOCKET_IFNAME", "lo", "ok"),
    ],
)
def test_variables_that_break_or_slow_down_a_run_are_found(monkeypatch, name, value, status):
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    found = check_variables(subject_of(environment={name: value}))
    assert found.status == status
    assert found.status == "ok" or found.fix == f"unset {name}"


def test_interfaces_are_matched_as_nccl_does():
    assert not missing_interfaces("ens,eth", ["lo", "eth0"])
    assert missing_interfaces("=eth", ["lo", "eth0"])
    assert not missing_interfaces("^docker", ["lo"])


def test_names_that_other_nodes_cannot_use_fail():
    def check(address: str):
        return check_hostnames(subject_of(nodes=2, master_addr=address, master_port=29500))

    assert check("no-such-host.invalid").detail == "--master-addr=no-such-host.invalid: does not resolve"
    assert "which other nodes cannot reach" in check("localhost").detail
    assert check("192.168.1.100").status == "ok"
    assert check_hostnames(subject_of()).status == "skipped"


def test_two_processes_sum_a_tensor():
    found = check_collective(subject_of(ranks=2))
    assert found.status == "ok", found.detail
    assert found.detail.startswith("all-reduce of 2 processes over gloo")
    assert [check_collective(subject_of(**place)).status for place in ({"ranks": 1}, {"gpus": 2})] == ["skipped"] * 2


def test_processes_that_cannot_reach_each_other_fail():
    found = check_collective(subject_of(ranks=2, environment={"GLOO_SOCKET_IFNAME": "nosuchinterface"}))
    assert found.status == "failed"
    assert "nosuchinterface" in found.detail


def test_a_failure_in_nvlink_multicast_has_a_fix_of_its_own():
    line = "node004:27907:27907 [1] transport/nvls.cc:254 NCCL WARN Cuda failure 401"
    assert "NCCL_NVLS_ENABLE=0" in collective_fix("nccl", line)
    assert "NCCL_DEBUG=INFO" in collective_fix("nccl", "unhandled system error")
