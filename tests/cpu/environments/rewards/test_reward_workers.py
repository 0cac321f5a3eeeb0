"""Reward functions in worker processes: the results of threads, and a call that goes wrong costs only itself."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from colocated_grpo.environments import EnvironmentSetupError
from colocated_grpo.environments.rewards import workers
from colocated_grpo.environments.rewards.functions import RewardScorer, build_rewards, start_workers
from colocated_grpo.settings.sources import RewardConfig
from colocated_grpo.types import Completion, Prompt, Score
from tests.support.servers import until

KEY = "environments 'data': rewards"
TIMEOUT = 120.0
SOURCE = """\
import functools, os, time

def length(completions, prompts, completion_ids, trainer_state, log_metric, answer, **columns):
    log_metric("step", trainer_state.global_step + trainer_state.max_steps)
    assert len(prompts) == len(answer) == len(completion_ids)
    return [float(len(text) + sum(ids)) for text, ids in zip(completions, completion_ids)]

def mixed(completions, **columns):
    if "raise" in completions:
        raise ValueError("bad completion")
    return [None if text == "none" else 0.5 for text in completions]

def misbehave(completions, answer, **columns):
    if "exit" in completions:
        os._exit(0)
    while "hang" in completions:
        open(f"{answer[0]}{os.getpid()}", "w").close() or time.sleep(60)  # one line: the test reads its number
    return [1.0] * len(completions)

def gpu(completions, **columns):
    return [float(os.environ["CUDA_VISIBLE_DEVICES"] == "")] * len(completions)

async def later(completions, **columns):
    return [1.0] * len(completions)

class Judge:
    def __call__(self, completions, **columns):
        return [1.0] * len(completions)

judge = Judge()
partial = functools.partial(mixed, strict=True)
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("rewards") / "my_rewards.py"
    path.write_text(SOURCE)
    return path


@pytest.fixture(scope="module")
def scorer(file):
    """Scorers by names of functions and place. Their processes end with this module's tests."""
    made: dict[tuple[str, ...], RewardScorer] = {}

    def make(*names: str, run_in: str = "process") -> RewardScorer:
        if (run_in, *names) not in made:
            made[run_in, *names] = build([RewardConfig(name=f"{file}:{name}", run_in=run_in) for name in names])
        return made[run_in, *names]

    yield make
    for one in made.values():
        if one.workers is not None:
            one.workers.pool.close()


def build(configs: list[RewardConfig]) -> RewardScorer:
    functions = build_rewards(configs, KEY)
    return RewardScorer(functions, 40, start_workers(configs, functions, KEY))


def scores(scorer: RewardScorer, *texts: str, item: object = "7") -> list[Score]:
    prompt = Prompt(index=0, token_ids=[1], text="q", item={"prompt": "q", "answer": item}, source="data")
    completions = [
        Completion(token_ids=[len(text)], sampling_logprobs=[-1.0], finish_reason="stop", policy_version=2)
        for text in texts
    ]
    return scorer.score(prompt, completions, list(texts))


def test_results_metrics_and_errors_are_those_of_threads(scorer):
    texts = ["none", "raise", "fine"]
    in_process = scores(scorer("length", "mixed"), *texts)
    assert in_process == scores(scorer("length", "mixed", run_in="thread"), *texts)
    assert in_process[0].parts == {"step": 42.0, "length": 8.0}
    assert in_process[1].error == "mixed: ValueError: bad completion (my_rewards.py, line 10)"


def test_calls_that_hang_are_ended_with_their_line_and_their_processes_are_replaced(scorer, tmp_path):
    misbehaving = scorer("misbehave")
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(scores, misbehaving, "hang", "fine", item=f"{tmp_path}/") for _ in range(2)]
        until(lambda: len(list(tmp_path.iterdir())) == 2)
        assert workers.end_busy_workers("no reward")
        hung = [score for call in calls for score in call.result(TIMEOUT)]
    assert {score.error for score in hung} == {"no reward, in misbehave (my_rewards.py, line 17)"}
    assert scores(misbehaving, "fine")[0].reward == 1.0
    assert workers.end_busy_workers("no reward") is False


