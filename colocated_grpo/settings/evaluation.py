"""Settings of evaluation: held-out prompts of the training environments, and separate evaluation sets."""

from collections.abc import Iterator, Sequence
from typing import Annotated

from pydantic import BeforeValidator, Field, model_validator

from colocated_grpo.settings import generation, sources
from colocated_grpo.settings.base import CodeName, NonNegative, Number, Positive, Section

HELD_OUT = "held_out/reward"
PREFIX = "eval"
MEAN = "mean"

ANSWERS = {"exact_match": "final_answer", "gsm8k": "last_number", "math_verify": "boxed"}
"""Built-in reward -> function that extracts the answer that the reward compares."""

SetSource = Annotated[
    sources.TaskSourceConfig | sources.DatasetSourceConfig | sources.EpisodeSourceConfig | sources.AgentSourceConfig,
    Field(discriminator="type"),
]


class EvaluationSetConfig(Section):
    """Prompts evaluated at regular intervals, separate from the training environments."""

    name: str = Field(pattern=r"^[A-Za-z0-9_.-]+$")
    """Part of the metrics' names: eval/<name>/mean."""
    source: SetSource
    """Source of the prompts. A dataset or agent provides all rows of `split`, in order; a task or episode provides its
    held-out items. A plain name is short for {type: dataset, name: ...}."""
    rewards: list[Annotated[sources.RewardConfig, BeforeValidator(sources.reward_by_name)]] | None = None
    """Reward functions of a dataset, short for `rewards` inside `source`."""
    prompts: Positive | None = None
    """Number of prompts. The first prompts of the source are used, so every evaluation has the same prompts. Default:
    all rows of a dataset or an agent; 64 prompts of a task or an episode."""
    samples: Positive = 1
    """Completions per prompt. pass@k is estimated for k = 1, 2, 4, ... up to this number."""
    temperature: Number = Field(1.0, ge=0, le=2)
    """Sampling temperature; 0 is greedy."""
    top_p: Number = Field(1.0, gt=0, le=1)
    """Nucleus sampling: keep the most likely tokens up to this total probability; 1 keeps all tokens."""
    every: NonNegative | None = None
    """Steps between evaluations of this set. The set is also evaluated at the start and the end of the run. 0: never;
    only colocated-grpo evaluate uses the set. Default: evaluation.every."""
    pass_reward: Number = 1.0
    """Minimum reward of a completion that counts as passed in pass@k and maj@k."""
    answer: CodeName | None = None
    """Function that extracts from a completion's text the answer that maj@k compares: final_answer, last_number, boxed,
    or your own 'package.module:function' or 'path/to/file.py:function'. Your function returns None if the text contains
    no answer. Default: the function that matches the reward exact_match, gsm8k or math_verify. With other rewards and
    no function, there is no maj@k."""

    @model_validator(mode="before")
    @classmethod
    def _long_form(cls, values: object) -> object:
        """Write a plain source in full, and move `rewards` into the source: in place, so that error lines find them."""
        if not isinstance(values, dict):
            return values
        source, rewards = values.get("source"), values.get("rewards")
        if isinstance(source, str):
            source = {"type": "dataset", "name": source}
        if not isinstance(source, dict):
            return values
        source = {"type": "dataset" if rewards or "rewards" in source else "task", **source}
        if rewards is not None and "rewards" in source:
            raise ValueError("rewards are given twice, in the set and in its source; remove one of them")
        if rewards is not None and source["type"] != "dataset":
            raise ValueError(f"rewards belong to a dataset; a source of type {source['type']} scores by itself")
        if source["type"] == "dataset" and rewards is None and "rewards" not in source:
            raise ValueError("a dataset needs rewards, such as rewards: [math_verify]")
        if rewards is not None:
            source["rewards"] = rewards
        values |= {"source": source, "rewards": None}
        return values

    @property
    def answer_name(self) -> str | None:
        """Name of the function whose results maj@k compares; None if there is no maj@k."""
        if self.answer is not None or not isinstance(self.source, sources.DatasetSourceConfig):
            return self.answer
        return next((ANSWERS[reward.name] for reward in self.source.rewards if reward.name in ANSWERS), None)

    @property
    def pass_ks(self) -> list[int]:
        """Values of k in pass@k: the powers of two up to the number of samples, and the number of samples itself."""
        powers = {1 << exponent for exponent in range(self.samples.bit_length())}
        return sorted(powers | {self.samples})

    @property
    def rates(self) -> list[str]:
        """Names of the metrics where higher is better, in display order."""
        majority = [f"maj@{self.samples}"] if self.samples > 1 and self.answer_name is not None else []
        return [MEAN, *(f"pass@{k}" for k in self.pass_ks), *majority]

    def problems(self, key: str) -> Iterator[str]:
        if self.answer is not None and ":" not in self.answer and self.answer not in ANSWERS.values():
            own = "your own module:function or path/to/file.py:function"
            yield f"{key}.answer={self.answer!r}: must be one of {', '.join(ANSWERS.values())}, or {own}"
        plain = type(self.source).model_fields
        for name in ("eval_split", "held_out", "shuffle", "weight"):
            value = getattr(self.source, name, None)
            if name in plain and value != plain[name].default:
                rule = "has no meaning here; a set uses its prompts in order, and all rows of `split`"
                yield f"{key}.source.{name}={value}: {rule}"


