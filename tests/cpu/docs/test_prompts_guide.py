"""The guide to prompts: its configs draw prompts, its log line is what the code does."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from colocated_grpo.assembly.data import open_source
from colocated_grpo.environments.build import build_environments
from colocated_grpo.settings.errors import parse_path, setting_names
from colocated_grpo.settings.schema import Config
from colocated_grpo.settings.sources import DatasetSourceConfig
from tests.support.config_text import load, notes
from tests.support.paths import ROOT
from tests.support.templates import tool_tokenizer

PAGE = (ROOT / "docs/guides/prompts.md").read_text()
FIRST, TOOLS = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
PART = r"\d+ by filter my_data\.py:easy \(rows \d+(, \d+)*(, \.\.\.)?\)"
LINE = re.compile(rf"environments 'questions\.jsonl': 'train': \d+ of \d+ rows are kept; left out: {PART}")
ROWS = [
    {
        "prompt": f"{'long ' * (100 * (row % 7 == 0))}x+{row}",
        "level": row % 5,
        "subject": "ab"[row % 3 == 0],
        "answer": "1",
    }
    for row in range(60)
]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The working folder, with the modules of the guide and data for its configs."""
    monkeypatch.chdir(tmp_path)
    for code in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        name = re.match(r"# (\w+\.py)\n", code)[1]
        Path(name).write_text(code)
    rows = [{**row, "subject": "algebra" if row["subject"] == "a" else "logic"} for row in ROWS]
    Path("questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("requests.jsonl").write_text('{"prompt": "wait 3 minutes", "tool_calls": {"name": "timer"}}\n' * 4)


def opened(text):
    lines: list[str] = []
    source = open_source(build_environments(load(text, alone=True), tool_tokenizer()), lines.append)
    return source, lines


def test_the_first_config_filters_and_mixes():
    source, [line] = opened(FIRST)
    prompts = source.next(12)
    rows = [prompt for prompt in prompts if prompt.source == "questions.jsonl"]
    assert len(rows) == 9
    assert {prompt.item["level"] for prompt in rows} <= {1, 2, 3}
    assert {prompt.item["subject"] for prompt in rows} == {"algebra"}
    assert all(len(prompt.item["prompt"][1]["content"]) < 400 for prompt in rows)
    assert rows[0].text.startswith("<|system|>Put the final answer into \\boxed{}.<|end|><|user|>x+")
    assert all(prompt.text.endswith("<think></think>") for prompt in prompts)
    [shown] = re.findall(r"```\n(environments .*?)\n```", PAGE)
    assert LINE.fullmatch(shown) and LINE.fullmatch(line), (shown, line)


def test_the_tools_of_the_guide_reach_the_template():
    [prompt] = opened(TOOLS)[0].next(1)
    assert prompt.text.startswith("<|system|>weather timer <|end|><|user|>wait 3 minutes")
    assert [tool["function"]["name"] for tool in prompt.template["tools"]] == ["weather", "timer"]


def test_settings_named_in_the_guide_exist():
    settings = {path for path, _ in setting_names(Config)}
    named = re.findall(r"`((?:model|rollout)\.\w[\w.]*)`", PAGE)
    assert len(named) > 4
    assert [name for name in named if parse_path(name) not in settings] == []
    for name in ("tools", "chat_template_kwargs", "system_prompt", "filter", "shuffle", "weight"):
        assert f"`{name}`" in PAGE and name in DatasetSourceConfig.model_fields


def test_the_name_of_trl_is_translated():
    assert "TRL's `chat_template_kwargs`" in PAGE
    assert notes("chat_template_kwargs: {enable_thinking: false}") == [
        "translated names: chat_template_kwargs -> model.chat_template_kwargs"
    ]
