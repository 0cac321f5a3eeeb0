"""The data side of a run: environments, prompts of training and evaluation, and the collector of their groups."""

import copy
from dataclasses import dataclass
from functools import partial

from colocated_grpo.assembly.engines import Site
from colocated_grpo.environments.build import Environments, build_environments
from colocated_grpo.environments.chat import ChatCodec
from colocated_grpo.environments.rewards.workers import end_idle_workers
from colocated_grpo.environments.streams import PromptSource
from colocated_grpo.evaluation.evaluator import EvaluationSet
from colocated_grpo.evaluation.metrics import Answer, answer_function, set_metrics
from colocated_grpo.policy.model_files import ModelFiles
from colocated_grpo.rollout.collect import Collector
from colocated_grpo.rollout.engine import LocalEngine, Sampling
from colocated_grpo.rollout.episodes import EpisodeRunner
from colocated_grpo.rollout.inbox import Driver, Inbox
from colocated_grpo.rollout.partial import PartialSupply
from colocated_grpo.rollout.prompt_queue import build_dispatch, engine_place
from colocated_grpo.rollout.resample import Resampling
from colocated_grpo.rollout.supply import AheadSupply, MixedSupply, Opponent, PromptSupply, Supply
from colocated_grpo.servers import agent_app, text
from colocated_grpo.settings.evaluation import HELD_OUT, PREFIX, EvaluationConfig
from colocated_grpo.settings.generation import RESHAPING
from colocated_grpo.settings.schema import Config, RolloutConfig
from colocated_grpo.summaries import held_out_metrics, mixed_held_out_metrics
from colocated_grpo.tracking.text import Note
from colocated_grpo.types import Prompt


def import_answers(evaluation: EvaluationConfig) -> list[Answer | None]:
    """Return the function of each set that returns the answers for maj@k."""
    names = [(entry.answer_name, f"evaluation set {entry.name!r}: answer") for entry in evaluation.sets]
    return [None if name is None else answer_function(name, key) for name, key in names]


def draw_evaluated(
    evaluation: EvaluationConfig, environments: Environments, note: Note
) -> tuple[list[Prompt], list[list[Prompt]]]:
    """Return the held-out prompts, and the prompts of the sets that this run evaluates. Rank 0 only: reads data."""
    held_out: list[Prompt] = []
    if evaluation.every:
        for environment in environments.trained:
            if (line := environment.items.held_out_note) is not None:
                note(line)
        held_out = environments.held_out(evaluation.prompts)
    sets: list[list[Prompt]] = []
    first_index = len(held_out)  # prompts of different sets have different indices in rollouts.jsonl
    for entry, environment in zip(evaluation.sets, environments.sets, strict=True):
        if not evaluation.interval(entry):
            sets.append([])
            continue
        prompts, dropped = environments.evaluated(environment, entry.prompts, first_index)
        sets.append(prompts)
        first_index += len(prompts)
        for line in environment.items.filter_notes:
            note(line)
        if dropped:
            rule = f"empty, or longer than rollout.max_prompt_tokens={environments.encoder.max_prompt_tokens}"
            note(f"evaluation set {entry.name!r}: {dropped} prompts are left out: {rule}")
    return held_out, sets


def read_evaluation_sets(
    evaluation: EvaluationConfig,
    rollout: RolloutConfig,
    environments: Environments,
    stop_tokens: tuple[int, ...],
    site: Site,
    *,
    mixed: bool,
) -> list[EvaluationSet]:
    """Return the held-out prompts and the sets of the config. Collective. Raises EnvironmentSetupError.

    Sets that this run does not evaluate have no prompts. mixed: the run has several environments.
    """
    answers = import_answers(evaluation)
    held_out, drawn = site.world.from_main(lambda: draw_evaluated(evaluation, environments, site.note))
    # Training's top_p, top_k, min_p and penalties do not apply.
    sampling = partial(
        Sampling, max_tokens=rollout.max_completion_tokens, stop=tuple(rollout.stop), stop_token_ids=stop_tokens
    )
    sets = zip(evaluation.sets, drawn, answers, strict=True)
    return [
        EvaluationSet(
            name=HELD_OUT.partition("/")[0],
            every=evaluation.every,
            prompts=held_out,
            samples=evaluation.samples_per_prompt,
            sampling=sampling(temperature=evaluation.temperature),
            metrics=mixed_held_out_metrics if mixed else held_out_metrics,
        ),
        *(
            EvaluationSet(
                name=(name := f"{PREFIX}/{entry.name}"),
                every=evaluation.interval(entry),
                prompts=prompts,
                samples=entry.samples,
                sampling=sampling(temperature=entry.temperature, top_p=entry.top_p),
                metrics=partial(set_metrics, name, pass_ks=entry.pass_ks, pass_reward=entry.pass_reward, answer=answer),
            )
            for entry, prompts, answer in sets
        ),
    ]


