"""Engine servers (`python -m colocated_grpo.servers`): calls to one, and those that the launcher starts and stops."""

from __future__ import annotations

import json
import os
import random
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar, cast
from urllib.parse import urlsplit

import psutil

from colocated_grpo.errors import ConfigError, RunError
from colocated_grpo.runtime.parents_death import signal_at_parents_death
from colocated_grpo.runtime.program import KEY_VARIABLE, URLS_VARIABLE, Launch
from colocated_grpo.types import JsonObject
from colocated_grpo.web.client import JsonClient, RequestRejected, Unavailable

if TYPE_CHECKING:
    from colocated_grpo.settings.schema import Config, EngineConfig, ModelConfig, PolicyConfig

CALL_SECONDS = 30.0
"""Timeout of calls that need no work by the engine."""
SILENT_SECONDS = 30.0
"""A stream without a message for this long is closed. The server sends an empty line every 5 seconds."""
RETRY_SECONDS = 0.25
BUSY_SECONDS = 75.0
"""Time for another trainer to end. A server notices within a minute that a trainer's machine is gone."""
CONFLICT = 409
"""Another trainer is attached, or this one is not, or the requests need another version of the weights."""
ADVICE = {
    401: "; name the variable with the server's key in engine.api_key_variable",
    404: "; this is not an engine server, or an older one: start it with colocated-grpo serve",
}
"""By status of a rejected call."""
SERVER_PORTS = range(20_000, 32_768)
"""Below Linux' ephemeral ports, which other sockets can get while a server loads its model."""
REQUESTS_PER_POST = 4096
TRAINER_HEADER = "X-Trainer"
"""Name of the header with the secret of a trainer, the same on all of its ranks."""

T = TypeVar("T")
Messages = SimpleQueue[JsonObject | None]


class EngineServer:
    """A server's routes for trainers. Calls raise Unavailable or RequestRejected, or RunError where documented.

    While a trainer has a stream open, no other client controls the engine.
    """

    def __init__(
        self,
        url: str,
        api_key: str | None,
        trainer: str,
        timeout: float,
        stop_requested: Callable[[], bool] = lambda: False,
    ) -> None:
        """trainer: secret of this trainer, the same on all of its ranks. timeout: seconds for the server to start, and
        for calls that wait for the engine."""
        self._stop_requested = stop_requested
        self.url = url.rstrip("/")
        self.host = urlsplit(self.url).hostname or ""
        self.timeout = timeout
        self._http = JsonClient(self.url, timeout=CALL_SECONDS, api_key=api_key, headers={TRAINER_HEADER: trainer})
        self.client = secrets.token_hex(16)
        """Name of this rank at the server."""
        self._messages: Messages | None = None
        """The last stream, while it is open."""
        self._instance = ""

    def info(self) -> JsonObject:
        """Attach to the server; return /bridge/info: model, limits, `instance` (one per start), `policy_version`."""
        info = self._http.get("/bridge/info")
        if not isinstance(info, dict) or "instance" not in info:
            raise Unavailable(f"{self.url}/bridge/info is not an engine server's; start one with colocated-grpo serve")
        if self._messages is None or self._instance != info["instance"]:
            self.stream()
            self._instance = info["instance"]
        return info

    def adapters(self) -> JsonObject:
        """Return /lora/status."""
        return cast(JsonObject, self._http.get("/lora/status"))

    def wait_until_ready(self) -> JsonObject:
        """Return `info` once the server responds. Raises RunError."""
        return self.until_answered(self.info)

    def until_answered(self, call: Callable[[], T]) -> T:
        """Repeat the call while it raises Unavailable, for at most `timeout` seconds. Raises RunError."""
        begun = time.monotonic()
        while True:
            try:
                return call()
            except RequestRejected as error:
                if error.status != CONFLICT or time.monotonic() > begun + BUSY_SECONDS:
                    raise RunError(f"engine.urls={self.url}: {error}{ADVICE.get(error.status, '')}") from None
                reason = str(error)
            except Unavailable as error:
                reason = str(error)
            if self._stop_requested():
                raise RunError(f"engine.urls={self.url}: stopped while waiting for the server ({reason})")
            if time.monotonic() > begun + self.timeout:
                problem = f"no answer within engine.server_timeout={self.timeout:g} s ({reason})"
                advice = "start it with colocated-grpo serve, or look into its log"
                raise RunError(f"engine.urls={self.url}: {problem}; {advice}")
            time.sleep(RETRY_SECONDS)

    def post(self, path: str, body: Mapping[str, object] | None = None) -> Any:
        """POST a request whose response waits for the engine."""
        return self._http.post(path, body or {}, self.timeout)

    def post_or_end(self, path: str, body: Mapping[str, object] | None = None) -> JsonObject:
        """POST a request that must succeed for the run to continue. Raises RunError."""
        try:
            return self.post(path, body)
        except (Unavailable, RequestRejected) as error:
            raise RunError(f"engine.urls={self.url}: POST {path} failed: {error}") from None

    def stream(self) -> Messages:
        """Open a stream in place of the last one, whose requests the server aborts. It ends with None."""
        lines = self._http.lines(f"/engine/stream?client={self.client}", SILENT_SECONDS)
        next(lines)  # confirms that the server is ready for requests
        self._messages = messages = Messages()
        threading.Thread(target=self._read, args=(lines, messages), name="engine server", daemon=True).start()
        return messages

    def close(self) -> None:
        """End the stream, which aborts its requests."""
        with suppress(Unavailable, RequestRejected):
            self._http.post("/engine/abort", {"client": self.client, "ids": None})

    def _read(self, lines: Iterator[str], messages: Messages) -> None:
        with suppress(Unavailable, RequestRejected, ValueError):  # the next call to the server shows the cause
            for line in lines:
                messages.put(json.loads(line))
        if self._messages is messages:
            self._messages = None
        messages.put(None)


