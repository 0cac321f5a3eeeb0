"""Checks of the servers that a run talks to: Atropos' API, engine servers, environments."""

from __future__ import annotations

import json
import os
from pathlib import Path

from colocated_grpo.atropos.reader import MISSING_LOGPROBS
from colocated_grpo.settings.schema import Config
from colocated_grpo.settings.sources import EpisodeSourceConfig
from colocated_grpo.settings.turns import TurnsSourceConfig
from colocated_grpo.tools.doctor.atropos_state import DUMMY, SECONDS, AtroposState
from colocated_grpo.tools.doctor.results import Finding, failed, failed_line, ok, skipped, warning
from colocated_grpo.tools.doctor.subject import Subject
from colocated_grpo.web.client import JsonClient, RequestRejected, Unavailable

NO_ENTRY = "no atropos entry"
NO_GROUP = "no group to look at"
LOGPROBS = "inference_logprobs"
"""Column of a group, and the reason for which its sequences are dropped if it is invalid."""
BRIDGE_FILE = "vllm_bridge_config.json"
PROBE = {"prompt": "1", "max_tokens": 1, "logprobs": 0}


def check_atropos_api(subject: Subject, config: Config) -> Finding:
    if config.atropos is None or subject.atropos is None:
        return skipped(NO_ENTRY)
    state, url = subject.atropos, config.atropos.url
    if state.error:
        port = url.rpartition(":")[2].strip("/")
        return failed(
            f"{url}: {state.error}", f"python -m colocated_grpo.atropos.api --port {port} (or run-api --port {port})"
        )
    if state.conflict:
        return failed_line(state.conflict, "restart the API server")
    return ok(f"{url} responds")


def _usable(subject: Subject) -> AtroposState | str:
    """Return the state of the API server, or the reason for skipping a check of it."""
    if subject.atropos is None:
        return NO_ENTRY
    return "the API server does not respond" if subject.atropos.error else subject.atropos


def check_atropos_environments(subject: Subject, config: Config) -> Finding:
    """Check that environments post groups, and that batches can be formed from them."""
    state, atropos = _usable(subject), config.atropos
    if isinstance(state, str) or atropos is None:
        return skipped(str(state))
    if not state.group_size:
        return warning(
            "no environment has posted a group; they start to sample when a trainer has registered",
            f"start one with --env.rollout_server_url {atropos.url} --env.wandb_name NAME --openai.base_url "
            f"http://{atropos.server.host}:{atropos.server.port}/v1, and see its log",
        )
    batch = round(config.atropos_share) * config.rollout.group_size
    size = state.group_size
    if batch % size:
        return failed(
            f"groups of {size} sequences: their size must divide the batch of {batch}",
            f"--env.group_size {config.rollout.group_size}, or another rollout.prompts_per_step * rollout.group_size",
        )
    if other := {why: n for why, n in state.dropped.items() if why not in (DUMMY, LOGPROBS, MISSING_LOGPROBS)}:
        shown = ", ".join(f"{count} for {why}" for why, count in other.items())
        return warning(
            f"{shown} of {size} sequences of the latest group would be dropped",
            "docs/guides/atropos.md explains the reasons; 'length' asks for a larger rollout.max_completion_tokens",
        )
    return ok(f"{state.waiting} groups are waiting; the latest has {size} sequences")


def check_server_type(subject: Subject, config: Config) -> Finding:
    state = _usable(subject)
    if isinstance(state, str) or not state.group_size:
        return skipped(state if isinstance(state, str) else NO_GROUP)
    if state.dropped[DUMMY]:
        return failed(
            "the latest group has placeholder tokens, as server_type: openai sends them",
            "start the environment with --openai.server_type vllm",
        )
    return ok("the latest group has sampled tokens")


def check_atropos_logprobs(subject: Subject, config: Config) -> Finding:
    state = _usable(subject)
    if isinstance(state, str) or not state.group_size:
        return skipped(state if isinstance(state, str) else NO_GROUP)
    if state.dropped[MISSING_LOGPROBS]:
        return failed(
            "the latest group has no inference_logprobs",
            "sample through managed_server with server_type vllm, or set missing_logprobs: recompute",
        )
    if state.dropped[LOGPROBS]:
        return failed(
            f"inference_logprobs of {state.dropped[LOGPROBS]} sequences: positive, or not one per token",
            "one log-probability (0 or less) for each trained token; masked tokens may have any number",
        )
    return ok("the latest group has inference_logprobs")


def check_engine_servers(subject: Subject, config: Config) -> Finding:
    """Sample one token from each engine server, with its log-probability."""
    engine = config.engine
    if engine.placement != "server" or not engine.urls:
        return skipped("engines run inside the ranks" if engine.placement != "server" else "the launcher starts them")
    key = None if engine.api_key_variable is None else subject.environment.get(engine.api_key_variable)
    for index, url in enumerate(engine.urls):
        if problem := engine_problem(url, key):
            wrong, fix = problem
            return failed(f"engine.urls.{index}={url}: {wrong}", fix)
    return ok(f"{len(engine.urls)} servers return log-probabilities")


def engine_problem(url: str, key: str | None) -> tuple[str, str] | None:
    """Return what is wrong with an engine server, and what to do; None if it returns log-probabilities."""
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


def check_weight_bridge(subject: Subject, config: Config) -> Finding:
    """Look for the server's description of its weights, which a trainer with shared weights reads."""
    engine = config.engine
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


def check_environments(subject: Subject, config: Config) -> Finding:
    """Call the servers of environments that have a url."""
    urls = {
        f"environments.{index}.args.url": str(source.args["url"])
        for index, source in enumerate(config.environments)
        if isinstance(source, EpisodeSourceConfig | TurnsSourceConfig) and "url" in source.args
    }
    for key, url in urls.items():
        try:
            JsonClient(url, timeout=SECONDS).get("/health")
        except (Unavailable, RequestRejected, ValueError) as error:
            return failed(f"{key}={url!r}: GET /health: {error}", "start the environment's server, or correct the url")
    return ok(f"{len(urls)} servers respond") if urls else skipped("no environment has a url")
