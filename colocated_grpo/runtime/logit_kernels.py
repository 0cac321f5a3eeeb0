"""Triton kernels that read rows of logits once: the sampler of decode steps, and statistics and gradients for training.

Sampler and statistics add up the exponentials of a row in one order, which depends on the vocabulary only. So a token's
log-probability has the same bits in both if its logits have, as `numerics: exact` needs. vLLM's own kernels read each
row of logits four times, and draw one Philox number for each token of the vocabulary.

Logits are [B, V] or [C, V]: B sequences or C tokens of a chunk, V vocabulary.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from colocated_grpo.runtime.triton_jit import jit

LANES = 1024
"""Lanes of one program. Each lane draws four tokens at a time, because Philox makes four numbers at once."""
DRAWS = 6
"""Draws of a lane: a row is divided into parts of 4 * DRAWS * LANES logits, one program each."""
SETTINGS = {"enable_fp_fusion": False}
"""No fused multiply-add: it skips a rounding, and the compiler would fuse other operations in each kernel."""
BLOCK = 4096
"""Logits of a row that the gradient reads at a time."""
PHILOX_ROUNDS = tl.constexpr(7)
"""The fewest rounds with which Philox4x32 passes BigCrush (Salmon et al., SC 2011)."""


def sample(
    logits: Tensor, rows: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor, *, divide: bool = False
) -> tuple[Tensor, Tensor]:
    """Draw from softmax(logits) by the Gumbel-max trick. Returns tokens [B] int64, and their log-probabilities [B].

    A row with temperature 0 gets its most likely token. The noise depends on the row's seed and position only.

    logits: [B, V]. rows: [B] indices into temperature and seeds. positions: [B]. divide: the logits are not divided by
    the temperature yet.
    """
    batch, parts, sizes = _sizes(logits)
    best_BP, top_BP, mass_BP = _outputs(3, (batch, parts), logits.device)
    token_BP = torch.empty(batch, parts, dtype=torch.int32, device=logits.device)
    found = best_BP, token_BP, top_BP, mass_BP
    _sample_part[(batch, parts)](
        logits, rows, temperature, seeds, positions, *found, *sizes,
        DIVIDE=divide, LANES=LANES, DRAWS=DRAWS, num_warps=8, **SETTINGS,
    )  # fmt: skip
    sampled_B = torch.empty(batch, dtype=torch.int64, device=logits.device)
    logprobs_B = torch.empty(batch, dtype=torch.float32, device=logits.device)
    _join_samples[(batch,)](
        logits, rows, temperature, *found, sampled_B, logprobs_B, logits.stride(0), parts,
        DIVIDE=divide, PARTS=triton.next_power_of_2(parts), num_warps=1, **SETTINGS,
    )  # fmt: skip
    return sampled_B, logprobs_B


def row_statistics(logits_CV: Tensor, targets_C: Tensor, temperature_C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return log p(target), entropy and log-sum-exp of logits / temperature, each [C] float32."""
    batch, parts, sizes = _sizes(logits_CV)
    found = _outputs(3, (batch, parts), logits_CV.device)
    _statistics_part[(batch, parts)](
        logits_CV, temperature_C, *found, *sizes, LANES=LANES, DRAWS=DRAWS, num_warps=8, **SETTINGS
    )
    logprobs_C, entropy_C, logsumexp_C = _outputs(3, (batch,), logits_CV.device)
    _join_statistics[(batch,)](
        logits_CV, temperature_C, *found, targets_C, logprobs_C, entropy_C, logsumexp_C, logits_CV.stride(0), parts,
        PARTS=triton.next_power_of_2(parts), num_warps=1, **SETTINGS,
    )  # fmt: skip
    return logprobs_C, entropy_C, logsumexp_C


def logit_gradient(
    logits_CV: Tensor, per_row: tuple[Tensor, Tensor, Tensor, Tensor], dtype: torch.dtype, softcap: float | None
) -> Tensor:
    """Return the gradient of sum(grad * log p(target)) with respect to the uncapped logits, [C, V] in `dtype`.

    The gradient overwrites the logits: a second matrix of their size would be the largest tensor of a training step.
    per_row: targets, temperatures, log-sum-exps and grad, each [C].
    """
    rows, vocabulary = logits_CV.shape
    out_CV = logits_CV.view(dtype)[:, :vocabulary]
    tensors = logits_CV, *per_row, out_CV
    sizes = vocabulary, logits_CV.stride(0), out_CV.stride(0)
    inverse = 0.0 if softcap is None else 1.0 / softcap
    _logit_gradient[(rows,)](*tensors, *sizes, inverse, BLOCK=BLOCK, num_warps=8)
    return out_CV


