"""Triton kernels of a decode step outside the model: they sample tokens, and make them the inputs of the next step.

A token and its log-probability take one pass over the logits. vLLM's own kernels read each row of logits four times
and draw one Philox number for each token of the vocabulary. Times within a step:
docs/results/decode_kernels_1xh200.json. Times of single launches: decode_launches_1xh200.json there.
"""

import weakref
from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors

from colocated_grpo.runtime.triton_jit import jit

LANES = 1024
"""Lanes of one part. Each lane draws four tokens at a time, because Philox makes four numbers at once."""
PROGRAMS = 1024
"""Programs that fill the device. Few rows are split into more parts to reach this number."""
MOST_PARTS = 16
PHILOX_ROUNDS = tl.constexpr(7)
"""The fewest rounds with which Philox4x32 passes BigCrush (Salmon et al., SC 2011)."""
UNPLAIN = "max_per_req_token_ids", "logits_mode"
"""Options of vLLM's `compute_topk_scores` that ask for more than the sampled token's log-probability."""


class _LastSample:
    """Logits of the last sampling call, and the log-probability of each sampled token.

    vLLM scores the sampled tokens right after sampling, from the same tensor, so one entry is enough. The tensor is
    recognised by identity: vLLM samples under inference_mode, where tensors have no version counter that would show a
    change in place. Such a change would appear in mismatch/plain, which stops the run.
    """

    logits: weakref.ref[Tensor] | None = None
    logprobs_B: Tensor | None = None

    @classmethod
    def logprobs_of(cls, logits: Tensor) -> Tensor | None:
        """Return the log-probability of each token; None if the last sampling call used other logits."""
        return cls.logprobs_B if cls.logits is not None and cls.logits() is logits else None


def make_gumbel_sample(vllm_sample: Callable[..., object], count_use: Callable[[], None]) -> Callable[..., object]:
    """Return the sampler's `gumbel_sample` with this kernel. The logits are already divided by the temperature."""

    def gumbel_sample(
        logits: Tensor, rows: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor, **options: object
    ) -> object:
        if any(isinstance(value, Tensor) or value for value in options.values()):  # speculative decoding, 64-bit noise
            return vllm_sample(logits, rows, temperature, seeds, positions, **options)
        count_use()
        sampled_B, logprobs_B = sample(logits, rows, temperature, seeds, positions)
        _LastSample.logits, _LastSample.logprobs_B = weakref.ref(logits), logprobs_B
        return sampled_B

    return gumbel_sample


def make_topk_scores(vllm_scores: Callable[..., object], count_use: Callable[[], None]) -> Callable[..., object]:
    """Return the sampler's `compute_topk_scores`, which then reuses the log-probabilities computed by sampling.

    Applies to requests for the sampled token's log-probability only. The token's rank is returned as 0; the trainer
    never reads the rank.
    """

    def topk_scores(logits: Tensor, num_logprobs: int, sampled: Tensor, *others: object, **options: object) -> object:
        logprobs_B = _LastSample.logprobs_of(logits)
        unplain = num_logprobs or others[:1] != (None,) or any(options.get(name) for name in UNPLAIN)
        if unplain or logprobs_B is None:
            return vllm_scores(logits, num_logprobs, sampled, *others, **options)
        count_use()
        return LogprobsTensors(sampled.view(-1, 1), logprobs_B.view(-1, 1), torch.zeros_like(sampled))

    return topk_scores


