"""A run on this rank, from its settings to its end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from colocated_grpo.assembly.assemble import build_run, describe, note_unusual_resume
from colocated_grpo.assembly.user_code import user_code_limit
from colocated_grpo.environments.chat import ChatCodec
from colocated_grpo.errors import RunError
from colocated_grpo.runtime.distributed import derive_seed, seed_everything, use_deterministic_kernels
from colocated_grpo.runtime.joining import Joined
from colocated_grpo.runtime.rank_process import RankProcess
from colocated_grpo.runtime.run_folder import choose_run_folder, lock_folder, removed_if_unused
from colocated_grpo.runtime.verdict import FOLDER_SUFFIX, STOPPED_SUFFIX, TRAINING_SUFFIX, mark
from colocated_grpo.settings.schema import Config
from colocated_grpo.tracking import RunOutput
from colocated_grpo.tracking.ending import FAILED, STOPPED
from colocated_grpo.trainer import settle_garbage_collector, train


def main(config: Config, joined: Joined, *, resume: str | None, name: str, output: RunOutput) -> None:
    """Train `config` on this rank, in a process that ends with the run. Collective.

    Until the first step, a stop signal keeps the handlers of the caller: there is nothing to save.

    name: first part of a new run folder's name. resume: a run folder, 'auto' (the newest run of this config) or None.
    output: its `folder` is set, and whether the run trains; the caller records a failure there.
    """
    process = start_rank(config, joined, output)
    train_on(process, config, resume=resume, name=name, output=output, on_start=process.stop.listen)
    process.close()


def start_rank(config: Config, joined: Joined, output: RunOutput) -> RankProcess:
    """Build the process group of the ranks. Stop signals keep their handlers. Collective."""
    if config.deterministic:
        use_deterministic_kernels()
    with output.phase("connecting the ranks"):
        return RankProcess(
            joined,
            *user_code_limit(config),
            replicate_nodes=config.policy.replicate == "nodes",
            context_parallel=config.policy.context_parallel,
        )


def train_on(
    process: RankProcess,
    config: Config,
    *,
    resume: str | None,
    name: str,
    output: RunOutput,
    callbacks: Sequence[object] = (),
    on_start: Callable[[], None] = lambda: None,
) -> Path:
    """Train `config` from its start or from a checkpoint to its end, and return the run folder. Collective.

    callbacks: the user's objects, whose methods follow the run on rank 0. on_start: called before the first step.
    """
    world = process.world
    try:
        seed_everything(derive_seed(config.seed, "build"))
        folder = world.from_main(lambda: lock_folder(choose_run_folder(config, resume, name)))
        with removed_if_unused(folder):
            output.folder = folder
            mark(FOLDER_SUFFIX, str(folder))
            resources, guarded = process.resources, process.guard.armed
            run = build_run(config, folder, world, process.stop, output, resources, guarded, callbacks)
        run.tracker.start(run.config, describe(run), run.start, ChatCodec(run.tokenizer).transcript)
        if resume is not None:
            note_unusual_resume(run)
        settle_garbage_collector()
        output.trains = True
        mark(TRAINING_SUFFIX)
        on_start()
        try:
            outcome = train(run)
        except BaseException:
            with suppress(OSError):  # on a full disk closing fails too, and would hide the error that ended the run
                run.tracker.abandon()
            run.callbacks.end(FAILED)
            raise
        run.tracker.close(outcome)
        run.callbacks.end(outcome)
        process.resources.close()
        if outcome == STOPPED and (reasons := list(filter(None, world.gather_objects(process.stop.reason)))):
            raise RunError(f"{reasons[0]}; the run has saved a checkpoint, from which --resume auto continues")
        if outcome == STOPPED:
            mark(STOPPED_SUFFIX)
    except BaseException as error:
        if (shown := process.failure(error)) is error:
            raise
        raise shown from error
    return folder
