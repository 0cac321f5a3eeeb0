"""The training loop. Every rank runs this same code; there is no controller."""

import gc
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import torch

from colocated_grpo.advantages import group_advantages
from colocated_grpo.batching.micro_batch import MicroBatch
from colocated_grpo.batching.pack import Batch, Minibatch, pack
from colocated_grpo.environments.base import BatchResult
from colocated_grpo.errors import NothingUsable, RunError
from colocated_grpo.evaluation.evaluator import EvaluationSet
from colocated_grpo.freshness import staleness_of
from colocated_grpo.metrics import Metrics, reduce
from colocated_grpo.phases import profiled
from colocated_grpo.policy.activations import out_of_memory_in_one_line
from colocated_grpo.policy.export import Export
from colocated_grpo.policy.masters import Weights
from colocated_grpo.policy.policy import fill_missing, score
from colocated_grpo.rollout.collect import Stopped
from colocated_grpo.run import BEST, GOAL_REACHED, LEARNING_RATE, Run
from colocated_grpo.runtime.distributed import derive_seed, seed_everything
from colocated_grpo.runtime.run_folder import MODEL_SHAPE
from colocated_grpo.runtime.verdict import FINISHED, STOPPED
from colocated_grpo.settings.losses import AdvantageConfig
from colocated_grpo.summaries import environment_metrics, group_rewards, is_informative, rollout_metrics
from colocated_grpo.types import Group

PUSH_SECONDS = 5.0
"""Seconds between checks for a stop request while the last push runs."""


class PatienceOver(Exception):
    """The last evaluation.patience evaluations were not better than the best evaluation before them."""


def settle_garbage_collector() -> None:
    """Exclude objects created so far from garbage collection, because vLLM runs a collection at every sleep.

    A sleep takes 0.124 s instead of 0.5 s (docs/results/generation_host_1xh200.json).
    """
    gc.collect()
    gc.freeze()


def train(run: Run) -> str:
    """Run the remaining steps. Returns FINISHED or STOPPED."""
    config = run.config
    # A run resumed with fewer training_steps than it has completed ends at once.
    ended = run.goal_reached or run.best.exhausted
    steps = run.start if ended else max(run.start, config.training_steps)
    goal_reached = run.goal_reached
    if run.hub is not None and run.world.is_main:
        run.hub.start()
    exported = [run.folder / export.name_at(run.start) for export in run.exports]
    if run.start and not run.world.from_main(lambda: all(folder.exists() for folder in exported)):
        maybe_export(run, run.start)  # the run was killed after this step's checkpoint and before its export
    for step in range(run.start, steps):
        with run.clock.time("step"):
            run.callbacks.step_begins(step)
            seed_everything(derive_seed(config.seed, step, run.world.rank))
            try:
                groups, settled = rollout(run, step)
            except PatienceOver:
                steps = step
                break
            except (Stopped, NothingUsable) as end:
                save(run, step)
                run.checkpoints.wait()
                if isinstance(end, NothingUsable):
                    raise
                return STOPPED
            batch = make_batch(run, step, groups)
            row = settled.metrics | batch_metrics(run, groups)
            profiles = run.world.is_main and step == config.tracking.profile_step
            with (
                run.choreography.training_phase(),
                profiled(run.folder / "profile" if profiles else None),
                out_of_memory_in_one_line(config.batch.max_tokens_per_micro_batch),
            ):
                metrics = update(run, with_logprobs(run, batch), staleness_of(groups, run.policy.version))
            row |= reduce(metrics, run.world.sum_, run.world.max_)
            if run.checkpoints.due(step + 1):
                with run.clock.time("checkpoint"):
                    save(run, step + 1, goal_reached=settled.finished)
        row |= throughput(run, groups, batch) | ({} if run.hub is None else run.hub.metrics())
        run.tracker.games(step, settled.games)
        run.tracker.flush(step, row | run.callbacks.step_ended(step, row), groups)
        maybe_export(run, step + 1)
        maybe_push(run, step + 1)
        if settled.finished:
            run.tracker.note(f"step {step} is the last one: the environment's goal is reached")
            steps, goal_reached = step + 1, True
            break
        if follow_callbacks(run, step):
            steps = step + 1
            break
    finish(run, steps, goal_reached)
    return FINISHED


def follow_callbacks(run: Run, step: int) -> bool:
    """Apply the callbacks' requests, on all ranks in the same step. Returns True if the run is to end."""
    wanted = run.callbacks.requests()
    if wanted.learning_rate != run.policy.fixed_lr:
        run.policy.fixed_lr = wanted.learning_rate
        if run.checkpoints.due(step + 1):
            save(run, step + 1)  # again: this step's checkpoint has the former rate
    return wanted.stop


