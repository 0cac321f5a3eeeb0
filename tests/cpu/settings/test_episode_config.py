"""Episodes in the config: found by name, mixed by weight, resumed exactly, rejected with one line where invalid."""

from __future__ import annotations

import pytest

from colocated_grpo.environments.build import build_environments
from colocated_grpo.settings.errors import ConfigError
from colocated_grpo.settings.inputs import check_inputs
from colocated_grpo.settings.rules import check
from colocated_grpo.settings.schema import Config
from colocated_grpo.tools.make_model import build_char_tokenizer

TOKENIZER = build_char_tokenizer()


def config_of(*environments: dict, **sections: dict) -> Config:
    return Config.model_validate({"model": {"name": "some/model"}, "environments": list(environments), **sections})


MIXED = config_of(
    {"type": "episode", "name": "tool_use", "args": {"template": "{question}"}, "weight": 3},
    {"type": "task", "name": "sorting"},
)


def test_episodes_and_tasks_are_mixed_by_weight_in_training_and_held_out():
    made = build_environments(MIXED, TOKENIZER)
    assert list(made.episodes) == ["tool_use"]
    assert list(made.scorers) == ["sorting"]
    for prompts in (made.open_source().next(40), made.held_out(40)):
        assert [sum(prompt.source == name for prompt in prompts) for name in ("tool_use", "sorting")] == [30, 10]


def test_a_resumed_source_continues_with_the_same_episodes():
    made = build_environments(MIXED, TOKENIZER)
    source = made.open_source()
    source.next(7)
    state = source.state_dict()
    expected = source.next(9)
    again = build_environments(MIXED, TOKENIZER).open_source()
    again.load_state_dict(state)
    assert again.next(9) == expected


def test_episodes_and_tensor_parallel_engines_exclude_each_other():
    episode = {"type": "episode", "name": "tool_use"}
    with pytest.raises(ConfigError, match=r"environments.1.type=episode: needs engine.tensor_parallel_size=1, not 2"):
        check(config_of({"type": "task", "name": "sorting"}, episode, engine={"tensor_parallel_size": 2}))
    agent = {"type": "agent", "name": "rows.jsonl", "program": "agent.py"}
    with pytest.raises(ConfigError, match=r"environments.0.type=agent: needs engine.tensor_parallel_size=1, not 2"):
        check(config_of(agent, engine={"tensor_parallel_size": 2}))
    check(config_of({"type": "task", "name": "sorting"}, engine={"tensor_parallel_size": 2}))
    check(config_of(episode))


def test_a_missing_file_of_an_episode_is_reported_before_the_run():
    with pytest.raises(ConfigError, match=r"environments.0.name='gone.py:Mine': no such file"):
        check_inputs(config_of({"type": "episode", "name": "gone.py:Mine"}))
    with pytest.raises(ConfigError) as error:
        check_inputs(config_of({"type": "agent", "name": "gone.jsonl", "program": "gone.sh"}))
    program, rows = str(error.value).splitlines()
    assert program == "environments.0.program='gone.sh': neither an executable file nor a command in PATH"
    assert rows.startswith("environments.0.name='gone.jsonl': no such file")
