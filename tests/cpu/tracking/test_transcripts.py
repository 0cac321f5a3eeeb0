"""Passages of stored rollouts: sampled and observed text."""

from pathlib import Path

import pytest

from colocated_grpo.tools import show_rollouts
from colocated_grpo.tracking import files
from colocated_grpo.tracking.report import write_report
from colocated_grpo.tracking.transcripts import passages
from colocated_grpo.types import Group, Prompt, Rollout, Score
from tests.support.tracked_run import TrackedRun, config_of, row_of

CHARACTERS = [chr(code) for code in range(32, 127)]


def played(observation: str) -> Group:
    """Return a group of one rollout of two turns, with a token for each character."""
    parts = [("look<|im_end|>", True), (observation, False), ("7<|im_end|>", True)]
    tokens = [CHARACTERS.index(c) for text, _ in parts for c in text]
    mask = [sampled for text, sampled in parts for _ in text]
    rollout = Rollout(
        token_ids=[0, *tokens],
        loss_mask=[False, *mask],
        sampling_logprobs=None,
        prompt_length=1,
        text="".join(text for text, _ in parts),
        finish_reason="stop",
        policy_version=0,
        temperature=1.0,
        score=Score(reward=1.0),
    )
    prompt = Prompt(index=0, token_ids=[0], text="<|im_start|>user 3+4=", item={}, source="tools")
    return Group(prompt=prompt, rollouts=[rollout])


def decode(token_ids: list[int]) -> str:
    return "".join(CHARACTERS[token] for token in token_ids)


def test_what_the_policy_observed_is_told_apart_from_what_it_sampled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    observation = "<|im_start|>tool <b>4 apples</b><|im_end|><|im_start|>assistant "
    run = TrackedRun(tmp_path)
    run.tracker.start(config_of().model_dump(mode="json"), {"model": ""}, 0, decode)
    run.tracker.flush(0, row_of(0), [played(observation)])
    [row] = files.read_rollouts(tmp_path)
    assert passages(row) == [
        ("policy", "look<|im_end|>"),
        ("environment", observation),
        ("policy", "7<|im_end|>"),
    ]
    page = write_report(tmp_path).read_text()
    assert page.count('class="bubble sampled"') == 2 and page.count('class="bubble observed"') == 2
    assert "4 apples" in page and "<b>4 apples" not in page
    capsys.readouterr()
    assert show_rollouts.main([str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    places = [printed.index(text) for text in ("look", "environment", "4 apples")]
    assert places == sorted(places) and places[-1] < printed.rindex("policy")
