"""From settings to the objects of a run. Every choice between modes is made here, once."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase

from colocated_grpo.build.weights import belongs_into_checkpoints, build_opponent, build_sync, read_opponent
from colocated_grpo.checkpoint import Checkpoints
from colocated_grpo.config.inputs import is_inline, shape_of
from colocated_grpo.config.schema import Config
from colocated_grpo.environments import Environments, build_environments
from colocated_grpo.environments.chat import ChatCodec
from colocated_grpo.environments.prompts import longest_token
from colocated_grpo.freshness import FreshnessCheck
from colocated_grpo.phases import Choreography, Clock, WeightSync
from colocated_grpo.policy.activations import choose_micro_batch_size
from colocated_grpo.policy.blocks import blocks_of, num_checkpointed
from colocated_grpo.policy.checkpoint_files import fetch_model
from colocated_grpo.policy.masters import ShardedWeights
from colocated_grpo.policy.model import read_model_config
from colocated_grpo.policy.policy import Policy, build_model, dtype_of
from colocated_grpo.rollout.collect import Collector
from colocated_grpo.rollout.engine import RolloutEngine, Sampling
from colocated_grpo.rollout.episodes import EpisodeRunner
from colocated_grpo.rollout.inbox import Driver, Inbox
from colocated_grpo.rollout.lengths import LongestFirst
from colocated_grpo.rollout.mixed import MixedSupply
from colocated_grpo.rollout.prompt_queue import build_sharing
from colocated_grpo.rollout.supply import Opponent, PromptSupply, Supply
from colocated_grpo.rollout.vllm.engine import VLLMEngine
from colocated_grpo.runtime.distributed import World
from colocated_grpo.runtime.supervision import StopRequest
from colocated_grpo.tracking import NullTracker, Tracker, files, make_tracker
from colocated_grpo.types import Prompt

if TYPE_CHECKING:
    from colocated_grpo.build.serving import Serving


GOAL_REACHED = "goal_reached"
"""Key in a checkpoint's state: the environment had nothing more to teach."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """Everything the loop works with."""

    config: Config
    world: World
    stop: StopRequest
    folder: Path
    model_folder: Path
    model_shape: dict[str, Any]
    """Goes into checkpoints: a run is resumed with a model of the same shape."""
    hf_config: PretrainedConfig
    tokenizer: PreTrainedTokenizerBase
    policy: Policy
    reference: ShardedWeights | None
    engine: RolloutEngine
    collector: Collector
    supply: Supply
    choreography: Choreography
    clock: Clock
    held_out: list[Prompt]
    held_out_sampling: Sampling
    checkpoints: Checkpoints
    tracker: Tracker | NullTracker
    start: int
    goal_reached: bool
    """By an earlier part of the run: nothing is left to train."""

    def close(self) -> None:
        self.supply.close()
        self.collector.close()
        self.engine.close()


def build_run(config: Config, folder: Path, world: World, stop: StopRequest) -> Run:
    """Collective. Resumes from the newest complete checkpoint in `folder`, if there is one."""
    model_folder = fetch_model(config.model, world)
    hf_config = read_model_config(config.model, model_folder)
    tokenizer = load_tokenizer(config, model_folder)
    stop_tokens = stop_token_ids(tokenizer, model_folder)
    tracker = make_tracker(config, folder, world.is_main)
    environments = build_environments(config, tokenizer)
    inbox, serving = Inbox(), None
    if config.atropos is not None:
        serving = build_serving(config, folder, inbox, tokenizer, hf_config, stop_tokens, world, tracker.note)
    source = LongestFirst(environments.open_source()) if world.is_main and environments.entries else None
    held_out = world.from_main(lambda: hold_out(config, environments, tracker))

    policy = Policy(config, hf_config, model_folder, world)
    reference = None
    if config.loss.kl.coef > 0 and config.loss.kl.target == "reference":
        offloaded = config.policy.cpu_offload
        reference = ShardedWeights(build_model(config, hf_config, model_folder, world, offloaded=offloaded))
    frozen = read_opponent(config, hf_config, world)
    checkpoints = Checkpoints(folder, config.checkpoint, world, belongs_into_checkpoints(config.opponent, frozen))
    start, state = checkpoints.restore(policy)

    clock = Clock(world.device)
    engine = build_engine(config, policy, model_folder, world)
    sync = build_sync(policy, engine, world)
    opponent = build_opponent(config.opponent, frozen, policy, engine, sync, world)
    # The engine sleeps: what is free now is free while the policy trains.
    config = choose_micro_batch_size(policy, config, world)
    driver = Driver(engine, inbox)
    collector = build_collector(config, driver, inbox, environments, tokenizer, world, stop)
    sampled = None
    if environments.entries:
        sampled = build_prompt_supply(config, source, collector, world, stop, stop_tokens, opponent)
    served = None if serving is None else serving.start(driver, start, stop.asked, lambda: policy.version)
    supply: Supply = MixedSupply(sampled, served) if sampled and served else sampled or served
    if state:
        supply.load_state_dict(state["source"])
    return Run(
        config=config,
        world=world,
        stop=stop,
        folder=folder,
        model_folder=model_folder,
        model_shape=shape_of(json.loads((model_folder / "config.json").read_text(encoding="utf-8"))),
        hf_config=hf_config,
        tokenizer=tokenizer,
        policy=policy,
        reference=reference,
        engine=engine,
        collector=collector,
        supply=supply,
        choreography=build_choreography(config, policy, engine, sync, clock),
        clock=clock,
        held_out=held_out,
        held_out_sampling=held_out_sampling(config, stop_tokens),
        checkpoints=checkpoints,
        tracker=tracker,
        start=start,
        goal_reached=state.get(GOAL_REACHED, False),
    )


