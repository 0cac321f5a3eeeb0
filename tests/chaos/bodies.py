"""10,000 hostile requests to each server, with and without a key, beside clients whose requests must all succeed."""

from __future__ import annotations

import json
import multiprocessing
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.client import HTTPConnection, HTTPException
from typing import Any

import psutil

from colocated_grpo.atropos.api import MAX_BODY_BYTES
from colocated_grpo.settings.atropos import ServerConfig
from colocated_grpo.types import JsonObject
from tests.chaos.hostile_requests import SECONDS, Route, Target, send_all
from tests.chaos.series import slope
from tests.chaos.trial import Trial
from tests.support.hostile_bodies import MIB
from tests.support.serve_process import ServeProcess
from tests.support.servers import EMBEDDED, ApiProcess, free_port
from tests.support.training_runs import ForkedRun, settings, tiny_model

REQUESTS = 10_000
THREADS = 4
KEY, VARIABLE = "the-key-of-the-attack", "CHAOS_KEY"
QUIET_SECONDS = 5.0
GROWTH_MIB = 256
"""Bound of what a server's memory may grow by after the first tenth of the requests."""
ENGINE = (
    Route("/v1/completions", {"model": "tiny", "prompt": "sort 31", "max_tokens": 4, "n": 1}, "prompt", "prompt"),
    Route(
        "/v1/chat/completions",
        {"model": "tiny", "messages": [{"role": "user", "content": "sort 31"}], "max_tokens": 4, "stop": ["0"]},
        "messages",
        "model",
    ),
    Route("/generate", {"prompt": {"prompt_token_ids": [1, 2, 3]}, "logprobs": 0, "max_tokens": 4}, "prompt", "prompt"),
    Route("/inference/v1/generate", {"token_ids": [1, 2], "sampling_params": {"max_tokens": 4}}, "token_ids", "model"),
)
GROUP = {
    "tokens": [[1, 2, 3, 4]] * 4,
    "masks": [[-100, -100, 3, 4]] * 4,
    "scores": [0.0, 1.0, 2.0, 3.0],
    "inference_logprobs": [[1.0, 1.0, -1.0, -1.0]] * 4,
    "env_id": 3,
}
ENVIRONMENT = {"max_token_length": 32, "desired_name": "a", "weight": 1.0, "group_size": 4}
API = (
    Route("/scored_data", GROUP, "inference_logprobs", "images"),
    Route("/scored_data_list", {"groups": [GROUP]}, "tokens", "images"),
    Route("/register-env", ENVIRONMENT, "weight", "desired_name"),
    Route("/disconnect-env", {"env_id": 0}, "env_id", "env_id"),
)


@dataclass
class Server:
    """A server under attack, its process, and a request that must succeed."""

    port: int
    pid: int
    routes: tuple[Route, ...]
    health: str
    normal: tuple[str, Any]
    """Path and body."""
    largest: int


@dataclass
class Watch:
    """Outcomes of honest requests while a server is attacked."""

    served: int = 0
    failures: list[str] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)
    """Seconds of each health request."""
    memory: list[tuple[float, float]] = field(default_factory=list)
    """(seconds, MiB) of the server."""


def attack(trial: Trial) -> JsonObject:
    """Attack each server twice."""
    os.environ[VARIABLE] = KEY  # before the fork server of the run starts
    servers = {"Atropos API": api, "engine endpoint of a run": run_endpoint, "colocated_grpo.servers": serve}
    cases = [(name, start, key) for name, start in servers.items() for key in (None, KEY)]
    figures = {}
    for number, (name, start, key) in enumerate(cases):
        label = f"{name}, {'with' if key else 'without'} a key"
        try:
            with start(trial, key) as server:
                figures[label] = _attack(trial, label, server, key, trial.seconds_left() / (len(cases) - number))
        except AssertionError as error:  # of a server that does not start
            trial.check(False, f"{label}: {error}")
            continue
        trial.say(f"{label}: {json.dumps(figures[label])}")
    return {
        "what": "hostile requests from 4 threads of another process, beside two clients with valid requests and one "
        "that asks for the server's health",
        "target_requests": REQUESTS,
        "bound_of_growth_mib": GROWTH_MIB,
        "servers": figures,
    }


