"""The training loop. Every rank runs this same code; there is no controller."""

from __future__ import annotations

import gc
import logging
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from colocated_grpo.advantages import group_advantages, is_constant
from colocated_grpo.batching import Batch, MicroBatch, pack
from colocated_grpo.build.run import GOAL_REACHED, Run, build_run, describe
from colocated_grpo.build.user_code import user_code_limit
from colocated_grpo.config.schema import Config
from colocated_grpo.environments.base import BatchResult
from colocated_grpo.errors import AlreadyReported, NothingUsable, RunError
from colocated_grpo.metrics import Metrics, reduce
from colocated_grpo.policy.export import Export
from colocated_grpo.policy.masters import Weights
from colocated_grpo.policy.policy import fill_missing, score
from colocated_grpo.rollout.collect import Stopped
from colocated_grpo.rollout.prompt_queue import Job
from colocated_grpo.runtime.blocking_code import BlockingCodeReporter
from colocated_grpo.runtime.distributed import derive_seed, init_world, seed_everything, use_deterministic_kernels
from colocated_grpo.runtime.profiling import profiled
from colocated_grpo.runtime.rank_guard import RankGuard
from colocated_grpo.runtime.run_folder import MODEL_SHAPE, choose_run_folder, lock_folder, removed_if_unused
from colocated_grpo.runtime.supervision import StopRequest, Watchdog, explain_missing_ranks
from colocated_grpo.summaries import (
    check_reward_errors,
    group_rewards,
    held_out_metrics,
    lack_of_signal,
    rollout_metrics,
)
from colocated_grpo.types import Group

FINISHED, STOPPED, FAILED = "finished", "stopped", "failed"


def main(config: Config, *, resume: str | None, name: str) -> None:
    """Train `config` on this rank. Collective.

    name: first part of a new run folder's name. resume: a run folder, 'auto' (the newest run of this config) or None.
    """
    if config.deterministic:
        use_deterministic_kernels()
    world = init_world()
    stop = StopRequest(world.store)
    watchdog = Watchdog(world, stop)
    guard = RankGuard(*user_code_limit(config))
    blocking_code = BlockingCodeReporter(logging.getLogger(__name__).warning, stop_requested=stop.requested)
    try:
        seed_everything(derive_seed(config.seed, "build"))
        folder = world.from_main(lambda: lock_folder(choose_run_folder(config, resume, name)))
        with removed_if_unused(folder):
            run = build_run(config, folder, world, stop, guard.armed)
        run.tracker.start(run.config, describe(run), run.start)
        if resume is not None:
            note_unusual_resume(run)
        settle_garbage_collector()
        try:
            outcome = train(run)
        except BaseException:
            with suppress(OSError):  # on a full disk the summary fails too, and would hide the error that ended the run
                run.tracker.close(FAILED)
            raise
        run.tracker.close(outcome)
        run.close()
        if outcome == STOPPED and (reasons := [reason for reason in world.gather_objects(stop.reason) if reason]):
            raise RunError(f"{reasons[0]}; the run has saved a checkpoint, from which --resume auto continues")
    except BaseException as error:
        if watchdog.report_failure():
            # A broken collective does not say why: name the ranks that died. Other errors of this rank are its own.
            broken = isinstance(error, RuntimeError) and not isinstance(error, RunError)
            if broken and (dead := watchdog.missing_ranks()):
                raise RunError(explain_missing_ranks(dead)) from error
            raise
        # The first rank's error again, or the connection that broke when that rank exited: showing it would mislead.
        raise AlreadyReported from error
    blocking_code.close()
    guard.close()
    watchdog.close()
    world.barrier()
    dist.destroy_process_group()


def note_unusual_resume(run: Run) -> None:
    """Note a resume that starts a new run, or that finds no step left."""
    if run.start == 0:
        run.tracker.note("nothing to resume: a new run")
    elif run.start >= (steps := run.config.training_steps):
        run.tracker.note(f"nothing left to train: the checkpoint is at step {run.start} of training_steps={steps}")


