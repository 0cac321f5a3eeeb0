"""Every replacement inside vLLM exists in the versions that its row names, and is installed once or reported."""

from __future__ import annotations

import logging
import os
import re
import sys
import tomllib
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
import vllm
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from benchmarks.patches import report
from colocated_grpo.errors import RunError
from colocated_grpo.rollout.vllm import process
from colocated_grpo.rollout.vllm.adapters import avoid_dependent_launches
from colocated_grpo.rollout.vllm.patches import (
    PATCHES,
    Patch,
    counted,
)
from colocated_grpo.rollout.vllm.versions import SUPPORTED, supported_version
from colocated_grpo.settings.errors import ConfigError
from tests.support.paths import ROOT
from tests.support.source_names import defines

OLDEST = "0.26.0"
SOURCES = {
    vllm.__version__: Path(vllm.__file__).parents[1],
    OLDEST: Path(sys.prefix) / f"vllm-{OLDEST}",
}
"""Version -> folder with its Python sources. `make test` unpacks the oldest supported ones into the environment."""
PRIVATE_STATE: dict[str, str] = {
    "vllm.distributed.parallel_state:_WORLD": "cleared when an engine closes",
    "vllm.distributed.parallel_state:_NODE_COUNT": "cleared when an engine closes",
    "vllm.platforms.interface:Platform._global_graph_pool": "cleared when an engine closes",
    "vllm.device_allocator.cumem:CuMemAllocator.pointer_to_data": "sleep unmaps allocations by tag",
    "vllm.device_allocator:AllocationData.is_asleep": "sleep marks what it unmapped",
    "vllm.device_allocator:AllocationData.handle": "holds the size of what sleep unmapped",
    "vllm.model_executor.layers.fused_moe.runner.moe_runner:MoERunner._quant_method": "kernels that choose experts",
    "vllm.model_executor.model_loader.default_loader:DefaultModelLoader.get_all_weights": "renames tensors",
    "vllm.v1.attention.backends.cpu_attn:_get_attn_isa": "the layout of a cache that the policy fills",
    "vllm.v1.attention.backends.flashinfer:FlashInferImpl.sinks": "a copy of a weight that syncs write",
    "vllm.v1.request:Request.num_computed_tokens": "counted by steady steps",
    "vllm.v1.request:Request.num_in_flight_tokens": "counted by steady steps",
    "vllm.v1.request:Request.num_output_placeholders": "counted by steady steps",
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.execute_model_state": "steady steps take it over",
    "vllm.v1.worker.gpu.states:RequestState.last_sampled_tokens": "steady steps read it",
    "vllm.v1.worker.gpu.states:RequestState.num_computed_tokens": "steady steps read it",
    "vllm.v1.core.sched.scheduler:Scheduler._free_request": "steady steps end requests",
    "vllm.v1.core.sched.scheduler:Scheduler._get_new_block_ids_to_zero": "steady steps allocate cache blocks",
    "vllm.v1.core.sched.scheduler:Scheduler.running": "steady steps read and end requests",
    "vllm.v1.core.sched.scheduler:Scheduler.finished_req_ids": "steady steps hand it over",
    "vllm.v1.core.sched.scheduler:Scheduler.current_step": "steady steps count on",
    "vllm.v1.engine.llm_engine:LLMEngine.engine_core": "completions bypass the output processor",
    "vllm.v1.engine.llm_engine:LLMEngine.input_processor": "completions bypass the output processor",
    "vllm.v1.engine.core:EngineCore.scheduler": "steady steps stand before the scheduler",
    "vllm.model_executor.layers.linear:QKVParallelLinear._get_shard_offset_mapping": "the sync plan's views",
    "vllm.model_executor.layers.linear:QKVParallelLinear._get_shard_size_mapping": "the sync plan's views",
}
"""Private attributes that the package reads or writes in place -> why."""


@pytest.fixture(params=SOURCES)
def sources(request: pytest.FixtureRequest) -> tuple[Version, Path]:
    folder = SOURCES[request.param]
    if not (folder / "vllm").is_dir():
        pytest.skip(f"no sources of vLLM {request.param} in {folder}; `make test` unpacks them")
    return Version(request.param), folder


def test_targets_exist_in_exactly_the_versions_that_their_rows_name(sources):
    version, folder = sources
    found = {patch.target: defines(folder, patch.target) for patch in PATCHES}
    assert found == {patch.target: version in patch.versions for patch in PATCHES}


def test_private_state_that_is_read_or_written_exists(sources):
    _, folder = sources
    assert [target for target in PRIVATE_STATE if not defines(folder, target)] == []


def test_a_name_that_vllm_does_not_have_is_not_found():
    folder = SOURCES[vllm.__version__]
    for missing in ("scheduler:Scheduler.misspelt", "scheduler:Misspelt.schedule", "misspelt:Scheduler.schedule"):
        assert not defines(folder, f"vllm.v1.core.sched.{missing}")


