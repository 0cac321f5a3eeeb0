"""Settings of an Atropos environment: what they exclude, and how they share a step with other environments."""

from __future__ import annotations

from typing import Any

import pytest

from colocated_grpo.atropos.source import trainer_of
from colocated_grpo.settings.errors import ConfigError
from colocated_grpo.settings.inputs import check_inputs
from colocated_grpo.settings.rules import check
from colocated_grpo.settings.schema import Config

ATROPOS = {"type": "atropos"}


def config(*environments: dict[str, Any], **sections: Any) -> Config:
    return Config.model_validate({"model": {"name": "m"}, "environments": [ATROPOS, *environments], **sections})


def mixture(weight: float, others: list[float]) -> Config:
    """Eight prompts per step in groups of four; the atropos entry is the last."""
    entries = [{"type": "task", "name": "sorting", "weight": other} for other in others]
    values = {"model": {"name": "m"}, "rollout": {"prompts_per_step": 8, "group_size": 4}}
    return Config.model_validate({**values, "environments": [*entries, {**ATROPOS, "weight": weight}]})


def test_an_atropos_environment_alone_is_valid():
    check(config())
    assert config().atropos.server.port == 9001


@pytest.mark.parametrize(("weight", "others", "share"), [(1, [1, 2], 2), (0.3, [0.1], 6), (6, [1, 1], 6)])
def test_prompts_are_divided_by_weight_among_an_atropos_entry_and_the_others(tmp_path, weight, others, share):
    mixed = mixture(weight, others)
    check(mixed)
    assert trainer_of(mixed, tmp_path).batch_size == 4 * share


@pytest.mark.parametrize(("weight", "others", "share"), [(1, [2], "2.667"), (1, [100], "0.07921"), (100, [1], "7.921")])
def test_a_share_that_is_not_a_whole_number_of_prompts_is_rejected(weight, others, share):
    with pytest.raises(
        ConfigError, match=rf"gives it {share} of rollout.prompts_per_step=8; it and the other entries need a whole"
    ):
        check(mixture(weight, others))


@pytest.mark.parametrize(
    ("broken", "line"),
    [
        (config(ATROPOS), "environments: 2 entries of type atropos"),
        (
            config(engine={"tensor_parallel_size": 2}),
            "engine.tensor_parallel_size=2: must be 1 with an atropos",
        ),
        (config(rollout={"generation": "replicated"}), "rollout.generation=replicated: must be sharded"),
        (config(deterministic=True), "deterministic=true: not possible with an atropos environment"),
    ],
)
def test_settings_that_exclude_an_atropos_environment_are_rejected(broken, line):
    with pytest.raises(ConfigError) as caught:
        check(broken)
    assert line in str(caught.value)


def test_a_repeated_port_is_rejected():
    twice = {"model": {"name": "m"}, "environments": [{**ATROPOS, "server": {"port": 9004, "more_ports": [9004]}}]}
    with pytest.raises(ConfigError, match="repeat a port: 9004, 9004"):
        check(Config.model_validate(twice))


def test_an_unset_api_key_variable_is_reported_before_the_run(monkeypatch):
    monkeypatch.delenv("ENGINE_KEY", raising=False)
    entry = {**ATROPOS, "server": {"api_key_variable": "ENGINE_KEY"}}
    wanted = Config.model_validate({"model": {"name": "m"}, "environments": [entry]})
    with pytest.raises(ConfigError, match=r"ENGINE_KEY.*is not set"):
        check_inputs(wanted)


def test_environments_are_sent_the_batch_size_and_the_longest_sequence(tmp_path):
    sizes = {"prompts_per_step": 4, "group_size": 8, "max_prompt_tokens": 100, "max_completion_tokens": 28}
    trainer = trainer_of(config(rollout=sizes, training_steps=7, checkpoint={"every": 0}), tmp_path)
    assert trainer.batch_size == 32
    assert trainer.max_token_len == 129, "environments drop sequences of this length too"
    assert (trainer.num_steps, trainer.save_checkpoint_interval) == (7, 7)