LOG_VARIABLE = "LOGDIR"
"""Folder of vllm_bridge_config.json, for servers and ranks."""
END_SECONDS, KILL_SECONDS = 20.0, 5.0
POLL_SECONDS = 0.05
LOG_LINES = 5
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values of vLLM's max_lora_rank."""


@dataclass(frozen=True, kw_only=True)
class ServerPlan:
    """Servers to start: one command and one set of devices each."""

    commands: list[list[str]]
    devices: list[str | None]
    """CUDA_VISIBLE_DEVICES of each server; None: inherited."""
    urls: list[str]
    trainer_devices: str | None
    """CUDA_VISIBLE_DEVICES of the ranks; None: inherited."""
    logs: list[Path]


def plan_servers(launch: Launch, config: Config, environment: Mapping[str, str]) -> ServerPlan | None:
    """Return the servers to start; None if there are none. Raises ConfigError if flags and config contradict."""
    engine = config.engine
    if engine.placement == "colocated" or engine.urls:
        if launch.engine_gpus:
            reason = "engine.urls names running servers" if engine.urls else "engine.placement is colocated"
            raise ConfigError(f"--engine-gpus={launch.engine_gpus}: must be absent, as {reason}")
        return None
    if launch.nodes > 1:
        advice = "with several nodes start servers with colocated-grpo serve and name them"
        raise ConfigError(f"engine.urls: empty; {advice}")
    devices, trainer_devices = _divide_gpus(launch, engine, environment)
    command = serve_command(config.model, engine, config.policy, engine.max_model_len or config.max_sequence_tokens)
    return local_servers(command, launch.log_dir or Path(config.output_dir), devices, trainer_devices)


def local_servers(
    command: list[str], folder: Path, devices: Sequence[str | None] = (None,), trainer_devices: str | None = None
) -> ServerPlan:
    """Return the plan of servers with the same command on free ports, whose logs are in `folder`."""
    names = ["server.log"] if len(devices) == 1 else [f"server_{index}.log" for index in range(len(devices))]
    ports = free_ports(len(devices))
    return ServerPlan(
        commands=[[*command, "--port", str(port)] for port in ports],
        devices=list(devices),
        urls=[f"http://127.0.0.1:{port}" for port in ports],
        trainer_devices=trainer_devices,
        logs=[folder / name for name in names],
    )


def _divide_gpus(
    launch: Launch, engine: EngineConfig, environment: Mapping[str, str]
) -> tuple[list[str | None], str | None]:
    """Return the visible devices of each server and of the ranks."""
    size = engine.tensor_parallel_size
    if launch.engine_gpus == 0 and launch.gpus and engine.bridge == "broadcast":
        why = "NCCL does not connect two processes on one GPU"
        advice = "on one GPU use engine.placement: colocated, or engine.bridge: shared"
        raise ConfigError(f"--engine-gpus=0: must be at least {size} with engine.bridge: broadcast, as {why}; {advice}")
    if launch.engine_gpus == 0:
        return [None], None  # on the CPU, or on the ranks' own GPUs
    if engine.bridge == "shared":
        raise ConfigError(f"--engine-gpus={launch.engine_gpus}: must be absent with engine.bridge: shared, one copy")
    if launch.engine_gpus % size:
        rule = f"must be a multiple of engine.tensor_parallel_size={size}, the GPUs of one server"
        raise ConfigError(f"--engine-gpus={launch.engine_gpus}: {rule}")
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    ids = [] if visible is None else visible.split(",")[: launch.gpus]
    if len(ids) < launch.gpus:  # all are visible; or too few, which the launcher reports
        ids = [str(index) for index in range(launch.gpus)]
    ours, theirs = ids[: launch.ranks], ids[launch.ranks :]
    return [",".join(theirs[first : first + size]) for first in range(0, len(theirs), size)], ",".join(ours)


def lora_limit(rank: int, key: str = "adapter's rank") -> int:
    """Return vLLM's smallest limit for an adapter of this rank. Raises ConfigError, about `key`, if there is none."""
    if rank > LORA_RANKS[-1]:
        advice = "train with engine.bridge: broadcast, or export merged weights (checkpoint.export_merged)"
        raise ConfigError(f"{key}={rank}: vLLM loads adapters up to rank {LORA_RANKS[-1]}; {advice}")
    return min(limit for limit in LORA_RANKS if limit >= rank)


