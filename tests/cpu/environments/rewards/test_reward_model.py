"""A reward model scores prompts with completions as transformers does, in bounded batches, and fails in one line."""

from __future__ import annotations

import gc
import json
import shutil
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification

from colocated_grpo import Trainer
from colocated_grpo.environments.base import EnvironmentSetupError
from colocated_grpo.environments.build import build_environments
from colocated_grpo.environments.rewards import reward_model
from colocated_grpo.environments.rewards.functions import RewardScorer, build_rewards
from colocated_grpo.rollout import reward_calls
from colocated_grpo.rollout.reward_calls import RewardCalls
from colocated_grpo.settings.config_file import load_config
from colocated_grpo.settings.errors import ConfigError
from colocated_grpo.settings.inputs import check_inputs
from colocated_grpo.settings.model_sizes import sizes_of
from colocated_grpo.settings.run_sizes import Placement, RunSizes
from colocated_grpo.settings.schema import Config
from colocated_grpo.settings.sources import RewardConfig
from colocated_grpo.tools.make_model import build_char_tokenizer
from colocated_grpo.types import Completion, Prompt, Score
from tests.support.config_text import load
from tests.support.fakes import Clock
from tests.support.reward_models import make_reward_model, scores_alone
from tests.support.training_runs import tiny_model

CPU = torch.device("cpu")
CHAT = [{"role": "user", "content": "sort 312"}]
TEXTS = ["123", "1", "a longer answer of forty-one characters", "321", "", "123 and more"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_reward_model(tmp_path_factory.mktemp("reward") / "skywork.v2")


def scorer(*names: object, load: bool = True, **args: object) -> RewardScorer:
    configs = [RewardConfig(name=str(name), args=args or None) for name in names]
    functions = build_rewards(configs, "rewards")
    for function in functions if load else ():
        function.function.load(CPU)
    return RewardScorer(functions, max_steps=1)


def score(rewards: RewardScorer, prompt: object, texts: list[str]) -> list[Score]:
    completion = Completion(token_ids=[1], sampling_logprobs=[0.0], finish_reason="stop", policy_version=0)
    item = {"prompt": prompt, "answer": "123"}
    row = Prompt(index=0, token_ids=[1], text="", item=item, source="data")
    return rewards.score(row, [completion] * len(texts), texts)


@pytest.mark.parametrize("prompt", ["sort 312: ", CHAT])
@pytest.mark.parametrize("most_tokens", [4096, 40])
def test_scores_equal_those_of_transformers_for_each_text_alone(folder, monkeypatch, prompt, most_tokens):
    monkeypatch.setattr(reward_model, "MAX_TOKENS", most_tokens)
    expected = scores_alone(folder, [(prompt, text) for text in TEXTS])
    assert max(expected) - min(expected) > 0.1
    rewards = [one.reward for one in score(scorer(folder), prompt, TEXTS)]
    assert rewards == pytest.approx(expected, abs=1e-5)


def test_an_encoder_does_not_see_the_padding(tmp_path):
    folder = make_reward_model(tmp_path / "encoder", encoder=True)
    rewards = [one.reward for one in score(scorer(folder), CHAT, TEXTS)]
    assert rewards == pytest.approx(scores_alone(folder, [(CHAT, text) for text in TEXTS]), abs=1e-5)


def test_a_batch_holds_the_shortest_texts_up_to_a_number_of_padded_tokens(monkeypatch):
    monkeypatch.setattr(reward_model, "MAX_TOKENS", 12)
    lengths = dict(enumerate([5, 2, 40, 3, 6, 4]))
    found = list(reward_model.batches(lengths))
    assert found == [[1, 3, 5], [0, 4], [2]]
    assert list(reward_model.batches({})) == []


def test_the_reward_is_called_after_the_models_last_name(folder):
    [one] = score(scorer(folder), "sort 1", ["1"])
    assert one.parts.keys() == {"skywork.v2"}


def test_a_text_that_is_too_long_and_a_score_that_is_not_a_number_cost_their_own_completion(folder, tmp_path):
    [short, long] = score(scorer(folder), "sort 1", ["1", "1" * 300])
    assert short.reward is not None
    assert long.error == "skywork.v2: prompt and completion have 306 tokens; the model reads 1 to 256"

    broken = shutil.copytree(folder, tmp_path / "broken")
    weights = load_file(broken / "model.safetensors")
    weights["score.weight"].fill_(torch.nan)
    save_file(weights, broken / "model.safetensors", {"format": "pt"})
    [nan] = score(scorer(broken), "sort 1", ["1"])
    assert (nan.reward, nan.error) == (None, "broken: the score is NaN")


def test_without_weights_the_template_is_still_applied(folder, tmp_path):
    [one] = score(scorer(folder, load=False), CHAT, ["1"])
    assert one.error == "skywork.v2: a dry run reads no weights"
    plain = make_reward_model(tmp_path / "plain", template=False)
    [one] = score(scorer(plain, load=False), CHAT, ["1"])
    assert one.error.startswith("plain: ValueError: Cannot use chat template functions")


def test_datasets_that_name_the_same_model_share_its_weights(folder, tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "sort 1"}) + "\n")
    entry = {"type": "dataset", "name": str(tmp_path / "rows.jsonl"), "rewards": [str(folder)]}
    evaluation = {"sets": [{"name": "test", "source": entry}]}
    config = Config(model={"name": "none"}, environments=[entry, entry], evaluation=evaluation)
    built = build_environments(config, build_char_tokenizer())
    built.load_reward_models(CPU)
    used = {id(one.function._classifier) for each in built.scorers.values() for one in each.functions}
    assert len(built.scorers) == 3 and len(used) == 1
    assert len(reward_model._loaded) == 1
    del built
    gc.collect()
    assert not reward_model._loaded


