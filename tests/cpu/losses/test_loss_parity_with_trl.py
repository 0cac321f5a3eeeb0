"""TRL 1.16's rollout scoring and loss code on padded rows against ours on packed tokens, on the same numbers.

A namespace replaces the trainer object that `GRPOTrainer` methods read settings from; all arithmetic is TRL's.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from colocated_grpo.advantages import group_advantages
from colocated_grpo.losses.inputs import Counts, LossInputs
from colocated_grpo.losses.objectives import make_denominator, make_loss
from colocated_grpo.losses.parts import weighted_mean
from colocated_grpo.metrics import Metrics, reduce
from colocated_grpo.settings.losses import (
    AdvantageConfig,
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
from colocated_grpo.summaries import rollout_metrics
from colocated_grpo.types import Score
from tests.support.small_policy import group_of, rollout_of

GRPOTrainer = pytest.importorskip("trl.trainer.grpo_trainer").GRPOTrainer

GROUP_SIZE = 4
REWARDS = [1.0, 0.0, 0.25, None, 2.0, -1.0, 0.5, 0.5]
LENGTHS = [5, 2, 7, 3, 1, 6, 4, 7]
MAX_COMPLETION_TOKENS = 9

# One row per objective: our settings, and the same in TRL's names.
CLIP = {"clip_low": 0.2, "clip_high": 0.3}
OBJECTIVES = {
    "grpo": (GRPOConfig, CLIP, {"loss_type": "grpo"}),
    "dr_grpo": (DrGRPOConfig, CLIP, {"loss_type": "dr_grpo"}),
    "bnpo": (BNPOConfig, CLIP, {"loss_type": "bnpo"}),
    "dapo": (DAPOConfig, CLIP, {"loss_type": "dapo"}),
    "dual_clip": (
        GRPOConfig,
        {"clip_low": 0.2, "clip_high": 0.3, "dual_clip": 1.4},
        {"loss_type": "grpo", "delta": 1.4},
    ),
    "cispo": (CISPOConfig, {"clip_high": 1.1}, {"loss_type": "cispo", "epsilon_high": 1.1}),
    "gspo": (
        GSPOConfig,
        {"clip_low": 0.02, "clip_high": 0.03},
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 0.02, "epsilon_high": 0.03},
    ),
}
CORRECTIONS = {
    "on policy": (CorrectionConfig(mode="off"), {"vllm_importance_sampling_correction": False}),
    "token truncate": (CorrectionConfig(cap=1.2), {"vllm_importance_sampling_mode": "token_truncate"}),
    "token mask": (
        CorrectionConfig(mode="mask", floor=0.8, cap=1.2),
        {"vllm_importance_sampling_mode": "token_mask", "vllm_importance_sampling_clip_min": 0.8},
    ),
    "sequence truncate": (
        CorrectionConfig(level="sequence", cap=1.2),
        {"vllm_importance_sampling_mode": "sequence_truncate"},
    ),
    "sequence mask": (
        CorrectionConfig(level="sequence", mode="mask", floor=0.8, cap=1.2),
        {"vllm_importance_sampling_mode": "sequence_mask", "vllm_importance_sampling_clip_min": 0.8},
    ),
}


class Rows:
    """Eight completions as padded rows; row 2 has an observation in the middle that is not trained."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        shape = (len(LENGTHS), max(LENGTHS))
        self.mask = torch.arange(shape[1]) < torch.tensor(LENGTHS).unsqueeze(1)
        self.tool_mask = torch.ones(shape, dtype=torch.long)
        self.tool_mask[2, 2:4] = 0
        self.old = -2 * torch.rand(shape, generator=generator)
        self.current = self.old + 0.25 * torch.randn(shape, generator=generator)
        self.sampling = self.old + 0.25 * torch.randn(shape, generator=generator)
        self.ref = self.old + 0.5 * torch.randn(shape, generator=generator)
        self.entropy = 3 * torch.rand(shape, generator=generator)
        self.trained = self.mask & self.tool_mask.bool()


class SingleProcess(SimpleNamespace):
    device, num_processes, process_index, sync_gradients = torch.device("cpu"), 1, 0, True

    def gather(self, tensor: Tensor) -> Tensor:
        return tensor

    def reduce(self, tensor: Tensor, reduction: str) -> Tensor:
        return tensor


