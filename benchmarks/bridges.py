"""Weight sync into an engine server: `python -m benchmarks.bridges --shape qwen3-1.7b --gpus 1`.

Starts a server for each bridge, on the ranks' own devices or, with --engine-gpus, on separate GPUs. Prints the seconds
of a verified sync, the host memory of both sides, and rank 0's device memory: `device_gib_server` of a server on it,
`device_gib` of both; for `broadcast` also the seconds of one gather and one broadcast of the same bytes.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import psutil
import torch

from benchmarks.harness import config_of, main_in_ranks, model_folder, model_name, rank_parser
from benchmarks.roofline import barrier, seconds_of
from benchmarks.sync import bare_seconds, slowest_median
from colocated_grpo.policy.model import read_model_config
from colocated_grpo.policy.policy import Policy
from colocated_grpo.runtime.distributed import World
from colocated_grpo.runtime.program import Launch
from colocated_grpo.runtime.supervision import StopRequest
from colocated_grpo.servers.engine_servers import EngineServers, plan_servers
from colocated_grpo.settings.schema import Config
from colocated_grpo.types import JsonObject

BRIDGES = ("broadcast", "shared", "adapter", "restart")
MAX_NUM_SEQS = 16
"""Small, because this engine only receives weights."""


def main(arguments: Sequence[str] | None = None) -> int:
    return main_in_ranks("bridges", parser(), measure, arguments)


def parser() -> argparse.ArgumentParser:
    parser = rank_parser(__doc__)
    parser.add_argument("--bridges", nargs="+", choices=BRIDGES, default=BRIDGES)
    parser.add_argument("--engine-gpus", type=int, default=0, help="GPUs only for the server (default: the ranks' own)")
    parser.add_argument("--repeats", type=int, default=10, help="syncs by broadcast, shared and adapter; restart: 2")
    return parser


def measure(world: World, options: argparse.Namespace) -> JsonObject:
    stop = StopRequest(world.store)
    with model_folder(options, world) as folder:
        rows = [_measure_bridge(bridge, folder, world, stop, options) for bridge in options.bridges]
    return {"rows": rows}


def _measure_bridge(
    bridge: str, folder: Path, world: World, stop: StopRequest, options: argparse.Namespace
) -> JsonObject:
    from colocated_grpo.assembly.engines import Site
    from colocated_grpo.assembly.serving import build_remote, connect_servers
    from colocated_grpo.policy.model_files import read_model_files

    lora = {"policy": {"lora": {"rank": 32}}} if bridge == "adapter" else {}
    engine = {"placement": "server", "bridge": bridge, "max_num_seqs": MAX_NUM_SEQS}
    config = config_of(folder, options, engine=engine, **lora)
    with ExitStack() as stack:
        scratch = world.broadcast_object(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bridges-"))))
        alone = _used_gib(world.device)
        os.environ |= world.from_main(lambda: _start_server(config, world, options, scratch, stack))
        servers = connect_servers(config, world, stop)
        server_gib = _used_gib(world.device) - alone
        policy = Policy(config, read_model_config(config.model, folder), folder, world)
        model = read_model_files(config.model, world, config.policy)
        site = Site(world=world, stop=stop, note=print, resources=stack)
        engines = build_remote(config, servers, policy, model, scratch, site)
        first = seconds_of(engines.sync.sync, world.device, repeats=1, warmup=0, align=lambda: barrier(world.device))[0]
        engines.engine.weights_changed(policy.version)
        repeats = 2 if bridge == "restart" else options.repeats
        policy.version += 1  # the base model is not sent again
        seconds = slowest_median(engines.sync.sync, world, repeats)
        moved = policy.num_parameters() * engines.dtype.itemsize
        row = {
            "shape": model_name(options),
            "bridge": bridge,
            "tensor_parallel_size": config.engine.tensor_parallel_size,
            "seconds": seconds,
            "first_seconds": first,
            "bytes": moved,
            "device_gib_server": server_gib,
            "device_gib": _used_gib(world.device) - alone,
            **world.from_main(_resident_gib),
        }
        if bridge == "broadcast":
            row |= bare_seconds(moved, world)
        engines.engine.close()
        world.barrier()
    return row


def _start_server(
    config: Config, world: World, options: argparse.Namespace, logs: Path, stack: ExitStack
) -> dict[str, str]:
    """Start the config's servers until `stack` is closed. Returns the variables that name them. Rank 0 only."""
    launch = Launch(
        gpus=options.gpus + options.engine_gpus,
        engine_gpus=options.engine_gpus,
        ranks=world.size,
        nodes=1,
        node_rank=0,
        master_addr="localhost",
        master_port=0,
        join_timeout=0,
        config="",
        resume=None,
        log_level="INFO",
        log_dir=logs,
        overrides=(),
    )
    plan = plan_servers(launch, config, os.environ)
    assert plan is not None  # the config names no server
    ranks = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in ranks}
    variables = stack.enter_context(EngineServers(plan, environment)).rank_environment()
    return {name: value for name, value in variables.items() if name != "CUDA_VISIBLE_DEVICES"}


def _used_gib(device: torch.device) -> float:
    """Return the device memory that all processes use, in GiB. 0 on CPUs."""
    if device.type != "cuda":
        return 0.0
    free, total = torch.cuda.mem_get_info(device)
    return (total - free) / 2**30


def _resident_gib() -> dict[str, float]:
    """Return proportional resident memory in GiB: of this process, and of the server's processes together."""
    own = psutil.Process()
    server = sum(child.memory_full_info().pss for child in own.children(recursive=True))
    return {"host_gib_trainer": own.memory_full_info().pss / 2**30, "host_gib_server": server / 2**30}


if __name__ == "__main__":
    sys.exit(main())
