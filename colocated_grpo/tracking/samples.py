"""One completion of a step as a line for the console."""

from __future__ import annotations

import math
from collections.abc import Sequence

from colocated_grpo.tracking.conversation import POLICY, Message, one_line, prompt_messages
from colocated_grpo.tracking.text import number
from colocated_grpo.types import Group

PROMPT_CHARACTERS, COMPLETION_CHARACTERS = 80, 240


def typical_completion(groups: Sequence[Group]) -> str | None:
    """Return the completion with the median reward, its prompt and its reward, as one line; None without a reward."""
    scored = [
        (rollout.score.reward, group.prompt, rollout)
        for group in groups
        for rollout in group.rollouts
        if rollout.score.reward is not None and math.isfinite(rollout.score.reward)
    ]
    if not scored:
        return None
    reward, prompt, rollout = sorted(scored, key=lambda one: one[0])[len(scored) // 2]
    asked = one_line(prompt_messages({"prompt": prompt.text})[-1:], PROMPT_CHARACTERS)
    answer = one_line([Message(POLICY, rollout.text, sampled=True)], COMPLETION_CHARACTERS)
    return f"reward {number(reward)}: {asked} -> {answer}"