def _sizes(logits: Tensor) -> tuple[int, int, tuple[int, int]]:
    """Return rows, parts of a row, and the kernels' (vocabulary, row stride)."""
    batch, vocabulary = logits.shape
    return batch, triton.cdiv(vocabulary, 4 * DRAWS * LANES), (vocabulary, logits.stride(0))


def _outputs(count: int, shape: tuple[int, ...], device: torch.device) -> list[Tensor]:
    """Return float32 tensors, each aligned: Triton compiles a kernel again for arguments of another alignment."""
    return [torch.empty(shape, dtype=torch.float32, device=device) for _ in range(count)]


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
def _scaled(x, divisor, DIVIDE: tl.constexpr):
    # By the same division as vLLM's `apply_temperature`, which has divided the logits already if DIVIDE is False.
    return x.to(tl.float32) / divisor if DIVIDE else x.to(tl.float32)


@jit
def _read(row, at, vocabulary, divisor, DIVIDE: tl.constexpr):
    return _scaled(tl.load(row + at, mask=at < vocabulary, other=float("-inf")), divisor, DIVIDE)


@jit
def _read_four(row, start, vocabulary, divisor, DIVIDE: tl.constexpr, LANES: tl.constexpr):
    lane = start + tl.arange(0, LANES)
    x0 = _read(row, lane, vocabulary, divisor, DIVIDE)
    x1 = _read(row, lane + LANES, vocabulary, divisor, DIVIDE)
    x2 = _read(row, lane + 2 * LANES, vocabulary, divisor, DIVIDE)
    x3 = _read(row, lane + 3 * LANES, vocabulary, divisor, DIVIDE)
    return x0, x1, x2, x3, tl.maximum(tl.maximum(x0, x1), tl.maximum(x2, x3))


@jit
def _of_four(index: tl.constexpr, x0, x1, x2, x3):
    return x0 if index == 0 else (x1 if index == 1 else (x2 if index == 2 else x3))


@jit
def _divisor(temperature):
    return tl.where(temperature == 0.0, 1.0, temperature)


@jit
def _finite(peak):
    """Return the maximum to subtract. With only -inf so far (masked tokens), a difference would be NaN."""
    return tl.where(peak == float("-inf"), 0.0, peak)


