"""Settings of dynamic sampling: which prompts are sampled again, and which no more."""

from __future__ import annotations

from pydantic import Field

from colocated_grpo.settings.base import Number, Positive, Section


class ResampleConfig(Section):
    max_rounds: Positive = 3
    """Largest number of further rounds in a step. A round samples about as many fresh prompts as are needed, at the
    step's own rate of groups with variance, to have rollout.prompts_per_step of them; at most that many prompts."""


class SkipSolvedConfig(Section):
    after: Positive = 2
    """Visits in a row in which all completions of a prompt were solved, after which it is skipped."""
    reward: Number = Field(1.0, gt=0)
    """A group is solved if its rewards are equal and at least this."""