def test_the_supported_versions_are_those_of_the_package_requirements():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert [Requirement(line).specifier for line in extras["cuda"]] == [SUPPORTED]
    assert OLDEST in SUPPORTED


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A library: a function and a class with a static method."""
    module = ModuleType("a_library")
    module.compute = lambda x: x + 1

    class Tools:
        @staticmethod
        def name(x: int) -> str:
            return f"tool {x}"

    module.Tools = Tools
    monkeypatch.setitem(sys.modules, "a_library", module)
    return module


def row(target: str, **changes) -> Patch:
    return Patch(**{"target": target, "make": counted(lambda x: -x), "cures": "it is slow", "upstream": "-"} | changes)


def test_a_function_is_replaced_once_and_its_calls_are_counted(module):
    patch = row("a_library:compute")
    patch.apply("cpu", Version("0.32.0"))
    installed = module.compute
    patch.apply("cpu", Version("0.32.0"))
    assert module.compute is installed
    assert (module.compute(3), patch.status, patch.hits) == (-3, "applied", 1)


def test_a_static_method_is_replaced_by_a_static_method(module):
    row("a_library:Tools.name").apply("cpu", Version("0.32.0"))
    assert module.Tools.name(3) == module.Tools().name(3) == -3


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"devices": ("cuda",)}, "skipped: only on cuda"),
        ({"versions": SpecifierSet("<0.30")}, "skipped: only for vLLM <0.30"),
    ],
)
def test_a_row_for_another_device_or_version_is_skipped(module, changes, status):
    original = module.compute
    patch = row("a_library:compute", required=True, **changes)
    patch.apply("cpu", Version("0.32.0"))
    assert (module.compute, patch.status) == (original, status)


@pytest.mark.parametrize(
    ("model", "by_default", "newer"),
    [
        (SimpleNamespace(is_moe=True, is_hybrid=False), False, True),
        (SimpleNamespace(is_moe=True, is_hybrid=True), False, False),
        (SimpleNamespace(is_moe=False, is_hybrid=False), True, True),
        (None, False, False),  # of an operator that the policy calls
    ],
)
def test_mixtures_without_linear_attention_run_in_the_newer_model_runner(model, by_default, newer):
    config = SimpleNamespace(model_config=model)
    assert process.has_newer_runner(lambda _config: by_default, config) is newer


def test_a_prerelease_counts_as_its_release(module):
    patch = row("a_library:compute")
    patch.apply("cpu", Version("0.33.0rc1.dev3+gabc"))
    assert patch.status == "applied"


@pytest.mark.parametrize("version", ["0.25.1", "0.34.0", "0.1.dev1+gabc", "dev"])
def test_an_unsupported_version_ends_the_start_with_one_line(version):
    with pytest.raises(ConfigError, match=rf"^vllm=={re.escape(version)}: not supported; install a version in "):
        supported_version(version)


@pytest.mark.parametrize("version", ["0.26.0", "0.32.0+cpu", "0.33.1rc2"])
def test_a_supported_version_is_parsed(version):
    assert supported_version(version) == Version(version)


@pytest.mark.parametrize("target", ["a_library:misspelt", "a_library:Tools.misspelt", "no_such_library:compute"])
def test_a_missing_target_ends_the_start_if_the_run_would_be_wrong_without_it(module, target):
    with pytest.raises(RunError) as caught:
        row(target, required=True).apply("cpu", Version("0.32.0"))
    line = str(caught.value)
    assert line.startswith(f"vllm==0.32.0: {target} is missing") and "it is slow" in line and "\n" not in line


def test_a_missing_target_is_one_warning_if_the_run_would_only_be_slower(module, caplog):
    patch = row("a_library:misspelt")
    with caplog.at_level(logging.WARNING):
        patch.apply("cpu", Version("0.32.0"))
    assert patch.status == "missing"
    assert len(caplog.records) == 1 and "a_library:misspelt is missing" in caplog.text


def test_the_report_names_each_row_with_its_hits(module):
    patch = row("a_library:compute")
    patch.apply("cpu", Version("0.32.0"))
    module.compute(1)
    assert report([patch]) == [
        {
            "target": "a_library:compute",
            "status": "applied",
            "hits": 1,
            "cures": "it is slow",
            "versions": str(SUPPORTED),
        }
    ]


@pytest.mark.parametrize(
    ("capability", "given", "expected"),
    [((9, 0), None, False), ((10, 0), None, True), ((12, 0), None, True), ((10, 0), "0", False)],
    ids=["Hopper", "B200", "RTX 50", "the user's value"],
)
def test_adapter_kernels_launch_without_dependencies_on_blackwell_gpus(monkeypatch, capability, given, expected):
    """vLLM's own switch, read back through vLLM."""
    monkeypatch.setattr(os, "environ", {} if given is None else {"VLLM_LORA_DISABLE_PDL": given})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    avoid_dependent_launches(torch.device("cuda"))
    assert vllm.envs.VLLM_LORA_DISABLE_PDL is expected
