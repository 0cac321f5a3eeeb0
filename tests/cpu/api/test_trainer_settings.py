"""The arguments of Trainer become the settings of a config file, checked before anything starts."""

from __future__ import annotations

import subprocess
import sys
from functools import partial

import pytest
import yaml

from colocated_grpo import ConfigError, Trainer
from colocated_grpo.environments.rewards.functions import build_rewards, start_workers
from colocated_grpo.settings.config_file import load_config
from colocated_grpo.settings.inputs import check_inputs
from tests.support.paths import ROOT

ROWS = [{"prompt": f"{number} + 1 = ", "answer": str(number + 1)} for number in range(50)]


def right(completions, answer, **columns):
    return [float(text == wanted) for text, wanted in zip(completions, answer, strict=True)]


class Length:
    def __init__(self, target=0):
        self.target = target

    def __call__(self, completions, **columns):
        return [float(len(text)) for text in completions]


def trainer(*rewards, **arguments) -> Trainer:
    return Trainer("some/model", list(rewards) or [right], train_dataset=ROWS, **arguments)


def error_of(**arguments) -> str:
    with pytest.raises(ConfigError) as caught:
        Trainer(**{"model": "some/model", "reward_funcs": right, "train_dataset": ROWS, **arguments})
    return str(caught.value)