def serve_command(model: ModelConfig, engine: EngineConfig, policy: PolicyConfig, max_tokens: int) -> list[str]:
    """Return the command of a server, without its port."""
    rank = policy.lora.rank if engine.bridge == "adapter" and policy.lora is not None else None
    flags = {
        "--dtype": policy.compute_dtype if engine.dtype == "auto" else engine.dtype,
        "--max-model-len": max_tokens,
        "--tensor-parallel-size": engine.tensor_parallel_size,
        "--api-key-variable": KEY_VARIABLE,
        "--revision": model.revision,
        "--tokenizer": model.tokenizer,
        "--chat-template": model.chat_template,
        "--chat-template-kwargs": json.dumps(model.chat_template_kwargs) if model.chat_template_kwargs else None,
        "--max-num-seqs": engine.max_num_seqs,
        "--gpu-memory-utilization": engine.gpu_memory_utilization,
        "--kv-cache-memory-bytes": engine.kv_cache_memory_bytes,
        "--engine-args": json.dumps(engine.args) if engine.args else None,
        "--max-lora-rank": None if rank is None else lora_limit(rank, "policy.lora.rank"),
    }
    switches = {
        "--trust-remote-code": model.trust_remote_code,
        "--enforce-eager": engine.enforce_eager,
        "--enable-lora": rank is not None,
        "--share-weights": engine.bridge == "shared",
    }
    command = [sys.executable, "-m", "colocated_grpo.servers", model.name]
    command += [text for flag, value in flags.items() if value is not None for text in (flag, str(value))]
    return command + [switch for switch, is_on in switches.items() if is_on]


def free_ports(count: int) -> list[int]:
    """Return ports of this machine that are currently free, in random order of `SERVER_PORTS`."""
    ports, found = iter(random.SystemRandom().sample(SERVER_PORTS, len(SERVER_PORTS))), list[int]()
    with ExitStack() as opened:
        while len(found) < count:
            with suppress(OSError):
                opened.enter_context(socket.create_server(("127.0.0.1", port := next(ports))))
                found.append(port)
    return found


class EngineServers:
    """Context that runs the servers of a plan. If a server exits, the run saves a checkpoint and stops."""

    def __init__(self, plan: ServerPlan, environment: Mapping[str, str]) -> None:
        """environment: environment of the servers, except for their devices."""
        self._plan = plan
        self._environment = {**environment, KEY_VARIABLE: secrets.token_urlsafe(32)}
        self._environment[LOG_VARIABLE] = str(plan.logs[0].parent.absolute())
        self._processes: list[subprocess.Popen[bytes]] = []
        self._closing = False
        self.failure: str | None = None
        """Lines about the first server that exited by itself."""

    def rank_environment(self) -> dict[str, str]:
        """Return the environment variables that give ranks the servers' addresses and key."""
        devices = self._plan.trainer_devices
        found = {name: self._environment[name] for name in (KEY_VARIABLE, LOG_VARIABLE)}
        found |= {URLS_VARIABLE: " ".join(self._plan.urls)}
        return found if devices is None else {**found, "CUDA_VISIBLE_DEVICES": devices}

    def __enter__(self) -> EngineServers:
        for command, devices, log in zip(self._plan.commands, self._plan.devices, self._plan.logs, strict=True):
            chosen = {} if devices is None else {"CUDA_VISIBLE_DEVICES": devices}
            with log.open("ab") as file:
                process = subprocess.Popen(
                    command,
                    env={**self._environment, **chosen},
                    stdout=file,
                    stderr=file,
                    start_new_session=True,  # so that Ctrl-C in a terminal reaches only the launcher
                    preexec_fn=signal_at_parents_death(signal.SIGTERM),
                )
            self._processes.append(process)
            threading.Thread(target=self._watch, args=(process, log), name="engine server", daemon=True).start()
        return self

    def _watch(self, process: subprocess.Popen[bytes], log: Path) -> None:
        code = process.wait()
        if self._closing or self.failure is not None:
            return
        end = log.read_text(errors="replace").strip().splitlines()[-LOG_LINES:]
        self.failure = "\n".join([f"error: an engine server ended with exit code {code}; the end of {log}:", *end])
        while not self._closing:
            if callable(signal.getsignal(signal.SIGTERM)):  # `run_command` is running
                os.kill(os.getpid(), signal.SIGTERM)  # like a stop by the user: the ranks save a checkpoint
                return
            time.sleep(POLL_SECONDS)

    def __exit__(self, *_exception: object) -> None:
        self._closing = True
        trees: list[psutil.Process] = []
        for server in self._processes:
            with suppress(psutil.NoSuchProcess):
                process = psutil.Process(server.pid)
                trees += [process, *process.children(recursive=True)]
            server.terminate()
        _, alive = psutil.wait_procs(trees, timeout=END_SECONDS)
        for process in alive:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(alive, timeout=KILL_SECONDS)
        for server in self._processes:
            server.wait()
