"""All replacements inside vLLM's engine, one row each: target, replacement, failure avoided, versions, upstream, hits.

vLLM is written to run in its own process. Inside the trainer's process it would destroy the trainer's process group,
freeze its heap and repack weights that the trainer writes in place. The remaining rows make decoding faster.

`apply` installs the rows that fit this version and device before an engine is built. If a target is missing in a
version that should have it, `apply` raises an error for a row without which the run would be wrong. For a row without
which the run would only be slower, `apply` logs one warning. A test looks up every target, and other private attributes
of vLLM that this package uses, in the sources of the oldest supported and the installed version.
"""

import importlib
import logging
import pkgutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from colocated_grpo.errors import RunError
from colocated_grpo.rollout.vllm import process
from colocated_grpo.rollout.vllm.versions import SUPPORTED, supported_version
from colocated_grpo.runtime import rows

Device = Literal["cpu", "cuda"]
Numerics = Literal["fast", "exact"]
Make = Callable[["Patch", object], Any]
"""(row, the original object) -> its replacement."""


@dataclass(eq=False, kw_only=True)
class Patch:
    """One replaced attribute. Example target: 'vllm.v1.core.sched.scheduler:Scheduler.schedule'."""

    target: str
    """'module:attribute' or 'module:Class.attribute'."""
    make: Make | None = None
    """None: an instance's method, replaced by `bind` when the instance exists."""
    cures: str
    """The failure or the cost without this replacement."""
    upstream: str | None = None
    """Issue, pull request or source file to check before the row is changed or dropped. None: the target's file."""
    versions: SpecifierSet = SUPPORTED
    devices: tuple[Device, ...] = ("cpu", "cuda")
    numerics: tuple[Numerics, ...] = ("fast", "exact")
    required: bool = False
    """True: the run would be wrong without the replacement. False: the run would be slower."""
    hits: int = 0
    """Calls that took the replacement's own path; 0 for a replaced constant.

    For a kernel inside CUDA graphs only captures count, because replays run no Python.
    """
    status: str = "not applied"

    def apply(self, device: Device, version: Version, numerics: Numerics = "fast") -> None:
        """Replace the target, once for the life of the process. Raises RunError if a required target is missing."""
        if self.status == "applied":
            return
        if device not in self.devices:
            self.status = f"skipped: only on {self.devices[0]}"
        elif numerics not in self.numerics:
            self.status = f"skipped: only with numerics: {self.numerics[0]}"
        elif not self.versions.contains(version, prereleases=True):
            self.status = f"skipped: only for vLLM {self.versions}"
        elif self.make is not None:
            self._replace(self.make, version)

    def _replace(self, make: Make, version: Version) -> None:
        module, _, path = self.target.partition(":")
        parent, _, name = path.rpartition(".")
        try:
            owner = pkgutil.resolve_name(f"{module}:{parent}")
            replacement = make(self, getattr(owner, name))
        except (ImportError, AttributeError):
            self._report_missing(version)
            return
        # Replace a static method by a static method: a plain function on a class would receive the instance.
        is_static = isinstance(owner, type) and isinstance(owner.__dict__.get(name), staticmethod)
        setattr(owner, name, staticmethod(replacement) if is_static else replacement)
        self.status = "applied"

    def bind(self, instance: object, method: Callable[..., object]) -> Any:
        """Replace the target on one instance only. Returns the instance's original method."""
        name = self.target.rpartition(".")[2]
        original = getattr(instance, name)
        setattr(instance, name, method)
        self.status = "applied"
        return original

    def _report_missing(self, version: Version) -> None:
        line = f"vllm=={version}: {self.target} is missing, so its replacement cannot be installed ({self.cures})"
        if self.required:
            raise RunError(f"{line}; use a version in {self.versions} that the tests ran with")
        self.status = "missing"
        logging.getLogger(__name__).warning("%s; the run is slower without it", line)


def counted(replacement: Callable[..., object]) -> Make:
    """Return a row's `make` that replaces the whole function. Each call is a hit."""

    def make(patch: Patch, _original: object) -> object:
        def call(*arguments: object, **options: object) -> object:
            patch.hits += 1
            return replacement(*arguments, **options)

        return call

    return make


def around(replacement: Callable[..., object]) -> Make:
    """Return a row's `make` for `replacement(original, *arguments)`, which calls the original. Each call is a hit."""
    return lambda patch, original: counted(partial(replacement, original))(patch, original)


def kernel(module: str, factory: str) -> Make:
    """Return a row's `make` that calls `factory(original, count_use)` from `module`, another file of this folder.

    The module is imported when the row is applied: Triton is installed only with CUDA, and `routes` imports this table.
    """

    def make(patch: Patch, original: object) -> object:
        def count_use() -> None:
            patch.hits += 1

        return getattr(importlib.import_module(f"{__package__}.{module}"), factory)(original, count_use)

    return make


