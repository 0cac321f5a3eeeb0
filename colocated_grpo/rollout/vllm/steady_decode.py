"""Decode steps without the scheduler's work per token.

vLLM's scheduler runs Python code for each token of each request; with hundreds of requests the GPU waits for the host.
While a batch only decodes, consecutive steps differ only in counters. `SteadyDecode` replaces the scheduler's two
methods: it builds such steps from arrays (`SteadyBatch`) and passes everything else to vLLM, such as prompts,
preemption and new requests. On a GPU, `DeviceSteps` decodes several tokens of each request in one such step: their
inputs are on the device already.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import Tensor
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.sched.utils import check_stop
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from colocated_grpo.rollout.vllm import steady_batch
from colocated_grpo.rollout.vllm.patches import STEADY_REPLAY, STEADY_SAMPLE, STEADY_SCHEDULE, STEADY_UPDATE
from colocated_grpo.types import FinishReason

if TYPE_CHECKING:  # these modules need Triton, which is installed only with CUDA
    from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

NOTHING = np.empty(0, dtype=np.float32)
MOST_STEPS = 8
"""Decode steps that the device takes in one step of the scheduler, where it would otherwise wait for the host."""
HOST_BYTES = 8 << 30
"""Bytes that a device reads while the host prepares one step of the scheduler: 2.5 ms at 3.35 TB/s."""


def is_supported(scheduler: Scheduler) -> bool:
    """True for one full-attention cache group without speculation, connectors, pipeline or context parallelism.

    Latent attention is left to vLLM: no GPU has run steady steps with it.
    """
    groups = scheduler.kv_cache_config.kv_cache_groups
    return (
        len(groups) == 1
        and isinstance(groups[0].kv_cache_spec, FullAttentionSpec)
        and not isinstance(groups[0].kv_cache_spec, MLAAttentionSpec)
        and scheduler.num_spec_tokens == 0
        and scheduler.num_lookahead_tokens == 0
        and scheduler.connector is None
        and not scheduler.defer_block_free
        and scheduler.parallel_config.pipeline_parallel_size == 1
        and scheduler.parallel_config.decode_context_parallel_size == 1
    )


class SteadyDecode:
    """Replaces `schedule` and `update_from_output` of one scheduler.

    Tokens of steady steps are returned by `drain`, not by vLLM's step.
    """

    def __init__(self, scheduler: Scheduler, device: DeviceSteps | None = None) -> None:
        """device: runs several decode steps in one step of the scheduler. None: one token at a time."""
        self._scheduler = scheduler
        self._device = device
        self._vllm_schedule = STEADY_SCHEDULE.bind(scheduler, self.schedule)
        self._vllm_update = STEADY_UPDATE.bind(scheduler, self.update_from_output)
        self._is_async = isinstance(scheduler, AsyncScheduler)
        self._stops = steady_batch.StopTable(scheduler.vllm_config.model_config.get_vocab_size())
        self._all_ran = False
        """vLLM's last step computed tokens of every running request: its first model runner forgets the others."""
        self._batch: steady_batch.SteadyBatch | None = None
        self._in_flight: deque[steady_batch.Step] = deque()
        self._chunks: list[steady_batch.Chunk] = []

    def drain(self) -> list[steady_batch.Chunk]:
        """Tokens of steady steps since the last call. They precede the outputs that vLLM returned meanwhile."""
        chunks = list(self._chunks)
        self._chunks.clear()  # not a new list: the batch appends to this list
        return chunks

    def settle(self) -> list[steady_batch.Chunk]:
        """Bring every request's record up to the last received token, and `drain`."""
        if self._batch is not None:
            for row in self._batch.rows():
                self._batch.settle(row)
        return self.drain()

    def schedule(self, *arguments: bool) -> SchedulerOutput:
        step = None if self._changed() else self._next_step()
        if step is not None:
            STEADY_SCHEDULE.hits += 1
            self._in_flight.append(step)
            self._announce(step.tokens, plainly=self._batch is not None and self._batch.samples_plainly)
            return step.output
        if any(step.tokens > 1 for step in self._in_flight):
            # vLLM can receive only one token of a request: first these steps must be received.
            return SchedulerOutput.make_empty()
        self._leave()
        self._announce(1)
        output = self._vllm_schedule(*arguments)
        self._all_ran = len(output.num_scheduled_tokens) == len(self._scheduler.running)
        return output

    def update_from_output(
        self, scheduled: SchedulerOutput, output: ModelRunnerOutput | steady_batch.Sampled
    ) -> dict[int, EngineCoreOutputs]:
        if self._in_flight and self._in_flight[0].output is scheduled:
            STEADY_UPDATE.hits += 1
            step = self._in_flight.popleft()
            assert self._batch is not None  # leaving a batch clears the steps in flight
            for row, after in self._batch.receive(step, _sampled(output)):
                self._maybe_finish(self._batch, row, after)
            return {}
        outputs = self._vllm_update(scheduled, output)
        if self._batch is not None:
            self._batch.drop_finished()  # vLLM's last step was in flight when steady steps began
        return outputs

    def _announce(self, tokens: int, *, plainly: bool = False) -> None:
        if self._device is not None:
            self._device.tokens, self._device.plainly = tokens, plainly

    def _most_tokens(self, requests: int, cached: int) -> int:
        return 1 if self._device is None else self._device.most_tokens(requests, cached)

    def _changed(self) -> bool:
        """True if a waiting request can be admitted, or a request of the batch was aborted."""
        running, waiting = self._scheduler.get_request_counts()
        can_admit = waiting > 0 and running < self._scheduler.max_num_running_reqs
        return can_admit or (self._batch is not None and self._batch.size != running)

    def _next_step(self) -> steady_batch.Step | None:
        """Return the next step of the batch, which begins if the requests only decode; None if there is none."""
        if self._batch is None and self._all_ran and all(map(steady_batch.is_plain, self._scheduler.running)):
            self._batch = steady_batch.SteadyBatch(self._scheduler, self._stops, self._chunks, self._most_tokens)
        return None if self._batch is None else self._batch.next_step()

    def _leave(self) -> None:
        """Bring every request's record up to date, so that vLLM can receive the steps in flight."""
        if (batch := self._batch) is None:
            return
        for row in batch.rows():
            batch.settle(row)
            request, in_flight = batch.requests[row], batch.in_flight(row)
            request.num_computed_tokens += in_flight
            request.num_in_flight_tokens += in_flight
            if self._is_async:
                request.num_output_placeholders += in_flight
        self._batch = None
        self._in_flight.clear()

    def _maybe_finish(self, batch: steady_batch.SteadyBatch, row: int, after: int) -> None:
        """End the row's request if vLLM's own stop rule applies to the token before its newest `after` tokens."""
        request = batch.requests[row]
        # An earlier token ended the request while this step was in flight, or the request was aborted.
        if request.is_finished():
            return
        batch.settle(row, without=after)
        if check_stop(request, self._scheduler.max_model_len):
            finish_reason = cast(FinishReason, str(request.get_finished_reason()))
            self._chunks.append(steady_batch.Chunk(request.request_id, [], NOTHING, finish_reason))
            self._scheduler.kv_cache_manager.cache_blocks(request, request.num_computed_tokens)
            self._scheduler._free_request(request)
            self._scheduler.running.remove(request)
            batch.drop(row)


