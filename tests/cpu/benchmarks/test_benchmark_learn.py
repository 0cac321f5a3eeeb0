"""Learning beside TRL: equal tasks and settings, runs in processes of their own, the table and the picture."""

from __future__ import annotations

import asyncio
import json
import re
import time
import xml.etree.ElementTree as ET
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import learn, learn_report
from benchmarks.learn_jobs import LearningRun, run_jobs
from benchmarks.learn_run import StepRecorder, Work, our_settings
from benchmarks.learn_tasks import CALL, GYM, TASKS, Counting, Shop, Sums, chats, price, score_chat, task_of
from benchmarks.learn_trl import TRLSetup, add_tools, trl_arguments
from colocated_grpo import Trainer
from colocated_grpo.tools.make_model import build_char_tokenizer
from colocated_grpo.types import JsonObject
from tests.support.ranks import TIMEOUT, start_module
from tests.support.training_runs import tiny_model

WORK = Work(task="sums", mode="full", model="somewhere", seed=1, steps=3)
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPELLING = f"{GYM}spell_backward"


def test_counting_rewards_the_numbers_that_are_right_from_the_start():
    scored = {text: Counting().score({"question": "4"}, text) for text in ("1, 2, 3, 4", "1, 2, 4", "1 2 3 4 5", "two")}

    assert scored == {"1, 2, 3, 4": 1.0, "1, 2, 4": 0.5, "1 2 3 4 5": 0.8, "two": 0.0}


@pytest.mark.parametrize("name", ["sums", "shop", SPELLING])
def test_training_and_held_out_questions_of_a_task_are_disjoint(name: str):
    environment = task_of(name).build()
    questions = {
        split: {item["question"] for item in islice(environment.prompts(0, split), 200)}
        for split in ("train", "held_out")
    }

    assert not questions["train"] & questions["held_out"]
    assert len(questions["held_out"]) == 200


@pytest.mark.parametrize("name", ["sums", SPELLING])
def test_the_right_answer_gets_1_from_both_trainers_and_another_less(name: str):
    task = task_of(name)
    environment = task.build()
    assert not isinstance(environment, Shop)
    item = next(environment.prompts(0, "train"))
    column = json.loads(chats(task, seed=0, count=1)[0]["item"])

    for answer, right in ((item["answer"], True), ("no idea", False)):
        ours = environment.score(item, answer)
        assert ours == score_chat(task, environment, column, [{"role": "assistant", "content": answer}])
        assert (ours == 1) is right


def test_a_sum_is_read_from_the_last_number_of_a_completion():
    item = {"answer": "91"}

    assert Sums().score(item, "34 + 57 = 91.") == 1
    assert Sums().score(item, "91 is the sum of 34 and 57") == 0


def test_what_a_base_model_adds_after_the_first_line_does_not_count_where_the_task_says_so():
    completion = " The sum is 91.\nQuestion: What is 10 + 10?"

    assert [Sums(first_line=flag).score({"answer": "91"}, completion) for flag in (False, True)] == [0, 1]


class Scripted:
    """A conversation whose messages are given."""

    def __init__(self, *texts: str) -> None:
        self.texts = list(texts)
        self.observed: list[Any] = []

    async def generate(self) -> SimpleNamespace:
        return SimpleNamespace(text=self.texts.pop(0))

    def observe(self, messages: list[JsonObject]) -> None:
        self.observed += messages


def played(item: JsonObject, *texts: str) -> tuple[float, list[Any]]:
    model = Scripted(*texts)
    return asyncio.run(Shop().run(item, model)), model.observed  # pyrefly: ignore[bad-argument-type]  (a stand-in)


def test_the_shop_pays_a_price_that_was_asked_for_and_stated():
    item = next(Shop().prompts(0, "train"))
    call, right = f"<price>{item['question']}</price>", f"The price is {item['answer']}."

    reward, observed = played(item, call, right)

    assert reward == 1 and [message["content"] for message in observed] == [item["answer"]]
    assert played(item, call, "The price is 1.")[0] == 0
    assert played(item, right) == (0, [])