STEADY_SCHEDULE = Patch(
    target="vllm.v1.core.sched.scheduler:Scheduler.schedule",
    cures="Python work for each request and step: 10 us, so that the GPU waits for the host at 512 sequences",
)
STEADY_UPDATE = Patch(
    target="vllm.v1.core.sched.scheduler:Scheduler.update_from_output",
    cures="the same, for the outputs of a step",
)
STEADY_SAMPLE = Patch(
    target="vllm.v1.worker.gpu.model_runner:GPUModelRunner.sample_tokens",
    cures="2 to 4 ms of Python work for each decode step, so that a small model waits for the host",
    devices=("cuda",),
)
STEADY_REPLAY = Patch(
    target="vllm.v1.worker.gpu.cudagraph_utils:ModelCudaGraphManager.run_fullgraph",
    cures="the same: names the CUDA graph of the batch",
    devices=("cuda",),
)

INITIALIZE_CACHE = Patch(
    target="vllm.v1.worker.gpu_worker:Worker.initialize_from_config",
    make=kernel("routes", "make_initialize"),
    cures="no record of the chosen experts: recording must begin before CUDA graphs are captured",
    upstream="https://github.com/vllm-project/vllm/pull/38163",
    required=True,
)
FREE_REQUEST = Patch(
    target="vllm.v1.core.sched.scheduler:Scheduler._free_request",
    cures="the record of the chosen experts ends with the request's cache blocks",
)


def _row_operator(target: str, make: Make, device: Device = "cuda") -> Patch:
    """Return a row of `numerics: exact`."""
    return Patch(
        target=f"vllm.{target}",
        make=make,
        cures="a token's log-probability depends on the tokens computed with it, and differs from the policy's",
        upstream="https://github.com/vllm-project/vllm/issues/27433",
        devices=(device,),
        numerics=("exact",),
        required=True,
    )


own = partial(kernel, "row_operators")

