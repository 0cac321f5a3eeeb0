"""The data side of a run: model files, environments, their prompts, and the collector that makes groups of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from transformers import AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from colocated_grpo.assembly.evaluation import Evaluated, read_evaluated
from colocated_grpo.environments.build import Environments, build_environments
from colocated_grpo.environments.chat import ChatCodec
from colocated_grpo.environments.prompts import longest_token
from colocated_grpo.environments.rewards.workers import end_idle_workers
from colocated_grpo.errors import in_one_line
from colocated_grpo.policy.checkpoint_files import fetch_model, fetch_tokenizer
from colocated_grpo.policy.model import read_model_config
from colocated_grpo.rollout.collect import Collector
from colocated_grpo.rollout.engine import Sampling
from colocated_grpo.rollout.episodes import EpisodeRunner
from colocated_grpo.rollout.inbox import Driver, Inbox
from colocated_grpo.rollout.lengths import LongestFirst
from colocated_grpo.rollout.prompt_queue import build_dispatch
from colocated_grpo.rollout.resample import Resampling
from colocated_grpo.rollout.supply import Opponent, PromptSupply
from colocated_grpo.runtime.distributed import World
from colocated_grpo.runtime.supervision import StopRequest
from colocated_grpo.servers.limits import LENGTH_KEYS, Limits
from colocated_grpo.settings.adapter_files import adapter_shape
from colocated_grpo.settings.config_json import config_json_in, shape_of
from colocated_grpo.settings.errors import ConfigError
from colocated_grpo.settings.generation import ModelConfig, RolloutConfig
from colocated_grpo.settings.inputs import is_inline
from colocated_grpo.settings.schema import Config
from colocated_grpo.settings.training import LoRAConfig
from colocated_grpo.tracking import NullTracker, Tracker
from colocated_grpo.types import JsonObject

PROCESSOR_TEMPLATE = "chat_template.json"
"""File that older vision-language models have their chat template in. transformers reads it with a processor only."""


@dataclass(frozen=True, kw_only=True)
class ModelFiles:
    """Everything that is read from the model's folder except the weights."""

    folder: Path
    hf_config: PretrainedConfig
    tokenizer: PreTrainedTokenizerBase
    stop_token_ids: tuple[int, ...]
    """Every token that ends a completion."""
    shape: JsonObject
    """Settings that determine the shapes of weights and adapter. A run resumes only with equal ones."""


@dataclass(frozen=True, kw_only=True)
class Data:
    """Environments, and their prompts on the ranks that draw them."""

    environments: Environments
    source: LongestFirst | None
    """Training prompts; on rank 0 only, and None if other processes supply all groups."""
    evaluated: Evaluated


def read_model_files(settings: ModelConfig, world: World, lora: LoRAConfig | None = None) -> ModelFiles:
    """Collective: rank 0 downloads the model if its name is not a folder. lora: settings of a trained adapter."""
    folder = fetch_model(settings, world)
    hf_config = read_model_config(settings, folder)
    tokenizer = load_tokenizer(settings, folder)
    return ModelFiles(
        folder=folder,
        hf_config=hf_config,
        tokenizer=tokenizer,
        stop_token_ids=stop_token_ids(tokenizer, folder),
        shape=shape_of(config_json_in(folder)) | adapter_shape(lora),
    )


def limits_of(model: ModelFiles, max_tokens: int, seed: int, max_tokens_setting: str = LENGTH_KEYS) -> Limits:
    """Limits for requests over HTTP. max_tokens_setting: name of what decides the longest sequence."""
    return Limits(
        max_tokens=max_tokens,
        longest_token=longest_token(model.tokenizer),
        vocab_size=model.hf_config.get_text_config().vocab_size,
        stop_token_ids=model.stop_token_ids,
        seed=seed,
        max_tokens_setting=max_tokens_setting,
    )


