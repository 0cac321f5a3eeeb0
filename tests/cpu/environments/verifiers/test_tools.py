"""Tasks of verifiers with tools and hooks, played by its own agent over a fake engine."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from colocated_grpo.environments import EnvironmentSetupError
from colocated_grpo.environments.build import build_environments
from colocated_grpo.environments.registry import build_episode
from colocated_grpo.rollout.engine import Request
from colocated_grpo.settings.schema import Config
from colocated_grpo.types import Completion, Rollout
from tests.support.adapter_play import items
from tests.support.agents import AgentRun, says
from tests.support.paths import ROOT
from tests.support.templates import tool_tokenizer

GUIDE = (ROOT / "docs/guides/adapters.md").read_text()
TASKSET = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)[-1]
CONTEXT, MAX_TURNS = 1000, 6


def call(name: str = "calculate", **arguments: Any) -> str:
    return f"<tool_call>{ {'name': name, 'arguments': arguments} }</tool_call>".replace("'", '"').replace("> {", ">{")


CALCULATE = call(expression="2*3")
SCRIPTS = {
    "solves": [CALCULATE, f"so {call(expression='7')}", "it is {answer}"],
    "malformed call": ['<tool_call>{"name": "calculate"'],
    "unknown tool": [call("divide", a=1), "{answer}"],
    "wrong arguments": [call(text="2*3"), "{answer}"],
    "endless": [CALCULATE],
    "too long": [CALCULATE.rjust(CONTEXT - 65, "a")],  # fits with a prompt of 54 to 59 tokens, but not with the result
}
"""Answers of the policy in one episode; the last is repeated."""


@pytest.fixture(scope="module")
def importable(tmp_path_factory) -> Iterator[Path]:
    """A folder whose modules can be imported here."""
    pytest.importorskip("verifiers.v1", reason="make test installs it")
    folder = tmp_path_factory.mktemp("tasksets")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        patch.setenv("PYTHONPATH", str(ROOT))
        yield folder


@pytest.fixture(scope="module")
def played(importable) -> Iterator[tuple[AgentRun, dict[str, Rollout]]]:
    """The scripts on the taskset of the guide, all at a time. The run is open, with the tool server."""
    (importable / "my_calculator.py").write_text(TASKSET)
    episode = build_episode("verifiers:my-calculator", {"agent": {"max_turns": MAX_TURNS}})
    drawn = items(episode, len(SCRIPTS))
    texts = [
        [text.replace("{answer}", str(item["data"]["answer"])) for text in script]
        for script, item in zip(SCRIPTS.values(), drawn, strict=True)
    ]
    with AgentRun(episode, by_prompt(texts), tokenizer=tool_tokenizer(), max_tokens=CONTEXT) as run:
        groups = run.collect_items([{**item, "number": index} for index, item in enumerate(drawn)])
        yield run, {name: group.rollouts[0] for name, group in zip(SCRIPTS, groups, strict=True)}


def by_prompt(texts: list[list[str]]) -> Callable[[Request, int], Completion]:
    """Return a function that answers the requests of each prompt with texts of its own."""
    answers = [says(*script) for script in texts]
    return lambda request, version: answers[request.key[1]](request, version)


def observed(rollout: Rollout) -> list[str]:
    """Return the results of tool calls, as the policy read them."""
    return re.findall(r"<\|tool\|>(.*?)<\|end\|>", rollout.text, re.DOTALL)


def test_tools_are_called_and_the_tasks_rewards_score_the_conversation(played):
    solved = played[1]["solves"]
    assert (solved.score.reward, solved.score.parts, solved.score.error) == (1.0, {"right": 1.0, "calls": 2.0}, None)
    assert observed(solved) == ["6", "error: write an expression such as 12*34"]


def test_an_episode_is_one_sequence_of_the_tokens_that_the_engine_sampled(played):
    run, rollouts = played
    for index, rollout in enumerate(rollouts.values()):
        assert not rollout.further
        mine = sorted((r for r in run.engine.submitted if r.key[1] == index), key=lambda request: request.key[3])
        said = [run.engine._complete(request, 0) for request in mine]
        trained = [token for token, in_loss in zip(rollout.token_ids, rollout.loss_mask, strict=True) if in_loss]
        assert trained == [token for one in said for token in one.token_ids]
        assert len(said) == len(mine) > 0


def test_the_tools_are_described_to_the_model(played):
    solved = played[1]["solves"]
    begin = tool_tokenizer().decode(solved.token_ids[: solved.prompt_length])
    assert re.fullmatch(r"<\|system\|>calculate <\|end\|><\|user\|>Calculate \S+ with the .*<\|assistant\|>", begin)


def test_a_malformed_call_ends_the_conversation_and_is_scored(played):
    rollout = played[1]["malformed call"]
    assert (rollout.score.reward, rollout.score.parts["calls"], rollout.score.error) == (0.0, 0.0, None)


@pytest.mark.parametrize(
    ("script", "result"), [("unknown tool", "error: unknown tool 'divide'"), ("wrong arguments", "expression")]
)
def test_a_call_that_cannot_be_made_gets_the_error_as_its_result(played, script, result):
    rollout = played[1][script]
    assert result in observed(rollout)[0]
    assert rollout.score.reward == 1.0


def test_the_turns_of_an_agent_are_limited(played):
    rollout = played[1]["endless"]
    assert (rollout.score.parts["calls"], rollout.score.error, rollout.finish_reason) == (MAX_TURNS - 1, None, "stop")


def test_a_conversation_that_outgrows_the_context_is_scored_and_counts_as_cut(played):
    rollout = played[1]["too long"]
    assert (rollout.score.reward, rollout.score.error, rollout.finish_reason) == (0.0, None, "length")
    assert len(rollout.token_ids) <= CONTEXT
    assert rollout.score.parts.keys() == {"right", "calls"}
    assert rollout.text.endswith(f"{CALCULATE}<|end|>"), "the answer was not cut; the next request was rejected"


def test_the_tool_server_is_one_for_all_episodes_and_ends_with_the_run(played):
    run, _ = played
    servers = [child for child in psutil.Process().children() if "my_calculator" in child.cmdline()]
    assert len(servers) == 1
    run.close()
    _, alive = psutil.wait_procs(servers, timeout=10)
    assert not alive


HOOKED = '''
import verifiers.v1 as vf

class Data(vf.TaskData):
    secret: str

class Seen(vf.State):
    asked: int = 0

class Vault(vf.Toolset[vf.ToolsetConfig, Seen]):
    async def setup_task(self, task):
        self.secret = task.secret

    @vf.tool
    def open(self) -> str:
        """Open the vault."""
        self.state.asked += 1
        return self.secret

    @vf.tool
    def crack(self) -> str:
        """Crack the vault."""
        raise ValueError("jammed")

class Heist(vf.Task[Data, Seen, vf.TaskConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Vault(vf.ToolsetConfig())]

    async def setup(self, trace, runtime):
        await runtime.write("plan", b"plan of ")

    @vf.reward
    async def found(self, trace, runtime) -> float:
        return float(trace.last_reply == (await runtime.read("plan")).decode() + self.data.secret)

    @vf.metric
    async def asked(self, trace) -> float:
        return trace.state.asked

class Heists(vf.Taskset[Heist, vf.TasksetConfig]):
    INFINITE = True

    def load(self):
        n = 0
        while True:
            yield Heist(Data(prompt=f"Open {n}.", secret=f"s{n}"), self.config.task)
            n += 1

__all__ = ["Heists"]
if __name__ == "__main__":
    Vault.run()
'''


def test_a_task_may_have_tools_hooks_and_state_of_its_own(importable):
    (importable / "heist.py").write_text(HOOKED)
    episode = build_episode("verifiers:heist", {})
    [item] = items(episode, 1)
    secret = item["data"]["secret"]
    answers = says(call("vault_crack"), call("vault_open"), f"plan of {secret}")
    with AgentRun(episode, answers, tokenizer=tool_tokenizer(), max_tokens=CONTEXT, tool_timeout=90) as run:
        [group] = run.collect_items([{**item, "number": 0}])
    [opened] = group.rollouts
    jammed, found = observed(opened)
    assert "jammed" in jammed and found == secret
    assert (opened.score.reward, opened.score.parts, opened.score.error) == (1.0, {"found": 1.0, "asked": 1.0}, None)


FAILS = """
import verifiers.v1 as vf