PATCHES: tuple[Patch, ...] = (
    Patch(
        target="vllm.distributed.parallel_state:destroy_distributed_environment",
        make=counted(process.close_engine_groups),
        cures="closing an engine destroys the default process group, which is the trainer's",
        upstream="https://github.com/pytorch/torchtitan/issues/3365",
        required=True,
    ),
    Patch(
        target="vllm.v1.engine.core:freeze_gc_heap",
        make=counted(lambda: None),
        cures="each engine start collects and freezes the whole heap; the trainer does so once, after its build",
        upstream="vllm/utils/gc_utils.py",
    ),
    Patch(
        target="vllm.model_executor.models.registry:_run_in_subprocess",
        make=counted(lambda inspect: inspect()),
        cures="to inspect the class of a model, its first start imports vLLM in a second process",
    ),
    Patch(
        target="vllm.sampling_params:SamplingParams.for_sampler_warmup",
        make=counted(process.default_sampling),
        cures="a first start compiles the kernels of all sampling settings, whether or not the run has them",
        devices=("cuda",),
    ),
    Patch(
        target="vllm.v1.sample.sampler:batched_count_greater_than",
        make=counted(process.count_at_least),
        cures="torch.compile of one comparison delays the first completions of every run by seconds",
        upstream="vllm/v1/sample/ops/logprobs.py",
    ),
    Patch(
        target="vllm.model_executor.layers.utils:dispatch_cpu_unquantized_gemm",
        make=counted(process.plain_cpu_linear),
        cures="the CPU backend repacks linear weights after loading, which leaves nothing to write new weights into",
        devices=("cpu",),
        required=True,
    ),
    *(
        Patch(
            target=f"vllm.model_executor.layers.mamba.ops.cpu.gdn_attention:{function}",
            make=around(process.convolve_unpacked),
            cures="linear attention reads convolution weights that the CPU backend has packed after loading",
            versions=SpecifierSet(">=0.32,<0.34"),
            devices=("cpu",),
            required=True,
        )
        for function in ("_causal_conv1d_fwd_cpu", "_causal_conv1d_update_cpu")
    ),
    Patch(
        target="vllm.model_executor.layers.rotary_embedding.base:RotaryEmbedding.forward_cpu",
        make=around(process.rotate_flat),
        cures="latent attention: the kernel for CPUs rotates wrong parts of [tokens, heads, size]",
        upstream="csrc/cpu/pos_encoding.cpp",
        devices=("cpu",),
        required=True,
    ),
    Patch(
        target="vllm.distributed.device_communicators.cpu_communicator:_CPUSHMDistributed.make_group_name",
        make=counted(process.unique_group_name),
        cures="under an external launcher all engines of a host get one shared-memory name, killed runs included",
        devices=("cpu",),
        required=True,
    ),
    Patch(
        target="vllm.distributed.device_communicators.cpu_communicator:_CPUSHMDistributed._init_cpu_shm",
        make=around(process.join_shared_memory),
        cures="the shared memory of a killed run stays in /dev/shm",
        devices=("cpu",),
    ),
    Patch(
        target="vllm.model_executor.warmup.kernel_warmup:_LL_BF16_WARMUP_MODEL_SHAPES",
        make=lambda _patch, _original: (),
        cures="on Hopper the routers of three large models are compiled at each start, whatever model is loaded",
        versions=SpecifierSet(">=0.26,<0.27"),
        devices=("cuda",),
    ),
    Patch(
        target="vllm.config.vllm:VllmConfig._is_default_v2_model_runner_model",
        make=around(process.has_newer_runner),
        cures="mixtures run in the older model runner, which draws random numbers request by request",
        versions=SpecifierSet(">=0.26,<0.29"),
        devices=("cuda",),
        required=True,  # with numerics: exact; only the newer runner's sampler has our kernel
    ),
    Patch(  # fast only: the kernel's results depend on the batch
        target="vllm.v1.attention.backends.flash_attn:flash_attn_varlen_func",
        make=kernel("decode_attention", "make_attention"),
        cures="FlashAttention 3 splits each sequence over the device, which is slow for large batches of one token",
        devices=("cuda",),
        numerics=("fast",),
    ),
    Patch(
        target="vllm.v1.attention.backends.flash_attn:flash_attn_supports_quant_query_input",
        make=counted(lambda: False),
        cures="with an fp8 cache, queries are rounded to fp8 too, also for the decode kernel, which does not need it",
        devices=("cuda",),
        numerics=("fast",),
    ),
    *(
        Patch(
            target=f"vllm.model_executor.models.{attention}.forward",
            make=kernel("qkv_kernel", "make_forward"),
            cures="four kernel launches a layer between the projections and attention",
            devices=("cuda",),
        )
        for attention in ("qwen3:Qwen3Attention", "qwen3_moe:Qwen3MoeAttention")
    ),
    *(
        Patch(
            target=f"vllm.v1.worker.gpu.sample.sampler:{function}",
            make=kernel("sampling_kernels", f"make_{function}"),
            cures=f"{cost}; with numerics: exact, the policy's kernel sums in another order than vLLM's",
            devices=("cuda",),
            required=True,
        )
        for function, cost in (
            ("gumbel_sample", "sampling reads each row of logits four times"),
            ("compute_topk_scores", "log-probabilities of the sampled tokens read all logits once more"),
        )
    ),
    _row_operator("model_executor.layers.utils:cpu_unquantized_gemm", counted(process.linear_by_rows), "cpu"),
    _row_operator("_custom_ops:cpu_attention_with_kv_cache", around(rows.attend_singly), "cpu"),
    _row_operator("model_executor.layers.linear:UnquantizedLinearMethod.apply", own("make_linear")),
    _row_operator("model_executor.layers.vocab_parallel_embedding:UnquantizedEmbeddingMethod.apply", own("make_head")),
    _row_operator("model_executor.layers.layernorm:RMSNorm.forward_cuda", own("make_norm")),
    _row_operator("model_executor.layers.layernorm:GemmaRMSNorm.forward_cuda", own("make_gemma_norm")),
    _row_operator("model_executor.layers.activation:SiluAndMul.forward_cuda", own("make_silu")),
    _row_operator("model_executor.layers.activation:GeluAndMul.forward_cuda", own("make_gelu")),
    _row_operator("v1.attention.backends.flash_attn:flash_attn_varlen_func", own("make_attention")),
    _row_operator("model_executor.models.qwen3_moe:Qwen3MoeSparseMoeBlock.forward", own("make_mixture")),
    _row_operator("model_executor.models.olmoe:OlmoeMoE.forward", own("make_mixture")),
    STEADY_SCHEDULE,
    STEADY_UPDATE,
    STEADY_SAMPLE,
    STEADY_REPLAY,
    INITIALIZE_CACHE,
    FREE_REQUEST,
)


def apply(device: Device, patches: Iterable[Patch] = PATCHES, numerics: Numerics = "fast") -> None:
    """Install the rows for this device and the installed version of vLLM. Later calls in a process add nothing.

    Raises ConfigError for versions outside SUPPORTED, and RunError if a required target is missing: a run would fail
    late, or sample from old weights.
    """
    import vllm

    version = supported_version(vllm.__version__)
    for patch in patches:
        patch.apply(device, version, numerics)
