"""Tasksets of verifiers: their questions, their judges, and the policy's turn between.

`make test` runs this file in an environment of its own, which has verifiers.
"""

from __future__ import annotations

import re
import sys

import pytest
import yaml

from colocated_grpo.config.schema import Config
from colocated_grpo.environments import EnvironmentSetupError, build_environments
from colocated_grpo.environments.episodes import build_episode
from tests.support.adapter_play import TOKENIZER, items, played, saying
from tests.support.paths import ROOT

GUIDE = ROOT / "docs/guides/adapters.md"
TASKSET = """
import verifiers.v1 as vf

class Data(vf.TaskData):
    answer: int

class Config(vf.TasksetConfig):
    rows: int = 40
    difficulty: int = 1

class Sum(vf.Task[Data, vf.State, vf.TaskConfig]):
    @vf.reward(weight=2.0)
    async def right(self, trace) -> float:
        return float(trace.last_reply == str(self.data.answer))

    @vf.reward(weight=0.5)
    async def asked_and_answered(self, trace) -> float:
        return float([message.role for message in trace.messages] == ["system", "user", "assistant"])

    @vf.metric
    async def length(self, trace) -> float:
        return len(trace.assistant_messages[-1].content)
"""
ROWS = """
class Sums(vf.Taskset[{task}, Config]):
    def load(self):
        for n in range(self.config.rows):
            yield {task}(Data(prompt={prompt}, system_prompt="Add.", answer=2 * n), self.config.task)

__all__ = ["Sums"]
"""
PROMPT = 'f"{n}+{n}="'
HOOKED = """
class Hooked(Sum):
    async def setup(self, trace, runtime):
        await runtime.start()
"""
RUN = """
class Run(Sum):
    @vf.reward
    async def passes(self, trace, runtime) -> float:
        return 1.0
"""
BARE = """
class Bare(vf.Task[Data, vf.State, vf.TaskConfig]):
    pass
"""


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Installs a taskset under a name."""
    pytest.importorskip("verifiers.v1", reason="pip install verifiers, or make test")
    monkeypatch.syspath_prepend(str(tmp_path))

    def install(name: str, task: str = "Sum", prompt: str = PROMPT, more: str = "") -> None:
        (tmp_path / f"{name}.py").write_text(TASKSET + more + ROWS.format(task=task, prompt=prompt))

    return install


@pytest.fixture
def taskset(installed, request):
    """Installs a taskset; gives its episode."""

    def build(task: str = "Sum", prompt: str = PROMPT, more: str = "", **args):
        name = f"sums_{abs(hash(request.node.name))}"
        installed(name, task, prompt, more)
        return build_episode(f"verifiers:{name}", args)

    return build


def test_a_task_asks_and_its_own_rewards_judge(taskset):
    episode = taskset()
    item = items(episode, 1)[0]
    assert [message["role"] for message in item["prompt"]] == ["system", "user"]
    right = played(episode, item, saying(str(item["data"]["answer"])))
    wrong = played(episode, item, saying("none"))
    assert right.score.reward == 2.5
    assert right.score.parts == {"right": 1, "asked_and_answered": 1, "length": len(str(item["data"]["answer"]))}
    assert wrong.score.reward == 0.5
    assert wrong.score.parts["right"] == 0


def test_one_task_in_ten_is_held_out_and_the_seed_decides_the_order(taskset):
    episode = taskset(config={"rows": 100})
    trained, held_out = (items(episode, 200, split=split) for split in ("train", "held_out"))
    assert len(trained) + len(held_out) == 100
    assert 3 <= len(held_out) <= 20
    assert trained == items(episode, 200)
    again = items(episode, 200, seed=1)
    assert trained != again
    assert {item["data"]["idx"] for item in trained} == {item["data"]["idx"] for item in again}


def test_messages_are_asked_as_they_are(taskset):
    episode = taskset(prompt='[vf.UserMessage(content=f"{n} twice?")]')
    assert re.fullmatch(r"\d+ twice\?", items(episode, 1)[0]["prompt"][-1]["content"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": "Hooked", "more": HOOKED}, "its tasks need a runtime"),
        ({"task": "Run", "more": RUN}, "its rewards need a runtime"),
        ({"task": "Bare", "more": BARE}, "its tasks have no rewards"),
        ({"prompt": "None"}, "its tasks have no prompt"),
        ({"config": {"rows": 0}}, "has no tasks"),
        ({"config": {"row": 3}}, "row"),
        ({"max_turns": 3}, "unknown argument 'max_turns'"),
    ],
)
def test_what_cannot_be_played_is_said_in_one_line(taskset, changes, message):
    with pytest.raises(EnvironmentSetupError, match=re.escape(message)) as caught:
        taskset(**changes)
    assert "\n" not in str(caught.value)


def test_the_configuration_of_the_guide_builds_and_asks(installed):
    installed("my_taskset", prompt='f"{n} of {self.config.difficulty}?"')
    (block,) = (part for part in re.findall(r"```yaml\n(.*?)```", GUIDE.read_text(), re.DOTALL) if "verifiers:" in part)
    environments = build_environments(Config.model_validate(yaml.safe_load(block)), TOKENIZER)
    (prompt,) = environments.held_out(1)
    assert re.search(r"\d+ of 2\?", prompt.text)


def test_a_missing_verifiers_names_the_pip_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "verifiers", None)
    monkeypatch.setitem(sys.modules, "verifiers.v1", None)
    with pytest.raises(EnvironmentSetupError, match="pip install verifiers"):
        build_episode("verifiers:sums", {})