def rollout(run: Run, step: int) -> tuple[list[Group], BatchResult]:
    """Generate the groups of this step. If an evaluation is due, evaluate first.

    Raises Stopped, NothingUsable or PatienceOver on every rank.
    """
    with run.clock.time("wait"):
        order = run.supply.order(step)
    sets = run.evaluator.due(step)
    # An evaluation measures the weights of its own step, also between the syncs of sync_frequency.
    with run.choreography.rollout_phase(step, sync=bool(sets)):
        evaluate(run, step, sets)
        if run.best.exhausted:
            raise PatienceOver
        with run.clock.time("generate"):
            groups = order()
    keep_best(run, step)
    run.rewards.check(groups, trained=step > 0)
    settled = run.supply.settle(groups)
    chosen = [groups[place] for place in settled.trained_now] + settled.released
    # Sort by prompt index, so that training and logs do not depend on the order in which groups finished.
    return with_advantages(sorted(chosen, key=lambda group: group.prompt.index), run.config.advantage), settled


def with_advantages(groups: list[Group], config: AdvantageConfig) -> list[Group]:
    computed = group_advantages([group_rewards(group) for group in groups], config)
    return [replace(group, advantages=advantages) for group, advantages in zip(groups, computed, strict=True)]


def evaluate(run: Run, step: int, sets: Sequence[EvaluationSet]) -> None:
    """Evaluate the engine's current weights. The engine must be awake."""
    for each in sets:
        with run.clock.time("evaluate"):
            row, groups = run.evaluator.evaluate(step, each)
        run.tracker.evaluation(step, row | run.callbacks.evaluated(step, row), groups)
        run.best.update(step, row)


def keep_best(run: Run, step: int, *, goal_reached: bool = False) -> None:
    """Save and export the policy if its evaluation at `step` is the best, unless already done. Collective.

    The weights of step 0 are not kept: they are the model that the run started from.
    """
    if step == 0 or run.best.step != step or run.world.from_main(lambda: run.best.is_kept(run.folder)):
        return
    with run.clock.time("checkpoint"):
        save(run, step, goal_reached=goal_reached)
        # A run that is killed during the export resumes at this step, and exports it again.
        run.checkpoints.wait()
        for export in run.exports:
            export_to(run, export, export.best_name)
        run.world.from_main(lambda: run.best.mark_kept(run.folder))


def batch_metrics(run: Run, groups: list[Group]) -> dict[str, float]:
    """Return metrics of the scored groups, also by environment if there are several; empty without groups."""
    if not groups:
        return {}
    by_environment = environment_metrics(groups) if run.config.is_mixed else {}
    return rollout_metrics(groups, run.policy.version) | by_environment


def make_batch(run: Run, step: int, groups: list[Group]) -> Batch:
    with run.clock.time("pack"):
        # A group of equal rewards has no gradient, unless the environment gave advantages or every token has a loss.
        every_token = run.config.loss.kl.coef > 0 or run.config.policy.load_balancing > 0
        without_gradient = [not every_token and not is_informative(group) for group in groups]
        return pack(
            groups,
            [group.advantages for group in groups],
            without_gradient,
            run.config.batch,
            rank=run.world.rank,
            world_size=run.world.size,
            context=run.world.context,
            shuffle_seed=derive_seed(run.config.seed, "minibatches", step),
            share_prefixes=run.policy.model.shares_prefixes,
        )


def with_logprobs(run: Run, batch: Batch) -> Batch:
    """Add the constant log-probabilities that the loss needs. One on-policy update without a reference needs none."""
    config = run.config
    if batch.lacks_sampling_logprobs:
        batch = run.policy.with_sampling_logprobs(batch)
    if config.recomputes_logprobs:
        batch = run.policy.with_old_logprobs(batch)
    if run.reference is not None:
        with run.reference() as reference:
            batch = batch.map(lambda m: with_ref_logprobs(m, reference, run.world.device))
    return batch


def with_ref_logprobs(micro_batch: MicroBatch, reference: Weights, device: torch.device) -> MicroBatch:
    """Add the log-probabilities that the environment gave, and elsewhere those of the reference model. Collective."""
    # The reference chooses its own experts, as it did when it was the policy.
    unrouted = replace(micro_batch, tokens=replace(micro_batch.tokens, routes=None))
    scored_N = score(reference, unrouted, device)
    return micro_batch.with_inputs(ref_logprobs_N=fill_missing(micro_batch.loss_inputs.ref_logprobs_N, scored_N))