def settle_garbage_collector() -> None:
    """Exclude the objects of the build from garbage collection, because vLLM collects at every sleep.

    A sleep takes 0.124 s instead of 0.5 s (docs/results/generation_host_1xh200.json).
    """
    gc.collect()
    gc.freeze()


def train(run: Run) -> str:
    """Run the remaining steps. Returns FINISHED or STOPPED."""
    config = run.config
    # A run resumed with fewer training_steps than it has completed ends at once.
    steps = run.start if run.goal_reached else max(run.start, config.training_steps)
    goal_reached = run.goal_reached
    if run.start and not run.world.from_main(lambda: all_exported(run, run.start)):
        maybe_export(run, run.start)  # the run was killed after this step's checkpoint and before its export
    for step in range(run.start, steps):
        with run.clock.time("step"):
            seed_everything(derive_seed(config.seed, step, run.world.rank))
            try:
                groups, settled = rollout(run, step)
            except (Stopped, NothingUsable) as end:
                save(run, step)
                run.checkpoints.wait()
                if isinstance(end, NothingUsable):
                    raise
                return STOPPED
            batch = make_batch(run, step, groups)
            row = settled.metrics | (rollout_metrics(groups, run.policy.version) if groups else {})
            with run.choreography.training_phase(), profiled(profile_folder(run, step)):
                metrics = update(run, with_logprobs(run, batch))
            metrics.add(run.choreography.freshness)
            row |= reduce(metrics, run.world.sum_, run.world.max_)
            run.freshness.check_samples(row.get("mismatch/on_policy", 0.0))
            if run.checkpoints.due(step + 1):
                with run.clock.time("checkpoint"):
                    save(run, step + 1, goal_reached=settled.finished)
        run.tracker.games(step, settled.games)
        run.tracker.flush(step, row | throughput(run, groups, batch), groups)
        maybe_export(run, step + 1)
        if settled.finished:
            run.tracker.note(f"step {step} is the last one: the environment's goal is reached")
            steps, goal_reached = step + 1, True
            break
    finish(run, steps, goal_reached)
    return FINISHED


def rollout(run: Run, step: int) -> tuple[list[Group], BatchResult]:
    """Generate the groups of this step, after an evaluation if one is due.

    Raises Stopped or NothingUsable on every rank.
    """
    with run.clock.time("wait"):
        order = run.supply.order(step)
    with run.choreography.rollout_phase(step, probe=order.probe):
        if evaluation_due(run, step):
            evaluate(run, step)
        with run.clock.time("generate"):
            groups = order.collect()
    check_reward_errors(groups, run.config.rollout)
    settled = run.supply.settle(groups)
    chosen = [groups[place] for place in settled.trained_now] + settled.released
    if step == 0 and (lack := lack_of_signal(chosen)):
        run.tracker.note(f"first batch: {lack}")
    # By prompt index: training and logs do not depend on the order in which groups finished.
    return sorted(chosen, key=lambda group: group.prompt.index), settled


def evaluation_due(run: Run, step: int) -> bool:
    every = run.config.evaluation.every
    return bool(every and run.held_out) and step % every == 0


def evaluate(run: Run, step: int) -> None:
    """Sample the held-out prompts with the engine's current weights and log their metrics. The engine must be awake."""
    job = Job(
        name=f"held_out/{step}",
        prompts=run.held_out,
        group_size=run.config.evaluation.samples_per_prompt,
        sampling=run.held_out_sampling,
    )
    with run.clock.time("evaluate"):
        groups = run.collector.collect(job)
    run.tracker.evaluation(step, held_out_metrics(groups), groups)


def make_batch(run: Run, step: int, groups: list[Group]) -> Batch:
    with run.clock.time("pack"):
        rewards = [group_rewards(group) for group in groups]
        # A group of equal rewards has no gradient, unless there is a KL penalty or it brings its own advantages.
        without_gradient = [
            run.config.loss.kl.coef == 0 and is_constant(values) and all(r.advantages is None for r in g.rollouts)
            for g, values in zip(groups, rewards, strict=True)
        ]
        return pack(
            groups,
            group_advantages(rewards, run.config.advantage),
            without_gradient,
            run.config.batch,
            rank=run.world.rank,
            world_size=run.world.size,
            shuffle_seed=derive_seed(run.config.seed, "minibatches", step),
            policy_version=None if moves_ahead_of_sampler(run.config) else run.policy.version,
        )