def test_a_checkpoint_without_the_head_or_with_damaged_weights_is_one_line(folder, tmp_path):
    headless = shutil.copytree(folder, tmp_path / "headless")
    weights = load_file(headless / "model.safetensors")
    del weights["score.weight"]
    save_file(weights, headless / "model.safetensors", {"format": "pt"})
    with pytest.raises(EnvironmentSetupError, match=r"^rewards='\S+headless': the checkpoint lacks score.weight$"):
        scorer(headless)
    damaged = shutil.copytree(folder, tmp_path / "damaged")
    (damaged / "model.safetensors").write_bytes(b"1234")
    with pytest.raises(EnvironmentSetupError, match=r"^rewards='\S+damaged': cannot be loaded: .*") as error:
        scorer(damaged)
    assert "\n" not in str(error.value)


def test_a_missing_tokenizer_and_an_unknown_argument_are_one_line_before_weights(folder, tmp_path):
    bare = shutil.copytree(folder, tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer*"))
    with pytest.raises(
        EnvironmentSetupError, match=r"^rewards: \S+: .*no usable tokenizer; copy the tokenizer's files"
    ):
        scorer(bare, load=False)
    with pytest.raises(
        EnvironmentSetupError, match=r"^rewards: \S+: unknown argument 'device'; valid: name, revision,"
    ):
        scorer(folder, load=False, device="cpu")


def problem(reward: object, tmp_path: Path) -> str:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "sort 1"}) + "\n")
    entry = {"type": "dataset", "name": str(tmp_path / "rows.jsonl"), "rewards": [reward]}
    with pytest.raises(ConfigError) as error:
        check_inputs(Config(model={"name": str(tiny_model())}, environments=[entry]))
    return str(error.value)


def test_another_kind_of_model_is_rejected_from_its_config_json(tmp_path):
    start = "environments.0.rewards.0="
    assert problem(f"{tmp_path}/none", tmp_path) == f"{start}'{tmp_path}/none': no such folder"
    rule = "a reward model is a ...ForSequenceClassification with one label"
    found = problem(str(tiny_model()), tmp_path)
    assert found == f"{start}'{tiny_model()}': architectures=['Qwen3ForCausalLM'], number of labels: 2; {rule}"
    causal = shutil.copytree(tiny_model(), tmp_path / "causal")
    (causal / "config.json").write_text((causal / "config.json").read_text().replace("{", '{"num_labels": 1,', 1))
    assert "ForCausalLM'], number of labels: 1; " in problem(str(causal), tmp_path)
    two = make_reward_model(tmp_path / "two", labels=2)
    assert "Qwen3ForSequenceClassification'], number of labels: 2; " in problem(str(two), tmp_path)


