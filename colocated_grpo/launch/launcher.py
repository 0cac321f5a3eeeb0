"""The command line `run_colocated_grpo.py`: parse, check everything, print a banner, start the ranks.

Imports only the standard library and psutil before parsing, so that --help takes less than 0.3 s of CPU time.
"""

import os
import shlex
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from colocated_grpo.errors import ConfigError, RunError
from colocated_grpo.launch import cli
from colocated_grpo.runtime import processes, program, verdict
from colocated_grpo.servers.engine_servers import EngineServers, ServerPlan, plan_servers

if TYPE_CHECKING:
    from colocated_grpo.settings.schema import Config, ModelConfig

TOOLS = ("init", "chat", "doctor", "evaluate", "show-rollouts", "compare-runs", "make-model", "sft")
COMMANDS = {
    "serve": "colocated_grpo.servers",
    "report": "colocated_grpo.tracking.report",
    **{name: f"colocated_grpo.tools.{name.replace('-', '_')}" for name in TOOLS},
}
"""First argument -> the module that runs instead of a training run."""
TITLE = "Co-located GRPO"
# Maximum characters of a folder's path. A socket's path has at most 107 characters, of which vLLM needs 37.
MAX_SOCKET_FOLDER = 70
TRAINER_LOG = "trainer.log"
SAVING = (
    b"\nstopping: the run saves a checkpoint at the next safe point and ends; "
    b"Ctrl-C again, or SIGTERM, kills it at once\n"
)
STARTING = b"\nstopping during start-up, before the first step\n"
START_SECONDS = 5.0
"""Seconds for ranks to exit before training has begun. A rank that is blocked in a library handles no signal."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Launch a run, or another program of COMMANDS. Return its exit code: 2 if it cannot be started."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments and arguments[0] in COMMANDS:
        environment = {**os.environ, "PYTHONPATH": program.python_path(os.environ)}
        os.execve(sys.executable, [sys.executable, "-m", COMMANDS[arguments[0]], *arguments[1:]], environment)
    try:
        return _launch(arguments)
    except KeyboardInterrupt:
        print(STARTING.decode(), end="", file=sys.stderr)
        return 128 + signal.SIGINT


def _launch(arguments: Sequence[str]) -> int:
    program.prepare_streams()
    try:
        options, overrides, remarks = cli.read_arguments(arguments, cli.run_parser())
        launch = cli.read_launch(options, overrides)
    except ConfigError as error:
        return program.exit_code(error)
    default = cli.default_config_note(options)
    try:
        config, notes = read_settings(launch)
        servers = plan_servers(launch, config, os.environ)
        on_cpu = launch.gpus == 0 and not config.engine.urls
        model = model_verdict(config.model, config.policy.compute_dtype if on_cpu else None)
        missing = missing_devices(launch)
        config, lines, problems = cli.adapted(config, launch.resume, Path(launch.config).stem)
        if (missing or problems) and not options.dry_run:
            raise ConfigError(*missing, *problems)
    except ConfigError as error:
        code = program.exit_code(error, *default)
        if launch.node_rank > 0 and not options.dry_run:
            from colocated_grpo.runtime.joining import report_failed_node

            line, address = "; ".join(str(error).splitlines()), (launch.master_addr, launch.master_port)
            report_failed_node(launch.node_rank, launch.node_rank * launch.ranks, line, address)
        return code
    command = rank_command(launch)
    whole = options.dry_run or launch.log_level == "DEBUG"
    shown = banner(launch, command, servers, model) if whole else title(launch, servers, model)
    text = "\n".join([shown, *default, *remarks])
    redirect = options.redirect_output if launch.log_dir is None else launch.log_dir / TRAINER_LOG
    flag = "--redirect-output" if launch.log_dir is None else "--log-dir"
    if options.dry_run:
        if redirect is not None and not _can_write(redirect, makes_folders=launch.log_dir is not None):
            problems.append(f"{flag}={str(launch.log_dir or redirect)!r}: cannot write; choose a writable place")
        makes_run_folder = launch.node_rank == 0 and launch.resume in (None, cli.AUTO)
        if makes_run_folder and not _can_write(Path(config.output_dir) / "run", makes_folders=True):
            problems.append(f"output_dir={config.output_dir!r}: cannot write; choose a writable place")
        warnings = (f"warning: {line}" for line in missing)
        print(text, *(f"note: {note}" for note in notes), *warnings, *lines, sep="\n")
        return dry_run(config, problems, launch)
    environment = child_environment(os.environ, launch.gpus, launch.ranks, launch.log_level)
    if launch.nodes == 1 and not config.engine.urls:
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")  # else ranks would listen on the network
    folders = [launch.log_dir, *(log.parent for log in (servers.logs if servers is not None else []))]
    try:
        for folder in filter(None, folders):
            folder.mkdir(parents=True, exist_ok=True)
        _show(text, redirect, sys.stdout)
    except OSError as error:
        print(f"error: {flag}={error.filename or str(redirect)!r}: cannot write ({error.strerror})", file=sys.stderr)
        return verdict.USAGE_ERROR
    run = partial(_run, launch, command, redirect)
    if servers is None:
        return run(environment)
    with EngineServers(servers, environment) as running:
        code = run(environment | running.rank_environment())
    if running.failure is None:
        return code
    with suppress(OSError):
        _show(running.failure, redirect, sys.stderr)
    return verdict.RUN_ERROR


def _can_write(file: Path, *, makes_folders: bool) -> bool:
    """Return True if a run could write the file. makes_folders: it makes missing folders first."""
    parents = [parent for parent in file.parents if parent.exists()] if makes_folders else [file.parent]
    place = file if file.exists() else parents[0]
    return not file.is_dir() and (place == file or place.is_dir()) and os.access(place, os.W_OK)


def read_settings(launch: program.Launch) -> tuple["Config", list[str]]:
    """Return the settings and notes about them. Raises ConfigError if they are invalid for this number of ranks."""
    from colocated_grpo.settings.config_file import read_config
    from colocated_grpo.settings.rules import check_world

    loaded = read_config(launch.config, launch.overrides)
    check_world(loaded.config, launch.ranks * launch.nodes, launch.ranks)
    return loaded.config, loaded.notes


def missing_devices(launch: program.Launch) -> list[str]:
    """Return a line if this machine has fewer GPUs than the run needs. Not fatal in a dry run."""
    if launch.gpus <= (visible := cli.visible_gpus(os.environ)):
        return []
    if visible == 0:
        return [f"--gpus={launch.gpus}: no GPU is visible (nvidia-smi, CUDA_VISIBLE_DEVICES); --gpus 0 uses the CPU"]
    return [f"--gpus={launch.gpus}: only {visible} GPUs are visible (nvidia-smi, CUDA_VISIBLE_DEVICES)"]


def model_verdict(model: "ModelConfig", cpu_dtype: str | None) -> str:
    """Return a line about the model, from its config.json alone. Raises ConfigError if the model is unsupported.

    cpu_dtype: weight type of an engine on the CPU; None: engines are on GPUs or in servers.
    """
    from colocated_grpo.settings import model_support
    from colocated_grpo.settings.config_json import read_config_json

    try:
        config_json = read_config_json(model)
    except ConfigError:  # `cli.adapted`, called next, reports the reason
        return f"{model.name}: unknown, as its config.json cannot be read"
    setting = f"model.name={model.name!r}"
    model_support.check_trains(config_json, setting)
    if cpu_dtype is not None:
        model_support.check_cpu_engine(config_json, setting, bfloat16=cpu_dtype == "bfloat16")
    return f"{model.name}: {model_support.verdict(config_json)}"


def rank_command(launch: program.Launch) -> list[str]:
    """Return the command of every rank; torchrun's variables differ. torchrun itself would import torch first."""
    command = [sys.executable, "-m", "colocated_grpo", "--config", launch.config]
    if launch.resume is not None:
        command += ["--resume", launch.resume]
    return command + list(launch.overrides)