def trl_trainer(rows: Rows, minibatches: int = 1, **settings: object) -> SimpleNamespace:
    logprobs = {"policy": rows.old, "reference": rows.ref, "current": rows.current.clone().requires_grad_()}

    def generate(prompts: list[str]) -> tuple:
        def per_row(values: Tensor) -> list[list]:
            return [row[:length].tolist() for row, length in zip(values, LENGTHS, strict=True)]

        ids = [[7] * length for length in LENGTHS]
        return [[3]] * len(ids), ids, per_row(rows.tool_mask), [""] * len(ids), per_row(rows.sampling), {}, None, None

    def per_token(model: SimpleNamespace, *rest: object, **unused: object) -> tuple:
        return logprobs[model.name], rows.entropy, None  # the last one is an auxiliary loss

    rewards = torch.tensor([[float("nan") if reward is None else reward] for reward in REWARDS])
    defaults = {
        "accelerator": SingleProcess(),
        "model": SimpleNamespace(name="policy", training=True, is_gradient_checkpointing=False),
        "ref_model": SimpleNamespace(name="reference"),
        "current": logprobs["current"],
        "_generate": generate,
        "_calculate_rewards": lambda inputs, *rest: rewards,
        "_get_per_token_logps_and_entropies": per_token,
        "_tokenizer": SimpleNamespace(pad_token_id=0),
        "args": SimpleNamespace(
            per_device_train_batch_size=len(LENGTHS),
            gradient_accumulation_steps=minibatches,
            steps_per_generation=minibatches,
            gradient_checkpointing_kwargs=None,
            delta=settings.pop("delta", None),
            use_bias_correction_kl=False,
            report_to=[],
        ),
        "current_gradient_accumulation_steps": 1,
        "num_iterations": 1,
        "num_generations": GROUP_SIZE,
        "environment_factories": None,
        "environments": None,
        "tools": None,
        "pad_to_multiple_of": None,
        "mask_truncated_completions": False,
        "use_vllm": True,
        "vllm_importance_sampling_correction": True,
        "vllm_importance_sampling_mode": "token_truncate",
        "vllm_importance_sampling_clip_min": None,
        "vllm_importance_sampling_clip_max": 1.2,
        "multi_objective_aggregation": "sum_then_normalize",
        "scale_rewards": "group",
        "reward_weights": torch.ones(1),
        "reward_func_names": ["reward"],
        "reward_funcs": [None],
        "loss_type": "grpo",
        "importance_sampling_level": "token",
        "epsilon_low": 0.2,
        "epsilon_high": 0.3,
        "beta": 0.0,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "aux_loss_enabled": False,
        "_entropy_bonus_enabled": False,
        "max_completion_length": MAX_COMPLETION_TOKENS,
        "log_multimodal": False,
        "_metrics": defaultdict(lambda: defaultdict(list)),
        "_logs": defaultdict(list, rewards=defaultdict(list), extra=defaultdict(list)),
        "_pending_extra_logs": {},
        "_pending_metrics": {},
    }
    return SimpleNamespace(**{**defaults, **settings})


def scored_by_trl(trainer: SimpleNamespace) -> dict:
    return GRPOTrainer._generate_and_score_completions(trainer, [{"prompt": "p"}] * len(LENGTHS))


def trl_loss_and_gradient(trainer: SimpleNamespace, inputs: dict) -> tuple[Tensor, Tensor]:
    loss = GRPOTrainer._compute_loss(trainer, SimpleNamespace(name="current"), inputs)
    return loss.detach(), torch.autograd.grad(loss, trainer.current)[0]


def our_advantages(config: AdvantageConfig) -> list[float]:
    return [a for group in group_advantages([REWARDS[:GROUP_SIZE], REWARDS[GROUP_SIZE:]], config) for a in group]


def our_inputs(rows: Rows, advantages: list[float], on_policy: bool) -> LossInputs:
    packed = rows.mask
    return LossInputs(
        old_logprobs_N=None if on_policy else rows.old[packed],
        sampling_logprobs_N=rows.sampling[packed],
        ref_logprobs_N=rows.ref[packed],
        advantages_N=torch.tensor(advantages).unsqueeze(1).expand_as(rows.old)[packed],
        loss_mask_N=rows.trained[packed],
        sequence_N=torch.arange(len(LENGTHS)).unsqueeze(1).expand_as(rows.old)[packed],
        num_sequences=len(LENGTHS),
    )


def our_loss_and_gradient(
    config: LossConfig, rows: Rows, advantages: list[float], on_policy: bool, minibatches: int = 1
) -> tuple[Tensor, Tensor]:
    """Compute our loss on the same completions, packed; the gradient has TRL's padded shape."""
    current = rows.current.clone().requires_grad_()
    tokens = int(rows.trained.sum())
    counts = Counts(tokens=tokens, sequences=len(LENGTHS), batch_tokens=tokens, minibatches=minibatches)
    loss_sum = make_loss(config)(current[rows.mask], our_inputs(rows, advantages, on_policy)).loss_sum
    loss = loss_sum / make_denominator(config, MAX_COMPLETION_TOKENS)(counts)
    return loss.detach(), torch.autograd.grad(loss, current)[0]


