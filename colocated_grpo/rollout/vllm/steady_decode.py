"""Decoding without the scheduler's work for every token.

vLLM's scheduler runs Python code for each token of each request, so that with hundreds of requests the GPU may have to
wait for the host. While a batch only decodes, consecutive steps differ in counters alone. `SteadyDecode` stands
before the scheduler's two methods, answers those steps from arrays (`SteadyBatch`), and leaves everything else to vLLM:
prompts, preemption, newly admitted requests.
"""

from __future__ import annotations

from collections import deque

import numpy as np
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.sched.utils import check_stop
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import ModelRunnerOutput

from colocated_grpo.rollout.vllm.steady_batch import Chunk, SteadyBatch, Step, StopTable, decodes_only, is_plain

NOTHING = np.empty(0, dtype=np.float32)


def is_supported(scheduler: Scheduler) -> bool:
    """Whether the cache and the settings are the plain ones that steady steps are made for."""
    groups = scheduler.kv_cache_config.kv_cache_groups
    return (
        len(groups) == 1
        and isinstance(groups[0].kv_cache_spec, FullAttentionSpec)
        and scheduler.num_spec_tokens == 0
        and scheduler.num_lookahead_tokens == 0
        and scheduler.connector is None
        and not scheduler.defer_block_free
        and scheduler.parallel_config.pipeline_parallel_size == 1
        and scheduler.parallel_config.decode_context_parallel_size == 1
    )


class SteadyDecode:
    """Takes the place of `scheduler.schedule` and `scheduler.update_from_output`.

    What steady steps sample comes out of `take` instead of vLLM's step.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._vllm_schedule, self._vllm_update = scheduler.schedule, scheduler.update_from_output
        scheduler.schedule, scheduler.update_from_output = self.schedule, self.update_from_output
        self._is_async = isinstance(scheduler, AsyncScheduler)
        self._stops = StopTable(scheduler.vllm_config.model_config.get_vocab_size())
        self._template: SchedulerOutput | None = None
        """vLLM's own last step, if it decoded one token for each of its requests and did nothing else."""
        self._batch: SteadyBatch | None = None
        self._under_way: deque[Step] = deque()
        self._chunks: list[Chunk] = []

    def take(self) -> list[Chunk]:
        """What was sampled since the last call; it precedes what vLLM itself returned meanwhile."""
        chunks = list(self._chunks)
        self._chunks.clear()  # the batch appends to this very list
        return chunks

    def schedule(self, *arguments: bool) -> SchedulerOutput:
        if self._batch is not None and self._is_disturbed(self._batch):
            self._leave(self._batch)
        if self._batch is None:
            self._batch = self._enter()
        if self._batch is not None:
            step = self._batch.next_step()
            if step is not None:
                self._under_way.append(step)
                return step.output
            self._leave(self._batch)
        output = self._vllm_schedule(*arguments)
        self._template = output if decodes_only(output) else None
        return output

    def update_from_output(self, scheduled: SchedulerOutput, output: ModelRunnerOutput) -> dict[int, EngineCoreOutputs]:
        if self._under_way and self._under_way[0].output is scheduled:
            step = self._under_way.popleft()
            for row in self._batch.receive(step, output):
                self._maybe_finish(self._batch, row)
            return {}
        outputs = self._vllm_update(scheduled, output)
        if self._batch is not None:
            self._batch.drop_finished()  # vLLM's last step was still under way when steady steps began
        return outputs

    def _room_for_waiting(self) -> bool:
        running, waiting = self._scheduler.get_request_counts()
        return waiting > 0 and running < self._scheduler.max_num_running_reqs

    def _is_disturbed(self, batch: SteadyBatch) -> bool:
        """Whether a request has come, or one has been aborted."""
        return self._room_for_waiting() or batch.size != len(self._scheduler.running)

    def _enter(self) -> SteadyBatch | None:
        running, template = self._scheduler.running, self._template
        if template is None or self._room_for_waiting() or not all(map(is_plain, running)):
            return None
        return SteadyBatch(self._scheduler, template, self._stops, self._chunks)

    def _leave(self, batch: SteadyBatch) -> None:
        """Bring every request's record to where vLLM would have it; steps under way become vLLM's own."""
        for row in batch.rows():
            batch.settle(row)
            request, under_way = batch.requests[row], batch.under_way(row)
            request.num_computed_tokens += under_way
            request.num_in_flight_tokens += under_way
            if self._is_async:
                request.num_output_placeholders += under_way
        self._batch = None
        self._under_way.clear()

    def _maybe_finish(self, batch: SteadyBatch, row: int) -> None:
        """Let vLLM's own rule decide whether the newest token of the row is its last."""
        request = batch.requests[row]
        if request.is_finished():  # this token was under way when an earlier one ended it, or it has been aborted
            return
        batch.settle(row)
        if check_stop(request, self._scheduler.max_model_len):
            self._chunks.append(Chunk(request.request_id, [], NOTHING, str(request.get_finished_reason())))
            self._scheduler.kv_cache_manager.cache_blocks(request, request.num_computed_tokens)
            self._scheduler._free_request(request)
            self._scheduler.running.remove(request)
            batch.drop(row)
