"""The composition root: from settings to the objects of a run. Every choice between modes is made here, once."""

from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import torch

from colocated_grpo.assembly import data, engines
from colocated_grpo.assembly.serving import Serving, build_remote, connect_servers
from colocated_grpo.callbacks import Callbacks
from colocated_grpo.checkpoint.checkpoints import Checkpoints, unreadable
from colocated_grpo.errors import RunError
from colocated_grpo.evaluation.evaluator import Best, Evaluator
from colocated_grpo.phases import Choreography, Clock
from colocated_grpo.policy import blocks, export, model_files
from colocated_grpo.policy.lora.weights import AdapterWeights, frozen_experts
from colocated_grpo.policy.model_loader import ModelLoader
from colocated_grpo.policy.policy import Policy
from colocated_grpo.rollout.inbox import Driver, Inbox
from colocated_grpo.rollout.supply import Supply
from colocated_grpo.rollout.vllm.spec import EngineSpec
from colocated_grpo.rollout.vllm.vllm_engine import prepare
from colocated_grpo.run import BEST, GOAL_REACHED, LEARNING_RATE, Run
from colocated_grpo.runtime import distributed, run_folder
from colocated_grpo.runtime.supervision import StopRequest
from colocated_grpo.servers.engine_servers import EngineServer
from colocated_grpo.settings.config_json import has_text_part, read_config_json
from colocated_grpo.settings.schema import Config, HubConfig, ModelConfig
from colocated_grpo.summaries import RewardCheck
from colocated_grpo.tracking.ending import RunOutput
from colocated_grpo.tracking.hub import Hub
from colocated_grpo.tracking.tracker import NullTracker, Tracker
from colocated_grpo.types import JsonObject


def build_run(
    config: Config,
    folder: Path,
    world: distributed.World,
    stop: StopRequest,
    output: RunOutput,
    resources: ExitStack,
    callbacks: Sequence[object] = (),
) -> Run:
    """Build every object and resume from the newest complete checkpoint in `folder`, if there is one. Collective.

    Steps that can fail for outside reasons come first. resources: collects everything to close, also after a failure.
    """
    tracker = Tracker(folder, output, config.tracking) if world.is_main else NullTracker()
    site = engines.Site(world=world, stop=stop, note=tracker.note, resources=resources)
    with output.phase("reading the model's settings and tokenizer"):
        model = model_files.read_model_files(config.model, world, config.policy)
        scored_by = engines.read_reference(config.reference_model, model, world)
        opponent_folder = engines.fetch_opponent(config.opponent_model, world)
        in_rank = config.engine.placement == "colocated"  # engine servers have checked their own vLLM
        spec = engines.engine_spec(config, model.folder, world.size, world.device) if in_rank else None
        if spec is not None:
            prepare(spec, world.device)
    with output.phase("reading data, rewards and environments"):
        run_data = data.build_data(config, model, site)
    inbox = Inbox()
    serving = None if config.atropos is None else Serving(config, config.atropos, model, inbox, folder, site)
    data.listen_to_agents(config, run_data, model, site)
    with output.phase("waiting for the engine servers"):
        servers = [] if in_rank else connect_servers(config, world, stop)
    with output.phase("reading the weights"):
        policy = Policy(config, model.hf_config, model.folder, world)
        scoring = ModelLoader(config, scored_by.hf_config, scored_by.folder, world)
        reference = engines.build_reference(config.loss.kl, policy, scoring, offloaded=config.policy.cpu_offload)
        playing = None if opponent_folder is None else ModelLoader(config, model.hf_config, opponent_folder, world)
        frozen = engines.read_opponent(playing, world.device)
        opponent_state = engines.opponent_state(config.opponent, frozen)
        checkpoints = Checkpoints(folder, config.checkpoint, world, opponent_state, site.note)
        start, state = checkpoints.restore(policy)
    policy.fixed_lr = state.get(LEARNING_RATE)
    clock = Clock(world.device)
    built = build_engines(config, spec, servers, policy, model, folder, site, output)
    opponent = engines.build_opponent(config.opponent, frozen, policy, built, world, config.freshness.every)
    with output.phase("rehearsing a training step"):
        config = engines.rehearse(config, policy, built.local, world, tracker.note)  # while the engine sleeps
    driver = Driver(built.engine, inbox)
    collector = data.build_collector(config, driver, inbox, run_data, model, site)
    served = None if serving is None else serving.start(driver, start, stop.requested, lambda: policy.version)
    prompts = data.build_prompt_supply(config, run_data, model, collector, opponent, site)
    supply = data.build_supply(prompts, served, built.local, config.ranks_per_engine, config.training_steps)
    resources.callback(supply.close)
    resources.callback(finish_writing, checkpoints)
    best = Best(config.evaluation.keep_best, config.evaluation.patience)
    load_state(state, start, supply, best, folder)
    return Run(
        config=config,
        world=world,
        stop=stop,
        folder=folder,
        model_shape=model.shape,
        tokenizer=model.tokenizer,
        policy=policy,
        reference=reference,
        engine=built.engine,
        collector=collector,
        supply=supply,
        choreography=Choreography(policy, built.engine, built.sync, clock, config.sync_frequency),
        rewards=RewardCheck(config.rollout.max_reward_errors, expected=config.is_rewarded),
        judge_samples=engines.build_judge(config.freshness, config.rollout.temperature, policy, built, world),
        clock=clock,
        evaluator=Evaluator(run_data.sets, collector, world),
        best=best,
        checkpoints=checkpoints,
        exports=export.build_exports(config.checkpoint, config.policy.lora, config.model.name, policy, model, world),
        hub=build_hub(config.hub, config.final_step, config.model, folder, site),
        tracker=tracker,
        callbacks=Callbacks(callbacks, config.training_steps, folder, world, tracker.note, policy.fixed_lr),
        start=start,
        goal_reached=state.get(GOAL_REACHED, False),
    )