def test_importing_the_package_is_cheap_and_trainer_loads_no_torch():
    code = (
        "import sys, colocated_grpo\n"
        "assert not [name for name in sys.modules if name.startswith('colocated_grpo.')]\n"
        "from colocated_grpo import Trainer\n"
        "import os\n"
        "print('torch' in sys.modules, 'vllm' in sys.modules, os.environ['VLLM_ENABLE_V1_MULTIPROCESSING'])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert result.stdout == "False False 0\n"


def test_a_file_and_arguments_make_the_same_config(tmp_path):
    written = {
        "model": {"name": "some/model"},
        "environments": [
            {"type": "dataset", "name": "rows.jsonl", "rewards": [{"name": "math_verify", "weight": 0.5}]}
        ],
        "training_steps": 7,
        "policy": {"lr": 2e-6, "lora": {"rank": 4}},
        "rollout": {"group_size": 4},
        "loss": {"type": "gspo"},
    }
    file = tmp_path / "x.yaml"
    file.write_text(yaml.safe_dump(written))
    from_file = load_config(file)
    assert Trainer(**written).config == from_file
    from_arguments = Trainer(
        "some/model",
        {"name": "math_verify", "weight": 0.5},
        train_dataset="rows.jsonl",
        args={"learning_rate": 2e-6, "num_generations": 4},
        max_steps=7,
        loss_type="gspo",
        policy={"lora": {"rank": 4}},
    )
    assert from_arguments.config == from_file


def test_arguments_override_single_settings_of_the_file(tmp_path):
    file = tmp_path / "x.yaml"
    file.write_text("model: other/model\npolicy: {lr: 3e-6, warmup_steps: 5}\nrollout: {group_size: 4}\n")
    config = trainer(config=file, policy={"lr": 2e-6}, **{"rollout.temperature": 0.7}).config
    assert (config.model.name, config.policy.lr, config.policy.warmup_steps) == ("some/model", 2e-6, 5)
    assert (config.rollout.group_size, config.rollout.temperature) == (4, 0.7)


def test_objects_are_named_by_module_and_qualified_name_in_the_saved_settings():
    def inner(completions, **columns):
        return [0.0] * len(completions)

    config = trainer(
        right, inner, partial(right, scale=2), Length(), "math_verify", reward_weights=[1, 1, 1, 1, 0.5]
    ).config
    [entry] = config.environments
    assert [reward.name for reward in entry.rewards] == [
        f"{__name__}:right",
        f"{__name__}:test_objects_are_named_by_module_and_qualified_name_in_the_saved_settings.<locals>.inner",
        f"{__name__}:right_2",
        f"{__name__}:Length",
        "math_verify",
    ]
    assert [reward.weight for reward in entry.rewards] == [1, 1, 1, 1, 0.5]
    assert yaml.safe_load(yaml.safe_dump(config.model_dump(mode="json")))["environments"][0]["name"] == "train_dataset"


def test_objects_are_called_themselves_and_in_threads():
    counted = Length()
    [entry] = trainer(right, counted).config.environments
    functions = build_rewards(entry.rewards, "rewards")
    assert [function.function for function in functions] == [right, counted]
    assert [function.name for function in functions] == ["right", "Length"]
    assert start_workers(entry.rewards, functions, "rewards") is None


def test_a_mapping_gives_a_function_a_weight_and_a_class_its_arguments():
    [entry] = trainer({"name": right, "weight": 0.25}, {"name": Length, "args": {"target": 9}}).config.environments
    [first, second] = build_rewards(entry.rewards, "rewards")
    assert (first.weight, first.function, second.function.target) == (0.25, right, 9)


def test_entries_of_environments_may_hold_objects():
    class Task:
        def prompts(self, seed, split): ...
        def score(self, item, completion): ...

    task = Task()
    config = Trainer(
        "some/model",
        environments=[
            {"type": "task", "name": task},
            {"type": "dataset", "name": ROWS, "eval_split": ROWS[:3], "rewards": [right, "math_verify"]},
        ],
    ).config
    first, second = config.environments
    assert first.given is task
    assert (second.given, second.given_held_out, second.rewards[0].given) == (ROWS, ROWS[:3], right)


def test_several_datasets_are_evaluation_sets_with_the_rewards_and_columns_of_the_training_data(tmp_path):
    file = tmp_path / "x.yaml"
    file.write_text(
        "environments: [{type: dataset, name: rows.jsonl, rewards: [exact_match], columns: {answer: solution}}]\n"
        "evaluation: {samples_per_prompt: 2, temperature: 0.5, sets: [{name: easy, source: {name: sorting}}]}\n"
    )
    settings = {"evaluation": {"keep_best": "eval/hard/pass@2"}, "num_train_epochs": 1}
    config = trainer(right, config=file, eval_datasets={"hard": ROWS[:2], "file": "hard.jsonl"}, **settings).config
    easy, hard, from_file = config.evaluation.sets
    assert (easy.name, hard.name, from_file.name) == ("easy", "hard", "file")
    assert (hard.samples, hard.temperature, hard.source.columns) == (2, 0.5, {"answer": "solution"})
    assert (hard.source.given, hard.source.rewards[0].given) == (ROWS[:2], right)
    assert (from_file.source.name, from_file.source.given) == ("hard.jsonl", None)
    assert config.environments[0].held_out == 0
    assert config.training_steps == 2, "no row is held out"
    assert trainer(eval_dataset={"hard": ROWS[:2]}).config.evaluation.sets[0].name == "hard", "TRL's name"


def test_args_may_be_the_config_of_trl():
    trl = pytest.importorskip("trl")
    args = trl.GRPOConfig(
        use_cpu=True,
        bf16=False,
        learning_rate=3e-6,
        num_generations=4,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        steps_per_generation=4,
        lr_scheduler_type="cosine",
        max_steps=5,
    )
    config = trainer(args=args).config
    assert (config.policy.lr, config.policy.schedule, config.training_steps) == (3e-6, "cosine", 5)
    assert (config.rollout.group_size, config.rollout.prompts_per_step, config.batch.minibatches) == (4, 8, 2)
    assert config.loss.type == trainer().config.loss.type, "a default of TRL is not a setting"


def test_the_config_of_peft_is_read():
    peft = pytest.importorskip("peft")
    lora = trainer(
        peft_config=peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])
    ).config.policy.lora
    assert (lora.rank, lora.alpha, sorted(lora.target_modules)) == (4, 8, ["q_proj", "v_proj"])


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({"lerning_rate": 1e-6}, "lerning_rate: unknown key; did you mean policy.lr? (argument)"),
        ({"train_dataset": None}, "train_dataset: required, but not given"),
        ({"reward_funcs": None}, "reward_funcs: required, but not given"),
        ({"train_datset": ROWS}, "train_datset: unknown argument; did you mean train_dataset?"),
        ({"dataset": ROWS}, "dataset: give the rows as train_dataset"),
        ({"tokenizer": Length()}, "tokenizer: give it as processing_class"),
        ({"callback": Length()}, "callback: unknown argument; did you mean callbacks?"),
        ({"resume": "auto"}, "resume: an argument of train() and check()"),
        ({"policy": {"lr": -1}}, "policy.lr=-1: must be greater than 0 (argument)"),
        ({"model": Length()}, "model: of type Length; give its folder or name, from which each rank reads its shard"),
        (
            {"reward_funcs": [{"name": right, "run_in": "process"}]},
            "reward_funcs.0.run_in='process': an object runs in threads; give the function's name instead",
        ),
        ({"reward_funcs": [3]}, "reward_funcs.0=3: must be a function, or the name of one"),
        (
            {"reward_funcs": {"fn": 3}},
            "reward_funcs.0={'fn': 3}: must be a function, or the name of one, alone or as `",
        ),
        (
            {"environments": [{"type": "dataset", "name": ROWS}]},
            "train_dataset: the same setting as environments.0.name; remove one of them",
        ),
        ({"train_dataset": {"train": ROWS}}, "train_dataset: a mapping of train; must be a datasets.Dataset or a list"),
        (
            {"train_dataset": ["one"]},
            "train_dataset: entry 0 is of type str; must be a datasets.Dataset or a list of dict",
        ),
        (
            {"train_dataset": [{"prompt": "x", 0: "y"}]},
            "train_dataset: entry 0 has the key 0; columns must have text as names",
        ),
        (
            {"train_dataset": iter(ROWS)},
            "train_dataset: of type list_iterator; must be a datasets.Dataset or a list of dict",
        ),
        ({"eval_datasets": "x.jsonl"}, "eval_datasets='x.jsonl': must be rows, as train_dataset is"),
        ({"eval_datasets": {}}, "eval_datasets={}: must have an entry, or be left out"),
        (
            {"eval_datasets": {"a": [3]}},
            "eval_datasets[a]: entry 0 is of type int; must be a datasets.Dataset or a list of",
        ),
        (
            {"eval_datasets": {"a": "openai/gsm8k"}},
            "eval_datasets[a]='openai/gsm8k': must be rows or a file (.jsonl, .json, .csv, .parquet); write a dataset",
        ),
        ({"processing_class": object()}, "processing_class: of type object; must be a tokenizer of transformers"),
        ({"args": 3}, "args=3: must be a mapping of settings or GRPOConfig"),
        ({"peft_config": "lora"}, "peft_config='lora': must be a mapping of settings or LoraConfig"),
        (
            {"reward_funcs": ["math_verfy"]},
            "environments 'train_dataset': rewards: unknown reward 'math_verfy'; did you",
        ),
        (
            {"environments": [{"type": "turns", "name": Length()}]},
            "environments.0.name: type turns needs a name, such as 'module:object'",
        ),
        (
            {"config": {"model": {"name": "some/model"}}},
            "config: must be the path of a YAML file; give settings by keyword, Trainer(**settings), or as",
        ),
        (
            {"model": {"model": "some/model", "training_steps": 3}},
            "model: must be the model alone; give settings by keyword, Trainer(**settings), or as",
        ),
        ({"callbacks": [Length()]}, "callbacks.0: Length: has none of the methods on_step_begin, on_step_end, on_"),
    ],
)
def test_a_wrong_argument_is_one_line(arguments, line):
    assert error_of(**arguments).startswith(line)