def _sampled(output: ModelRunnerOutput | steady_batch.Sampled) -> steady_batch.Sampled:
    if isinstance(output, steady_batch.Sampled):
        return output
    assert output.logprobs is not None
    return steady_batch.Sampled(
        output.req_ids, np.array(output.sampled_token_ids, dtype=np.int64), output.logprobs.logprobs[:, :1]
    )


class DeviceSteps:
    """Replaces `sample_tokens` of one model runner, to take several decode steps in one step of the scheduler.

    For the first step vLLM has prepared the inputs on the host and run the model. The inputs of each further step are
    the tokens that the former step sampled, at the next position: they need no work on the host but launches. A request
    that ends within these steps is computed to their end; the tokens after its end are dropped.
    """

    def __init__(self, runner: GPUModelRunner) -> None:
        self.tokens = 1
        """Tokens of each request in the step that is executed next."""
        self.plainly = False
        """True if only a temperature changes the distribution of all its requests."""
        self._runner = runner
        self._vllm_sample = STEADY_SAMPLE.bind(runner, self.sample_tokens)
        self._replay = STEADY_REPLAY.bind(runner.cudagraph_manager, self._note_graph)
        self._graph: BatchExecutionDescriptor | None = None
        self._largest = largest_batch(runner)
        (group,) = runner.kv_cache_config.kv_cache_groups
        self._token_bytes = (
            len(group.layer_names) * group.kv_cache_spec.page_size_bytes / group.kv_cache_spec.block_size
        )
        self._weight_bytes = sum(weight.nbytes for weight in runner.get_model().parameters())

    def most_tokens(self, requests: int, cached: int) -> int:
        """Return how many tokens of each request one step may have. cached: tokens in the caches of all requests.

        The choice follows no clock: with `deterministic: true` it is the same in each run.
        """
        read = self._weight_bytes + cached * self._token_bytes
        if read >= HOST_BYTES or requests > self._largest:
            return 1
        return MOST_STEPS if read < HOST_BYTES / 4 else MOST_STEPS // 2

    def _note_graph(self, graph: BatchExecutionDescriptor) -> Tensor:
        self._graph = graph
        return self._replay(graph)

    @torch.inference_mode()
    def sample_tokens(self, grammar_output: GrammarOutput | None) -> AsyncModelRunnerOutput | ModelRunnerOutput | None:
        state = self._runner.execute_model_state
        if self.tokens == 1 or state is None:
            return self._vllm_sample(grammar_output)
        STEADY_SAMPLE.hits += 1
        self._runner.execute_model_state = None
        batch, hidden = state.input_batch, state.hidden_states
        assert hidden is not None  # there is one pipeline stage
        take = self._take_plainly if self.plainly else self._take
        sampled = [take(hidden, batch)]
        while len(sampled) < self.tokens:
            sampled.append(take(self._forward(batch), batch))
        self._graph = None
        return SampledLater(batch.req_ids, sampled)

    def _take_plainly(self, hidden: Tensor, batch: InputBatch) -> tuple[Tensor, Tensor]:
        """Do the same as `_take` in fewer launches, for a step that samples `plainly`."""
        from colocated_grpo.rollout.vllm import sampling_kernels as kernels  # needs Triton

        runner, places = self._runner, batch.idx_mapping
        states, buffers, sampler = runner.req_states, runner.input_buffers, runner.sampler
        assert sampler is not None  # there is one pipeline stage
        logits = runner.get_model().compute_logits(hidden[: batch.num_reqs])  # pyrefly: ignore[not-callable]
        temperature, seeds = sampler.sampling_states.temperature.gpu, sampler.sampling_states.seeds.gpu
        ids_B, logprobs_B = kernels.sample(logits, places, temperature, seeds, buffers.positions, divide=True)
        requests = kernels.Requests(
            computed=states.num_computed_tokens.gpu,
            last_token=states.last_sampled_tokens,
            tokens=states.all_token_ids.gpu,
            lengths=states.total_len.gpu,
        )
        inputs = kernels.Inputs(token_ids=buffers.input_ids, positions=buffers.positions, lengths=buffers.seq_lens)
        kernels.advance(ids_B, places, requests, inputs)
        return ids_B[:, None], logprobs_B[:, None]

    def _take(self, hidden: Tensor, batch: InputBatch) -> tuple[Tensor, Tensor]:
        """Sample a token of each request, and make it the input of the next step.

        Returns ids and log-probabilities, both [requests, 1].
        """
        runner, requests = self._runner, batch.num_reqs
        output, num_sampled, num_rejected = runner.sample(hidden, batch, None)
        ids, logprobs = output.sampled_token_ids, output.logprobs_tensors
        assert logprobs is not None  # all requests ask for them
        runner.postprocess_sampled(batch.idx_mapping, ids, num_sampled, num_rejected, batch.query_start_loc)
        computed = runner.req_states.num_computed_tokens.gpu[batch.idx_mapping]
        batch.input_ids[:requests] = runner.req_states.last_sampled_tokens[batch.idx_mapping, 0]
        batch.positions[:requests] = computed
        torch.add(computed, 1, out=batch.seq_lens[:requests])
        return ids, logprobs.logprobs[:, :1]

    def _forward(self, batch: InputBatch) -> Tensor:
        """Run the model on the tokens that were just sampled. Returns the hidden states."""
        runner = self._runner
        batch.seq_lens_cpu_upper_bound[: batch.num_reqs] += 1
        tables, slots = runner.prepare_attn(batch)
        groups, cache = runner.attn_groups, runner.kv_cache_config
        runner.model_state.prepare_attn(batch, CUDAGraphMode.FULL, tables, slots, groups, cache)
        assert self._graph is not None  # `most_tokens`: the first step replayed it
        return self._replay(self._graph)


