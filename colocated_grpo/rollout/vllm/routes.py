"""Record the experts that each layer chose for each token, by the token's slot in the KV cache.

vLLM's own option (`enable_return_routed_experts`) needs Triton, which CPUs lack, and works in 0.26 only with the older
model runner. A slot keeps its routes as long as its keys, so tokens of cached prefixes and of preempted requests have
routes too. The routes of a preempted request are those of its last computation.

Shapes: S slots of the KV cache, T tokens, L layers with experts, K experts per token.
"""

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.fused_moe.layer import MoERunner
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig
from vllm.v1.request import Request

from colocated_grpo.errors import RunError
from colocated_grpo.rollout.vllm.patches import FREE_REQUEST
from colocated_grpo.types import MAX_UINT8_EXPERTS, Completion, Routes

RECORD_ROUTES = "colocated_grpo_record_routes"
"""Key in vLLM's `additional_config` that turns on the recording of chosen experts."""


class SlotRoutes:
    """Routes of all slots, on the engine's device: S * L * K bytes, or twice as many for more than 256 experts."""

    def __init__(self, model: nn.Module, cache: KVCacheConfig, device: torch.device) -> None:
        """Raises RunError for engines whose routes cannot be recorded."""
        self.group = _attention_group(cache)
        """Index of the KV cache group whose slots are used."""
        group = cache.kv_cache_groups[self.group]
        self._block_size, self._attention = group.kv_cache_spec.block_size, group.layer_names[0]
        runners = [module for module in model.modules() if isinstance(module, MoERunner)]
        routers = [_router(runner) for runner in sorted(runners, key=lambda runner: runner.layer_id)]
        dtype = torch.uint8 if routers[0].global_num_experts <= MAX_UINT8_EXPERTS else torch.int16
        # The last row receives the writes of padding tokens, whose slot is -1.
        rows = cache.num_blocks * self._block_size + 1
        self._routes_SLK = torch.zeros((rows, len(routers), routers[0].top_k), dtype=dtype, device=device)
        for layer, router in enumerate(routers):
            router.set_capture_fn(partial(self._record, layer))

    def _record(self, layer: int, experts_TK: Tensor) -> None:
        """Store the experts of one layer. Called in each forward pass; inside a CUDA graph, only during capture."""
        context = get_forward_context()
        if not context.slot_mapping:  # a trial run without a KV cache
            return
        if context.dp_metadata is not None or not isinstance(context.slot_mapping, dict):
            rule = "with data parallelism or dual batch overlap in engine.args, which split the tokens of a step"
            raise RunError(f"policy.routing_replay=true: not possible {rule}")
        slots_T = context.slot_mapping[self._attention]
        tokens = min(len(slots_T), len(experts_TK))  # either may be padded for a CUDA graph
        self._routes_SLK[slots_T[:tokens], layer] = experts_TK[:tokens].to(self._routes_SLK.dtype)

    def read(self, blocks: Sequence[int], tokens: int) -> Routes:
        """Return the routes of the first `tokens` tokens in these blocks of the KV cache, as a copy."""
        offsets = torch.arange(self._block_size)
        slots = (torch.tensor(blocks, dtype=torch.int64)[:, None] * self._block_size + offsets).flatten()[:tokens]
        routes = self._routes_SLK[slots.to(self._routes_SLK.device)].cpu().numpy()
        # Two equal experts of a token are the zeros of an empty record.
        if routes.shape[-1] > 1 and (routes[..., 0] == routes[..., 1]).any():
            raise RunError("policy.routing_replay=true: the engine computed tokens without recording their experts")
        return routes


class RequestRoutes:
    """Routes of the requests that ask for them, read just before vLLM frees a request's blocks."""

    def __init__(self, slots: SlotRoutes, scheduler: Scheduler) -> None:
        self._slots = slots
        self._scheduler = scheduler
        self._expected: dict[str, tuple[Hashable, int]] = {}
        """vLLM's id of each running request -> its key and the length of its prompt."""
        self._finished: dict[Hashable, tuple[int, Routes]] = {}
        self._free = FREE_REQUEST.bind(scheduler, self._read_and_free)

    def expect(self, key: Hashable, request_id: str, prompt_length: int) -> None:
        """Keep the routes of this request until `add_to` or `drop`. request_id: vLLM's id of the request."""
        self._expected[request_id] = key, prompt_length

    def add_to(self, key: Hashable, completion: Completion) -> Completion:
        """Return the completion of a finished request with its routes, if they were expected."""
        if key not in self._finished:
            return completion
        prompt_length, routes = self._finished.pop(key)
        computed = prompt_length + len(completion.token_ids) - 1
        assert len(routes) >= computed  # there are more if a stop string ends the completion within a step in flight
        return replace(completion, routes=routes[:computed])

    def drop(self, keys: Collection[Hashable] | None) -> None:
        """Forget the requests with these keys, which are about to be aborted; None: all requests."""

        def stays(key: Hashable) -> bool:
            return keys is not None and key not in keys

        self._expected = {name: entry for name, entry in self._expected.items() if stays(entry[0])}
        self._finished = {key: entry for key, entry in self._finished.items() if stays(key)}

    def _read_and_free(self, request: Request, *arguments: object, **options: object) -> object:
        FREE_REQUEST.hits += 1
        if request.request_id in self._expected:
            key, prompt_length = self._expected.pop(request.request_id)
            blocks = self._scheduler.kv_cache_manager.get_block_ids(request.request_id)[self._slots.group]
            self._finished[key] = prompt_length, self._slots.read(blocks, request.num_tokens - 1)
        return self._free(request, *arguments, **options)


def make_initialize(original: Callable[..., None], count_use: Callable[[], None]) -> Callable[..., None]:
    """Return vLLM's allocation of the KV cache, which then starts recording if requested, or raises RunError."""

    def initialize(worker: Any, cache: KVCacheConfig) -> None:
        original(worker, cache)
        if worker.vllm_config.additional_config.get(RECORD_ROUTES):
            count_use()
            worker.slot_routes = SlotRoutes(worker.get_model(), cache, worker.device)

    return initialize


def _attention_group(cache: KVCacheConfig) -> int:
    """Return the index of the cache group with full attention, in which each token has its own slot.

    Hybrid models have other groups as well. Raises RunError if there is no full-attention group.
    """
    specs = [group.kv_cache_spec for group in cache.kv_cache_groups]
    found = [index for index, spec in enumerate(specs) if isinstance(spec, FullAttentionSpec)]
    if not found:
        raise RunError("policy.routing_replay=true: needs a model with layers that attend to all tokens")
    return found[0]


def _router(runner: MoERunner) -> BaseRouter:
    """Return the layer's router. Raises RunError if the layer's kernel chooses experts itself."""
    if runner._quant_method.is_monolithic or not isinstance(runner.router, BaseRouter):
        kernel = type(runner._quant_method).__name__
        problem = f"the engine's kernel for experts ({kernel}) does not return its choice"
        raise RunError(f"policy.routing_replay=true: {problem}; set engine.args: {{moe_backend: triton}}")
    return runner.router