def several_updates(config: Config) -> bool:
    return config.batch.minibatches * config.batch.epochs > 1


def moves_ahead_of_sampler(config: Config) -> bool:
    """True if a batch has several updates, whose ratios are taken against sampling_logprobs.

    From the second update on the weights differ from the sampler's, so no sample counts as on-policy.
    """
    return several_updates(config) and config.loss.old_logprobs == "sampling"


def with_logprobs(run: Run, batch: Batch) -> Batch:
    """Add the constant log-probabilities that the loss needs; none for one on-policy update without a reference."""
    config = run.config
    if batch.lacks_sampling_logprobs:
        batch = run.policy.with_sampling_logprobs(batch)
    if several_updates(config) and config.loss.old_logprobs == "trainer":
        batch = run.policy.with_old_logprobs(batch)
    if run.reference is not None:
        with run.reference.scoring() as reference:
            batch = batch.map(lambda m: with_ref_logprobs(m, reference, run.world.device))
    return batch


def with_ref_logprobs(micro_batch: MicroBatch, reference: Weights, device: torch.device) -> MicroBatch:
    """Add log-probabilities from the environment where it gave them, else from the reference model. Collective."""
    inputs = micro_batch.loss_inputs
    ref_logprobs_N = fill_missing(inputs.ref_logprobs_N, score(reference, micro_batch, device))
    return replace(micro_batch, loss_inputs=replace(inputs, ref_logprobs_N=ref_logprobs_N))


def update(run: Run, batch: Batch) -> Metrics:
    """One optimizer step for each minibatch of each epoch."""
    metrics = Metrics(run.world.device)
    for _ in range(run.config.batch.epochs):
        for minibatch in batch.minibatches:
            run.policy.forward_backward(minibatch, metrics)
            run.policy.optimizer_step(metrics)
    return metrics


def profile_folder(run: Run, step: int) -> Path | None:
    wanted = run.world.is_main and step == run.config.tracking.profile_step
    return run.folder / "profile" if wanted else None


def throughput(run: Run, groups: list[Group], batch: Batch) -> dict[str, float]:
    """Seconds and memory by phase, and tokens per second of the whole step over all ranks."""
    row = run.clock.read()
    tokens = sum(len(rollout.token_ids) for group in groups for rollout in group.rollouts)
    trained = batch.num_tokens * run.config.batch.epochs
    row["tokens_per_second"] = tokens / row["seconds/step"]
    row["tokens_per_second/train"] = trained / row["seconds/train"]
    row["prefix_reuse"] = 1 - batch.computed_tokens / batch.num_tokens if batch.num_tokens else 0.0
    row["imbalance"] = batch.imbalance
    row["padding"] = batch.padding
    return row


def save(run: Run, step: int, *, goal_reached: bool = False) -> None:
    state = {"source": run.supply.state_dict(), GOAL_REACHED: goal_reached, MODEL_SHAPE: run.model.shape}
    run.checkpoints.save(step, run.policy, state)


def maybe_export(run: Run, step: int) -> None:
    every = run.config.checkpoint.export_every
    if every and step % every == 0:
        for export in run.exports:
            export_to(run, export, export.name_at(step))


def all_exported(run: Run, step: int) -> bool:
    return all((run.folder / export.name_at(step)).exists() for export in run.exports)


def export_to(run: Run, export: Export, name: str) -> None:
    export.write(run.folder / name)
    run.tracker.note(f"exported {run.folder / name}")


def finish(run: Run, steps: int, goal_reached: bool) -> None:
    """Evaluate the final weights, save them and export them."""
    if run.config.evaluation.every and run.held_out:
        # A stop request now skips only this evaluation: every step is complete.
        with suppress(Stopped), run.choreography.rollout_phase(steps, probe=run.held_out[0].token_ids, sync=True):
            evaluate(run, steps)
    if run.config.checkpoint.final:
        save(run, steps, goal_reached=goal_reached)
        for export in run.exports:
            export_to(run, export, export.final_name)
    run.checkpoints.wait()
