"""Settings that choose rows of a dataset, and in which order they are drawn."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from colocated_grpo.settings.base import Fraction, Integer, Number, Positive, Section

Scalar = bool | int | float | str


class ConditionConfig(Section):
    """Condition on a column: some values, or bounds of a number. A plain value or list is short for {any: ...}."""

    any: list[Scalar] | None = Field(None, min_length=1)
    """Values that meet the condition."""
    min: Number | None = None
    """Smallest number that meets the condition."""
    max: Number | None = None
    """Largest number that meets the condition."""

    @model_validator(mode="before")
    @classmethod
    def _long_form(cls, value: Any) -> Any:
        return value if isinstance(value, dict) else {"any": value if isinstance(value, list) else [value]}

    @model_validator(mode="after")
    def _is_one_condition(self) -> Self:
        has_bounds = self.min is not None or self.max is not None
        if has_bounds == (self.any is not None):
            raise ValueError("needs either values or a min, a max or both")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"min={self.min:g} is above max={self.max:g}")
        return self


def _in_order(bounds: Any) -> Any:
    if bounds.high is not None and bounds.low > bounds.high:
        raise ValueError(f"low={bounds.low:g} is above high={bounds.high:g}")
    return bounds


class ColumnCurriculumConfig(Section):
    """Rows from easy to hard by a column: each stage draws from the easiest rows, the last one from all."""

    type: Literal["column"]
    column: str
    """Column of the difficulty: numbers, or the values that `order` lists."""
    order: Literal["ascending", "descending"] | Annotated[list[Scalar], Field(min_length=2)] = "ascending"
    """ascending: small numbers are easy. descending: large numbers are easy, such as solve rates of another model. Or
    all values of the column, the easiest first. Example: [easy, medium, hard]"""
    stages: Integer = Field(5, ge=2)
    """Number of stages. Stage k of n draws from the easiest k/n of the rows. Rows of equal difficulty join together."""
    steps: Positive | None = None
    """Training steps before the last stage, which draws from all rows. The other stages share them equally. Either this
    or `high` is given."""
    high: Fraction | None = None
    """Pass rate above which the next stage begins: the mean over the last `window` prompts of the stage."""
    low: Fraction = 0.0
    """Pass rate below which the stage before begins again."""
    window: Positive = 64
    """Prompts over which the pass rate is taken. The pass rate of a prompt is the fraction of its completions whose
    reward is at least `pass_reward`."""
    pass_reward: Number = 1.0
    """Smallest reward of a completion that counts as passed."""

    @model_validator(mode="after")
    def _has_one_pace(self) -> Self:
        if (self.steps is None) == (self.high is None):
            raise ValueError("needs either steps or high, which decide when the next stage begins")
        if self.high is None and self.low:
            raise ValueError(f"low={self.low:g} needs high")
        return _in_order(self)


class PassRateCurriculumConfig(Section):
    """Prompts whose last visit was too easy or too hard rest for some turns, so others are drawn instead."""

    type: Literal["pass_rate"]
    low: Fraction = 0.1
    """Smallest pass rate of a prompt that does not rest. The pass rate is the fraction of the completions of its last
    visit whose reward is at least `pass_reward`."""
    high: Fraction = 0.9
    """Largest pass rate of a prompt that does not rest."""
    rest: Positive = 2
    """Number of turns for which a prompt outside these bounds is passed over. Then it is sampled again."""
    pass_reward: Number = 1.0
    """Smallest reward of a completion that counts as passed."""

    _checked = model_validator(mode="after")(_in_order)


CurriculumConfig = Annotated[ColumnCurriculumConfig | PassRateCurriculumConfig, Field(discriminator="type")]
