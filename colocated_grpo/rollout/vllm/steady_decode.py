"""Decode steps without the scheduler's work per token.

vLLM's scheduler runs Python code for each token of each request; with hundreds of requests the GPU waits for the host.
While a batch only decodes, consecutive steps differ only in counters. `SteadyDecode` replaces the scheduler's two
methods: it builds such steps from arrays (`SteadyBatch`) and passes everything else to vLLM, such as prompts,
preemption and new requests.
"""

from collections import deque
from typing import cast

import numpy as np
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.sched.utils import check_stop
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec
from vllm.v1.outputs import ModelRunnerOutput

from colocated_grpo.rollout.vllm.patches import STEADY_SCHEDULE, STEADY_UPDATE
from colocated_grpo.rollout.vllm.steady_batch import Chunk, SteadyBatch, Step, StopTable, decodes_only, is_plain
from colocated_grpo.types import FinishReason

NOTHING = np.empty(0, dtype=np.float32)


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

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._vllm_schedule = STEADY_SCHEDULE.bind(scheduler, self.schedule)
        self._vllm_update = STEADY_UPDATE.bind(scheduler, self.update_from_output)
        self._is_async = isinstance(scheduler, AsyncScheduler)
        self._stops = StopTable(scheduler.vllm_config.model_config.get_vocab_size())
        self._template: SchedulerOutput | None = None
        """vLLM's last step, if it `decodes_only`."""
        self._batch: SteadyBatch | None = None
        self._in_flight: deque[Step] = deque()
        self._chunks: list[Chunk] = []

    def drain(self) -> list[Chunk]:
        """Tokens of steady steps since the last call. They precede the outputs that vLLM returned meanwhile."""
        chunks = list(self._chunks)
        self._chunks.clear()  # not a new list: the batch appends to this list
        return chunks

    def settle(self) -> list[Chunk]:
        """Bring every request's record up to the last received token, and `drain`."""
        if self._batch is not None:
            for row in self._batch.rows():
                self._batch.settle(row)
        return self.drain()

    def schedule(self, *arguments: bool) -> SchedulerOutput:
        # A waiting request can be admitted, or a running request was aborted.
        if self._batch is not None and (self._room_for_waiting() or self._batch.size != len(self._scheduler.running)):
            self._leave(self._batch)
        if self._batch is None:
            self._batch = self._enter()
        if self._batch is not None:
            step = self._batch.next_step()
            if step is not None:
                STEADY_SCHEDULE.hits += 1
                self._in_flight.append(step)
                return step.output
            self._leave(self._batch)
        output = self._vllm_schedule(*arguments)
        self._template = output if decodes_only(output) else None
        return output

    def update_from_output(self, scheduled: SchedulerOutput, output: ModelRunnerOutput) -> dict[int, EngineCoreOutputs]:
        if self._in_flight and self._in_flight[0].output is scheduled:
            STEADY_UPDATE.hits += 1
            step = self._in_flight.popleft()
            assert self._batch is not None  # leaving a batch clears the steps in flight
            for row in self._batch.receive(step, output):
                self._maybe_finish(self._batch, row)
            return {}
        outputs = self._vllm_update(scheduled, output)
        if self._batch is not None:
            self._batch.drop_finished()  # vLLM's last step was in flight when steady steps began
        return outputs

    def _room_for_waiting(self) -> bool:
        running, waiting = self._scheduler.get_request_counts()
        return waiting > 0 and running < self._scheduler.max_num_running_reqs

    def _enter(self) -> SteadyBatch | None:
        running, template = self._scheduler.running, self._template
        if template is None or self._room_for_waiting() or not all(map(is_plain, running)):
            return None
        return SteadyBatch(self._scheduler, template, self._stops, self._chunks)

    def _leave(self, batch: SteadyBatch) -> None:
        """Bring every request's record up to date, so that vLLM can receive the steps in flight."""
        for row in batch.rows():
            batch.settle(row)
            request, in_flight = batch.requests[row], batch.in_flight(row)
            request.num_computed_tokens += in_flight
            request.num_in_flight_tokens += in_flight
            if self._is_async:
                request.num_output_placeholders += in_flight
        self._batch = None
        self._in_flight.clear()

    def _maybe_finish(self, batch: SteadyBatch, row: int) -> None:
        """End the row's request if vLLM's own stop rule applies to its newest token."""
        request = batch.requests[row]
        # An earlier token ended the request while this step was in flight, or the request was aborted.
        if request.is_finished():
            return
        batch.settle(row)
        if check_stop(request, self._scheduler.max_model_len):
            finish_reason = cast(FinishReason, str(request.get_finished_reason()))
            self._chunks.append(Chunk(request.request_id, [], NOTHING, finish_reason))
            self._scheduler.kv_cache_manager.cache_blocks(request, request.num_computed_tokens)
            self._scheduler._free_request(request)
            self._scheduler.running.remove(request)
            batch.drop(row)
