"""Checks of the run: settings, the files and functions that they name, the run folder, and the servers of the run."""

from __future__ import annotations

import fcntl
import json
import netrc
import os
from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from colocated_grpo.atropos.reader import MISSING_LOGPROBS
from colocated_grpo.environments.registry import check_names
from colocated_grpo.runtime.run_folder import (
    CHECKPOINTS,
    LOCK_FILE,
    STATE_FILE,
    check_resumed,
    choose_run_folder,
    complete_checkpoints,
)
from colocated_grpo.settings.errors import ConfigError
from colocated_grpo.settings.inputs import check_inputs
from colocated_grpo.settings.rules import remarks
from colocated_grpo.settings.sources import EpisodeSourceConfig
from colocated_grpo.settings.turns import TurnsSourceConfig
from colocated_grpo.tools.doctor.atropos_state import DUMMY, SECONDS
from colocated_grpo.tools.doctor.subject import Finding, Subject, failed, failed_line, ok, skipped, warning
from colocated_grpo.web.client import JsonClient, RequestRejected, Unavailable

WANDB_URL = "https://api.wandb.ai"
DCP_METADATA = ".metadata"


def check_settings(subject: Subject) -> Finding:
    """Report invalid settings, and valid settings that make engine and policy compute different probabilities."""
    if subject.config_errors:
        return failed(
            "; ".join(subject.config_errors), "correct the setting (colocated_grpo/settings/schema.py has all)"
        )
    if subject.config is None:
        return skipped("no --config: only the machine is checked")
    lines = remarks(subject.config)
    quantization = subject.config.engine.args.get("quantization")
    if quantization is not None:
        lines = [f"engine.args.quantization={quantization}: the engine's weights differ from the policy's", *lines]
    if lines:
        return warning("; ".join(lines), "leave the settings out, unless you want their effect")
    return ok(f"{subject.launch.config} is valid for {subject.ranks} ranks")


def check_files(subject: Subject) -> Finding:
    """Look up the files and names in the settings. User code is not imported; the dry run does that."""
    lines: list[str] = []
    for check in (partial(check_names, subject.run.sources), partial(check_inputs, subject.run)):
        try:
            check()
        except ConfigError as error:
            lines += str(error).splitlines()
    lines = [line for line in dict.fromkeys(lines) if line not in subject.model.error.splitlines()]
    if not lines:
        return ok("all files exist")
    if len(lines) == 1:
        return failed_line(lines[0], "correct the name")
    return failed(" | ".join(lines), "correct the names")


def check_run_folder(subject: Subject) -> Finding:
    """Check the checkpoint that a resumed run continues from, and that no other run uses its folder."""
    launch, config = subject.launch, subject.run
    try:
        folder = choose_run_folder(Path(config.output_dir), config.run_name, launch.resume, subject.run_name)
        check_resumed(config, launch.resume, subject.run_name)
    except ConfigError as error:
        return failed_line(str(error).splitlines()[0], "--resume auto, or another --run_name")
    if holder := _lock_holder(folder / LOCK_FILE):
        return failed(f"{folder}: in use by another run ({holder})", "stop that process, or another --run_name")
    checkpoints = complete_checkpoints(folder / CHECKPOINTS)
    if not checkpoints:
        return ok("a new run")
    if damage := damaged(checkpoints[-1]):
        return failed(
            f"checkpoint {checkpoints[-1]}: {damage}", f"mv {checkpoints[-1]} {folder}/damaged, then --resume {folder}"
        )
    return ok(f"continues from {checkpoints[-1]}")


