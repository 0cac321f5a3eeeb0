"""The requests of a batch that only decodes, as arrays with one row for each request.

vLLM's own record of a request is updated (`settle`) once for each cache block instead of once for each token. Rows are
created with the batch; later they are only removed.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from colocated_grpo.rollout.engine import only_temperature
from colocated_grpo.types import FinishReason

TOKENS_PER_SEARCH = 16
"""Tokens of a row between two searches for a repetition. One takes 0.02 to 0.05 ms of Python."""
MAX_STOP_LISTS = 64
"""Distinct stop lists in the table. A run has one or two lists, but clients of a server may send new lists."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """Decode steps in flight: `tokens` tokens for each of `rows`."""

    output: SchedulerOutput
    rows: np.ndarray
    names: list[str]
    tokens: int


class Sampled(NamedTuple):
    """Tokens that a `Step` sampled."""

    names: list[str]
    """Requests in the order of the rows, which is the model's."""
    token_ids_RS: np.ndarray
    """[requests, steps]"""
    logprobs_RS: np.ndarray


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


def is_plain(request: Request) -> bool:
    """True if the request needs only its next token and that token's log-probability, and does not stream."""
    params = request.sampling_params
    return (
        params is not None
        and params.logprobs == 0
        and params.prompt_logprobs is None
        and not params.stop
        and params.output_kind is not RequestOutputKind.DELTA
        and not request.use_structured_output
        and not request.has_encoder_inputs
        and not request.resumable
        and request.num_computed_tokens + 1 == request.num_tokens + request.num_output_placeholders
    )


class SteadyBatch:
    """Rows of running requests, and the steps built from them."""

    def __init__(
        self, scheduler: Scheduler, stops: StopTable, chunks: list[Chunk], most_tokens: Callable[[int, int], int]
    ) -> None:
        """chunks: the list to append settled tokens to.
        most_tokens: (requests of a `Step`, tokens in their caches) -> most tokens of each request."""
        self._scheduler = scheduler
        self._chunks = chunks
        self._most_tokens = most_tokens
        self.requests: list[Request] = list(scheduler.running)
        params: list[Any] = [request.sampling_params for request in self.requests]  # of `is_plain` requests, not None
        self.samples_plainly = all(map(only_temperature, params))
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
        self._detects_repetition = np.array([one.repetition_detection is not None for one in params], dtype=bool)

        rows = len(self.requests)
        self._alive = np.ones(rows, dtype=bool)
        self._steps = 0
        self._received = np.zeros(rows, dtype=np.int64)
        self._unsettled = np.zeros(rows, dtype=np.int64)
        """Tokens received and not yet settled: at most a block and two steps."""
        self._tokens = np.zeros((rows, 3 * self._block), dtype=np.int64)
        self._logprobs = np.zeros(self._tokens.shape, dtype=np.float32)
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
        """Return the next tokens of each unfinished row. None if all rows have finished or no cache block is free."""
        if self._stale or self._steps >= self._until:
            self._select_rows()
        scheduler, active = self._scheduler, self._active
        computed = self._computed[active] + self._steps
        free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        # At most a block, so that a row needs at most one new block.
        most = min(self._most_tokens(len(active), int(computed.sum())), self._block, self._until - self._steps)
        for tokens in (most, 1):
            full = np.flatnonzero(computed + tokens > self._capacity[active])
            if len(full) <= free:
                break
        if not len(active) or len(full) > free:
            return None
        scheduler.current_step += 1
        scheduler.kv_cache_manager.new_step_starts()
        blocks = self._no_blocks
        if len(full):
            blocks = list(blocks)
            for position in full.tolist():
                blocks[position] = self._new_block(int(active[position]), tokens)
        cached = replace(
            CachedRequestData.make_empty(),
            req_ids=self._active_names,
            new_block_ids=blocks,
            num_computed_tokens=computed.tolist(),
            num_output_tokens=(self._sampled[active] + self._steps).tolist(),
        )
        output = replace(
            SchedulerOutput.make_empty(),
            scheduled_cached_reqs=cached,
            num_scheduled_tokens=self._one_each,
            total_num_scheduled_tokens=len(active),
            finished_req_ids=scheduler.finished_req_ids,
            new_block_ids_to_zero=scheduler._get_new_block_ids_to_zero(),
        )
        scheduler.finished_req_ids = set()
        self._steps += tokens
        return Step(output=output, rows=active, names=self._active_names, tokens=tokens)

    def _new_block(self, row: int, tokens: int) -> tuple[list[int], ...] | None:
        """Allocate the cache block for the row's next tokens. Returns its ids, by cache group."""
        self.settle(row)
        request = self.requests[row]
        wanted = int(self._computed[row]) + self._steps + tokens
        blocks = self._scheduler.kv_cache_manager.allocate_slots(request, wanted - request.num_computed_tokens)
        assert blocks is not None  # next_step has checked that enough blocks are free
        self._capacity[row] = -(-wanted // self._block) * self._block
        return blocks.get_block_ids(allow_none=True)

    def settle(self, row: int, without: int = 0) -> None:
        """Append the row's received tokens, except the last `without`, to its request's record and to `chunks`."""
        count = int(self._unsettled[row]) - without
        if count:
            request, tokens = self.requests[row], self._tokens[row, :count].tolist()
            request.append_output_token_ids(tokens)
            request.num_computed_tokens += count
            self._chunks.append(Chunk(request.request_id, tokens, self._logprobs[row, :count].copy(), None))
            for kept in (self._tokens, self._logprobs):
                kept[row, :without] = kept[row, count : count + without].copy()
            self._unsettled[row] = without

    def receive(self, step: Step, sampled: Sampled) -> list[tuple[int, int]]:
        """Store a step's tokens. Returns (row, tokens after it) of each token that may be the last of its row.

        Dropped rows may be among them.
        """
        tokens_RS, logprobs_RS = sampled.token_ids_RS, sampled.logprobs_RS
        if sampled.names != step.names:
            position = {name: index for index, name in enumerate(sampled.names)}
            order = [position[name] for name in step.names]
            tokens_RS, logprobs_RS = tokens_RS[order], logprobs_RS[order]
        rows, count = step.rows, step.tokens
        places = rows[:, None], self._unsettled[rows, None] + np.arange(count)
        self._tokens[places] = tokens_RS
        self._logprobs[places] = logprobs_RS
        self._unsettled[rows] += count
        self._received[rows] += count
        ends_RS = self._stop_table[self._stop_row[rows, None], tokens_RS]
        searched = self._detects_repetition[rows] & (self._received[rows] % TOKENS_PER_SEARCH < count)
        ends_RS[:, -1] |= searched | (self._received[rows] == self._limit[rows])
        found, at = np.nonzero(ends_RS)
        return list(zip(rows[found].tolist(), (count - 1 - at).tolist(), strict=True))