def rank_variables(launch: program.Launch, port: int) -> list[dict[str, str]]:
    """Return the variables of each rank of this node. port: of the ranks' store on node 0."""
    host = program.LOOPBACK if launch.nodes == 1 else launch.master_addr
    place = {"node": launch.node_rank, "nodes": launch.nodes, "host": host, "port": port}
    wait = {program.JOIN_VARIABLE: str(launch.join_timeout)}
    return [program.rank_variables(rank, launch.ranks, **place) | wait for rank in range(launch.ranks)]


def child_environment(environment: Mapping[str, str], gpus: int, ranks: int, log_level: str) -> dict[str, str]:
    """Return `environment` with the variables that the ranks need. Library variables set by the user are kept."""
    child = program.library_environment(log_level) | dict(environment)
    child |= {"PYTHONUNBUFFERED": "1", "PYTHONPATH": program.python_path(environment)}
    child[program.LOG_LEVEL_VARIABLE] = log_level
    if gpus == 0:
        child["CUDA_VISIBLE_DEVICES"] = ""
    if gpus == 0 or ranks > 1:
        child.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // ranks)))
    return child


def title(launch: program.Launch, servers: ServerPlan | None, model: str) -> str:
    """Return the line printed before the run starts; a second line names the logs of engine servers."""
    devices = f"{launch.ranks} x {'GPU' if launch.gpus else 'CPU'}"
    nodes = f" on node {launch.node_rank} of {launch.nodes}" if launch.nodes > 1 else ""
    if launch.node_rank > 0:
        nodes += f", which joins node 0 at {launch.master_addr}"
    line = f"{TITLE}: {launch.config}, {devices}{nodes}; {model}"
    return line if servers is None else f"{line}\n  server log     {', '.join(map(str, servers.logs))}"