def hold_out(config: Config, environments: Environments, tracker: Tracker) -> list[Prompt]:
    """Prompts that are evaluated and never trained on. Rank 0 only."""
    if config.evaluation.every:
        for line in environments.remarks():
            tracker.note(line)
    return environments.held_out(config.evaluation.prompts)


def build_serving(
    config: Config,
    folder: Path,
    inbox: Inbox,
    tokenizer: PreTrainedTokenizerBase,
    hf_config: PretrainedConfig,
    stop_tokens: tuple[int, ...],
    world: World,
    note: Callable[[str], None],
) -> Serving:
    """The engine over HTTP, for environments in other processes."""
    # Here, for it brings a web framework, which other runs would load at the start of each rank without need.
    from colocated_grpo.build.serving import Serving
    from colocated_grpo.serving.sampler import Limits

    limits = Limits(
        max_tokens=config.max_sequence_tokens,
        longest_token=longest_token(tokenizer),
        vocab_size=hf_config.get_text_config().vocab_size,
        stop_token_ids=stop_tokens,
        seed=config.seed,
    )
    keep = partial(files.write_atropos_batch, folder) if config.atropos.keep_last_batch else lambda items: None
    return Serving(config, folder, inbox, tokenizer, limits, world, note, keep)


def build_prompt_supply(
    config: Config,
    source: LongestFirst | None,
    collector: Collector,
    world: World,
    stop: StopRequest,
    stop_tokens: tuple[int, ...],
    opponent: Opponent | None,
) -> PromptSupply:
    """Of the prompts that are left to this run where other processes bring some of a batch."""
    prompts = config.rollout.prompts_per_step - round(config.atropos_share)
    rollout = config.rollout.model_copy(update={"prompts_per_step": prompts})
    sampling = training_sampling(config, stop_tokens)
    return PromptSupply(source, collector, world, stop.asked, rollout, sampling, opponent)


def load_tokenizer(config: Config, folder: Path) -> PreTrainedTokenizerBase:
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=config.model.trust_remote_code)
    template = config.model.chat_template
    if template is not None:
        tokenizer.chat_template = template if is_inline(template) else Path(template).read_text(encoding="utf-8")
    return tokenizer


def build_engine(config: Config, policy: Policy, model_folder: Path, world: World) -> VLLMEngine:
    """An engine beside the trainer's resident state, asleep."""
    if world.device.type == "cuda":
        # The cache is sized from what is free, so everything that stays must be there already.
        policy.init_optimizer_state()
        if policy.offload is not None:
            policy.offload.to_host()
    engine = VLLMEngine(config, model_folder, engine_dtype(config, policy), world)
    engine.sleep()
    if policy.offload is not None:
        policy.offload.to_device()
    return engine


def engine_dtype(config: Config, policy: Policy) -> torch.dtype:
    return dtype_of(config.engine.dtype, auto=policy.dtype)


def build_choreography(
    config: Config, policy: Policy, engine: VLLMEngine, sync: WeightSync, clock: Clock
) -> Choreography:
    freshness = FreshnessCheck(policy, engine, engine_dtype(config, policy), config.freshness)
    return Choreography(policy, engine, sync, freshness, clock, config.sync_frequency)


def build_collector(
    config: Config,
    driver: Driver,
    inbox: Inbox,
    environments: Environments,
    tokenizer: PreTrainedTokenizerBase,
    world: World,
    stop: StopRequest,
) -> Collector:
    rollout, codec = config.rollout, ChatCodec(tokenizer)
    episodes = EpisodeRunner(environments.episodes, codec, inbox, seed=config.seed, tool_timeout=rollout.tool_timeout)
    return Collector(
        driver,
        episodes,
        environments.scorers,
        codec.turn_text,
        world,
        build_sharing(config, world),
        seed=config.seed,
        reward_workers=rollout.reward_workers,
        reward_timeout=rollout.reward_timeout,
        stop_asked=stop.asked,
    )


def stop_token_ids(tokenizer: PreTrainedTokenizerBase, folder: Path) -> tuple[int, ...]:
    """Every token that ends a completion: the tokenizer's and those of the model's generation settings."""
    ids = {tokenizer.eos_token_id}
    settings = folder / "generation_config.json"
    if settings.exists():
        eos = json.loads(settings.read_text()).get("eos_token_id")
        ids |= set(eos) if isinstance(eos, list) else {eos}
    return tuple(sorted(ids - {None}))


def training_sampling(config: Config, stop_tokens: tuple[int, ...]) -> Sampling:
    rollout = config.rollout
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


def held_out_sampling(config: Config, stop_tokens: tuple[int, ...]) -> Sampling:
    """Plain sampling at the evaluation's temperature: what the model does without the tricks of exploration."""
    return Sampling(
        temperature=config.evaluation.temperature,
        max_tokens=config.rollout.max_completion_tokens,
        stop=tuple(config.rollout.stop),
        stop_token_ids=stop_tokens,
    )


def describe(run: Run) -> dict[str, str]:
    """Facts for the banner that only the built run knows."""
    on_gpu, model = run.world.device.type == "cuda", run.policy.model
    device = torch.cuda.get_device_name(run.world.device) if on_gpu else "CPU"
    facts = {
        "parameters": f"{run.policy.num_parameters():,}",
        "ranks": f"{run.world.size} x {device}",
        "compute": str(run.policy.dtype).removeprefix("torch."),
    }
    checkpointing = {"checkpointing": f"{num_checkpointed(model)} of {len(blocks_of(model))} blocks"}
    return facts | (checkpointing if on_gpu else {})