@pytest.mark.parametrize(
    "text",
    [
        "<price>1234</price><|im_end|>",
        "I ask <price>1234</price> and <price> 77 </price> now<|im_end|>",
        "<price>1234<|im_end|>",
        "1234<|im_end|>",
        "</price> 4<|im_end|>",
        "a <price>b <price>c</price><|im_end|>",
        "<price></price><|im_end|>",
    ],
)
def test_trl_reads_the_calls_that_our_episode_reads(text: str):
    from trl.chat_template_utils import is_chat_template_prefix_preserving, parse_response, supports_tool_calling

    tokenizer = build_char_tokenizer()
    tokenizer.chat_template = CHATML
    messages = next(Shop().prompts(0, "train"))["prompt"]
    plain = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert not supports_tool_calling(tokenizer)
    add_tools(tokenizer)
    assert supports_tool_calling(tokenizer) and is_chat_template_prefix_preserving(tokenizer)
    prefix = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False, tools=[price])

    ids = tokenizer.encode(text, add_special_tokens=False)
    parsed = parse_response(tokenizer, ids, prefix=prefix, tools=[price])

    theirs = [price(**call["function"]["arguments"]) for call in parsed.get("tool_calls") or []]
    assert theirs == [price(article) for article in CALL.findall(text.removesuffix("<|im_end|>"))]
    assert plain == prefix, "our trainer uses the unchanged template"


@pytest.mark.parametrize("name", ["sums", "shop"])
def test_trl_gets_our_prompts_in_our_order(name: str):
    items = list(islice(TASKS[name].build().prompts(7, "train"), 5))
    ours = [item["prompt"] for item in items]

    rows = chats(TASKS[name], seed=7, count=5)

    assert [json.loads(row["item"]) for row in rows] == items
    assert [row["prompt"] if name == "shop" else row["prompt"][0]["content"] for row in rows] == ours


@pytest.mark.parametrize("mode", ["full", "lora"])
@pytest.mark.parametrize("name", ["sums", "shop"])
def test_both_trainers_accept_their_settings_and_these_are_equal(name: str, mode: Any, tmp_path: Path):
    trl = pytest.importorskip("trl")
    model = tiny_model()
    work = Work(task=name, mode=mode, model=str(model), seed=1, steps=3, parallel=3)

    ours = Trainer(**our_settings(work, {"policy": {"compile": False}}, tmp_path)).config
    theirs = trl.GRPOConfig(**trl_arguments(work, TRLSetup(liger=True), {}, tmp_path, on_gpu=False))

    sequences = theirs.per_device_train_batch_size * theirs.gradient_accumulation_steps
    assert sequences == ours.rollout.prompts_per_step * ours.rollout.group_size == theirs.generation_batch_size == 256
    assert theirs.per_device_train_batch_size <= TRLSetup().micro_batch / 3
    optimizer = ours.policy.optimizer
    assert (theirs.learning_rate, theirs.lr_scheduler_type, theirs.warmup_steps, theirs.max_grad_norm) == (
        (ours.policy.lr, ours.policy.schedule, ours.policy.warmup_steps, ours.policy.grad_clip)
    )
    assert (theirs.adam_beta1, theirs.adam_beta2, theirs.adam_epsilon, theirs.weight_decay) == (
        (optimizer.beta1, optimizer.beta2, optimizer.eps, optimizer.weight_decay)
    )
    loss: Any = ours.loss
    assert (theirs.loss_type, theirs.epsilon, theirs.epsilon_high, theirs.beta, theirs.scale_rewards) == (
        (loss.type, loss.clip_low, loss.clip_high, loss.kl.coef, ours.advantage.scale)
    )
    assert theirs.vllm_importance_sampling_mode == f"{loss.correction.level}_{loss.correction.mode}"
    assert theirs.vllm_importance_sampling_clip_max == loss.correction.cap
    assert (theirs.num_generations, theirs.max_completion_length, theirs.temperature, theirs.max_steps) == (
        (8, ours.rollout.max_completion_tokens, ours.rollout.temperature, ours.training_steps)
    )
    assert theirs.mask_truncated_completions is ours.batch.mask_truncated is False
    assert ours.policy.compile is False and ours.policy.lr == work.lr
    assert (ours.policy.lora is not None) is (mode == "lora")