def _attack(trial: Trial, label: str, server: Server, key: str | None, seconds: float) -> JsonObject:
    target = Target(server.port, server.routes, key, server.largest)
    sent, outcomes, deadline = 0, {}, time.monotonic() + seconds
    with _watched(server, key) as quiet:
        time.sleep(QUIET_SECONDS)
    with (
        ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool,
        _watched(server, key) as watch,
    ):
        while sent < REQUESTS and (sent == 0 or time.monotonic() < deadline):
            part = pool.submit(send_all, target, trial.random.randrange(1 << 30), REQUESTS // 20, THREADS).result()
            sent += part.total()
            for outcome, count in part.items():
                outcomes[outcome] = outcomes.get(outcome, 0) + count
    settled = watch.memory[len(watch.memory) // 10 :]
    growth = max(mib for _, mib in settled) - settled[0][1]
    bad = {outcome: count for outcome, count in outcomes.items() if outcome in ("500", "502", "timeout")}
    trial.check(not bad, f"{label}: responses {bad}")
    trial.check(not watch.failures, f"{label}: failed honest requests: {watch.failures[:3]}")
    trial.check(growth < GROWTH_MIB, f"{label}: memory grew by {growth:.0f} MiB")
    trial.check(psutil.pid_exists(server.pid), f"{label}: the server has ended")
    return {
        "requests": sent,
        "outcomes": dict(sorted(outcomes.items())),
        "honest_requests": watch.served,
        "honest_requests_failed": len(watch.failures),
        "health_seconds_max": round(max(watch.latencies), 3),
        "health_seconds_p99": round(sorted(watch.latencies)[int(0.99 * len(watch.latencies))], 3),
        "health_seconds_max_before": round(max(quiet.latencies), 3),
        "memory_growth_mib": round(growth, 1),
        "memory_slope_mib_per_minute": round(60 * slope(settled), 2),
    }


@contextmanager
def _watched(server: Server, key: str | None) -> Iterator[Watch]:
    """Send honest requests from threads until the context is left."""
    watch, done = Watch(), threading.Event()
    workers = [partial(_normal, server, key, watch, done)] * 2 + [partial(_health, server, key, watch, done)]
    threads = [threading.Thread(target=worker) for worker in workers]
    for thread in threads:
        thread.start()
    try:
        yield watch
    finally:
        done.set()
        for thread in threads:
            thread.join()


def _normal(server: Server, key: str | None, watch: Watch, done: threading.Event) -> None:
    path, body = server.normal
    while not done.wait(0.05):
        status = _call(server.port, "POST", path, json.dumps(body).encode(), key)
        watch.served += status == "200"
        if status != "200":
            watch.failures.append(status)


def _health(server: Server, key: str | None, watch: Watch, done: threading.Event) -> None:
    process = psutil.Process(server.pid)
    while not done.wait(0.02):
        began = time.monotonic()
        status = _call(server.port, "GET", server.health, None, key)
        watch.latencies.append(time.monotonic() - began)
        watch.memory.append((began, process.memory_info().rss / MIB))
        if status != "200":
            watch.failures.append(f"health: {status}")


def _call(port: int, method: str, path: str, body: bytes | None, key: str | None) -> str:
    """Return the status, or the error."""
    connection = HTTPConnection("127.0.0.1", port, timeout=SECONDS)
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    try:
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        response.read()
        return str(response.status)
    except (OSError, HTTPException) as error:
        return repr(error)
    finally:
        connection.close()


@contextmanager
def api(_trial: Trial, key: str | None) -> Iterator[Server]:
    """The embedded API."""
    with ApiProcess([*EMBEDDED, *(["--api-key-variable", VARIABLE] if key else [])]) as process:
        normal = ("/scored_data", GROUP)
        yield Server(process.port, process.process.pid, API, "/", normal, MAX_BODY_BYTES // 2)


@contextmanager
def serve(_trial: Trial, key: str | None) -> Iterator[Server]:
    """A server without a trainer."""
    with ServeProcess(tiny_model(), *(["--api-key-variable", VARIABLE] if key else [])) as process:
        process.wait_until_ready()
        [model] = process.call("GET", "/v1/models", key=key)[1]["data"]
        engine = process.call("GET", "/bridge/info", key=key)[1]["pid"]  # which also answers the requests
        normal = ("/v1/completions", ENGINE[0].template | {"model": model["id"]})
        yield Server(process.port, engine, ENGINE, "/health", normal, ServerConfig().max_body_bytes)


@contextmanager
def run_endpoint(trial: Trial, key: str | None) -> Iterator[Server]:
    """The engine of a training run that waits for its first batch from the API."""
    port = free_port()
    with ExitStack() as stack:
        api = stack.enter_context(ApiProcess(EMBEDDED))
        entry: JsonObject = {"type": "atropos", "url": api.url, "server": {"port": port}}
        if key:
            entry["server"]["api_key_variable"] = VARIABLE
        config = settings(tiny_model(), environments=[entry], evaluation={"every": 0})
        run = stack.enter_context(ForkedRun(trial.folder / f"run-{port}", config))
        run.wait_until(
            lambda: _call(port, "POST", "/v1/completions", json.dumps(ENGINE[0].template).encode(), key) == "200"
        )
        yield Server(
            port,
            run.ranks()[0].pid,
            ENGINE,
            "/health",
            ("/v1/completions", ENGINE[0].template),
            ServerConfig().max_body_bytes,
        )
