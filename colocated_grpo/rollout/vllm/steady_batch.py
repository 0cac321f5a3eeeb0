"""The requests of a batch that only decodes, as arrays with one row for each request.

vLLM's own record of a request is updated (`settle`) once for each cache block instead of once for each token. Rows are
created with the batch; later they are only removed.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from colocated_grpo.types import FinishReason

MAX_STOP_LISTS = 64
"""Distinct stop lists in the table. A run has one or two lists, but clients of a server may send new lists."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """A decode step in flight: one token for each of `rows`."""

    output: SchedulerOutput
    rows: np.ndarray
    names: list[str]


class Chunk(NamedTuple):
    """Consecutive tokens of one request."""

    request_id: str
    token_ids: list[int]
    logprobs: np.ndarray
    finish_reason: FinishReason | None
    """None: the request is still running."""


class StopTable:
    """Stop tokens as booleans: one row over the vocabulary for each distinct stop list."""

    def __init__(self, vocabulary: int) -> None:
        self._row_of: dict[tuple[int, ...], int] = {}
        self.table = np.zeros((0, vocabulary), dtype=bool)

    def rows(self, requests: Sequence[Request]) -> list[int]:
        """Return each request's row in `table`. Adds rows for new stop lists, and may renumber earlier rows."""
        if len(self.table) > MAX_STOP_LISTS:
            self._row_of.clear()
            self.table = self.table[:0]
        lists = [_stop_tokens(request) for request in requests]
        new = {tokens: None for tokens in lists if tokens not in self._row_of}
        if new:
            rows = np.zeros((len(new), self.table.shape[1]), dtype=bool)
            for row, tokens in zip(rows, new, strict=True):
                row[list(tokens)] = True
                self._row_of[tokens] = len(self._row_of)
            self.table = np.vstack([self.table, rows])
        return [self._row_of[tokens] for tokens in lists]


def _stop_tokens(request: Request) -> tuple[int, ...]:
    params = request.sampling_params
    assert params is not None  # generation requests have sampling parameters
    own = params.stop_token_ids or ()
    return tuple(own) if params.eos_token_id is None else (params.eos_token_id, *own)


def decodes_only(step: SchedulerOutput) -> bool:
    """True if the step only decodes one token for each request of the previous step."""
    return (
        0 < step.total_num_scheduled_tokens == len(step.num_scheduled_tokens)
        and not step.scheduled_new_reqs
        and not step.scheduled_cached_reqs.resumed_req_ids
        and not step.scheduled_cached_reqs.all_token_ids
        and not step.preempted_req_ids
        and not step.kv_cache_block_copies
    )


def is_plain(request: Request) -> bool:
    """True if the request needs only its next token and that token's log-probability, and does not stream."""
    params = request.sampling_params
    return (
        params is not None
        and params.logprobs == 0
        and params.prompt_logprobs is None
        and params.repetition_detection is None
        and not params.stop
        and params.output_kind is not RequestOutputKind.DELTA
        and not request.use_structured_output
        and not request.has_encoder_inputs
        and not request.resumable
        and request.num_computed_tokens + 1 == request.num_tokens + request.num_output_placeholders
    )