def test_a_call_that_ends_its_process_costs_its_completions_only(scorer):
    misbehaving = scorer("misbehave")
    assert scores(misbehaving, "exit", "fine")[1].error == "misbehave: the worker process ended with exit code 0"
    assert scores(misbehaving, "fine")[0].reward == 1.0


def test_a_reward_of_weight_zero_that_ends_its_process_costs_no_completion_its_reward(file):
    logged = RewardConfig(name=f"{file}:misbehave", run_in="process", weight=0.0)
    scorer = build([logged, RewardConfig(name=f"{file}:length", run_in="process")])
    try:
        [exited, fine] = scores(scorer, "exit", "fine")
    finally:
        scorer.workers.pool.close()
    assert (exited.reward, fine.reward, exited.parts["length"]) == (8.0, 8.0, 8.0)
    assert exited.error == "misbehave: the worker process ended with exit code 0"


def test_a_process_that_ends_leaves_no_completion_with_a_part_of_its_reward(scorer):
    for names in (("misbehave", "length"), ("length", "misbehave")):
        assert [one.reward for one in scores(scorer(*names), "exit", "fine")] == [None, None]


def test_after_the_idle_processes_were_ended_the_next_call_starts_one(scorer):
    assert scores(scorer("gpu"), "fine")[0].reward == 1.0
    workers.end_idle_workers()
    assert scores(scorer("gpu"), "fine")[0].reward == 1.0


def test_a_prompt_that_cannot_be_sent_is_named(scorer):
    [score] = scores(scorer("misbehave"), "fine", item=threading.Lock())
    assert score.error.startswith("run_in: cannot send the prompt to a process: TypeError: cannot pickle")


@pytest.mark.parametrize("answers", ["read", "unread"])
def test_a_process_ends_without_a_traceback_when_its_connection_closes(capfd, answers):
    pool = workers.WorkerPool(echoing)
    worker = pool.start()
    assert worker.wait_until_started().error is None
    with workers._lock:
        worker.busy = True  # its request stays without a reader
    worker.connection.send(1)
    assert worker.connection.poll(TIMEOUT)
    if answers == "read":
        worker.connection.recv()
    assert worker.discard() == 0
    assert capfd.readouterr().err == ""


def echoing() -> tuple[workers.Started, workers.Answer]:
    return workers.Started(), lambda request: [request]


def test_a_process_sees_no_gpu(scorer):
    assert scores(scorer("gpu"), "fine")[0].reward == 1.0


@pytest.mark.parametrize("name", ["later", "judge", "partial"])
def test_coroutines_and_objects_stay_in_threads(scorer, name):
    assert scorer(name, run_in="auto").workers is None


def test_built_in_rewards_stay_in_threads():
    assert build([RewardConfig(name="exact_match")]).workers is None


@pytest.mark.parametrize(
    "line",
    [
        "import torch",
        "def load():\n    from transformers import AutoModel",
        "def count():\n    global calls\n    calls = 1",
        "import helper",
    ],
)
def test_functions_of_files_with_signs_of_device_memory_or_state_stay_in_threads(tmp_path, line):
    (tmp_path / "helper.py").write_text("import triton\n")
    (tmp_path / "mine.py").write_text(f"{line}\ndef right(completions, **columns):\n    return [1.0]\n")
    assert build([RewardConfig(name=f"{tmp_path / 'mine.py'}:right")]).workers is None


def test_a_file_that_a_process_cannot_load_stays_in_a_thread_unless_a_process_was_asked_for(tmp_path):
    source = "open({!r}, 'x').close()\ndef right(completions):\n    return [1.0]\n"
    path = tmp_path / "once.py"
    path.write_text(source.format(str(tmp_path / "lock")))
    assert build([RewardConfig(name=f"{path}:right")]).workers is None
    with pytest.raises(EnvironmentSetupError, match=r"FileExistsError.*; it was loaded in a process \(run_in\)"):
        build([RewardConfig(name=f"{path}:right", run_in="process")])
