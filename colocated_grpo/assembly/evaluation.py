"""The evaluation side of a run: prompts, sampling and metrics of everything that is evaluated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from transformers import PreTrainedTokenizerBase

from colocated_grpo.environments import Environments
from colocated_grpo.environments.evaluation_sets import EvaluationSource, EvaluationSources, build_evaluation_sources
from colocated_grpo.evaluation.answers import Answer, answer_function
from colocated_grpo.evaluation.evaluator import EvaluationSet
from colocated_grpo.evaluation.metrics import set_metrics
from colocated_grpo.rollout.engine import Sampling
from colocated_grpo.runtime.distributed import World
from colocated_grpo.settings.evaluation import HELD_OUT
from colocated_grpo.settings.schema import Config
from colocated_grpo.summaries import held_out_metrics, mixed_held_out_metrics
from colocated_grpo.types import Prompt

Note = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """Prompts that are evaluated and never trained on. The same on every rank."""

    held_out: list[Prompt]
    """Held-out prompts of the training environments."""
    sources: EvaluationSources
    """The evaluation sets."""
    answers: dict[str, Answer]
    """Functions that return the answers for maj@k, by the name of the set's source; none for a set without maj@k."""
    prompts: dict[str, list[Prompt]]
    """Prompts of each set by the name of its source; none of a set that this run does not evaluate."""


def read_evaluated(
    config: Config, tokenizer: PreTrainedTokenizerBase, environments: Environments, world: World, note: Note
) -> Evaluated:
    """Collective. User code is imported on every rank; data are read on rank 0 only."""
    sources, answers = import_sets(config, tokenizer, environments)
    held_out, prompts = world.from_main(lambda: draw_evaluated(config, environments, sources, note))
    return Evaluated(held_out=held_out, sources=sources, answers=answers, prompts=prompts)


def import_sets(
    config: Config, tokenizer: PreTrainedTokenizerBase, environments: Environments
) -> tuple[EvaluationSources, dict[str, Answer]]:
    """Return the sources of the evaluation sets, and their functions for answers by the names of the sources.

    Imports user code and reads no data. Raises EnvironmentSetupError.
    """
    sources = build_evaluation_sources(config, tokenizer, environments.endpoint)
    answers = {
        source.name: answer_function(name, f"evaluation set {source.config.name!r}: answer")
        for source in sources.sources
        if (name := source.config.answer_name) is not None
    }
    return sources, answers


def draw_evaluated(
    config: Config, environments: Environments, sources: EvaluationSources, note: Note
) -> tuple[list[Prompt], dict[str, list[Prompt]]]:
    """Return the held-out prompts, and those of the sets that this run evaluates. Rank 0 only: reads data."""
    held_out = draw_held_out(config, environments, note)
    prompts: dict[str, list[Prompt]] = {}
    first_index = len(held_out)  # prompts of different sets have different indices in rollouts.jsonl
    for source in sources.sources:
        if config.evaluation.interval(source.config):
            prompts[source.name], dropped = source.prompts(sources.encoder, config.seed, first_index)
            first_index += len(prompts[source.name])
            for line in source.filter_notes():
                note(line)
            if dropped:
                note(
                    f"evaluation set {source.config.name!r}: {dropped} prompts are left out, as they are empty or "
                    f"longer than rollout.max_prompt_tokens={config.rollout.max_prompt_tokens}"
                )
    return held_out, prompts


def draw_held_out(config: Config, environments: Environments, note: Note) -> list[Prompt]:
    """Prompts of the training environments that are never trained on; none if they are not evaluated. Rank 0 only."""
    if not config.evaluation.every:
        return []
    for line in environments.held_out_notes():
        note(line)
    return environments.held_out(config.evaluation.prompts)


def evaluation_sets(config: Config, evaluated: Evaluated, stop_tokens: tuple[int, ...]) -> list[EvaluationSet]:
    """Return the held-out prompts and the sets of the config, those that this run evaluates."""
    held_out = EvaluationSet(
        name=HELD_OUT.partition("/")[0],
        every=config.evaluation.every,
        prompts=evaluated.held_out,
        samples=config.evaluation.samples_per_prompt,
        sampling=_sampling(config, config.evaluation.temperature, 1.0, stop_tokens),
        metrics=mixed_held_out_metrics if config.is_mixed else held_out_metrics,
    )
    return [
        held_out,
        *(
            _evaluation_set(config, source, evaluated, stop_tokens)
            for source in evaluated.sources.sources
            if source.name in evaluated.prompts
        ),
    ]


def _evaluation_set(
    config: Config, source: EvaluationSource, evaluated: Evaluated, stop_tokens: tuple[int, ...]
) -> EvaluationSet:
    entry = source.config
    return EvaluationSet(
        name=source.name,
        every=config.evaluation.interval(entry),
        prompts=evaluated.prompts[source.name],
        samples=entry.samples,
        sampling=_sampling(config, entry.temperature, entry.top_p, stop_tokens),
        metrics=partial(
            set_metrics,
            source.name,
            pass_ks=entry.pass_ks,
            pass_reward=entry.pass_reward,
            answer=evaluated.answers.get(source.name),
        ),
    )


def _sampling(config: Config, temperature: float, top_p: float, stop_tokens: tuple[int, ...]) -> Sampling:
    """Sampling without the top_k, min_p and penalties of training."""
    return Sampling(
        temperature=temperature,
        top_p=top_p,
        max_tokens=config.rollout.max_completion_tokens,
        stop=tuple(config.rollout.stop),
        stop_token_ids=stop_tokens,
    )