class EvaluationConfig(Section):
    every: NonNegative = 10
    """Steps between evaluations on held-out prompts. The run also evaluates at its start and its end. 0: never."""
    prompts: Positive = 64
    """Held-out prompts per evaluation, taken from all environments by weight. Every evaluation has the same."""
    samples_per_prompt: Positive = 1
    """Completions per held-out prompt."""
    temperature: Number = Field(1.0, ge=0, le=2)
    """Temperature on held-out prompts; 0 is greedy. rollout.top_p, top_k, min_p, repetition_penalty are not applied."""
    sets: list[EvaluationSetConfig] = []
    """Additional evaluation sets with their own metrics: docs/guides/evaluation.md."""
    keep_best: str | None = None
    """Metric that selects the best evaluated step: held_out/reward, or eval/<name>/mean, pass@k or maj@k of a set. The
    checkpoint of the best step is kept. The weights of the best step are exported as best_model/ (an adapter as
    best_adapter/). null: none."""
    patience: Positive | None = None
    """End the run after this many evaluations in a row without a new best value of keep_best. null: never."""

    def interval(self, entry: EvaluationSetConfig) -> int:
        """Return the steps between evaluations of a set; 0: never."""
        return self.every if entry.every is None else entry.every

    def problems(self) -> Iterator[str]:
        temperatures = {"evaluation.temperature": self.temperature}
        temperatures |= {f"evaluation.sets.{i}.temperature": entry.temperature for i, entry in enumerate(self.sets)}
        for key, temperature in temperatures.items():
            if 0 < temperature < generation.MIN_TEMPERATURE:
                yield f"{key}={temperature:g}: must be 0 (greedy) or at least {generation.MIN_TEMPERATURE:g}"
        names = [entry.name for entry in self.sets]
        for name in sorted({name for name in names if names.count(name) > 1}):
            yield f"evaluation.sets: {names.count(name)} sets are named {name!r}; their metrics would have equal names"
        for index, entry in enumerate(self.sets):
            yield from entry.problems(f"evaluation.sets.{index}")
        if self.keep_best is not None and self.keep_best not in (possible := self._metrics()):
            listed = f"must be one of {', '.join(possible)}" if possible else "needs `every` above 0, here or in a set"
            yield f"evaluation.keep_best={self.keep_best}: {listed}"
        if self.patience is not None and self.keep_best is None:
            yield f"evaluation.patience={self.patience}: needs evaluation.keep_best, the metric that has to improve"

    def _metrics(self) -> list[str]:
        """Return the metrics that keep_best accepts."""
        own = [f"{PREFIX}/{entry.name}/{rate}" for entry in self.sets if self.interval(entry) for rate in entry.rates]
        return [HELD_OUT, *own] if self.every else own

    def remarks(self, trained: Sequence[sources.EnvironmentConfig]) -> Iterator[str]:
        """Yield a note for each set whose rows are also training rows."""
        sources_of_rows = (source for source in trained if isinstance(source, sources.RowsSourceConfig))
        used = {(source.name, source.subset, source.split) for source in sources_of_rows}
        for entry in self.sets:
            own = entry.source
            if isinstance(own, sources.RowsSourceConfig) and (own.name, own.subset, own.split) in used:
                name = f"evaluation set {entry.name!r}"
                yield f"{name}: its rows are also trained on, so it does not measure generalization"
