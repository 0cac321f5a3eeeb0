"""`LocalEngine` over an in-process vLLM engine that shares the trainer's process group."""

from collections.abc import Collection, Generator, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from vllm import LLM, SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import RepetitionDetectionParams, RequestOutputKind, StructuredOutputsParams

from colocated_grpo.errors import RunError, in_one_line
from colocated_grpo.rollout.engine import Finished, Part, Request, TokenDelta
from colocated_grpo.rollout.vllm import kv_budget, patches, process, routes, vllm_arguments
from colocated_grpo.rollout.vllm.adapters import VLLMAdapters, avoid_dependent_launches
from colocated_grpo.rollout.vllm.requests import EngineRequests, scheduler_of
from colocated_grpo.rollout.vllm.spec import EngineSpec
from colocated_grpo.runtime.distributed import World
from colocated_grpo.settings import exact, model_support
from colocated_grpo.settings.config_json import config_json_in

UNQUANTIZED_CACHE = ("auto", "bfloat16", "float16", "half")
"""Types of vLLM's KV cache that are not quantized."""
FP8_BY_ROWS = "fp8_per_channel"
"""The quantization whose layout a plan knows."""
AS_LOADED = {"TRITON", "BATCHED_TRITON"}
"""Expert kernels that read weights in their loaded layout."""

EXPERT_STACKS = ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")
SINKS = ".self_attn.sinks"
HOPPER = (9, 0)

_closed: list[object] = []
"""Model runners of closed engines, kept until the process ends. Sleeping memory is already unmapped, and vLLM's
allocator would unmap it again if the tensors were freed."""