def banner(launch: program.Launch, command: Sequence[str], servers: ServerPlan | None, model: str) -> str:
    """Return the summary that a dry run and --log-level DEBUG print. Secrets are masked, because it may be logged."""
    from colocated_grpo.settings.errors import masked_arguments

    master = "this machine, any free port" if launch.master_port == 0 else f"{launch.master_addr}:{launch.master_port}"
    facts = {
        "GPUs per node": str(launch.gpus) if launch.gpus else "0 (CPU)",
        "Nodes": launch.nodes,
        "Total ranks": launch.ranks * launch.nodes,
        "Node rank": launch.node_rank,
        "Master": master,
        "Config": launch.config,
        "Model": model,
        "Overrides": shlex.join(masked_arguments(launch.overrides)) or "none",
        "Resume": launch.resume or "no",
        "Log level": launch.log_level,
        "Rank command": shlex.join(masked_arguments(command)),
    }
    if servers is not None:
        facts["Engine servers"] = ", ".join(servers.urls)
        facts["Engine GPUs"] = " ".join(devices or "those of the ranks" for devices in servers.devices)
        facts["Server command"] = shlex.join(servers.commands[0])
        facts["Server log"] = ", ".join(map(str, servers.logs))
    rows = [f"  {name:<14} {value}" for name, value in facts.items()]
    return "\n".join([TITLE, *rows])


def dry_run(config: "Config", problems: Sequence[str], launch: program.Launch) -> int:
    """Print the problems that were found, or else a preview of the first prompts. Returns 2 for problems, else 0."""
    if not problems:
        program.prepare_libraries(launch.log_level)
        from colocated_grpo.assembly.preview import preview
        from colocated_grpo.settings.run_sizes import Placement

        program.show_crashes()
        place = Placement(ranks=launch.ranks * launch.nodes, on_gpu=launch.gpus > 0, device_bytes=0, nodes=launch.nodes)
        try:
            with verdict.reported_exits():
                lines = preview(config, place, lambda line: print(f"note: {line}"))
            print(*lines, sep="\n")
        except (ConfigError, RunError) as error:
            problems = str(error).splitlines()
    for line in program.error_text(problems):
        print(line, file=sys.stderr)
    print("Dry run mode - command not executed")
    return verdict.USAGE_ERROR if problems else 0


def _run(launch: program.Launch, command: Sequence[str], redirect: Path | None, environment: Mapping[str, str]) -> int:
    host = program.LOOPBACK if launch.nodes == 1 else ""  # torch's own stores listen on every interface
    try:
        bound = processes.bind_store(host, launch.master_port) if launch.node_rank == 0 else None
    except OSError as error:
        why = os.strerror(error.errno or 0)
        print(f"error: --master-port={launch.master_port}: {why}; choose another port", file=sys.stderr)
        return verdict.USAGE_ERROR
    with processes.scratch_folder() as folder:
        inside = {**environment, verdict.VERDICT_VARIABLE: str(folder)}
        if len(str(folder)) <= MAX_SOCKET_FOLDER:
            inside.setdefault("VLLM_RPC_BASE_PATH", str(folder))  # else an engine's sockets would remain in /tmp
        port = launch.master_port if bound is None else bound.getsockname()[1]
        ranks = [inside | variables for variables in rank_variables(launch, port)]
        ended = processes.run_command(command, ranks, redirect, partial(begin_stop, folder), bound)
        verdicts = verdict.read_verdicts(folder) if folder.is_dir() else None
    from colocated_grpo.tracking.ending import ending

    code, lines = ending(ended.code, verdicts, rank=launch.node_rank * launch.ranks + ended.local_rank)
    if lines:
        with suppress(OSError):
            _show("\n".join(lines), redirect, sys.stderr)
    return code


def begin_stop(folder: Path, number: int) -> tuple[bytes, float | None]:
    """Begin a stop: ranks that train save a checkpoint, others exit. folder: of the verdicts. number: of the signal."""
    cleaned = not (folder / processes.LOCK_FILE).exists()  # by a cleanup of /tmp during a long run
    if cleaned or any(end.training for end in verdict.read_verdicts(folder)):
        return SAVING, None
    # This verdict keeps the ranks from reporting their exits: the line STARTING is sufficient.
    verdict.write_verdict(folder / "launcher.json", verdict.ProcessEnd(code=128 + number, reported=time.time()))
    return STARTING, START_SECONDS


def _show(text: str, redirect: Path | None, console: TextIO) -> None:
    """Print `text`. Raises OSError if the file cannot be written; a closed console is not an error."""
    if redirect is None:
        with suppress(OSError):
            print(text, file=console, flush=True)
    else:
        with redirect.open("a", encoding="utf-8", errors="backslashreplace") as file:
            print(text, file=file)


if __name__ == "__main__":
    sys.exit(main())
