"""Two paths of a request through vLLM: around its output processor or, if stop strings need text, through it."""

import itertools
from collections.abc import Collection, Hashable, Sequence
from typing import NamedTuple, cast

import numpy as np
from vllm import RequestOutput, SamplingParams, TokensPrompt
from vllm.inputs.engine import TokensInput
from vllm.logprobs import Logprob
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine.llm_engine import LLMEngine

from colocated_grpo.rollout.engine import Finished, TokenDelta
from colocated_grpo.rollout.vllm.steady_batch import Chunk
from colocated_grpo.rollout.vllm.steady_decode import DeviceSteps, SteadyDecode, is_supported
from colocated_grpo.types import Completion, FinishReason


def scheduler_of(engine: LLMEngine) -> Scheduler:
    """Return the scheduler of an engine whose core runs in this process."""
    return engine.engine_core.engine_core.scheduler  # pyrefly: ignore[missing-attribute]


def _device_steps(engine: LLMEngine) -> DeviceSteps | None:
    """Return None if the model runner neither keeps the requests' state on the device nor replays CUDA graphs."""
    runner = engine.model_executor.driver_worker.worker.model_runner  # pyrefly: ignore[missing-attribute]
    return None if getattr(runner, "cudagraph_manager", None) is None else DeviceSteps(runner)


class EngineRequests:
    """Requests that run in one engine.

    Only requests with stop strings go through vLLM's output processor, which finds these in the text. It builds objects
    for every token of every request. With 512 requests, the processor took a seventh of the generation time: 7.7 s
    against 6.6 s for 236,000 tokens of a 0.6B model on one H200 (docs/results/generation_host_1xh200.json).
    """

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self._names = itertools.count(1)
        self._by_id: dict[str, _RunningRequest] = {}
        """Requests without stop strings, by vLLM's id."""
        self._with_stop: dict[str, _RunningRequest] = {}
        """Requests with stop strings, by name."""
        self._deltas: list[tuple[Hashable, TokenDelta]] = []
        scheduler = scheduler_of(engine)
        self._steady = SteadyDecode(scheduler, _device_steps(engine)) if is_supported(scheduler) else None

    def add(self, key: Hashable, token_ids: list[int], params: SamplingParams, adapter: LoRARequest | None) -> str:
        """Start a request and return vLLM's id of it. adapter: None for the engine's own weights."""
        name = str(next(self._names))
        running = _RunningRequest(key, [], [], params.output_kind is RequestOutputKind.DELTA)
        if params.stop:
            prompt = TokensPrompt(prompt_token_ids=token_ids)
            request_id = self._engine.add_request(name, prompt, params, lora_request=adapter)
            self._with_stop[name] = running
            return request_id
        processor = self._engine.input_processor
        request = processor.process_inputs(
            name,
            TokensInput(type="token", prompt_token_ids=token_ids),
            params,
            supported_tasks=self._engine.get_supported_tasks(),
            lora_request=adapter,
        )
        processor.assign_request_id(request)
        self._by_id[request.request_id] = running
        self._engine.engine_core.add_request(request)
        return request.request_id

    def step(self, policy_version: int) -> Finished:
        """Run one step and return the completions that finished in it, stamped with `policy_version`."""
        outputs = self._engine.engine_core.get_output().outputs
        self._deltas.clear()
        chunks = self._steady.drain() if self._steady is not None else []
        chunks += [_chunk(output) for output in outputs if output.request_id in self._by_id]
        if self._with_stop:
            processed = self._engine.output_processor.process_outputs(outputs)
            self._engine.engine_core.abort_requests(processed.reqs_to_abort)
            chunks += [_text_chunk(output) for output in cast("list[RequestOutput]", processed.request_outputs)]
        finished = []
        for chunk in chunks:
            if (request := self._append(chunk)) is not None and chunk.finish_reason is not None:
                finished.append((request.key, request.completion(chunk.finish_reason, policy_version)))
        return finished

    def _append(self, chunk: Chunk) -> "_RunningRequest | None":
        """Append the chunk's tokens to its request, and return it; None if the request was aborted in the meantime."""
        running = self._with_stop if chunk.request_id in self._with_stop else self._by_id
        if (request := running.get(chunk.request_id)) is None:
            return None
        request.token_ids.extend(chunk.token_ids)
        request.logprobs.append(chunk.logprobs)
        if chunk.finish_reason is not None:
            del running[chunk.request_id]
        elif request.streams:
            self._deltas.append((request.key, TokenDelta(list(chunk.token_ids), chunk.logprobs.tolist())))
        return request

    def deltas(self) -> list[tuple[Hashable, TokenDelta]]:
        """Tokens that the last step added to running requests of output kind DELTA."""
        return list(self._deltas)

    def sampled(self, policy_version: int) -> Finished:
        """Return the tokens of the running requests without stop strings, if they have any."""
        for chunk in self._steady.settle() if self._steady is not None else []:
            self._append(chunk)
        running = [request for request in self._by_id.values() if request.token_ids]
        return [(request.key, request.completion("abort", policy_version)) for request in running]

    def abort(self, keys: Collection[Hashable] | None) -> None:
        """Abort the requests with these keys; None: all requests."""
        by_path = (self._by_id, self._engine.engine_core.abort_requests), (self._with_stop, self._engine.abort_request)
        for running, abort in by_path:
            aborted = [name for name, request in running.items() if keys is None or request.key in keys]
            abort(aborted)
            for name in aborted:
                del running[name]

    def prompt_logprobs(
        self, token_ids: Sequence[int], params: SamplingParams, adapter: LoRARequest | None
    ) -> list[dict[int, float]]:
        """Log-probabilities for each of token_ids[1:], the token's own first. No request may be running."""
        prompt = TokensPrompt(prompt_token_ids=list(token_ids))
        self._engine.add_request(str(next(self._names)), prompt, params, lora_request=adapter)
        finished: list[RequestOutput] = []
        while not finished:
            outputs = self._engine.step()
            finished = [output for output in outputs if isinstance(output, RequestOutput) and output.finished]
        entries = cast(Sequence[dict[int, Logprob]], finished[0].prompt_logprobs)[1:]  # the first token has none
        return [
            {token: entry[token].logprob, **{other: value.logprob for other, value in entry.items()}}
            for entry, token in zip(entries, token_ids[1:], strict=True)
        ]