class VLLMEngine:
    """`LocalEngine` over `vllm.LLM`. Construction is collective over all ranks."""

    admission_cost = 3  # a step with prompts runs without a CUDA graph

    def __init__(self, spec: EngineSpec, world: World) -> None:
        prepare(spec, world.device)
        if world.device.type == "cpu":
            process.name_shared_memory(world)
        self._sleeps = world.device.type == "cuda" and spec.sleep
        self._stays_awake = False
        self._keeps_weights = spec.keeps_weights
        self.max_num_seqs = spec.max_num_seqs
        arguments = vllm_arguments.engine_arguments(spec, world)
        with process.keep_trainer_state():
            try:
                self._llm = LLM(**arguments)
            except (TypeError, ValueError, NotImplementedError) as error:
                raise RunError(f"engine: vLLM does not start: {in_one_line(error)}; check engine.args") from error
        self._engine = self._llm.llm_engine
        self._worker = self._engine.model_executor.driver_worker.worker
        # Latent attention decodes with rearranged parts of a projection: views or copies made after loading.
        absorbs = self._engine.vllm_config.model_config.use_mla
        # vLLM repacks experts for their kernel on the CPU, and for FlashInfer.
        repacks = any(method.unquantized_backend.name not in AS_LOADED for method in _expert_methods(self.model))
        quantization = arguments.get("quantization")
        self.transforms_weights = absorbs or repacks or quantization not in (None, FP8_BY_ROWS)
        self._rebuilds_layers = self.transforms_weights or quantization is not None
        cache_type = arguments.get("kv_cache_dtype", "auto")
        self.is_quantized = quantization is not None or cache_type not in UNQUANTIZED_CACHE
        self._requests = EngineRequests(self._engine)
        records, scheduler = spec.records_routes, scheduler_of(self._engine)
        self._routes = routes.RequestRoutes(self._worker.slot_routes, scheduler) if records else None
        self.adapters = VLLMAdapters(self._engine)
        self._buffers: dict[str, Tensor] = {}
        self._policy_version = 0

    @property
    def model(self) -> nn.Module:
        return self._worker.get_model()

    @property
    def tensor_parallel_rank(self) -> int:
        parallel = self._engine.vllm_config.parallel_config
        return parallel.rank % parallel.tensor_parallel_size

    def submit(self, requests: Iterable[Request]) -> None:
        for request in requests:
            with _rejections_as_value_errors():
                params, adapter = _sampling_params(request), self.adapters.active
                request_id = self._requests.add(request.key, request.token_ids, params, adapter)
            if request.routes:
                # policy.routing_replay sets both `spec.records_routes` and `request.routes`.
                assert self._routes is not None
                self._routes.expect(request.key, request_id, len(request.token_ids))

    def step(self) -> Finished:
        finished = self._requests.step(self._policy_version)
        if self._routes is None:
            return finished
        return [(key, self._routes.add_to(key, completion)) for key, completion in finished]

    def deltas(self) -> list[tuple[Hashable, TokenDelta]]:
        return self._requests.deltas()

    def abort(self, keys: Collection[Hashable] | None = None) -> None:
        if self._routes is not None:
            # Before the abort, because slots of a partly computed prompt have no routes yet.
            self._routes.drop(keys)
        self._requests.abort(keys)

    def sampled(self) -> Finished:
        return self._requests.sampled(self._policy_version)

    def top_logprobs(self, token_ids: Sequence[int], k: int) -> list[dict[int, float]]:
        kind = RequestOutputKind.FINAL_ONLY
        with _rejections_as_value_errors():
            # Parameters that return each prompt token's log-probability and the `k` largest at its position.
            params = SamplingParams(
                temperature=1.0, seed=0, max_tokens=1, prompt_logprobs=k, detokenize=False, output_kind=kind
            )
            return self._requests.prompt_logprobs(token_ids, params, self.adapters.active)

    def load_weights(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        # Drop the copies of buffers: the checkpoint of some families has buffers too, and vLLM replaces buffers of the
        # layers that it rebuilds.
        self._buffers = {}
        if self._rebuilds_layers:
            # The layers do not have the checkpoint's shapes: vLLM rebuilds them one by one.
            kernels = {method: method.moe_kernel for method in _expert_methods(self.model)}
            for method in kernels:
                method.moe_kernel = None  # with a kernel, vLLM would not repack the experts
            sinks: list[tuple[str, Tensor]] = []
            self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": reloadable(weights, aside=sinks)})
            for method, kernel in kernels.items():
                method.moe_kernel = method.moe_kernel or kernel  # for a layer that these weights do not change
            weights = iter(sinks)
        self._worker.get_model().load_weights(weights)

    def weights_changed(self, policy_version: int) -> None:
        self._policy_version = policy_version
        refresh_sinks(self.model)
        # Cached prefixes of the old weights would silently give wrong log-probabilities.
        self._llm.reset_prefix_cache()

    def wake(self, part: Part) -> None:
        if not self._sleeps or self._stays_awake or (part == "weights" and self._keeps_weights):
            return
        # vLLM maps memory outside torch's allocator, whose cached blocks must be returned first.
        torch.cuda.empty_cache()
        self._worker.wake_up([part])
        if part == "weights":
            # vLLM reloads some models in inference mode; buffers created there can be written only in inference mode.
            with torch.inference_mode():
                for name, buffer in self.model.named_buffers():
                    buffer.copy_(self._buffers[name])

    def stay_awake(self) -> None:
        self.wake("weights")
        self.wake("kv_cache")
        self._stays_awake = True

    def asleep_bytes(self) -> int:
        return process.asleep_bytes() if self._sleeps else 0

    def sleep(self) -> None:
        if not self._sleeps or self._stays_awake:
            return
        self._llm.reset_prefix_cache()
        if self._keeps_weights:
            process.discard("kv_cache")
        else:
            # Sleeping discards the buffers (rotary tables, scales), so these buffers are copied to the host. Only
            # `load_weights` changes them, not planned syncs, so one copy is enough until its next call.
            self._buffers = self._buffers or {name: buffer.cpu() for name, buffer in self.model.named_buffers()}
            process.discard("weights", "kv_cache")

    def close(self) -> None:
        if self._sleeps:
            # Not the weights that the policy may compute with (`weights: shared`).
            process.discard("kv_cache", *(() if self._keeps_weights else ("weights",)))
            # Hide the runner from the worker's shutdown, which frees the runner's tensors (since vLLM 0.32).
            _closed.append(self._worker.model_runner)
            self._worker.model_runner = None
        self._engine.engine_core.shutdown()
        process.forget_graph_pool()


def prepare(spec: EngineSpec, device: torch.device) -> None:
    """Install the patches, and check that vLLM has the model and takes the arguments. Takes no device memory.

    A run calls this before it reads weights. The engine's constructor calls it again, which installs nothing. Raises
    ConfigError or RunError.
    """
    patches.apply("cuda" if device.type == "cuda" else "cpu", numerics=spec.numerics)
    vllm_arguments.check_arguments(spec.args)
    kv_budget.check_cache(spec)
    config_json = config_json_in(spec.folder)
    vllm_arguments.register_class(spec.folder, config_json)
    if spec.numerics == "exact":
        on_cpu = device.type == "cpu"
        on_hopper = not on_cpu and torch.cuda.get_device_capability(device) == HOPPER
        exact.check_exact(config_json, on_cpu=on_cpu, on_hopper=on_hopper, float32=spec.dtype == torch.float32)
    adapters = bool(spec.args.get("enable_lora"))
    if device.type == "cpu":
        key, bfloat16 = f"model.name={str(spec.folder)!r}", spec.dtype == torch.bfloat16
        model_support.check_cpu_engine(config_json, key, bfloat16=bfloat16, adapters=adapters)
    elif adapters:
        avoid_dependent_launches(device)


def _expert_methods(model: nn.Module) -> list[Any]:
    """Return the compute method of each layer of unquantised experts; empty for models without experts."""
    methods = (getattr(module, "quant_method", None) for module in model.modules())
    return [method for method in methods if hasattr(method, "unquantized_backend")]


def reloadable(weights: Iterable[tuple[str, Tensor]], aside: list[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield stacked experts one by one, so that vLLM 0.32 uses the parameters' loaders. Other tensors stay unchanged.

    Sinks are appended to `aside` instead, to be loaded after the reload. During a layer-by-layer reload, parameters
    have no storage, and vLLM records only the tensors passed to their weight loaders. vLLM's gpt-oss model copies
    stacked experts and sinks into the parameters directly: these copies would be lost.
    """
    for name, tensor in weights:
        layer, found, stack = name.partition(".mlp.experts.")
        if found and stack in EXPERT_STACKS:
            yield from ((f"{layer}{found}{expert}.{stack}", part) for expert, part in enumerate(tensor))
        elif name.endswith(SINKS):
            aside.append((name, tensor))
        else:
            yield name, tensor


@torch.inference_mode()  # vLLM reloads some models in inference mode, and such tensors can be written only in this mode
def refresh_sinks(model: nn.Module) -> None:
    """Copy attention sinks to the tensors that the kernels read.

    FlashInfer's kernels read a float32 copy. vLLM makes this copy after loading all weights, but not after a planned
    sync or `load_weights`, and in older releases only once. This function writes the copy in place, because CUDA graphs
    read it. Other kernels read the weight itself, and nothing is copied.
    """
    for module in model.modules():
        for attention in module.children():
            if (kept := getattr(getattr(attention, "impl", None), "sinks", None)) is None:
                continue
            weights = [weight for weight in module.parameters(recurse=False) if weight.shape == kept.shape]
            if len(weights) != 1:
                raise RunError(f"engine: attention sinks of {type(module).__name__} are not supported")
            kept.copy_(weights[0])


@contextmanager
def _rejections_as_value_errors() -> Generator[None]:
    """Convert VLLMValidationError, which is not a ValueError, so that a bad client request cannot end the run."""
    try:
        yield
    except VLLMValidationError as error:
        raise ValueError(str(error)) from error


def _sampling_params(request: Request) -> SamplingParams:
    sampling, detection = request.sampling, request.sampling.repetition_detection
    return SamplingParams(
        temperature=sampling.temperature,
        max_tokens=sampling.max_tokens,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        stop=list(sampling.stop),
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=True,  # stop_token_ids lists every token that may end the completion
        seed=request.seed,
        logprobs=0,
        detokenize=bool(sampling.stop),
        output_kind=RequestOutputKind.DELTA if request.stream else RequestOutputKind.FINAL_ONLY,
        repetition_detection=None if detection is None else RepetitionDetectionParams(**detection.model_dump()),
        structured_outputs=None if request.pattern is None else StructuredOutputsParams(regex=request.pattern),
        skip_clone=True,  # these parameters are not reused, and may hold hundreds of stop tokens
    )