def _lock_holder(file: Path) -> str:
    """Return the process that holds the lock of a run folder; empty if the folder is not locked."""
    try:
        with file.open("r+", encoding="utf-8") as stream:
            try:
                fcntl.lockf(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                return stream.read().strip() or "unknown process"
    except OSError:
        pass
    return ""


def damaged(checkpoint: Path) -> str:
    """Return what is wrong with the files of a checkpoint; empty if they can be read. Tensors are not read."""
    try:
        json.loads((checkpoint / STATE_FILE).read_text())["step"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{STATE_FILE} cannot be read ({type(error).__name__})"
    for name in (DCP_METADATA, *(file.name for file in checkpoint.glob("*.distcp"))):
        file = checkpoint / name
        if not file.is_file() or file.stat().st_size == 0:
            return f"{name} is missing or empty"
    return "" if any(checkpoint.glob("*.distcp")) else "no tensor files (*.distcp)"


def check_wandb(subject: Subject) -> Finding:
    """Look for the key of Weights & Biases."""
    mode, wandb = subject.environment.get("WANDB_MODE"), subject.run.tracking.wandb
    if wandb != "online" or mode in ("offline", "disabled"):
        return skipped(f"tracking.wandb={wandb}" + (f", WANDB_MODE={mode}" if mode else ""))
    if subject.environment.get("WANDB_API_KEY"):
        return ok("logged in by WANDB_API_KEY")
    host = urlsplit(subject.environment.get("WANDB_BASE_URL", WANDB_URL)).hostname or ""
    if _in_netrc(host, subject.environment):
        return ok(f"logged in to {host}")
    return failed(f"tracking.wandb=online: no key for {host}", "wandb login, or --tracking.wandb offline")


def _in_netrc(host: str, environment: Mapping[str, str]) -> bool:
    home = environment.get("HOME", os.path.expanduser("~"))
    for file in filter(None, (environment.get("NETRC"), f"{home}/.netrc", f"{home}/_netrc")):
        try:
            if netrc.netrc(file).authenticators(host):
                return True
        except (OSError, netrc.NetrcParseError):
            continue
    return False


NO_ENTRY = "no atropos entry"
NO_RESPONSE = "the API server does not respond"
LOGPROBS = "inference_logprobs"
"""Column of a group. Also the reason given for sequences dropped because this column is invalid."""
BRIDGE_FILE = "vllm_bridge_config.json"
PROBE = {"prompt": "1", "max_tokens": 1, "logprobs": 0}


def check_atropos_api(subject: Subject) -> Finding:
    state, atropos = subject.atropos, subject.run.atropos
    if state is None or atropos is None:
        return skipped(NO_ENTRY)
    url = atropos.url
    if state.error:
        port = url.rpartition(":")[2].strip("/")
        return failed(
            f"{url}: {state.error}", f"python -m colocated_grpo.atropos.api --port {port} (or run-api --port {port})"
        )
    if state.conflict:
        return failed_line(state.conflict, "restart the API server")
    return ok(f"{url} responds")


def check_atropos_environments(subject: Subject) -> Finding:
    """Check that environments post groups, and that batches can be formed from them."""
    state, atropos, rollout = subject.atropos, subject.run.atropos, subject.run.rollout
    if state is None or atropos is None or state.error:
        return skipped(NO_ENTRY if state is None else NO_RESPONSE)
    if not state.group_size:
        return warning(
            "no environment has posted a group; they start to sample when a trainer has registered",
            f"start one with --env.rollout_server_url {atropos.url} --env.wandb_name NAME --openai.base_url "
            f"http://{atropos.server.host}:{atropos.server.port}/v1, and see its log",
        )
    batch = round(subject.run.atropos_share) * rollout.group_size
    size = state.group_size
    if batch % size:
        return failed(
            f"groups of {size} sequences: their size must divide the batch of {batch}",
            f"--env.group_size {rollout.group_size}, or another rollout.prompts_per_step * rollout.group_size",
        )
    if other := {why: n for why, n in state.dropped.items() if why not in (DUMMY, LOGPROBS, MISSING_LOGPROBS)}:
        shown = ", ".join(f"{count} for {why}" for why, count in other.items())
        return warning(
            f"{shown} of {size} sequences of the latest group would be dropped",
            "docs/guides/atropos.md explains the reasons; 'length' asks for a larger rollout.max_completion_tokens",
        )
    return ok(f"{state.waiting} groups are waiting; the latest has {size} sequences")


def _dropped(subject: Subject) -> Counter[str] | Finding:
    """Return the dropped sequences of the latest group by reason, or the finding if there is no group."""
    state = subject.atropos
    if state is None or state.error:
        return skipped(NO_ENTRY if state is None else NO_RESPONSE)
    return state.dropped if state.group_size else skipped("no group to look at")


def check_server_type(subject: Subject) -> Finding:
    dropped = _dropped(subject)
    if isinstance(dropped, Finding):
        return dropped
    if dropped[DUMMY]:
        return failed(
            "the latest group has placeholder tokens, as server_type: openai sends them",
            "start the environment with --openai.server_type vllm",
        )
    return ok("the latest group has sampled tokens")


def check_atropos_logprobs(subject: Subject) -> Finding:
    dropped = _dropped(subject)
    if isinstance(dropped, Finding):
        return dropped
    if dropped[MISSING_LOGPROBS]:
        return failed(
            "the latest group has no inference_logprobs",
            "sample through managed_server with server_type vllm, or set missing_logprobs: recompute",
        )
    if dropped[LOGPROBS]:
        return failed(
            f"inference_logprobs of {dropped[LOGPROBS]} sequences: positive, or not one per token",
            "one log-probability (0 or less) for each trained token; masked tokens may have any number",
        )
    return ok("the latest group has inference_logprobs")


def check_engine_servers(subject: Subject) -> Finding:
    """Sample one token from each engine server, with its log-probability."""
    engine = subject.run.engine
    if engine.placement != "server" or not engine.urls:
        return skipped("engines run inside the ranks" if engine.placement != "server" else "the launcher starts them")
    key = None if engine.api_key_variable is None else subject.environment.get(engine.api_key_variable)
    for index, url in enumerate(engine.urls):
        if problem := engine_problem(url, key):
            wrong, fix = problem
            return failed(f"engine.urls.{index}={url}: {wrong}", fix)
    return ok(f"{len(engine.urls)} servers return log-probabilities")


def engine_problem(url: str, key: str | None) -> tuple[str, str] | None:
    """Return what is wrong with an engine server, and a fix. None if the server returns log-probabilities."""
    client = JsonClient(url, timeout=SECONDS, api_key=key)
    serve = "python -m colocated_grpo.servers MODEL --port PORT"
    try:
        client.get("/health")
        response = client.post("/generate", PROBE)
    except Unavailable as error:
        return str(error), f"{serve}, and see its log"
    except RequestRejected as error:
        if str(error).startswith("401"):
            return str(error), "set engine.api_key_variable to the variable with the server's key"
        return f"POST /generate: {error}", f"{serve}: vLLM's own server has no /generate"
    if not isinstance(response, dict) or not response.get("logprobs"):
        return "POST /generate returns no log-probabilities", serve
    return None


def check_weight_bridge(subject: Subject) -> Finding:
    """Look for the server's description of its weights, which a trainer with shared weights reads."""
    engine = subject.run.engine
    if engine.placement != "server" or engine.bridge != "shared" or not engine.urls:
        return skipped("no running server shares its weights")
    folder = subject.environment.get("LOGDIR") or os.getcwd()
    file = Path(engine.bridge_config or Path(folder) / BRIDGE_FILE)
    fix = "start the server first, with the same LOGDIR, or set engine.bridge_config"
    try:
        mappings = json.loads(file.read_text(encoding="utf-8")).get("param_mappings")
    except OSError as error:
        return failed(f"{file}: {error.strerror}", fix)
    except (ValueError, AttributeError):
        return failed(f"{file}: not a JSON object", fix)
    return ok(f"{file}: {len(mappings)} parameters") if mappings else failed(f"{file}: param_mappings is empty", fix)


def check_environments(subject: Subject) -> Finding:
    """Call the servers of environments that have a url."""
    urls = {
        f"environments.{index}.args.url": str(source.args["url"])
        for index, source in enumerate(subject.run.environments)
        if isinstance(source, EpisodeSourceConfig | TurnsSourceConfig) and "url" in source.args
    }
    for key, url in urls.items():
        try:
            JsonClient(url, timeout=SECONDS).get("/health")
        except (Unavailable, RequestRejected, ValueError) as error:
            return failed(f"{key}={url!r}: GET /health: {error}", "start the environment's server, or correct the url")
    return ok(f"{len(urls)} servers respond") if urls else skipped("no environment has a url")