class SteadyBatch:
    """Rows of running requests, and the steps built from them."""

    def __init__(self, scheduler: Scheduler, template: SchedulerOutput, stops: StopTable, chunks: list[Chunk]) -> None:
        """template: a step of vLLM's scheduler that `decodes_only`. chunks: the list to append settled tokens to."""
        self._scheduler = scheduler
        self._template = template
        self._chunks = chunks
        self.requests: list[Request] = list(scheduler.running)
        self._names = [request.request_id for request in self.requests]
        self._block = scheduler.kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size

        def column(values: Iterable[int]) -> np.ndarray:
            return np.fromiter(values, dtype=np.int64, count=len(self.requests))

        # All counts include tokens in flight.
        ahead = column(request.num_output_placeholders for request in self.requests)
        self._computed = column(request.num_computed_tokens for request in self.requests)
        self._sampled = column(request.num_output_tokens for request in self.requests) + ahead
        tokens = column(request.num_tokens for request in self.requests) + ahead
        longest = column(request.max_tokens for request in self.requests)
        self._limit = np.minimum(longest - self._sampled, scheduler.max_model_len - tokens)
        """Remaining steps of each row."""
        self._capacity = -(-self._computed // self._block) * self._block
        """Tokens that the row's cache blocks hold."""
        self._stop_row = column(stops.rows(self.requests))
        self._stop_table = stops.table

        rows = len(self.requests)
        self._alive = np.ones(rows, dtype=bool)
        self._steps = 0
        self._received = np.zeros(rows, dtype=np.int64)
        self._unsettled = np.zeros(rows, dtype=np.int64)
        """Tokens received and not yet settled: at most a block and the tokens in flight."""
        self._tokens = np.zeros((rows, self._block + 2), dtype=np.int64)
        self._logprobs = np.zeros((rows, self._block + 2), dtype=np.float32)
        self._select_rows()

    @property
    def size(self) -> int:
        return int(self._alive.sum())

    def rows(self) -> list[int]:
        return np.flatnonzero(self._alive).tolist()

    def in_flight(self, row: int) -> int:
        """Tokens of the row that are scheduled and not yet received."""
        return int(min(self._steps, self._limit[row]) - self._received[row])

    def drop(self, row: int) -> None:
        self._alive[row] = False
        self._stale = True

    def drop_finished(self) -> None:
        for row in self.rows():
            if self.requests[row].is_finished():
                self.drop(row)

    def _select_rows(self) -> None:
        """Fix the rows of the next steps. Valid until a row is dropped or takes its last step."""
        self._active = np.flatnonzero(self._alive & (self._limit > self._steps))
        self._active_names = [self._names[row] for row in self._active]
        self._one_each = dict.fromkeys(self._active_names, 1)
        self._no_blocks: list[tuple[list[int], ...] | None] = [None] * len(self._active)
        self._until = int(self._limit[self._active].min(initial=np.iinfo(np.int64).max))
        self._stale = False

    def next_step(self) -> Step | None:
        """Return a step with one token per unfinished row. None if all rows have finished or no cache block is free."""
        if self._stale or self._steps >= self._until:
            self._select_rows()
        scheduler, active = self._scheduler, self._active
        computed = self._computed[active] + self._steps
        full = np.flatnonzero(computed >= self._capacity[active])
        if not len(active) or len(full) > scheduler.kv_cache_manager.block_pool.get_num_free_blocks():
            return None
        scheduler.current_step += 1
        scheduler.kv_cache_manager.new_step_starts()
        blocks = self._no_blocks
        if len(full):
            blocks = list(blocks)
            for position in full.tolist():
                blocks[position] = self._new_block(int(active[position]))
        cached = replace(
            self._template.scheduled_cached_reqs,
            req_ids=self._active_names,
            new_block_ids=blocks,
            num_computed_tokens=computed.tolist(),
            num_output_tokens=(self._sampled[active] + self._steps).tolist(),
        )
        output = replace(
            self._template,
            scheduled_cached_reqs=cached,
            num_scheduled_tokens=self._one_each,
            total_num_scheduled_tokens=len(active),
            finished_req_ids=scheduler.finished_req_ids,
            new_block_ids_to_zero=scheduler._get_new_block_ids_to_zero(),
        )
        scheduler.finished_req_ids = set()
        self._steps += 1
        return Step(output=output, rows=active, names=self._active_names)

    def _new_block(self, row: int) -> tuple[list[int], ...] | None:
        """Allocate the cache block for the row's next token. Returns its ids, by cache group."""
        self.settle(row)
        request = self.requests[row]
        wanted = int(self._computed[row]) + self._steps + 1
        blocks = self._scheduler.kv_cache_manager.allocate_slots(request, wanted - request.num_computed_tokens)
        assert blocks is not None  # next_step has checked that enough blocks are free
        self._capacity[row] = -(-wanted // self._block) * self._block
        return blocks.get_block_ids(allow_none=True)

    def settle(self, row: int) -> None:
        """Append the row's received tokens to its request's record and to `chunks`, ignoring steps in flight."""
        count = int(self._unsettled[row])
        if count:
            request, tokens = self.requests[row], self._tokens[row, :count].tolist()
            request.append_output_token_ids(tokens)
            request.num_computed_tokens += count
            self._chunks.append(Chunk(request.request_id, tokens, self._logprobs[row, :count].copy(), None))
            self._unsettled[row] = 0

    def receive(self, step: Step, output: ModelRunnerOutput) -> list[int]:
        """Store a step's tokens. Returns the rows that may end with this token; dropped rows may be among them."""
        assert output.logprobs is not None
        tokens = np.array(output.sampled_token_ids, dtype=np.int64)[:, 0]
        logprobs = output.logprobs.logprobs[:, 0]
        if output.req_ids != step.names:
            order = [output.req_id_to_index[name] for name in step.names]
            tokens, logprobs = tokens[order], logprobs[order]
        rows = step.rows
        column = self._unsettled[rows]
        self._tokens[rows, column] = tokens
        self._logprobs[rows, column] = logprobs
        self._unsettled[rows] += 1
        self._received[rows] += 1
        last = self._stop_table[self._stop_row[rows], tokens] | (self._received[rows] == self._limit[rows])
        return rows[last].tolist()