def assert_equal(ours: tuple[Tensor, Tensor], theirs: tuple[Tensor, Tensor]) -> None:
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(ours[1], theirs[1], rtol=1e-5, atol=1e-6)
    assert theirs[1].abs().max() > 1e-3  # two zeros would be equal too


@pytest.mark.parametrize("kl_coef", [0.0, 0.3])
@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_loss_and_gradient_equal_trl(objective: str, correction: str, kl_coef: float):
    config_class, ours, theirs = OBJECTIVES[objective]
    our_correction, their_correction = CORRECTIONS[correction]
    rows = Rows()
    trainer = trl_trainer(rows, beta=kl_coef, **theirs, **their_correction)
    inputs = scored_by_trl(trainer)
    config = config_class(**ours, correction=our_correction, kl=KLConfig(coef=kl_coef))
    on_policy = correction == "on policy"
    assert ("old_per_token_logps" not in inputs) == on_policy

    advantages = our_advantages(AdvantageConfig())
    assert_equal(our_loss_and_gradient(config, rows, advantages, on_policy), trl_loss_and_gradient(trainer, inputs))


@pytest.mark.parametrize("objective", ["dapo", "cispo"])
def test_a_minibatch_is_divided_by_the_same_part_of_the_batch_tokens_as_in_trl(objective: str):
    config_class, ours, theirs = OBJECTIVES[objective]
    rows = Rows()
    trainer = trl_trainer(rows, minibatches=3, **theirs)
    inputs = scored_by_trl(trainer)
    config = config_class(**ours, correction=CorrectionConfig(cap=1.2))
    advantages = inputs["advantages"].tolist()
    assert_equal(
        our_loss_and_gradient(config, rows, advantages, on_policy=False, minibatches=3),
        trl_loss_and_gradient(trainer, inputs),
    )


@pytest.mark.parametrize("objective", ["grpo", "dr_grpo", "bnpo", "dapo"])
def test_metrics_over_tokens_equal_trl(objective: str):
    config_class, _, theirs = OBJECTIVES[objective]
    rows = Rows()
    trainer = trl_trainer(rows, beta=0.3, epsilon_low=0.02, epsilon_high=0.03, **theirs)
    trl_loss_and_gradient(trainer, scored_by_trl(trainer))
    correction, kl = CorrectionConfig(cap=1.2), KLConfig(coef=0.3)
    config = config_class(clip_low=0.02, clip_high=0.03, correction=correction, kl=kl)
    inputs = our_inputs(rows, our_advantages(AdvantageConfig()), on_policy=False)
    metrics = Metrics("cpu")
    metrics.add(make_loss(config)(rows.current[rows.mask], inputs).metrics)
    metrics.add({"entropy": weighted_mean(rows.entropy[rows.mask], inputs.loss_mask_N)})
    row = reduce(metrics, lambda _: None, lambda _: None)
    shown = {name: value for name, [value] in trainer._metrics["train"].items()}
    assert row["entropy"] == pytest.approx(shown["entropy"], rel=1e-5)
    assert row["kl"] == pytest.approx(shown["kl"], rel=1e-5)
    for bound in ("low", "high"):
        assert shown[f"clip_ratio/{bound}_mean"] > 0
        assert row[f"clip_fraction/{bound}"] == pytest.approx(shown[f"clip_ratio/{bound}_mean"], rel=1e-5)
    difference = "sampling/sampling_logp_difference"
    assert row["mismatch/abs"] == pytest.approx(shown[f"{difference}/mean"], rel=1e-5)
    assert row["mismatch/max"] == pytest.approx(shown[f"{difference}/max"], rel=1e-5)


def test_metrics_of_rewards_equal_trl():
    trainer = trl_trainer(Rows())
    scored_by_trl(trainer)
    shown = {name: value for name, [value] in trainer._metrics["train"].items()}
    scores = [Score(reward=reward, parts={} if reward is None else {"reward": reward}) for reward in REWARDS]
    rollouts = [replace(rollout_of([3], [7]), score=score) for score in scores]
    row = rollout_metrics([group_of(0, rollouts[:GROUP_SIZE]), group_of(1, rollouts[GROUP_SIZE:])], policy_version=0)
    names = {
        "reward": "reward",
        "reward_std": "reward_std",
        "reward/reward": "rewards/reward/mean",
        "reward_std/reward": "rewards/reward/std",
        "groups/constant": "frac_reward_zero_std",
    }
    assert {name: row[name] for name in names} == pytest.approx({name: shown[each] for name, each in names.items()})


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_advantages_equal_trl(scale: str):
    theirs = scored_by_trl(trl_trainer(Rows(), scale_rewards=scale))["advantages"]
    ours = torch.tensor(our_advantages(AdvantageConfig(scale=scale)))
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