def test_a_step_lasts_from_the_end_of_the_one_before():
    recorder = StepRecorder()
    recorder.begin(time.perf_counter() - 10)
    recorder.end_step(0.25)
    recorder.end_step(0.5, tokens=3.0)

    first, second = recorder.rows
    assert first["seconds"] == first["wall"] > 10
    assert second["wall"] == first["wall"] + second["seconds"] and second["seconds"] < 5
    assert (second["reward"], second["tokens"]) == (0.5, 3.0)
    assert recorder.start_seconds > -10


def job(folder: Path, name: str, *flags: str) -> LearningRun:
    return LearningRun(
        name=name, flags=["--json", str(folder / f"{name}.json"), *flags], result=folder / f"{name}.json"
    )


def test_a_failed_run_is_reported_and_the_others_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "done.json").write_text("{}")
    jobs = [job(tmp_path, "broken", "--trainer", "none", "--model", "m"), job(tmp_path, "done")]

    assert run_jobs(jobs, 1, timeout=300, deadline=time.time() + 300) == ["broken"]

    output = capsys.readouterr().out
    assert "broken: exit code 2" in output and "invalid choice: 'none'" in output
    assert "done: done before" in output


def test_a_run_is_ended_at_its_timeout_and_none_begins_after_the_deadline(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    endless = job(tmp_path, "endless", "--trainer", "ours", "--model", str(tiny_model()), "--steps", "100000")

    assert run_jobs([endless], 1, timeout=3, deadline=time.time() + 300) == ["endless"]
    assert run_jobs([endless], 1, timeout=3, deadline=time.time() - 1) == ["endless"]

    output = capsys.readouterr().out
    assert re.search("endless: ended after [0-9]+ s", output) and "endless: not started" in output


def steps(learned: float, seconds: float) -> list[JsonObject]:
    return [
        {"reward": min(1.0, learned * index), "seconds": seconds, "wall": seconds * (index + 1)} for index in range(60)
    ]


def curve_run(trainer: str, seed: int, learned: float, seconds: float, **changes: Any) -> JsonObject:
    held_out = {"sampled": {"mean": 0.5 + 0.1 * seed}, "greedy": {"mean": 0.75}}
    base = {"trainer": trainer, "label": "", "seed": seed, "parallel": 1, "start_seconds": 30.0, "held_out": held_out}
    return {**base, "steps": steps(learned, seconds), **changes}


def results(*runs: JsonObject) -> JsonObject:
    work = {"model": "small", "task": "sums", "mode": "full", "prompts": 32, "group_size": 8}
    return {"work": work, "start_held_out": None, "runs": list(runs)}


def test_the_table_has_windows_and_spread_over_seeds_and_seconds_of_undisturbed_runs():
    content = results(
        curve_run("ours", 0, 0.02, 0.5),
        curve_run("ours", 1, 0.02, 0.7),
        curve_run("ours", 2, 0.02, 9.0, parallel=4),
        curve_run("trl", 0, 0.01, 2.0, label="sleep"),
    )

    columns, _, ours, trl = [line.strip("| ").split(" | ") for line in learn_report.table_lines(content, reach=0.8)]

    assert columns[1:5] == ["Seeds", "Steps 0-19", "Steps 20-39", "Steps 40-59"]
    assert ours[:3] == ["ours", "3", "0.190 +- 0.000"]
    assert ours[5:] == ["0.600 +- 0.100", "0.750 +- 0.000", "30 +- 0 s", "0.60 +- 0.10 s", "25 +- 4 s"]
    assert trl[0] == "TRL sleep" and trl[-2:] == ["2.00 s", "not reached"]


def test_curves_of_several_seeds_end_where_the_shortest_ends():
    merged = learn_report.curve([[(0.0, 0.0), (2.0, 1.0), (4.0, 1.0)], [(0.0, 0.2), (3.0, 0.8)]])

    assert [place for place, *_ in merged] == [0.0, 2.0]
    assert merged[1] == pytest.approx((2.0, 0.8, 0.6, 1.0))


def test_the_picture_is_an_svg_without_scripts_whose_second_panel_has_undisturbed_runs_only():
    shared = [curve_run(name, 0, 0.02, 1.0, parallel=4) for name in ("ours", "trl")]
    alone = [curve_run("ours", 1, 0.02, 0.5), curve_run("trl", 1, 0.02, 2.0)]

    one, both = (ET.fromstring(learn_report.picture(results(*runs), "a < b")) for runs in (shared, [*shared, *alone]))

    name = "{http://www.w3.org/2000/svg}"
    assert [len(root.findall(f"{name}g")) for root in (one, both)] == [1, 2]
    assert [len(root.findall(f".//{name}polyline")) for root in (one, both)] == [2, 4]
    assert not both.findall(f".//{name}script")
    texts = [text.text for text in both.iter(f"{name}text")]
    assert {"ours, 2 seeds", "TRL, 2 seeds", "step", "seconds of training", "Reward: a < b"} <= set(texts)


def test_collected_files_hold_runs_with_their_scores(tmp_path: Path):
    out, docs = tmp_path / "runs", tmp_path / "results"
    origin = {"benchmark": "learn", **dict.fromkeys(("commit", "python", "packages", "machine", "gpu", "ranks"))}
    for trainer in ("ours", "trl"):
        run = {**origin, **curve_run(trainer, 0, 0.02, 1.0), "command": "c", "time": "t", "configuration": {}}
        run["work"] = {"model": "small", "task": "sums", "mode": "full", "seed": 0, "parallel": 1}
        learn.write(out / f"small_sums_full_{trainer}_0.json", run)
    score = {"sampled": {"mean": 0.5}, "greedy": {"mean": 0.75}}
    learn.write(learn_report.scores_file(out, "small"), {"sums": score, "small_sums_full_trl_0": score})
    learn.write(out / "tuned_small_sums_full.json", {"best": {"liger": True}})

    assert learn.main(["collect", "--out", str(out), "--results", str(docs)]) == 0

    content = json.loads((docs / "learn_small_sums_full.json").read_text())
    assert [(run["trainer"], run["held_out"]) for run in content["runs"]] == [("ours", None), ("trl", score)]
    assert content["tuning"] == {"best": {"liger": True}} and content["start_held_out"] == score
    assert content["work"] == {"model": "small", "task": "sums", "mode": "full"}


@pytest.mark.slow
def test_a_tiny_model_trains_with_both_trainers_and_is_scored(tmp_path: Path):
    model, out = tiny_model(), tmp_path / "runs"
    flags = ["--model", str(model), "--steps", "2", "--prompts", "2", "--group-size", "2", "--out", str(out)]
    ours = "{engine: {kv_cache_memory_bytes: 67108864}}"
    run = ["--ours", ours, "--seeds", "0", "--models", str(tmp_path / "models"), "--timeout", "240"]

    assert learn.main(["suite", "--modes", "lora", *flags, *run]) == 0

    name = f"{model.name}_sums_lora"
    for trainer in ("ours", "trl"):
        result = json.loads((out / f"{name}_{trainer}_0.json").read_text())
        assert len(result["steps"]) == 2 and result["start_seconds"] > 0
        assert all(row["seconds"] > 0 and 0 <= row["reward"] <= 1 for row in result["steps"])
        assert result["configuration"]
    arguments, stderr = ["score", "--model", str(model), "--out", str(out), "--prompts", "4"], tmp_path / "stderr"
    with start_module(learn.__name__, arguments, 1, tmp_path / "stdout", stderr) as process:
        assert process.exit_codes(TIMEOUT) == [0], stderr.read_text()
    scores = json.loads(learn_report.scores_file(out, model.name).read_text())
    assert scores.keys() == {"sums", f"{name}_ours_0", f"{name}_trl_0"}
    assert all(0 <= part["mean"] <= 1 for row in scores.values() for part in row.values())