@jit
def _sample_part(
    logits, rows, temperature, seeds, positions, best, token, top, mass, vocabulary, stride,
    DIVIDE: tl.constexpr, LANES: tl.constexpr, DRAWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    place = tl.load(rows + row).to(tl.int64)
    heat = tl.load(temperature + place)
    noisy, divisor = heat != 0.0, _divisor(heat)
    seed = tl.randint(tl.load(seeds + place), tl.load(positions + row))
    lane = tl.arange(0, LANES)
    # Each lane keeps a best token, a running maximum, and a sum relative to that maximum. Lanes are reduced at the end.
    best_score = tl.zeros([LANES], tl.float32)
    best_token = tl.zeros([LANES], tl.int32)
    peak = tl.full([LANES], float("-inf"), tl.float32)
    sums = tl.zeros([LANES], tl.float32)
    first = tl.program_id(1) * (4 * DRAWS * LANES)
    for start in range(first, tl.minimum(first + 4 * DRAWS * LANES, vocabulary), 4 * LANES):
        # The counter is the index of the four-token draw within the row, so that parts do not change the draws.
        bits0, bits1, bits2, bits3 = tl.randint4x(seed, start // 4 + lane, n_rounds=PHILOX_ROUNDS)
        x0, x1, x2, x3, most = _read_four(logits + row * stride, start, vocabulary, divisor, DIVIDE, LANES)
        new_peak = tl.maximum(peak, most)
        shrink = tl.exp(peak - _finite(new_peak))
        sums *= shrink
        best_score *= shrink
        for quarter in tl.static_range(4):
            x = _of_four(quarter, x0, x1, x2, x3)
            bits = _of_four(quarter, bits0, bits1, bits2, bits3)
            weight = tl.exp(x - _finite(new_peak))
            sums += weight
            score = _race(weight, bits, noisy)
            better = score > best_score
            best_token = tl.where(better, start + quarter * LANES + lane, best_token)
            best_score = tl.where(better, score, best_score)
        peak = new_peak
    # Continue with logarithms, which are comparable between lanes and parts with different peaks.
    best_score = tl.log(best_score) + _finite(peak)
    winner = tl.max(best_score, 0)
    highest = tl.max(peak, 0)
    out = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(best + out, winner)
    tl.store(token + out, tl.min(tl.where(best_score == winner, best_token, 0x7FFFFFFF), 0))
    tl.store(top + out, highest)
    tl.store(mass + out, tl.sum(sums * tl.exp(peak - _finite(highest)), 0))


@jit
def _statistics_part(
    logits, temperature, top, mass, moment, vocabulary, stride, LANES: tl.constexpr, DRAWS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    divisor = _divisor(tl.load(temperature + row))
    peak = tl.full([LANES], float("-inf"), tl.float32)
    sums = tl.zeros([LANES], tl.float32)
    moments = tl.zeros([LANES], tl.float32)
    first = tl.program_id(1) * (4 * DRAWS * LANES)
    for start in range(first, tl.minimum(first + 4 * DRAWS * LANES, vocabulary), 4 * LANES):
        x0, x1, x2, x3, most = _read_four(logits + row * stride, start, vocabulary, divisor, True, LANES)
        new_peak = tl.maximum(peak, most)
        shrink = tl.exp(peak - _finite(new_peak))
        sums *= shrink
        moments *= shrink
        for quarter in tl.static_range(4):
            x = _of_four(quarter, x0, x1, x2, x3)
            weight = tl.exp(x - _finite(new_peak))
            sums += weight
            moments += weight * _finite(x)
        peak = new_peak
    highest = tl.max(peak, 0)
    shrink = tl.exp(peak - _finite(highest))
    out = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(top + out, highest)
    tl.store(mass + out, tl.sum(sums * shrink, 0))
    tl.store(moment + out, tl.sum(moments * shrink, 0))


@jit
def _join_exponentials(top, mass, at, real):
    """Return the log-sum-exp of a row, the factor of each part's sums, and the row's sum after these factors."""
    peaks = tl.load(top + at, mask=real, other=float("-inf"))
    sums = tl.load(mass + at, mask=real, other=0.0)
    highest = tl.max(peaks, 0)
    shrink = tl.exp(peaks - _finite(highest))
    total = tl.sum(sums * shrink, 0)
    return highest + tl.log(total), shrink, total


@jit
def _join_samples(
    logits, rows, temperature, best, token, top, mass, sampled, logprobs, stride, parts,
    DIVIDE: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    real = part < parts
    at = row * parts + part
    score = tl.load(best + at, mask=real, other=float("-inf"))
    tokens = tl.load(token + at, mask=real, other=0x7FFFFFFF)
    winner = tl.min(tl.where(real & (score == tl.max(score, 0)), tokens, 0x7FFFFFFF), 0)
    tl.store(sampled + row, tl.cast(winner, tl.int64))
    logsumexp, _, _ = _join_exponentials(top, mass, at, real)
    divisor = _divisor(tl.load(temperature + tl.load(rows + row)))
    tl.store(logprobs + row, _scaled(tl.load(logits + row * stride + winner), divisor, DIVIDE) - logsumexp)


@jit
def _join_statistics(
    logits, temperature, top, mass, moment, targets, logprobs, entropies, logsumexps, stride, parts,
    PARTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    real = part < parts
    at = row * parts + part
    logsumexp, shrink, total = _join_exponentials(top, mass, at, real)
    moments = tl.load(moment + at, mask=real, other=0.0)
    target = tl.load(logits + row * stride + tl.load(targets + row))
    tl.store(logprobs + row, _scaled(target, _divisor(tl.load(temperature + row)), True) - logsumexp)
    tl.store(entropies + row, logsumexp - tl.sum(moments * shrink, 0) / total)
    tl.store(logsumexps + row, logsumexp)


@jit
def _logit_gradient(
    logits, targets, temperatures, logsumexps, grads, out, vocabulary, stride, out_stride, inverse_cap,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    out += row * out_stride
    scale = 1.0 / tl.load(temperatures + row)
    grad = tl.load(grads + row) * scale
    target = tl.load(targets + row)
    logsumexp = tl.load(logsumexps + row)
    lanes = tl.arange(0, BLOCK)
    for start in range(0, vocabulary, BLOCK):
        inside = start + lanes < vocabulary
        x = tl.load(logits + start + lanes, mask=inside, other=0.0)
        # d logp / d logit = (onehot - softmax) / temperature, times the slope of the cap.
        change = tl.where(start + lanes == target, 1.0, 0.0) - tl.exp(x * scale - logsumexp)
        slope = 1.0 - (x * inverse_cap) * (x * inverse_cap)
        # `out` overwrites the start of this row of logits. The barrier ensures that each block is read in full before
        # it is written. The output is at most as wide as the logits, so it never overwrites later blocks.
        tl.debug_barrier()
        tl.store(out + start + lanes, (grad * change * slope).to(out.dtype.element_ty), mask=inside)