def test_a_model_object_of_a_script_is_one_line(folder):
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    with pytest.raises(ConfigError, match=r"^reward_funcs.0: a Qwen3ForSequenceClassification is a model; give"):
        Trainer("some/model", [model], train_dataset=[{"prompt": "sort 1"}] * 20)


def test_prompts_that_wait_for_the_model_while_it_scores_others_do_not_time_out(monkeypatch):
    model, clock = threading.Lock(), Clock()
    monkeypatch.setattr(reward_calls, "time", clock)
    monkeypatch.setattr(reward_calls, "POLL_SECONDS", 0.01)

    def judge(_prompt: Prompt, _completions: object) -> tuple[list[str], list[Score]]:
        with model:
            clock.move(0.2)  # the time of a forward pass
        return [], []

    calls = RewardCalls(judge, workers=4, timeout=0.6)
    waiting = [calls.submit(Prompt(index=index, token_ids=[1], text="", item={}, source=""), []) for index in range(6)]
    assert calls.wait(waiting, since=clock.monotonic())
    calls.close()
    assert [call.judged() for call in waiting] == [([], [])] * 6


def test_a_reward_model_does_not_run_in_worker_processes(folder):
    with pytest.raises(ValueError, match="run_in=process: a reward model runs in the rank"):
        RewardConfig(name=str(folder), run_in="process")


def test_a_folder_beside_the_config_is_found_and_a_file_of_code_is_no_model(tmp_path, monkeypatch):
    (tmp_path / "models/reward").mkdir(parents=True)
    text = "model: a\ndataset_name: d\nreward_funcs: [models/reward, organization/model.v2, a.f]"
    monkeypatch.chdir(tmp_path.parent)
    (tmp_path / "run.yaml").write_text(text)
    [source] = load_config(tmp_path / "run.yaml").environments
    assert [reward.name for reward in source.rewards] == [f"{tmp_path}/models/reward", "organization/model.v2", "a:f"]


def test_the_reward_model_of_trls_script_comes_before_its_functions():
    text = "model: a\ndataset_name: d\nreward_model_name_or_path: some/model"
    functions = "\nreward_funcs: [accuracy_reward]\nreward_weights: [1, 0.5]"
    for names, expected in (
        ("", [("some/model", 1)]),
        (functions, [("some/model", 1), ("trl.rewards:accuracy_reward", 0.5)]),
    ):
        [source] = load(text + names, alone=True).environments
        assert [(reward.name, reward.weight) for reward in source.rewards] == expected


def test_functions_of_trls_script_on_the_command_line_replace_the_rewards_of_the_file():
    text = "model: a\nenvironments: [{type: dataset, name: d, rewards: [{name: gsm8k, weight: 2}, format_think]}]"
    [source] = load(text, "--reward_funcs", "[accuracy_reward]", alone=True).environments
    assert [(reward.name, reward.weight) for reward in source.rewards] == [("trl.rewards:accuracy_reward", 1)]


def test_the_arithmetic_of_memory_counts_each_model_once_on_every_rank(folder):
    def footprint(rewards: list[str], *, on_gpu: bool) -> int:
        entries = [{"type": "dataset", "name": "d", "rewards": [*rewards, "gsm8k"]}] * 2
        config = Config(model={"name": str(tiny_model())}, environments=entries)
        model = json.loads((tiny_model() / "config.json").read_text())
        place = Placement(ranks=4, on_gpu=on_gpu, device_bytes=1 << 34)
        return RunSizes(config, sizes_of(model), place).footprint().generating

    parameters = sum(one.numel() for name, one in load_file(folder / "model.safetensors").items() if "norm" not in name)
    for on_gpu, itemsize in ((True, 2), (False, 4)):
        added = footprint([str(folder)], on_gpu=on_gpu) - footprint([], on_gpu=on_gpu)
        assert added == pytest.approx(itemsize * parameters, rel=0.2)
