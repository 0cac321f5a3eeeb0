"""Every objective against hand arithmetic, and the properties that hold for all of them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from colocated_grpo.losses.inputs import Counts
from colocated_grpo.losses.objectives import make_denominator, make_loss
from colocated_grpo.metrics import Metrics, reduce
from colocated_grpo.settings.losses import (
    BNPOConfig,
    CISPOConfig,
    CorrectionConfig,
    DAPOConfig,
    DrGRPOConfig,
    GRPOConfig,
    GSPOConfig,
    KLConfig,
    LossConfig,
)
from tests.support.loss_inputs import ALL_LOSSES, BUSY_SETTINGS, Example, loss_and_gradient, random_inputs

OFF = CorrectionConfig(mode="off")


def make_inputs(
    ratios: list[float],
    advantages: list[float],
    sequence: list[int] | None = None,
    mask: list[bool] | None = None,
    mismatch: list[float] | None = None,
    reference: list[float] | None = None,
) -> Example:
    """Make tokens from ratios: policy / old, old / sampler (`mismatch`), reference / policy; old is always 1/2."""
    old_N = torch.full((len(ratios),), math.log(0.5))
    logprobs_N = (old_N + torch.tensor(ratios).log()).requires_grad_()
    sequence_N = torch.tensor(sequence or [0] * len(ratios))
    return Example(
        logprobs_N=logprobs_N,
        old_logprobs_N=old_N,
        sampling_logprobs_N=old_N - torch.tensor(mismatch or [1.0] * len(ratios)).log(),
        ref_logprobs_N=None if reference is None else logprobs_N.detach() + torch.tensor(reference).log(),
        advantages_N=torch.tensor(advantages),
        loss_mask_N=torch.tensor(mask or [True] * len(ratios)),
        sequence_N=sequence_N,
        num_sequences=int(sequence_N.max()) + 1,
    )


def metrics_of(config: LossConfig, inputs: Example) -> dict[str, float]:
    metrics = Metrics("cpu")
    metrics.add(make_loss(config)(inputs.logprobs_N, inputs).metrics)
    return reduce(metrics, lambda tensor: None, lambda tensor: None)


# Hand arithmetic


def test_grpo_is_the_mean_of_each_completion_summed_over_completions():
    inputs = make_inputs([1.1, 0.9, 1.0], [2.0, 2.0, -1.0], sequence=[0, 0, 1])
    loss, gradient = loss_and_gradient(GRPOConfig(), inputs)
    assert_close(loss, torch.tensor(-(1.1 * 2 + 0.9 * 2) / 2 - (1.0 * -1)))
    assert_close(gradient, torch.tensor([-1.1 * 2 / 2, -0.9 * 2 / 2, 1.0]))


@pytest.mark.parametrize("config_class", [DrGRPOConfig, DAPOConfig, BNPOConfig])
def test_token_sums_weight_every_token_equally(config_class: type):
    inputs = make_inputs([1.1, 0.9, 1.0], [2.0, 2.0, -1.0], sequence=[0, 0, 1])
    loss, gradient = loss_and_gradient(config_class(), inputs)
    assert_close(loss, torch.tensor(-(1.1 * 2 + 0.9 * 2 - 1.0)))
    assert_close(gradient, torch.tensor([-1.1 * 2, -0.9 * 2, 1.0]))


def test_cispo_weights_reinforce_by_the_truncated_ratio_as_a_constant():
    inputs = make_inputs([1.5, 3.0, 3.0], [2.0, 2.0, -1.0])
    loss, gradient = loss_and_gradient(CISPOConfig(clip_high=2.0), inputs)
    logprobs = [math.log(0.5 * ratio) for ratio in (1.5, 3.0, 3.0)]
    assert_close(loss, torch.tensor(-(1.5 * 2 * logprobs[0] + 2.0 * 2 * logprobs[1] + 2.0 * -1 * logprobs[2])))
    assert_close(gradient, torch.tensor([-1.5 * 2, -2.0 * 2, 2.0]))


def test_gspo_uses_the_geometric_mean_ratio_of_the_completion():
    config = GSPOConfig(clip_low=0.3, clip_high=0.3)
    inputs = make_inputs([1.2, 1.0, 0.9, 1.1], [2.0] * 3 + [-1.0], sequence=[0, 0, 0, 1])
    ratio = (1.2 * 1.0 * 0.9) ** (1 / 3)
    loss, gradient = loss_and_gradient(config, inputs)
    assert_close(loss, torch.tensor(-ratio * 2 + 1.1))
    assert_close(gradient, torch.tensor([-ratio * 2 / 3] * 3 + [1.1]))


def test_gspo_clips_whole_completions():
    config = GSPOConfig(clip_low=0.05, clip_high=0.05)
    inputs = make_inputs([1.5, 0.9, 1.5, 0.9], [1.0, 1.0, -1.0, -1.0], sequence=[0, 0, 1, 1])
    ratio = (1.5 * 0.9) ** (1 / 2)
    loss, gradient = loss_and_gradient(config, inputs)
    assert_close(loss, torch.tensor(-1.05 + ratio))
    assert_close(gradient, torch.tensor([0.0, 0.0, ratio / 2, ratio / 2]))


@pytest.mark.parametrize(
    ("advantage", "ratio", "used", "has_gradient"),
    [
        (1.0, 0.5, 0.5, True),  # good and less likely than before: raise it
        (1.0, 1.1, 1.1, True),
        (1.0, 1.5, 1.3, False),  # good and likely enough
        (-1.0, 0.5, 0.8, False),  # bad and unlikely enough
        (-1.0, 0.9, 0.9, True),
        (-1.0, 1.5, 1.5, True),  # bad and more likely than before: lower it
    ],
)
def test_ppo_quadrants(advantage: float, ratio: float, used: float, has_gradient: bool):
    config = DAPOConfig(clip_low=0.2, clip_high=0.3)
    loss, gradient = loss_and_gradient(config, make_inputs([ratio], [advantage]))
    assert_close(loss, torch.tensor(-used * advantage))
    assert_close(gradient, torch.tensor([-ratio * advantage if has_gradient else 0.0]))


def test_dual_clip_bounds_the_ratio_of_bad_tokens_only():
    config = DAPOConfig(clip_low=0.2, clip_high=0.3, dual_clip=3.0)
    loss, gradient = loss_and_gradient(config, make_inputs([4.0, 2.0, 4.0], [-1.0, -1.0, 1.0]))
    assert_close(loss, torch.tensor(3.0 + 2.0 - 1.3))
    assert_close(gradient, torch.tensor([0.0, 2.0, 0.0]))


def test_dual_clip_inside_the_clip_range_is_rejected():
    with pytest.raises(ValueError, match=r"dual_clip=1.2: must be greater than 1 \+ clip_high=1.28"):
        DAPOConfig(dual_clip=1.2)


@pytest.mark.parametrize(
    ("correction", "weights"),
    [
        (CorrectionConfig(mode="truncate", cap=2.0), [0.5, 1.5, 2.0]),
        (CorrectionConfig(mode="mask", cap=2.0, floor=0.6), [0.0, 1.5, 0.0]),
        (CorrectionConfig(mode="mask", cap=2.0), [0.5, 1.5, 0.0]),
        (CorrectionConfig(level="sequence", mode="truncate", cap=2.0), [0.75, 0.75, 2.0]),
        (CorrectionConfig(level="sequence", mode="mask", cap=2.0, floor=0.7), [0.75, 0.75, 0.0]),
        (CorrectionConfig(level="sequence", mode="mask", cap=2.0, floor=0.8), [0.0, 0.0, 0.0]),
        (OFF, [1.0, 1.0, 1.0]),
    ],
)
def test_correction_weights_each_token(correction: CorrectionConfig, weights: list[float]):
    inputs = make_inputs([1.1] * 3, [1.0] * 3, sequence=[0, 0, 1], mismatch=[0.5, 1.5, 4.0])
    config = DAPOConfig(correction=correction)
    loss, gradient = loss_and_gradient(config, inputs)
    assert_close(loss, torch.tensor(-1.1 * sum(weights)))
    assert_close(gradient, torch.tensor([-1.1 * weight for weight in weights]))
    assert metrics_of(config, inputs)["correction/weight"] == pytest.approx(sum(weights) / 3)


def test_sequence_correction_multiplies_over_trained_tokens_only():
    inputs = make_inputs([1.0] * 3, [1.0] * 3, mask=[True, False, True], mismatch=[0.5, 50.0, 1.5])
    loss, gradient = loss_and_gradient(DAPOConfig(correction=CorrectionConfig(level="sequence")), inputs)
    assert_close(gradient, torch.tensor([-0.75, 0.0, -0.75]))
    assert_close(loss, torch.tensor(-1.5))


def test_a_sequence_weight_too_large_for_float32_is_capped():
    inputs = make_inputs([1.0] * 100, [1.0] * 100, mismatch=[3.0] * 100)
    loss, gradient = loss_and_gradient(DAPOConfig(correction=CorrectionConfig(level="sequence", cap=2.0)), inputs)
    assert_close(loss, torch.tensor(-200.0))
    assert_close(gradient, torch.full((100,), -2.0))


@pytest.mark.parametrize("on_policy", [False, True])
def test_with_sampling_as_old_logprobs_the_ratio_is_against_the_sampler_and_not_corrected_again(on_policy: bool):
    config = DAPOConfig(old_logprobs="sampling", correction=CorrectionConfig(cap=1.01))
    inputs = make_inputs([1.1], [-1.0], mismatch=[1.5])
    if on_policy:
        inputs = replace(inputs, old_logprobs_N=None)
    loss, gradient = loss_and_gradient(config, inputs)
    assert_close(loss, torch.tensor(1.1 * 1.5))
    assert_close(gradient, torch.tensor([1.1 * 1.5]))


def test_on_policy_correction_compares_the_current_policy_with_the_sampler():
    inputs = replace(make_inputs([1.5], [1.0], mismatch=[1.2]), old_logprobs_N=None)
    loss, gradient = loss_and_gradient(DAPOConfig(correction=CorrectionConfig(cap=5.0)), inputs)
    assert_close(loss, torch.tensor(-1.5 * 1.2))
    assert_close(gradient, torch.tensor([-1.5 * 1.2]))


@pytest.mark.parametrize("target", ["reference", "rollout"])
def test_kl_is_k3_to_its_target_and_is_not_weighted_by_the_correction(target: str):
    x = {"reference": 1.6, "rollout": 1 / (1.1 * 0.25)}[target]  # target / policy
    config = DAPOConfig(kl=KLConfig(coef=0.5, target=target), correction=CorrectionConfig(cap=2.0))
    inputs = make_inputs([1.1, 1.1], [1.0, 1.0], mismatch=[0.25, 0.25], reference=[1.6, 1.6], mask=[True, False])
    loss, gradient = loss_and_gradient(config, inputs)
    assert_close(loss, torch.tensor(-1.1 * 0.25 + 0.5 * (x - math.log(x) - 1)))
    assert_close(gradient, torch.tensor([-1.1 * 0.25 + 0.5 * (1 - x), 0.0]))
    assert metrics_of(config, inputs)["kl"] == pytest.approx(x - math.log(x) - 1)


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_the_mean_gradient_of_an_estimator_is_that_of_the_kl_it_stands_for(estimator: str):
    """Every token of a vocabulary of four once, weighted by its probability, in place of samples from the policy."""
    logits_V = torch.tensor([0.3, -1.2, 2.0, 0.1], dtype=torch.float64, requires_grad=True)
    policy_V = logits_V.log_softmax(0)
    target_V = torch.tensor([1.0, 0.4, -0.7, 0.6], dtype=torch.float64).log_softmax(0)
    kl = {"k2": (policy_V.exp() * (policy_V - target_V)).sum(), "k3": (target_V.exp() * (target_V - policy_V)).sum()}
    exact = torch.autograd.grad(kl[estimator], logits_V, retain_graph=True)[0]

    config = DAPOConfig(kl=KLConfig(coef=0.5, estimator=estimator), correction=OFF)
    inputs = replace(
        make_inputs([1.0] * 4, [0.0] * 4), logprobs_N=policy_V, ref_logprobs_N=target_V, old_logprobs_N=None
    )
    _, gradient_of_logprobs = loss_and_gradient(config, inputs)
    sampled = torch.autograd.grad(policy_V, logits_V, policy_V.detach().exp() * gradient_of_logprobs)[0]
    assert_close(sampled, 0.5 * exact, rtol=1e-5, atol=1e-6)


def test_k2_is_half_the_squared_log_ratio_and_the_kl_metric_stays_k3():
    config = DAPOConfig(kl=KLConfig(coef=0.5, estimator="k2"))
    inputs = make_inputs([1.0, 1.0], [0.0, 0.0], reference=[1.6, 0.3])
    loss, gradient = loss_and_gradient(config, inputs)
    d = [math.log(1.6), math.log(0.3)]
    assert_close(loss, torch.tensor(0.5 * (d[0] ** 2 + d[1] ** 2) / 2))
    assert_close(gradient, torch.tensor([-0.5 * d[0], -0.5 * d[1]]))
    metrics = metrics_of(config, inputs)
    assert metrics["kl"] == pytest.approx((1.6 - d[0] - 1 + 0.3 - d[1] - 1) / 2)
    assert metrics["loss/kl"] == pytest.approx(0.5 * (d[0] ** 2 + d[1] ** 2) / 4)


def test_a_model_for_a_penalty_without_reference_is_rejected():
    for penalty in ({}, {"coef": 0.1, "target": "rollout"}):
        with pytest.raises(ValueError, match="model='teacher': has no effect; set coef above 0"):
            KLConfig(model="teacher", **penalty)


def test_a_kl_penalty_without_reference_logprobs_is_rejected():
    with pytest.raises(ValueError, match="needs ref_logprobs_N"):
        loss_and_gradient(GRPOConfig(kl=KLConfig(coef=0.1)), make_inputs([1.0], [1.0]))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (GRPOConfig(), 8),
        (GSPOConfig(), 8),
        (DrGRPOConfig(), 8 * 512),
        (BNPOConfig(), 100),
        (DAPOConfig(), 900 / 3),
        (CISPOConfig(), 900 / 3),
    ],
)
def test_denominators(config: LossConfig, expected: float):
    denominator = make_denominator(config, max_completion_tokens=512)
    assert denominator(Counts(tokens=100, sequences=8, batch_tokens=900, minibatches=3)) == expected
    assert denominator(Counts(tokens=0, sequences=0, batch_tokens=0, minibatches=3)) == 1


# Properties of every objective


@pytest.mark.parametrize("config_class", ALL_LOSSES)
@pytest.mark.parametrize("settings", BUSY_SETTINGS)
def test_masked_positions_contribute_exactly_zero_whatever_their_values(config_class: type, settings: dict):
    config, clean = config_class(**settings), random_inputs(seed=1, lengths=[3, 5, 1, 4])
    garbage = torch.tensor([math.nan, math.inf, -math.inf, 1e38]).repeat(4)[: len(clean.loss_mask_N)]
    masked_N = ~clean.loss_mask_N
    assert masked_N.sum() >= 3

    def with_garbage(values_N: Tensor, shift: int) -> Tensor:
        return torch.where(masked_N, garbage.roll(shift), values_N.detach())

    dirty = replace(
        clean,
        logprobs_N=with_garbage(clean.logprobs_N, 0).requires_grad_(),
        old_logprobs_N=with_garbage(clean.old_logprobs_N, 1),
        sampling_logprobs_N=with_garbage(clean.sampling_logprobs_N, 2),
        ref_logprobs_N=with_garbage(clean.ref_logprobs_N, 3),
        advantages_N=with_garbage(clean.advantages_N, 0),
    )
    (loss, gradient), (clean_loss, clean_gradient) = loss_and_gradient(config, dirty), loss_and_gradient(config, clean)
    assert torch.equal(loss, clean_loss) and torch.equal(gradient, clean_gradient)
    assert gradient[masked_N].eq(0).all() and gradient.ne(0).any()
    assert metrics_of(config, dirty) == metrics_of(config, clean)


@pytest.mark.parametrize("config_class", ALL_LOSSES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "name", ["logprobs_N", "old_logprobs_N", "sampling_logprobs_N", "ref_logprobs_N", "advantages_N"]
)
@pytest.mark.parametrize("settings", BUSY_SETTINGS[:4])
def test_nan_or_infinity_at_a_trained_position_makes_loss_and_gradient_nan(
    config_class: type, name: str, bad: float, settings: dict
):
    inputs = random_inputs(seed=1, lengths=[3, 5])
    values_N = getattr(inputs, name).detach().clone()
    values_N[int(inputs.loss_mask_N.nonzero()[0])] = bad
    inputs = replace(inputs, **{name: values_N})
    inputs.logprobs_N.requires_grad_()
    loss, gradient = loss_and_gradient(config_class(**settings), inputs)
    assert loss.isnan() and gradient.isnan().any()
    assert gradient[~inputs.loss_mask_N].eq(0).all()


@pytest.mark.parametrize("config_class", ALL_LOSSES)
@pytest.mark.parametrize("settings", BUSY_SETTINGS[::4])
@pytest.mark.parametrize("log_ratio", [-1000.0, 95.0, 1000.0])
@pytest.mark.parametrize("advantage", [1.0, 0.0, -1.0])
def test_an_extreme_policy_ratio_leaves_loss_and_gradient_finite(
    config_class: type, settings: dict, log_ratio: float, advantage: float
):
    inputs = random_inputs(seed=1, lengths=[3, 5])
    first = int(inputs.loss_mask_N.nonzero()[0])
    far_N = inputs.old_logprobs_N.clone()
    far_N[first] -= log_ratio
    advantages_N = inputs.advantages_N.clone()
    advantages_N[first] = advantage
    inputs = replace(inputs, old_logprobs_N=far_N, sampling_logprobs_N=far_N, advantages_N=advantages_N)
    loss, gradient = loss_and_gradient(config_class(**settings), inputs)
    assert loss.isfinite() and gradient.isfinite().all()
    assert gradient.count_nonzero() > 1


@pytest.mark.parametrize("config_class", ALL_LOSSES)
@pytest.mark.parametrize("reference", [-1000.0, 1000.0])
def test_an_extreme_reference_ratio_leaves_the_gradient_finite(config_class: type, reference: float):
    inputs = random_inputs(seed=1, lengths=[3, 5])
    first = int(inputs.loss_mask_N.nonzero()[0])
    inputs.ref_logprobs_N[first] += reference
    _, gradient = loss_and_gradient(config_class(kl=KLConfig(coef=0.1)), inputs)
    _, without = loss_and_gradient(config_class(), inputs)
    assert gradient.isfinite().all()
    # The penalty keeps its gradient where the reference finds the token far less likely, and loses it where far more.
    assert (gradient[first] - without[first] > 0.005) == (reference < 0)


@pytest.mark.parametrize("config_class", ALL_LOSSES)
@pytest.mark.parametrize("settings", BUSY_SETTINGS)
def test_the_log_ratio_bound_changes_no_bit_of_ordinary_ratios(monkeypatch, config_class: type, settings: dict):
    inputs = random_inputs(seed=7, lengths=[3, 5, 9, 2, 6], spread=2.0)
    loss, gradient = loss_and_gradient(config_class(**settings), inputs)
    monkeypatch.setattr("colocated_grpo.losses.parts.MAX_LOG_RATIO", math.inf)
    unbounded_loss, unbounded_gradient = loss_and_gradient(config_class(**settings), inputs)
    assert torch.equal(loss, unbounded_loss) and torch.equal(gradient, unbounded_gradient)


@pytest.mark.parametrize("config_class", ALL_LOSSES)
def test_a_micro_batch_without_trained_tokens_is_zero_and_can_be_differentiated(config_class: type):
    inputs = random_inputs(seed=2, lengths=[2, 3])
    inputs = replace(inputs, loss_mask_N=torch.zeros_like(inputs.loss_mask_N), advantages_N=torch.full((5,), math.nan))
    loss, gradient = loss_and_gradient(config_class(kl=KLConfig(coef=0.1)), inputs)
    assert loss == 0 and torch.equal(gradient, torch.zeros(5))
    assert metrics_of(config_class(), inputs) == {"mismatch/max": 0.0}


@pytest.mark.parametrize("config_class", ALL_LOSSES)
def test_on_policy_the_gradient_is_reinforce_with_baseline(config_class: type):
    inputs = random_inputs(seed=3, lengths=[3, 5, 2])
    advantages_N = torch.tensor([0.5, -2.0, 1.0])[inputs.sequence_N]
    inputs = replace(inputs, old_logprobs_N=None, advantages_N=advantages_N)
    _, gradient = loss_and_gradient(config_class(correction=OFF), inputs)
    weights_N = inputs.loss_mask_N.float()
    if config_class in (GRPOConfig, GSPOConfig):
        weights_N = weights_N / torch.zeros(3).index_add(0, inputs.sequence_N, weights_N)[inputs.sequence_N]
    assert_close(gradient, -inputs.advantages_N * weights_N)


@pytest.mark.parametrize("config_class", ALL_LOSSES)
def test_without_old_logprobs_the_detached_current_ones_are_used(config_class: type):
    inputs = random_inputs(seed=4, lengths=[4, 3])
    explicit = replace(inputs, old_logprobs_N=inputs.logprobs_N.detach())
    implicit = replace(inputs, old_logprobs_N=None)
    assert_close(loss_and_gradient(config_class(), implicit), loss_and_gradient(config_class(), explicit))
    assert metrics_of(config_class(), implicit)["ratio"] == 1.0


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**31),
    lengths=st.lists(st.integers(1, 6), min_size=2, max_size=6),
    cut=st.integers(1, 5),
    config_class=st.sampled_from(ALL_LOSSES),
    busy=st.sampled_from(BUSY_SETTINGS),
)
def test_the_gradient_does_not_depend_on_how_a_batch_is_split(
    seed: int, lengths: list[int], cut: int, config_class: type, busy: dict
):
    config, whole = config_class(**busy), random_inputs(seed, lengths)
    cut = min(cut, len(lengths) - 1)
    parts = [part_of(whole, 0, cut), part_of(whole, cut, len(lengths))]
    loss, gradient = loss_and_gradient(config, whole)
    losses, gradients = zip(*(loss_and_gradient(config, part) for part in parts), strict=True)
    assert_close(sum(losses), loss, rtol=1e-5, atol=1e-5)
    assert_close(torch.cat(gradients), gradient, rtol=1e-5, atol=1e-6)


def part_of(whole: Example, first: int, end: int) -> Example:
    tokens = (whole.sequence_N >= first) & (whole.sequence_N < end)
    tensors = {name: value[tokens].detach() for name, value in vars(whole).items() if isinstance(value, Tensor)}
    tensors["logprobs_N"].requires_grad_()
    tensors["sequence_N"] -= first
    return Example(**tensors, num_sequences=end - first)


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 2**31), config_class=st.sampled_from(ALL_LOSSES), busy=st.sampled_from(BUSY_SETTINGS))
def test_the_order_of_tokens_does_not_matter(seed: int, config_class: type, busy: dict):
    inputs = random_inputs(seed, [3, 4, 2])
    order = torch.randperm(9, generator=torch.Generator().manual_seed(seed))
    shuffled = {name: value[order].detach() for name, value in vars(inputs).items() if isinstance(value, Tensor)}
    shuffled["logprobs_N"].requires_grad_()
    loss, gradient = loss_and_gradient(config_class(**busy), inputs)
    shuffled_loss, shuffled_gradient = loss_and_gradient(config_class(**busy), replace(inputs, **shuffled))
    assert_close(shuffled_loss, loss, rtol=1e-5, atol=1e-5)
    assert_close(shuffled_gradient, gradient[order], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("config_class", ALL_LOSSES)
def test_half_precision_inputs_are_computed_in_float32(config_class: type):
    inputs = random_inputs(seed=6, lengths=[4, 4])
    names = [name for name in vars(inputs) if name.endswith(("logprobs_N", "advantages_N"))]
    halved = {name: getattr(inputs, name).detach().bfloat16() for name in names}
    half, full = replace(inputs, **halved), replace(inputs, **{name: v.float() for name, v in halved.items()})
    loss = make_loss(config_class())
    half_sum, full_sum = (loss(example.logprobs_N, example).loss_sum for example in (half, full))
    assert torch.equal(half_sum, full_sum) and half_sum.dtype == torch.float32


@pytest.mark.parametrize("config_class", ALL_LOSSES)
def test_the_loss_does_not_synchronize_with_the_device_and_metrics_are_detached(config_class: type):
    inputs = random_inputs(seed=7, lengths=[4, 4])
    on_meta = {name: v.to("meta") for name, v in vars(inputs).items() if isinstance(v, Tensor)}
    for busy in BUSY_SETTINGS:
        example = replace(inputs, **on_meta)
        output = make_loss(config_class(**busy))(example.logprobs_N, example)  # a meta tensor has no value to read
        assert output.loss_sum.requires_grad
        assert not any(part.requires_grad for stat in output.metrics.values() for part in stat.parts)


# Metrics


def test_clip_fractions_count_trained_tokens_that_lost_their_gradient():
    config = DAPOConfig(clip_low=0.2, clip_high=0.2, dual_clip=3.0, correction=OFF)
    ratios, advantages = [0.5, 0.5, 1.5, 1.5, 4.0, 1.5, 9.0, 1.0], [1.0, -1.0, 1.0, -1.0, -1.0, 0.0, 1.0, 1.0]
    inputs = make_inputs(ratios, advantages, mask=[True] * 6 + [False, True])
    metrics = metrics_of(config, inputs)
    assert metrics["clip_fraction/low"] == pytest.approx(1 / 7)
    assert metrics["clip_fraction/high"] == pytest.approx(2 / 7)
    assert metrics["ratio"] == pytest.approx((0.5 + 0.5 + 1.5 + 1.5 + 4.0 + 1.5 + 1.0) / 7)


def test_cispo_counts_truncated_weights():
    assert metrics_of(CISPOConfig(clip_high=2.0), make_inputs([3.0, 1.0, 3.0, 2.0], [1.0, 1.0, -1.0, 1.0]))[
        "clip_fraction/high"
    ] == pytest.approx(0.5)


def test_mismatch_metrics_compare_trainer_and_sampler_before_truncation():
    weights = [0.25, 1.0, 2.5]
    inputs = make_inputs([1.1] * 4, [1.0] * 4, mask=[True, True, True, False], mismatch=[*weights, 100.0])
    metrics = metrics_of(GRPOConfig(), inputs)
    logs = [math.log(weight) for weight in weights]
    assert metrics["mismatch/kl"] == pytest.approx(sum(w - 1 - x for w, x in zip(weights, logs, strict=True)) / 3)
    assert metrics["mismatch/mean"] == pytest.approx(sum(logs) / 3)
    assert metrics["mismatch/abs"] == pytest.approx(sum(map(abs, logs)) / 3)
    assert metrics["mismatch/max"] == pytest.approx(math.log(4))
    assert metrics["mismatch/outside"] == pytest.approx(2 / 3)
    assert metrics["mismatch/ess"] == pytest.approx(sum(weights) ** 2 / (3 * sum(w * w for w in weights)))


@pytest.mark.parametrize("config_class", ALL_LOSSES)
def test_log_probabilities_of_reinforced_and_of_suppressed_tokens_are_averaged_apart(config_class: type):
    inputs = make_inputs([1.0, 1.5, 0.5, 1.2, 9.0], [1.0, 0.5, -1.0, 0.0, -1.0], mask=[True] * 4 + [False])
    metrics = metrics_of(config_class(), inputs)
    assert metrics["logprob/positive"] == pytest.approx((math.log(0.5) + math.log(0.75)) / 2)
    assert metrics["logprob/negative"] == pytest.approx(math.log(0.25))


def test_a_tiny_mismatch_keeps_its_digits_in_float32():
    x = 1e-3
    inputs = make_inputs([1.0], [1.0], mismatch=[math.exp(x)])
    x = float(inputs.old_logprobs_N - inputs.sampling_logprobs_N)
    assert metrics_of(GRPOConfig(), inputs)["mismatch/kl"] == pytest.approx(math.expm1(x) - x, rel=1e-3)


@pytest.mark.parametrize(("config_class", "weights"), [(GRPOConfig, [0.5, 0.5, 1.0]), (DAPOConfig, [1.0, 1.0, 1.0])])
def test_loss_metrics_are_weighted_like_the_loss(config_class: type, weights: list[float]):
    config = config_class(kl=KLConfig(coef=0.5), correction=OFF)
    inputs = make_inputs([1.1, 0.9, 1.0], [2.0, 2.0, -1.0], sequence=[0, 0, 1], reference=[2.0, 1.0, 1.0])
    metrics = metrics_of(config, inputs)
    policy = [-2.2, -1.8, 1.0]
    mean = sum(value * weight for value, weight in zip(policy, weights, strict=True)) / sum(weights)
    assert metrics["loss/policy"] == pytest.approx(mean)
    assert metrics["loss/kl"] == pytest.approx(0.5 * (1 - math.log(2)) * weights[0] / sum(weights))