@dataclass(frozen=True, kw_only=True)
class Data:
    """Environments, and their prompts on the ranks that draw them."""

    environments: Environments
    source: PromptSource | None
    """Training prompts; on rank 0 only, and None if other processes supply all groups."""
    sets: list[EvaluationSet]


def build_data(config: Config, model: ModelFiles, site: Site, *, trains: bool = True) -> Data:
    """Import user code on every rank, and read data on rank 0. Collective. trains: False: no training prompts."""
    site.resources.callback(end_idle_workers)
    environments = build_environments(config, model.tokenizer, getattr(model.hf_config, "vocab_size", None))
    source = open_source(environments, site.note) if trains and site.world.is_main and environments.trained else None
    sets = read_evaluation_sets(
        config.evaluation, config.rollout, environments, model.stop_token_ids, site, mixed=config.is_mixed
    )
    environments.load_reward_models(site.world.device)
    return Data(environments=environments, source=source, sets=sets)


def open_source(environments: Environments, note: Note) -> PromptSource:
    """Return the source of training prompts. Rank 0 only: reads data."""
    source = environments.open_source()
    for environment in environments.trained:
        for line in environment.items.filter_notes:
            note(line)
    return source


def listen_to_agents(config: Config, data: Data, model: ModelFiles, site: Site) -> None:
    """Open the address at which agents sample from this rank's engine, if there are agents."""
    if data.environments.open_episodes is None:
        return
    limits = text.limits_of(model, config.max_sequence_tokens, config.seed)
    # A copy, because tokenizers are not thread-safe.
    codec = text.TextCodec(copy.deepcopy(model.tokenizer), limits, config.model.chat_template_kwargs)
    episodes = data.environments.open_episodes
    server = agent_app.listen_for_agents(episodes, codec, config.model.name, config.rollout.stop)
    site.resources.callback(server.close)


def build_collector(
    config: Config, driver: Driver, inbox: Inbox, data: Data, model: ModelFiles, site: Site
) -> Collector:
    """Return the collector of the groups of training and of evaluation."""
    rollout, codec = config.rollout, ChatCodec(model.tokenizer)
    environments = data.environments
    episodes = EpisodeRunner(
        environments.episodes,
        codec,
        inbox,
        seed=config.seed,
        tool_timeout=rollout.tool_timeout,
        agents=environments.limits,
    )
    collector = Collector(
        driver,
        episodes,
        environments.scorers,
        codec.message_text,
        site.world,
        build_dispatch(
            site.world,
            ranks_per_engine=config.ranks_per_engine,
            replicated=rollout.generation == "replicated",
            deterministic=config.deterministic,
        ),
        seed=config.seed,
        reward_workers=rollout.reward_workers,
        reward_timeout=rollout.reward_timeout,
        stop_requested=site.stop.requested,
    )
    site.resources.callback(collector.close)
    return collector


def build_prompt_supply(
    config: Config, data: Data, model: ModelFiles, collector: Collector, opponent: Opponent | None, site: Site
) -> PromptSupply | None:
    """Return the supply of prompts that this run samples itself; None if other processes supply all groups."""
    if not data.environments.trained:
        return None
    prompts = config.rollout.prompts_per_step - round(config.atropos_share)
    rollout = config.rollout.model_copy(update={"prompts_per_step": prompts})
    sampling = Sampling(
        temperature=rollout.temperature,
        max_tokens=rollout.max_completion_tokens,
        **{name: getattr(rollout, name) for name in (*RESHAPING, "repetition_detection")},
        stop=tuple(rollout.stop),
        stop_token_ids=model.stop_token_ids,
    )
    resampling = None if rollout.resample is None else Resampling(rollout.resample.max_rounds, prompts, site.note)
    routes = config.policy.routing_replay
    return PromptSupply(data.source, collector, rollout, sampling, opponent, resampling, routes=routes)


def build_supply(
    prompts: PromptSupply | None,
    served: Supply | None,
    engine: LocalEngine | None,
    ranks_per_engine: int,
    num_steps: int,
) -> Supply:
    """Return the supply of the run. served: groups of other processes. engine: None with engine servers."""
    if prompts is None:
        assert served is not None  # the config has at least one environment
        return served
    if served is not None:
        return MixedSupply(prompts, served)
    if (partial := prompts.config.partial) is not None and engine is not None:
        place = engine_place(prompts.collector.world, ranks_per_engine)
        return PartialSupply(prompts, partial, engine.sampled, place, num_steps)
    return AheadSupply(prompts, num_steps) if prompts.config.max_staleness else prompts
