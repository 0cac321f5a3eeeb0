"""References of the KL penalty that are another model than the policy's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from colocated_grpo.assembly.engines import build_reference
from colocated_grpo.policy.masters import Reference
from colocated_grpo.policy.model import read_model_config
from colocated_grpo.policy.model_loader import ModelLoader
from colocated_grpo.policy.policy import score
from colocated_grpo.runtime.distributed import World
from colocated_grpo.settings.losses import KLConfig
from colocated_grpo.settings.schema import Config
from tests.support.families import SETTINGS
from tests.support.small_policy import Policy, config_of, pack_for, policy_of, random_groups


def reference_of(policy: Policy, config: Config, teacher: Path, world: World) -> Reference:
    files = read_model_config(config.model, teacher), teacher
    reference = build_reference(
        KLConfig(coef=1, model=str(teacher)), policy, ModelLoader(config, *files, world), offloaded=False
    )
    assert reference is not None
    return reference


@pytest.mark.parametrize("policy_settings", [{}, {"lora": {}}, {"compute_dtype": "bfloat16"}])
def test_a_teacher_scores_with_its_own_weights(world, model_folder, policy_settings):
    student, teacher = model_folder(), model_folder("llama", tied=False)
    config = config_of(student, policy=policy_settings)
    policy = policy_of(config, world)
    (micro_batch,) = pack_for(world, random_groups(3, 3), config).minibatches[0].micro_batches
    expected = policy_of(config_of(teacher, policy=policy_settings), world).score(micro_batch)
    with reference_of(policy, config, teacher, world)() as weights:
        torch.testing.assert_close(score(weights, micro_batch, world.device), expected)
    assert not torch.equal(policy.score(micro_batch), expected)


def test_prompts_are_not_shared_with_a_teacher_that_carries_a_state(world, model_folder):
    config = config_of(model_folder())
    policy = policy_of(config, world)
    assert policy.model.shares_prefixes
    reference_of(policy, config, model_folder("qwen3_next", edits=SETTINGS["qwen3_next"]), world)
    assert not policy.model.shares_prefixes