def sample(
    logits: Tensor, rows: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor, *, divide: bool = False
) -> tuple[Tensor, Tensor]:
    """Draw from softmax(logits) by the Gumbel-max trick. Returns tokens [B] int64, and their log-probabilities [B].

    A row with temperature 0 gets its most likely token. The noise depends on the row's seed and position only.

    logits: [B, V]. rows: [B] indices into temperature and seeds. positions: [B]. divide: the logits are not divided by
    the temperature yet.
    """
    batch, vocabulary = logits.shape
    parts = min(MOST_PARTS, max(1, PROGRAMS // batch))
    size = triton.cdiv(triton.cdiv(vocabulary, parts), 4 * LANES) * 4 * LANES
    best_BP, token_BP, top_BP, mass_BP = (
        torch.empty(batch, parts, dtype=dtype, device=logits.device)
        for dtype in (torch.float32, torch.int32, torch.float32, torch.float32)
    )
    _sample_part[(batch, parts)](
        logits, rows, temperature, seeds, positions, best_BP, token_BP, top_BP, mass_BP,
        vocabulary, logits.stride(0), size, DIVIDE=divide, LANES=LANES, num_warps=8,
    )  # fmt: skip
    sampled_B = torch.empty(batch, dtype=torch.int64, device=logits.device)
    logprobs_B = torch.empty(batch, dtype=torch.float32, device=logits.device)
    _join_parts[(batch,)](
        logits, rows, temperature, best_BP, token_BP, top_BP, mass_BP, sampled_B, logprobs_B,
        logits.stride(0), parts, DIVIDE=divide, PARTS=MOST_PARTS, num_warps=1,
    )  # fmt: skip
    return sampled_B, logprobs_B


class Requests(NamedTuple):
    """vLLM's record of all requests on the device, one entry or row for each."""

    computed: Tensor
    """Tokens in the KV cache."""
    last_token: Tensor
    tokens: Tensor
    """[requests, tokens of the longest]"""
    lengths: Tensor


class Inputs(NamedTuple):
    """What the model's CUDA graphs read, one entry for each request of a decode step."""

    token_ids: Tensor
    positions: Tensor
    lengths: Tensor


def advance(sampled_B: Tensor, rows: Tensor, requests: Requests, inputs: Inputs) -> None:
    """Append each sampled token to its request, and make it the request's input of the next decode step.

    rows: [B] indices of the requests.
    """
    _advance[(len(sampled_B),)](sampled_B, rows, *requests, *inputs, requests.tokens.stride(0), num_warps=1)


@jit
def _race(weight, bits, noisy):
    """Return weight / E, where E ~ Exp(1) comes from 32 random bits. The argmax is then a draw proportional to weight.

    E = -log(1 - u). Small values of E decide the draw. Near 0 the float32 logarithm is too coarse, so a series is used
    there.
    """
    u = (bits.to(tl.uint32, bitcast=True).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    exponential = tl.where(u < 0.01, u * (1.0 + u * (0.5 + u * (0.33333333 + u * 0.25))), -tl.log(1.0 - u))
    return tl.where(noisy, weight / tl.maximum(exponential, 1e-30), weight)


@jit
def _read(row, at, vocabulary, scale):
    return tl.load(row + at, mask=at < vocabulary, other=float("-inf")).to(tl.float32) * scale


@jit
def _scale_of(temperature, DIVIDE: tl.constexpr):
    return 1.0 / tl.where(temperature == 0.0, 1.0, temperature) if DIVIDE else 1.0


@jit
def _sample_part(
    logits, rows, temperature, seeds, positions, best, token, top, mass,
    vocabulary, stride, size, DIVIDE: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    place = tl.load(rows + row).to(tl.int64)
    heat = tl.load(temperature + place)
    noisy, scale = heat != 0.0, _scale_of(heat, DIVIDE)
    seed = tl.randint(tl.load(seeds + place), tl.load(positions + row))
    lane = tl.arange(0, LANES)
    # Each lane keeps a best token, a running maximum, and a sum relative to that maximum. Lanes are reduced at the end.
    best_score = tl.zeros([LANES], tl.float32)
    best_token = tl.zeros([LANES], tl.int32)
    peak = tl.full([LANES], float("-inf"), tl.float32)
    sums = tl.zeros([LANES], tl.float32)
    first = part * size
    for start in range(first, tl.minimum(first + size, vocabulary), 4 * LANES):
        # The counter is the index of the four-token draw within the row, so that parts do not change the draws.
        bits0, bits1, bits2, bits3 = tl.randint4x(seed, start // 4 + lane, n_rounds=PHILOX_ROUNDS)
        x0 = _read(logits + row * stride, start + lane, vocabulary, scale)
        x1 = _read(logits + row * stride, start + LANES + lane, vocabulary, scale)
        x2 = _read(logits + row * stride, start + 2 * LANES + lane, vocabulary, scale)
        x3 = _read(logits + row * stride, start + 3 * LANES + lane, vocabulary, scale)
        new_peak = tl.maximum(peak, tl.maximum(tl.maximum(x0, x1), tl.maximum(x2, x3)))
        # A lane with only -inf so far (masked tokens) would give NaN.
        safe = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        shrink = tl.exp(peak - safe)
        sums *= shrink
        best_score *= shrink
        for quarter in tl.static_range(4):
            x = x0 if quarter == 0 else (x1 if quarter == 1 else (x2 if quarter == 2 else x3))
            bits = bits0 if quarter == 0 else (bits1 if quarter == 1 else (bits2 if quarter == 2 else bits3))
            weight = tl.exp(x - safe)
            sums += weight
            score = _race(weight, bits, noisy)
            better = score > best_score
            best_token = tl.where(better, start + quarter * LANES + lane, best_token)
            best_score = tl.where(better, score, best_score)
        peak = new_peak
    # Continue with logarithms, which are comparable between lanes and parts with different peaks.
    best_score = tl.log(best_score) + tl.where(peak == float("-inf"), 0.0, peak)
    winner = tl.max(best_score, 0)
    highest = tl.max(peak, 0)
    safe = tl.where(highest == float("-inf"), 0.0, highest)
    out = row * tl.num_programs(1) + part
    tl.store(best + out, winner)
    tl.store(token + out, tl.min(tl.where(best_score == winner, best_token, 0x7FFFFFFF), 0))
    tl.store(top + out, highest)
    tl.store(mass + out, tl.sum(sums * tl.exp(peak - safe), 0))


@jit
def _join_parts(
    logits, rows, temperature, best, token, top, mass, sampled, logprobs,
    stride, parts, DIVIDE: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    real = part < parts
    at = row * parts + part
    score = tl.load(best + at, mask=real, other=float("-inf"))
    tokens = tl.load(token + at, mask=real, other=0x7FFFFFFF)
    winner = tl.max(score, 0)
    winner_token = tl.min(tl.where(real & (score == winner), tokens, 0x7FFFFFFF), 0)
    tl.store(sampled + row, tl.cast(winner_token, tl.int64))
    peaks = tl.load(top + at, mask=real, other=float("-inf"))
    sums = tl.load(mass + at, mask=real, other=0.0)
    highest = tl.max(peaks, 0)
    safe = tl.where(highest == float("-inf"), 0.0, highest)
    logsumexp = highest + tl.log(tl.sum(sums * tl.exp(peaks - safe), 0))
    scale = _scale_of(tl.load(temperature + tl.load(rows + row)), DIVIDE)
    tl.store(logprobs + row, tl.load(logits + row * stride + winner_token).to(tl.float32) * scale - logsumexp)


@jit
def _advance(sampled, rows, computed, last_token, tokens, lengths, token_ids, positions, input_lengths, stride):
    row = tl.program_id(0)
    request = tl.load(rows + row).to(tl.int64)
    token = tl.load(sampled + row)
    length = tl.load(lengths + request)
    tl.store(tokens + request * stride + length, token.to(tokens.dtype.element_ty))
    tl.store(lengths + request, length + 1)
    tl.store(last_token + request, token)
    position = tl.load(computed + request) + 1
    tl.store(computed + request, position)
    tl.store(token_ids + row, token.to(token_ids.dtype.element_ty))
    tl.store(positions + row, position.to(positions.dtype.element_ty))
    tl.store(input_lengths + row, position + 1)
