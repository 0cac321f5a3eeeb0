"""The composition root: from settings to the objects of a run. Every choice between modes is made here, once."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from colocated_grpo.build.data import (
    ModelFiles,
    build_collector,
    build_data,
    build_prompt_supply,
    held_out_sampling,
    limits_of,
    read_model_files,
)
from colocated_grpo.build.engines import Engines
from colocated_grpo.build.policy import (
    build_colocated,
    build_exports,
    build_freshness,
    build_opponent,
    build_reference,
    opponent_state,
    read_opponent,
)
from colocated_grpo.build.servers import build_remote, connect
from colocated_grpo.build.user_code import Guarded
from colocated_grpo.checkpoint import Checkpoints
from colocated_grpo.config.schema import Config
from colocated_grpo.freshness import FreshnessCheck
from colocated_grpo.phases import Choreography, Clock
from colocated_grpo.policy.activations import choose_micro_batch_size
from colocated_grpo.policy.blocks import blocks_of, num_checkpointed
from colocated_grpo.policy.export import Export
from colocated_grpo.policy.lora.weights import AdapterWeights, frozen_experts
from colocated_grpo.policy.policy import Policy
from colocated_grpo.policy.reference import Reference
from colocated_grpo.rollout.ahead import AheadSupply
from colocated_grpo.rollout.collect import Collector
from colocated_grpo.rollout.engine import RolloutEngine, Sampling
from colocated_grpo.rollout.engine_server import EngineServer
from colocated_grpo.rollout.inbox import Driver, Inbox
from colocated_grpo.rollout.mixed import MixedSupply
from colocated_grpo.rollout.supply import PromptSupply, Supply
from colocated_grpo.runtime.distributed import World
from colocated_grpo.runtime.supervision import StopRequest
from colocated_grpo.tracking import NullTracker, Tracker, files, make_tracker
from colocated_grpo.types import Prompt

if TYPE_CHECKING:
    from colocated_grpo.build.serving import Serving


GOAL_REACHED = "goal_reached"
"""Key in a checkpoint's state: the environment has reached its goal, so no step is left."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """The objects that the loop works with."""

    config: Config
    """With the settings that were left open filled in, such as the size of micro-batches."""
    world: World
    stop: StopRequest
    folder: Path
    model: ModelFiles
    policy: Policy
    reference: Reference | None
    engine: RolloutEngine
    collector: Collector
    supply: Supply
    choreography: Choreography
    freshness: FreshnessCheck
    clock: Clock
    held_out: list[Prompt]
    held_out_sampling: Sampling
    checkpoints: Checkpoints
    exports: list[Export]
    tracker: Tracker | NullTracker
    start: int
    """Steps completed by earlier parts of the run."""
    goal_reached: bool
    """By an earlier part of the run: no step is left."""

    def close(self) -> None:
        self.supply.close()
        self.collector.close()
        self.engine.close()