class _RunningRequest(NamedTuple):
    key: Hashable
    token_ids: list[int]
    logprobs: list[np.ndarray]
    """Log-probabilities of the sampled tokens, one array for each chunk."""
    streams: bool

    def completion(self, finish_reason: FinishReason, policy_version: int) -> Completion:
        return Completion(
            token_ids=self.token_ids,
            sampling_logprobs=np.concatenate(self.logprobs).tolist(),
            finish_reason=finish_reason,
            policy_version=policy_version,
        )


def _chunk(output: EngineCoreOutput) -> Chunk:
    assert output.new_logprobs is not None  # every request asks for the sampled token's log-probability
    finish_reason = None if output.finish_reason is None else cast(FinishReason, str(output.finish_reason))
    return Chunk(output.request_id, output.new_token_ids, output.new_logprobs.logprobs[:, 0], finish_reason)


def _text_chunk(output: RequestOutput) -> Chunk:
    """Return the new tokens of a request with stop strings. Without streaming, its only output has all tokens."""
    sample = output.outputs[0]
    token_ids = list(sample.token_ids)
    entries = cast(Sequence[dict[int, Logprob]], sample.logprobs)
    logprobs = [entry[token].logprob for entry, token in zip(entries, token_ids, strict=True)]
    finish_reason = cast(FinishReason, sample.finish_reason) if output.finished else None
    return Chunk(output.request_id, token_ids, np.array(logprobs), finish_reason)
