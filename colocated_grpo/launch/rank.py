"""Runs a training run on this rank, from settings to shutdown."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import torch.distributed as dist

from colocated_grpo.assembly.assemble import build_run, describe, note_unusual_resume
from colocated_grpo.environments.chat import ChatCodec
from colocated_grpo.errors import RunError
from colocated_grpo.runtime import distributed, run_folder, user_code, verdict
from colocated_grpo.runtime.joining import Joined
from colocated_grpo.settings.base import SAVED
from colocated_grpo.settings.schema import Config, PolicyConfig
from colocated_grpo.settings.sources import AgentSourceConfig, EpisodeSourceConfig
from colocated_grpo.tracking.ending import RunOutput
from colocated_grpo.trainer import settle_garbage_collector, train


def main(config: Config, joined: Joined, *, resume: str | None, name: str, output: RunOutput) -> None:
    """Train `config` on this rank, in a process that ends with the run. Collective.

    name: first part of a new run folder's name. resume: a run folder, 'auto' (the newest run of this config) or None.
    """
    process = start_rank(config, joined, output)
    # The caller's signal handlers stay in place until the first step, because there is nothing to save before.
    train_on(process, config, resume=resume, name=name, output=output, on_start=process.stop.listen)
    process.close()


class RankProcess:
    """Process-wide state of one run: process group, signal handlers, watchdogs. Construction is collective.

    After a run without errors, call `close`. After a failed run, exit, or call `abandon` if the process continues.
    """

    def __init__(self, joined: Joined, user_code_seconds: float, setting: str, policy: PolicyConfig) -> None:
        """user_code_seconds: maximum time that user code may block all threads, from `setting`."""
        try:
            world = distributed.init_world(joined.store, replicate_nodes=policy.replicate == "nodes")
            self.world = distributed.with_context(world, policy.context_parallel)
        except Exception as error:
            joined.fail(error)
        self.stop = joined.stop
        self.fail = joined.fail
        """Makes the other ranks exit, and raises the error of this rank."""
        self._watchdog = joined.watchdog
        warn = logging.getLogger(__name__).warning
        self._user_code = user_code.UserCodeWatch(user_code_seconds, setting, warn, stacks=verdict.stacks_file())
        self.resources = ExitStack()
        """Resources opened by the run. They are closed at the end of a run without errors, and by `abandon`."""

    def close(self) -> None:
        """Leave the process group and restore the signal handlers. Collective; the run is complete."""
        self._user_code.close()
        self._watchdog.close()
        self.world.barrier()
        self._watchdog.links.close()
        dist.destroy_process_group()
        self.stop.close()  # last: until here, a stop signal changes nothing

    def abandon(self) -> None:
        """Release what it can after a failed run: with several ranks little, as none can leave the group alone."""
        if self.world.size == 1:
            self.resources.close()
        self._user_code.close()
        self.stop.close()
        if self.world.size == 1:
            self._watchdog.close()
            dist.destroy_process_group()


def start_rank(config: Config, joined: Joined, output: RunOutput) -> RankProcess:
    """Build the process group of the ranks. Does not change the handlers of stop signals. Collective."""
    if config.deterministic:
        distributed.use_deterministic_kernels()
    limits = {"rollout.reward_timeout": config.rollout.reward_timeout}
    if any(isinstance(entry, EpisodeSourceConfig | AgentSourceConfig) for entry in config.sources):
        limits["rollout.tool_timeout"] = config.rollout.tool_timeout
    name = max(limits, key=lambda name: limits[name])
    with output.phase("connecting the ranks"):
        return RankProcess(joined, limits[name], f"{name}={limits[name]:g}", config.policy)


def missing_space(config: Config, world: distributed.World) -> Iterator[str]:
    """Yield a line if the disk of the run folder has too little space for checkpoints and exports."""
    from colocated_grpo.settings.config_json import read_config_json
    from colocated_grpo.settings.model_sizes import sizes_of
    from colocated_grpo.settings.run_sizes import Placement, RunSizes, disk_notes

    if (sizes := sizes_of(read_config_json(config.model))) is not None:
        place = Placement(ranks=world.size, on_gpu=world.device.type == "cuda", device_bytes=0)
        yield from disk_notes(RunSizes(config, sizes, place))


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
    """Train `config` to the end, from the start or a checkpoint, and return the run folder. Collective.

    callbacks: the user's objects, whose methods are called on rank 0. on_start: called before files are written.
    """
    world = process.world
    try:
        distributed.seed_everything(distributed.derive_seed(config.seed, "build"))
        choice = Path(config.output_dir), config.run_name, resume, name
        folder = world.from_main(lambda: run_folder.lock_folder(run_folder.choose_run_folder(*choice)))
        output.folder = folder
        verdict.leave(folder=str(folder))
        try:
            for line in world.from_main(lambda: [*missing_space(config, world)]) if resume is None else ():
                output.note(f"note: {line}")
            run = build_run(config, folder, world, process.stop, output, process.resources, callbacks)
        except BaseException:
            run_folder.remove_if_unused(folder)
            raise
        settings, transcript = run.config.model_dump(mode="json", context=SAVED), ChatCodec(run.tokenizer).transcript
        verdict.leave(training=True)
        on_start()
        run.tracker.start(settings, describe(run), run.start, transcript)
        if resume is not None:
            note_unusual_resume(run)
        settle_garbage_collector()
        output.trains = True
        try:
            outcome = train(run)
        except BaseException as error:
            if world.size == 1 and isinstance(error, Exception):  # not a second Ctrl-C
                # Of several ranks, one may be lost, and would never finish its part.
                with suppress(Exception):  # the run's own error is the one to show
                    run.checkpoints.wait()
            with suppress(OSError):  # on a full disk closing also fails, which would hide the original error
                run.tracker.abandon()
            run.callbacks.end(verdict.FAILED)
            raise
        run.tracker.close(outcome)
        run.callbacks.end(outcome)
        process.resources.close()
        if outcome == verdict.STOPPED and (reasons := list(filter(None, world.gather_objects(process.stop.reason)))):
            raise RunError(f"{reasons[0]}; the run has saved a checkpoint, from which --resume auto continues")
        if outcome == verdict.STOPPED:
            verdict.leave(stopped=True)
    except BaseException as error:
        process.fail(error)
    return folder