def build_run(config: Config, folder: Path, world: World, stop: StopRequest, guarded: Guarded = nullcontext) -> Run:
    """Build every object and resume from the newest complete checkpoint in `folder`, if there is one. Collective.

    Steps that can fail for outside reasons come first (model files, data, user code, ports), before device memory is
    allocated. guarded: context of rewards and episodes.
    """
    model = read_model_files(config, world)
    tracker = make_tracker(config, folder, world.is_main)
    data = build_data(config, model, world, tracker)
    inbox = Inbox()
    serving = build_serving(config, folder, inbox, model, world, tracker.note)
    servers = connect(config, world, stop)

    policy = Policy(config, model.hf_config, model.folder, world)
    reference = build_reference(config, model, policy, world)
    opponent_shards = read_opponent(config, model.hf_config, world)
    others = opponent_state(config.opponent, opponent_shards)
    checkpoints = Checkpoints(folder, config.checkpoint, world, others, tracker.note)
    start, state = checkpoints.restore(policy)

    clock = Clock(world.device)
    engines = build_engines(config, servers, policy, model, folder, world, stop)
    engine = engines.engine
    opponent = build_opponent(config.opponent, opponent_shards, policy, engines, world)
    # The engine sleeps, so memory that is free now is free while the policy trains.
    config = choose_micro_batch_size(policy, config, world)

    driver = Driver(engine, inbox)
    collector = build_collector(config, driver, inbox, data, model, world, stop, guarded)
    sampled = build_prompt_supply(config, data, model, collector, world, stop, opponent)
    served = None if serving is None else serving.start(driver, start, stop.requested, lambda: policy.version)
    supply = join_supplies(config, sampled, served)
    if state:
        supply.load_state_dict(state["source"])
    freshness = build_freshness(config, policy, engines)
    return Run(
        config=config,
        world=world,
        stop=stop,
        folder=folder,
        model=model,
        policy=policy,
        reference=reference,
        engine=engine,
        collector=collector,
        supply=supply,
        choreography=Choreography(policy, engine, engines.sync, freshness, clock, config.sync_frequency),
        freshness=freshness,
        clock=clock,
        held_out=data.held_out,
        held_out_sampling=held_out_sampling(config, model.stop_token_ids),
        checkpoints=checkpoints,
        exports=build_exports(config, policy, model, world),
        tracker=tracker,
        start=start,
        goal_reached=state.get(GOAL_REACHED, False),
    )


def build_engines(
    config: Config,
    servers: list[EngineServer],
    policy: Policy,
    model: ModelFiles,
    folder: Path,
    world: World,
    stop: StopRequest,
) -> Engines:
    if config.engine.placement == "colocated":
        return build_colocated(config, policy, model.folder, world)
    return build_remote(config, servers, policy, model, folder, world, stop)


def join_supplies(config: Config, sampled: PromptSupply | None, served: Supply | None) -> Supply:
    """One supply of the run's own prompts and of groups that other processes bring. At least one is given."""
    if sampled is not None and served is not None:
        return MixedSupply(sampled, served)
    if sampled is not None and config.rollout.max_staleness:
        return AheadSupply(sampled, config.training_steps)
    only = sampled or served
    assert only is not None  # the config has at least one environment
    return only


def build_serving(
    config: Config,
    folder: Path,
    inbox: Inbox,
    model: ModelFiles,
    world: World,
    note: Callable[[str], None],
) -> Serving | None:
    """The engines over HTTP for environments in other processes; None without an atropos entry. Collective."""
    if config.atropos is None:
        return None
    # Imported here: the web framework would delay the start of every other run.
    from colocated_grpo.build.serving import Serving

    keep = partial(files.write_atropos_batch, folder) if config.atropos.keep_last_batch else lambda items: None
    return Serving(config, config.atropos, folder, inbox, model.tokenizer, limits_of(config, model), world, note, keep)


def _trained_facts(policy: Policy) -> dict[str, str]:
    """Return banner facts on the trained parameters; none if all are trained."""
    trained, total = policy.num_trained(), policy.num_parameters()
    if trained == total:
        return {}
    facts = {"trained": f"{trained:,} ({trained / total:.2%})"}
    if isinstance(policy.weights, AdapterWeights) and (experts := frozen_experts(policy.model)):
        facts["without adapter"] = f"{experts:,} in fused experts, which are not linear layers"
    return facts


def describe(run: Run) -> dict[str, str]:
    """Facts for the banner that are known only after the build."""
    on_gpu, model = run.world.device.type == "cuda", run.policy.model
    device = torch.cuda.get_device_name(run.world.device) if on_gpu else "CPU"
    facts = {
        "parameters": f"{run.policy.num_parameters():,}",
        **_trained_facts(run.policy),
        "ranks": f"{run.world.size} x {device}",
        "compute": str(run.policy.dtype).removeprefix("torch."),
    }
    checkpointing = {"checkpointing": f"{num_checkpointed(model)} of {len(blocks_of(model))} blocks"}
    return facts | (checkpointing if on_gpu else {})