def load_tokenizer(model: ModelConfig, folder: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer of `folder` with the configured chat template. Raises ConfigError if it is not usable."""
    try:
        tokenizer = _read_tokenizer(model, folder)
        template = model.chat_template
        if template is not None:
            tokenizer.chat_template = template if is_inline(template) else Path(template).read_text(encoding="utf-8")
        elif tokenizer.chat_template is None and (folder / PROCESSOR_TEMPLATE).is_file():
            entries = json.loads((folder / PROCESSOR_TEMPLATE).read_text(encoding="utf-8"))
            tokenizer.chat_template = entries.get("chat_template")
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.name={model.name!r}: no usable tokenizer: {in_one_line(error)}") from error
    return tokenizer


def _read_tokenizer(model: ModelConfig, folder: Path) -> PreTrainedTokenizerBase:
    loaded = AutoTokenizer.from_pretrained(folder, trust_remote_code=model.trust_remote_code)
    if type(loaded).__name__ == "MistralCommonBackend":
        return _without_mistral_common(model, folder)
    return cast(PreTrainedTokenizerBase, loaded)  # a model's own code may bring another class


def _without_mistral_common(model: ModelConfig, folder: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer of tokenizer.json. Raises ConfigError without that file.

    If a folder has Mistral's tekken.json, and mistral-common is installed, which vLLM needs, transformers (5.19) loads
    a tokenizer without a chat template: prompts would become plain text.
    """
    if not (folder / "tokenizer.json").is_file():
        raise ConfigError(
            f"model.name={model.name!r}: its only tokenizer is Mistral's tekken.json, which has no chat template; add "
            "the tokenizer.json and chat template of another release of the model"
        )
    return PreTrainedTokenizerFast.from_pretrained(folder)


def read_tokenizer(model: ModelConfig) -> PreTrainedTokenizerBase:
    """Return the tokenizer alone: no weights are downloaded. Raises ConfigError where it cannot be read."""
    return load_tokenizer(model, fetch_tokenizer(model))


def stop_token_ids(tokenizer: PreTrainedTokenizerBase, folder: Path) -> tuple[int, ...]:
    """The end-of-sequence tokens of the tokenizer and of the model's generation settings, ascending."""
    ids = {tokenizer.eos_token_id}
    settings = folder / "generation_config.json"
    if settings.exists():
        eos = json.loads(settings.read_text(encoding="utf-8")).get("eos_token_id")
        ids |= set(eos) if isinstance(eos, list) else {eos}
    return tuple(sorted(ids - {None}))


def build_data(
    config: Config, model: ModelFiles, world: World, tracker: Tracker | NullTracker, resources: ExitStack
) -> Data:
    """Collective. User code is imported on every rank; datasets are read on rank 0 only.

    resources: end the processes of reward functions.
    """
    resources.callback(end_idle_workers)
    environments = build_environments(config, model.tokenizer)
    source = open_source(environments, tracker.note) if world.is_main and environments.trained else None
    evaluated = read_evaluated(config.evaluation, environments, world, tracker.note)
    return Data(environments=environments, source=source, evaluated=evaluated)


def open_source(environments: Environments, note: Callable[[str], None]) -> LongestFirst:
    """Return the source of training prompts. Rank 0 only: reads data."""
    source = environments.open_source()
    for environment in environments.trained:
        for line in environment.items.filter_notes:
            note(line)
    return LongestFirst(source)


def listen_to_agents(config: Config, data: Data, model: ModelFiles, resources: ExitStack) -> None:
    """Open the address at which agents sample from this rank's engine, if there are agents. resources: close it."""
    if data.environments.open_episodes is None:
        return
    # Imported here: the web framework would delay the start of every other run.
    from colocated_grpo.assembly.agents import listen_for_agents

    limits = limits_of(model, config.max_sequence_tokens, config.seed)
    server = listen_for_agents(data.environments.open_episodes, config, model.tokenizer, limits)
    resources.callback(server.close)


def build_collector(
    config: Config,
    driver: Driver,
    inbox: Inbox,
    data: Data,
    model: ModelFiles,
    world: World,
    stop: StopRequest,
) -> Collector:
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
    return Collector(
        driver,
        episodes,
        environments.scorers,
        codec.message_text,
        world,
        build_dispatch(
            world,
            ranks_per_engine=config.ranks_per_engine,
            replicated=config.rollout.generation == "replicated",
            deterministic=config.deterministic,
        ),
        seed=config.seed,
        reward_workers=rollout.reward_workers,
        reward_timeout=rollout.reward_timeout,
        stop_requested=stop.requested,
    )


def build_prompt_supply(
    config: Config,
    data: Data,
    model: ModelFiles,
    collector: Collector,
    world: World,
    stop: StopRequest,
    opponent: Opponent | None,
    note: Callable[[str], None],
) -> PromptSupply | None:
    """Prompts that this run samples itself; None if other processes supply all groups."""
    if not data.environments.trained:
        return None
    prompts = config.rollout.prompts_per_step - round(config.atropos_share)
    rollout = config.rollout.model_copy(update={"prompts_per_step": prompts})
    sampling = training_sampling(config.rollout, model.stop_token_ids)
    resample = rollout.resample
    resampling = None if resample is None else Resampling(resample.max_rounds, prompts, note)
    routes = config.policy.routing_replay
    return PromptSupply(
        data.source, collector, world, stop.requested, rollout, sampling, opponent, resampling, routes=routes
    )


def training_sampling(rollout: RolloutConfig, stop_tokens: tuple[int, ...]) -> Sampling:
    return Sampling(
        temperature=rollout.temperature,
        max_tokens=rollout.max_completion_tokens,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
        repetition_penalty=rollout.repetition_penalty,
        stop=tuple(rollout.stop),
        stop_token_ids=stop_tokens,
    )