def largest_batch(runner: GPUModelRunner) -> int:
    """Return the most requests whose decode step is one CUDA graph, without further inputs that change; 0 for none."""
    backends = {group.backend.get_name() for groups in runner.attn_groups for group in groups}
    parallel, manager = runner.vllm_config.parallel_config, runner.cudagraph_manager
    if (
        manager is None
        or backends != {"FLASH_ATTN"}  # others were not tried: FlashInfer plans each step in one host buffer
        or runner.lora_config is not None
        or runner.supports_mm_inputs
        or getattr(runner.model_state, "rope_state", None) is not None
        or parallel.data_parallel_size > 1
        or parallel.enable_expert_parallel  # ranks have different weights, and would choose different steps
    ):
        return 0
    graphs = [graph for graph in manager.graphs if graph.cg_mode is CUDAGraphMode.FULL]
    return max((graph.num_reqs or 0 for graph in graphs if graph.uniform_token_count in (None, 1)), default=0)


class SampledLater(AsyncModelRunnerOutput):
    """`Sampled`, while it is copied to the host."""

    def __init__(self, names: list[str], sampled: Sequence[tuple[Tensor, Tensor]]) -> None:
        """sampled: ids and log-probabilities of each step, [requests, 1] on the device."""
        ids, logprobs = zip(*sampled, strict=True)
        self._names = names
        self._ids_RS = torch.cat(ids, 1).to("cpu", non_blocking=True)
        self._logprobs_RS = torch.cat(logprobs, 1).to("cpu", non_blocking=True)
        self._copied = torch.cuda.Event(blocking=True)
        self._copied.record()

    def get_output(self) -> steady_batch.Sampled:  # pyrefly: ignore[bad-override]: only `SteadyDecode` reads it
        self._copied.synchronize()
        return steady_batch.Sampled(self._names, self._ids_RS.numpy(), self._logprobs_RS.numpy())
