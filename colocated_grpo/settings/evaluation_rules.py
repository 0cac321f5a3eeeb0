"""Rules for evaluation sets and for the best step. Each rule yields one error line per violation."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from colocated_grpo.settings.evaluation import ANSWERS, HELD_OUT, PREFIX
from colocated_grpo.settings.schema import MIN_TEMPERATURE, Config
from colocated_grpo.settings.sources import AgentSourceConfig, EpisodeSourceConfig, RowsSourceConfig

Lines = Iterator[str]


def _temperatures_are_possible(config: Config) -> Lines:
    temperatures = {"evaluation.temperature": config.evaluation.temperature}
    for index, entry in enumerate(config.evaluation.sets):
        temperatures[f"evaluation.sets.{index}.temperature"] = entry.temperature
    for key, temperature in temperatures.items():
        if 0 < temperature < MIN_TEMPERATURE:
            yield f"{key}={temperature:g}: must be 0 (greedy) or at least {MIN_TEMPERATURE:g}"


def _names_of_sets_differ(config: Config) -> Lines:
    names = [entry.name for entry in config.evaluation.sets]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"evaluation.sets: {names.count(name)} sets are named {name!r}; their metrics would have the same names"


def _answers_are_known(config: Config) -> Lines:
    for index, entry in enumerate(config.evaluation.sets):
        if entry.answer is not None and ":" not in entry.answer and entry.answer not in ANSWERS.values():
            yield (
                f"evaluation.sets.{index}.answer={entry.answer!r}: must be one of {', '.join(ANSWERS.values())}, or "
                "your own module:function or path/to/file.py:function"
            )


def _sources_of_sets_are_whole(config: Config) -> Lines:
    for index, entry in enumerate(config.evaluation.sets):
        plain = type(entry.source).model_fields
        for name in ("eval_split", "held_out", "shuffle", "curriculum", "weight"):
            value = getattr(entry.source, name, None)
            if name in plain and value != plain[name].default:
                yield (
                    f"evaluation.sets.{index}.source.{name}={value}: has no meaning here; a set uses its prompts in "
                    "order, and all rows of `split`"
                )


def _episodes_of_sets_need_single_rank_engines(config: Config) -> Lines:
    for index, entry in enumerate(config.evaluation.sets):
        if config.ranks_per_engine > 1 and isinstance(entry.source, EpisodeSourceConfig | AgentSourceConfig):
            yield (
                f"evaluation.sets.{index}.source.type={entry.source.type}: needs engine.tensor_parallel_size=1, not "
                f"{config.ranks_per_engine}, because the ranks of an engine would have to submit every turn at the "
                "same step"
            )


def _best_is_a_metric_of_the_run(config: Config) -> Lines:
    metric = config.evaluation.keep_best
    if metric is None:
        return
    possible = [HELD_OUT] if config.evaluation.every else []
    for entry in config.evaluation.sets:
        if config.evaluation.interval(entry):
            possible += [f"{PREFIX}/{entry.name}/{rate}" for rate in entry.rates]
    if metric not in possible:
        listed = f"must be one of {', '.join(possible)}" if possible else "needs evaluation.every above 0, or a set"
        yield f"evaluation.keep_best={metric}: {listed}"


def _patience_needs_a_best(config: Config) -> Lines:
    if config.evaluation.patience is not None and config.evaluation.keep_best is None:
        yield (
            f"evaluation.patience={config.evaluation.patience}: needs evaluation.keep_best, the metric that has to "
            "improve"
        )


def evaluated_data_is_trained(config: Config) -> Lines:
    """Yield a note for each evaluation set whose rows are also trained on."""

    def rows(source: RowsSourceConfig) -> tuple[str, str | None, str]:
        return source.name, source.subset, source.split

    trained = {rows(source) for source in config.environments if isinstance(source, RowsSourceConfig)}
    for entry in config.evaluation.sets:
        if isinstance(entry.source, RowsSourceConfig) and rows(entry.source) in trained:
            yield f"evaluation set {entry.name!r}: its rows are also trained on, so it does not measure generalization"


EVALUATION_RULES: tuple[Callable[[Config], Lines], ...] = (
    _temperatures_are_possible,
    _names_of_sets_differ,
    _answers_are_known,
    _sources_of_sets_are_whole,
    _episodes_of_sets_need_single_rank_engines,
    _best_is_a_metric_of_the_run,
    _patience_needs_a_best,
)