def load_state(state: JsonObject, start: int, supply: Supply, best: Best, folder: Path) -> None:
    """Continue where the checkpoint of step `start` ends, if there is one. Raises RunError if its state differs."""
    if start or state:
        with unreadable(folder / run_folder.CHECKPOINTS / f"step_{start:06d}"):
            supply.load_state_dict(state["source"])
            best.load_state_dict(state.get(BEST, {}))


def build_engines(
    config: Config,
    spec: EngineSpec | None,
    servers: list[EngineServer],
    policy: Policy,
    model: model_files.ModelFiles,
    folder: Path,
    site: engines.Site,
    output: RunOutput,
) -> engines.Engines:
    """Build the engines in the ranks, or connect to engine servers if `spec` is None. Collective."""
    if spec is not None:
        shared, every = config.weights == "shared", config.freshness.every
        graphs = site.world.device.type == "cuda" and not spec.enforce_eager
        with output.phase("building the engine" + (" and capturing its CUDA graphs" if graphs else "")):
            return engines.build_colocated(spec, policy, site.world, site.resources, shared=shared, check_every=every)
    with output.phase("connecting to the engines"):
        built = build_remote(config, servers, policy, model, folder, site)
        site.resources.callback(built.engine.close)
        return built


def build_hub(
    settings: HubConfig | None, final_step: int | None, model: ModelConfig, folder: Path, site: engines.Site
) -> Hub | None:
    """Return the run's Hub; None without settings. final_step: see `Config`."""
    if settings is None:
        return None
    hub = Hub(settings, folder, final_step, has_text_part(read_config_json(model)), site.note)
    if site.world.is_main:
        site.resources.callback(hub.close)
    return hub


def finish_writing(checkpoints: Checkpoints) -> None:
    """Wait for a checkpoint that was being written when the run failed. Its error did not cause the failure."""
    with suppress(RunError):
        checkpoints.wait()


def note_unusual_resume(run: Run) -> None:
    """Note a resume that starts a new run, or that finds no step left."""
    if run.start == 0:
        stopped = run_folder.complete_checkpoints(run.folder / run_folder.CHECKPOINTS)
        run.tracker.note("resuming a run that was stopped in step 0" if stopped else "nothing to resume: a new run")
    elif run.start >= (steps := run.config.training_steps):
        run.tracker.note(f"nothing left to train: the checkpoint is at step {run.start} of training_steps={steps}")


def describe(run: Run) -> dict[str, str]:
    """Return facts that are known only after the build. The banner shows `model`; DEBUG logs the others."""
    on_gpu, policy = run.world.device.type == "cuda", run.policy
    device = torch.cuda.get_device_name(run.world.device) if on_gpu else "CPU"
    trained, total = policy.num_trained(), policy.num_parameters()
    part = f" ({trained:,} trained, {trained / total:.2%})" if trained < total else ""
    dtype = str(policy.dtype).removeprefix("torch.")
    facts = {"model": f"{total:,} parameters{part} in {dtype}, {run.world.size} x {device}"}
    facts["micro-batches"] = f"{run.config.batch.max_tokens_per_micro_batch} tokens"
    if isinstance(policy.weights, AdapterWeights) and (experts := frozen_experts(policy.model)):
        facts["without adapter"] = f"{experts:,} in fused experts, which are not linear layers"
    if on_gpu:
        facts["checkpointing"] = (
            f"{blocks.num_checkpointed(policy.model)} of {len(blocks.blocks_of(policy.model))} blocks"
        )
    return facts
