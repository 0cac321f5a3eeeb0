"""The page of questions: every setting of an answer exists, and has the value that the answer gives it."""

from __future__ import annotations

import re

import pytest

from colocated_grpo.settings.errors import parse_path, setting_names
from colocated_grpo.settings.schema import Config
from tests.support.config_text import load
from tests.support.paths import ROOT

PAGE = (ROOT / "docs/faq.md").read_text()
SETTINGS = {path for path, _ in setting_names(Config)}
SPANS = re.findall(r"`([^`]+)`", PAGE.replace("\n", " "))
NAMES = [span.split()[0].rstrip(":") for span in SPANS if span.partition(".")[0] in Config.model_fields]
VALUES = [span.split(": ", 1) for span in SPANS if re.match(r"[a-z]+\.[a-z_.]+: ", span)]


def test_every_setting_of_an_answer_exists():
    assert len(NAMES) > 20
    assert [name for name in NAMES if parse_path(name) not in SETTINGS] == []


@pytest.mark.parametrize(("name", "value"), VALUES, ids=[name for name, _ in VALUES])
def test_every_value_of_an_answer_is_accepted(name: str, value: str):
    section = name.partition(".")[0]
    assert section in load("", f"--{name}={value}").model_fields_set


def test_every_heading_is_a_question():
    questions = re.findall(r"^### (.*)$", PAGE, re.MULTILINE)
    assert len(questions) >= 20
    assert [question for question in questions if "?" not in question] == []