def test_a_run_to_resume_is_a_folder():
    with pytest.raises(ConfigError, match=r"^resume=5: must be a run folder, 'auto' or True$"):
        trainer().check(resume=5)


def test_a_function_where_only_a_name_works_is_answered_with_the_form_of_the_name():
    entry = {"type": "dataset", "filter": len}
    line = "environments.0.filter=<built-in function len>: must be text; write FILE.py:NAME (argument)"
    assert line in error_of(environments=[entry]).splitlines()


def test_only_the_program_can_continue_a_run_with_its_objects(tmp_path):
    """The command line finds neither the functions of a program nor its rows."""
    [entry] = trainer().config.environments
    saved = tmp_path / "config.yaml"
    settings = trainer("exact_match", eval_datasets={"a": ROWS}).config.model_dump(mode="json")
    settings["environments"][0]["rewards"][0]["name"] = "__main__:right"
    saved.write_text(yaml.safe_dump(settings))
    with pytest.raises(ConfigError) as caught:
        check_inputs(load_config(saved))
    its_program = "of the program that began the run; continue it there: train(resume=RUN)"
    assert str(caught.value).splitlines() == [
        f"environments.0.rewards.0='__main__:right': an object {its_program}",
        f"environments.0.name='train_dataset': rows {its_program}",
        f"evaluation.sets.0.source.name='eval_datasets[a]': rows {its_program}",
    ]
    assert entry.given == ROWS
