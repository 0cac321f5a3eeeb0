"""A run is as long as the epochs that a program gives, those of TRL's GRPOConfig included."""

from __future__ import annotations

from typing import Any

import pytest
from datasets import Dataset

from colocated_grpo import ConfigError
from colocated_grpo.api.arguments import read_arguments
from colocated_grpo.settings.config_file import LoadedConfig

ROWS = [{"prompt": f"{number} + 1 = ", "level": number % 2} for number in range(50)]


def reward(completions, **columns):
    return [0.0] * len(completions)


def is_odd(row):
    return row["level"] == 1


def misspelt(row):
    return row["levle"] == 1


def read(**settings: Any) -> LoadedConfig:
    """Return the settings of a program, with 32 prompts a step unless it says otherwise."""
    named: dict[str, Any] = {
        "model": "some/model",
        "reward_funcs": reward,
        "train_dataset": ROWS,
        **dict.fromkeys(("eval_datasets", "args", "processing_class", "peft_config", "config")),
    }
    named |= {name: settings.pop(name) for name in [*named] if name in settings}
    return read_arguments(**named, settings=settings)


def steps(**settings: Any) -> int:
    return read(**settings).config.training_steps


def grpo_config(**settings: Any) -> Any:
    """Return TRL's settings, with 16 prompts a step."""
    trl = pytest.importorskip("trl")
    sizes = {"num_generations": 4, "generation_batch_size": 64, "gradient_accumulation_steps": 8}
    return trl.GRPOConfig(use_cpu=True, bf16=False, **sizes, **settings)


def test_steps_follow_from_epochs_and_rows():
    assert steps(num_train_epochs=2, rollout={"prompts_per_step": 16}) == 6, "45 of 50 rows are trained"
    assert steps(num_train_epochs=2, eval_datasets=ROWS[:4]) == 4, "all rows are trained"
    assert steps(num_train_epochs=2, max_steps=3) == 3


def test_epochs_count_the_rows_that_are_kept():
    rows = {"type": "dataset", "name": ROWS, "rewards": [reward], "filter": f"{__name__}:is_odd", "held_out": 1}
    no_arguments = {"train_dataset": None, "reward_funcs": None}
    assert steps(**no_arguments, environments=[rows], num_train_epochs=3, rollout={"prompts_per_step": 1}) == 72
    rows |= {"name": Dataset.from_list(ROWS), "filter": f"{__name__}:misspelt"}
    with pytest.raises(ConfigError, match=r"^environments\.0: filter .*: row 0: KeyError: 'levle'"):
        read(**no_arguments, environments=[rows], num_train_epochs=3)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, 9),
        ({"num_train_epochs": 3}, 9),
        ({"num_train_epochs": 1.5}, 5),
        ({"max_steps": 0}, 9),
        ({"max_steps": 7}, 7),
        ({"max_steps": 7, "num_train_epochs": 2}, 7),
    ],
)
def test_a_run_with_the_config_of_trl_has_its_steps_or_its_epochs(settings, expected):
    assert steps(args=grpo_config(**settings)) == expected


def test_steps_of_a_program_take_precedence_over_the_epochs_of_the_config_of_trl():
    assert steps(args=grpo_config(num_train_epochs=2), training_steps=4) == 4
    assert steps(args=grpo_config(), max_steps=4) == 4


@pytest.mark.parametrize("line", ["training_steps: 100", "max_steps: 100"])
def test_steps_of_a_file_take_precedence_over_the_default_epochs_of_trl(tmp_path, line):
    file = tmp_path / "x.yaml"
    file.write_text(line)
    assert steps(config=file, args=grpo_config()) == 100


def test_epochs_of_a_program_take_precedence_over_the_steps_of_a_file(tmp_path):
    file = tmp_path / "x.yaml"
    file.write_text("training_steps: 100")
    assert steps(config=file, args=grpo_config(num_train_epochs=2)) == 6
    assert steps(config=file, num_train_epochs=2) == 3


@pytest.mark.parametrize(
    "data",
    [
        {"train_dataset": "rows.jsonl"},
        {"train_dataset": None, "reward_funcs": None, "environments": [{"type": "task", "name": "sorting"}]},
        {"environments": [{}, {"type": "task", "name": "sorting"}]},
        {
            "train_dataset": None,
            "reward_funcs": None,
            "environments": [
                {"type": "task", "name": "sorting"},
                {"type": "dataset", "name": ROWS, "rewards": [reward]},
            ],
        },
    ],
    ids=["file", "task", "rows and a task", "a task and rows"],
)
def test_epochs_are_counted_over_rows_alone_and_a_line_says_so(data):
    with pytest.raises(ConfigError) as caught:
        read(**data, num_train_epochs=2)
    rule = "needs a train_dataset of rows as the only environment"
    assert str(caught.value) == f"num_train_epochs=2: {rule}; or set training_steps"
    loaded = read(**data, args=grpo_config())
    assert loaded.config.training_steps == 100
    assert f"training_steps=100: the default; num_train_epochs=3 {rule}; set max_steps" in loaded.notes


def test_a_line_says_how_many_steps_the_epochs_are():
    assert "training_steps=3: num_train_epochs=2 over 45 rows, 32 prompts a step" in read(num_train_epochs=2).notes


def test_a_warmup_may_be_longer_than_the_default_number_of_steps():
    assert steps(warmup_steps=150, num_train_epochs=150) == 211
    assert steps(args=grpo_config(warmup_steps=150, num_train_epochs=100), eval_datasets={"a": ROWS}) == 313


def test_a_warmup_that_is_longer_than_the_epochs_is_an_error():
    with pytest.raises(ConfigError, match=r"policy.warmup_steps=150: must be at most the run's 9 optimizer steps"):
        read(args=grpo_config(warmup_steps=150))


@pytest.mark.parametrize("number", [0, -1, float("inf"), "two"])
def test_epochs_are_a_number_above_0(number):
    with pytest.raises(ConfigError, match=r"^num_train_epochs=.*: must be a number above 0$"):
        read(num_train_epochs=number)