def update(run: Run, batch: Batch, staleness: int) -> Metrics:
    """Take one optimizer step for each minibatch of each epoch. Raises RunError before a step with faulty samples.

    All minibatches are judged before the first step, if the log-probabilities for it were recomputed. Otherwise each
    forward pass judges its own minibatch.
    staleness: optimizer steps since the oldest plainly sampled sequence of the batch was sampled.
    """
    metrics = Metrics(run.world.device)
    lr = max(run.config.policy.lr, run.policy.fixed_lr or 0.0)
    if judged := run.config.recomputes_logprobs:
        for minibatch in batch.minibatches:
            judge(run, minibatch, run.policy.mismatch(minibatch), staleness * lr)
    for _ in range(run.config.batch.epochs):
        for minibatch in batch.minibatches:
            own = Metrics(run.world.device)
            run.policy.forward_backward(minibatch, own)
            if not judged:
                judge(run, minibatch, own, staleness * lr)
            run.policy.optimizer_step(own)
            metrics.add(dict(own.ordered()))
            staleness += 1
    return metrics


def judge(run: Run, minibatch: Minibatch, metrics: Metrics, moved: float) -> None:
    """Raise RunError if the samples differ too much from the policy. With `numerics: exact`, name the first token."""
    try:
        run.judge_samples(metrics, moved)
    except RunError as error:
        if not run.policy.is_exact:
            raise
        raise RunError(f"{error}; {run.policy.first_difference(minibatch)}") from error


def throughput(run: Run, groups: list[Group], batch: Batch) -> dict[str, float]:
    """Seconds and memory by phase, and tokens per second of the whole step over all ranks."""
    row = run.clock.read()
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    tokens = sum(len(sequence.token_ids) for rollout in rollouts for sequence in rollout.sequences)
    trained = batch.num_tokens * run.config.batch.epochs
    row["tokens_per_second"] = tokens / row["seconds/step"]
    row["tokens_per_second/train"] = trained / row["seconds/train"]
    row["prefix_reuse"] = 1 - batch.computed_tokens / batch.num_tokens if batch.num_tokens else 0.0
    row["imbalance"] = batch.imbalance
    row["padding"] = batch.padding
    row["decode_tail"] = run.collector.driver.read_tail()
    return row


def save(run: Run, step: int, *, goal_reached: bool = False) -> None:
    state = {
        "source": run.supply.state_dict(),
        GOAL_REACHED: goal_reached,
        MODEL_SHAPE: run.model_shape,
        LEARNING_RATE: run.policy.fixed_lr,
        BEST: run.best.state_dict(),
    }
    run.checkpoints.save(step, run.policy, state, best=run.best.step)


def maybe_export(run: Run, step: int) -> None:
    if (every := run.config.checkpoint.export_every) and step % every == 0:
        for export in run.exports:
            export_to(run, export, export.name_at(step))


def maybe_push(run: Run, step: int) -> None:
    """Export the policy for the Hub and push it in the background, unless a push is still running. Collective.

    With an adapter, the adapter is pushed.
    """
    if (hub := run.hub) is not None and hub.due(step) and run.world.from_main(lambda: hub.free(step)):
        run.exports[0].write(hub.staging(step))
        run.world.from_main(lambda: hub.push(hub.staging(step), step))


def push_final(run: Run, steps: int) -> None:
    """Push the final export after the push before it. Both end, fail, or are ended by a stop. Collective."""
    if (hub := run.hub) is not None:
        for begin in (lambda: None, lambda: hub.push(run.folder / run.exports[0].final_name, steps)):
            run.world.from_main(begin)
            while run.world.from_main(lambda: hub.pending(PUSH_SECONDS, stopped=run.stop.requested())):
                pass


def export_to(run: Run, export: Export, name: str) -> None:
    export.write(run.folder / name)
    run.tracker.note(f"exported {run.folder / name}")


def finish(run: Run, steps: int, goal_reached: bool) -> None:
    """Evaluate the final weights, save them and export them."""
    run.supply.release_engine()  # a callback may have ended the run while the next step is sampled
    if sets := run.evaluator.due(steps, last=True):
        # A stop request now skips only this evaluation: every step is complete.
        with suppress(Stopped), run.choreography.rollout_phase(steps, sync=True):
            evaluate(run, steps, sets)
    keep_best(run, steps, goal_reached=goal_reached)
    if line := run.best.summary():
        run.tracker.note(line)
    if run.config.checkpoint.final:
        save(run, steps, goal_reached=goal_reached)
        for export in run.exports:
            export_to(run, export, export.final_name)
        push_final(run, steps)
    run.checkpoints.wait()