class Judged(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def good(self, trace) -> float:
        return 1 / (self.data.idx % 2)

class Judgements(vf.Taskset[Judged, vf.TasksetConfig]):
    def load(self):
        for n in range(40):
            yield Judged(vf.TaskData(prompt=f"Say {n}."), self.config.task)

__all__ = ["Judgements"]
"""


def test_a_reward_that_raises_costs_its_episode_and_is_named(importable):
    (importable / "judged.py").write_text(FAILS)
    episode = build_episode("verifiers:judged", {"agent": {}})
    drawn = items(episode, 10)
    with AgentRun(episode, says("yes")) as run:
        groups = run.collect_items([{**item, "number": index} for index, item in enumerate(drawn)])
    for item, group in zip(drawn, groups, strict=True):
        [rollout] = group.rollouts
        assert rollout.score.reward == (1.0 if item["data"]["idx"] % 2 else None)
        assert rollout.score.reward or "TaskError: task Judged scoring: ZeroDivisionError" in rollout.score.error


@pytest.mark.parametrize("key", ["system_prompt", "tools", "chat_template_kwargs"])
def test_settings_of_prompts_are_rejected_because_the_agent_writes_them(importable, key):
    (importable / "my_calculator.py").write_text(TASKSET)
    values = {"system_prompt": "Think.", "tools": [{"type": "function"}], "chat_template_kwargs": {"tools_too": True}}
    entry = {"type": "episode", "name": "verifiers:my-calculator", key: values[key]}
    config = Config.model_validate({"model": {"name": "none"}, "environments": [entry]})
    with pytest.raises(EnvironmentSetupError, match=f"environments 'verifiers:my-calculator': {key}: an agent plays"):
        build_environments(config, tool_tokenizer())
