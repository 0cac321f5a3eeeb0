"""Weight sync into engine servers, by broadcast or through files.

The trainer's ranks gather each bucket; rank 0 broadcasts it. Through files, servers load an adapter or restart.
"""

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from colocated_grpo.errors import RunError, in_one_line
from colocated_grpo.policy.export import Export
from colocated_grpo.runtime import checksums, rendezvous, supervision
from colocated_grpo.runtime.distributed import World
from colocated_grpo.runtime.processes import bind_store
from colocated_grpo.servers.engine_servers import EngineServer
from colocated_grpo.types import JsonObject
from colocated_grpo.web.client import Unavailable
from colocated_grpo.weights.buckets import count_shards, gather, make_buckets
from colocated_grpo.weights.transport import ShardFingerprints, Summed, every_nth, raise_if_any


class MissingMembers(RuntimeError):
    """Members of a group have not joined in time."""

    def __init__(self, ranks: Sequence[int], size: int, timeout: float) -> None:
        """ranks: the missing ranks in the group of `size` members."""
        super().__init__(f"{supervision.named_ranks(ranks)} of {size} did not join within {timeout:g} s")
        self.ranks = ranks


class JoinedGroup:
    """Process group of one trainer rank (rank 0) and every rank of every engine server."""

    def __init__(self, store: dist.Store, rank: int, size: int, device: torch.device, timeout: float) -> None:
        """Wait for all members. Collective. Raises MissingMembers if a member has not joined after `timeout` seconds.

        Raises RuntimeError if members cannot connect to each other. store: a new store, used by this group only.
        """
        # NCCL's constructor does not wait, and a broadcast would wait for a dead member.
        keys = [f"member {member}" for member in range(size)]
        store.set(keys[rank], "")
        if missing := rendezvous.wait_for_keys(store, keys, time.monotonic() + timeout):
            raise MissingMembers([keys.index(key) for key in missing], size, timeout)
        limit = timedelta(seconds=timeout)
        self._group: Any  # torch's stubs lack the collectives of backends
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = limit
            self._group = dist.ProcessGroupNCCL(store, rank, size, options)
        else:
            self._group = dist.ProcessGroupGloo(store, rank, size, limit)
        self._store = store  # rank 0's store serves the other ranks, so it must outlive the group

    def broadcast(self, tensor: Tensor) -> dist.Work:
        """Start sending rank 0's values into the other ranks' `tensor`. The caller waits for the returned work."""
        return self._group.broadcast(tensor, 0)

    def close(self) -> None:
        self._group.shutdown()


POLL_SECONDS = 0.0002


@dataclass(eq=False)
class BroadcastSync:
    """Weight sync by broadcast. Every method is collective over the trainer's ranks, except `restore`."""

    parameters: Mapping[str, Tensor]
    """Sharded tensors by checkpoint name."""
    prefix: str
    """Name prefix of the base model, such as "model"."""
    servers: Sequence[EngineServer]
    world: World
    check_every: int
    """Fingerprints are compared after every n-th sync; 0: never."""

    def __post_init__(self) -> None:
        self._posts = ThreadPoolExecutor(len(self.servers), thread_name_prefix="weight sync")
        self._joined: list[str] = []
        """Instances of the servers in the last sync."""
        self._group: JoinedGroup | None = None
        """Set on rank 0 only."""
        self._dtype: torch.dtype = getattr(torch, self.servers[0].wait_until_ready()["dtype"])
        self._num_shards = count_shards(self.parameters)
        shapes = {name: parameter.shape for name, parameter in self.parameters.items()}
        self._buckets = make_buckets(shapes, self._num_shards, self._dtype)
        self._check_due = every_nth(self.check_every)
        self._shards = ShardFingerprints(self.parameters, self._dtype, self.world)

    @torch.no_grad()
    def sync(self) -> None:
        """Return once all servers have written the weights, and their bytes equal the policy's.

        Raises RunError: on all ranks if a server does not join or differs, on rank 0 if one is lost meanwhile.
        """
        self._joined = self.world.from_main(self._join)
        servers = self.servers if self.world.is_main else []
        updates = [self._posts.submit(server.post_or_end, "/bridge/update") for server in servers]
        last: tuple[Tensor, dist.Work] | None = None
        for bucket in self._buckets:
            gathered = gather(bucket, self.parameters, self.world.device)
            if self._group is not None:
                self._wait(last, updates)  # two buckets are in memory at a time
                last = gathered, self._group.broadcast(gathered)
        self._wait(last, updates)
        sent = Summed(self.world.sum_(self._shards.compute()), self._shards.copies) if self._check_due() else None

        def finish() -> None:
            for server, update in zip(self.servers, updates, strict=True):
                written = update.result()
                if sent is not None:
                    different_P = sent.differs_from(Summed.from_json(written, self.world.device))
                    raise_if_any(different_P, list(self.parameters), where=f"the engine at {server.url}")

        self.world.from_main(finish)

    def restore(self, server: EngineServer) -> bool:
        """Return True if the last sync reached this process of the server. Not collective."""
        return server.info()["instance"] in self._joined

    def _wait(self, sent: tuple[Tensor, dist.Work] | None, updates: Sequence[Future[JsonObject]]) -> None:
        """Wait for a broadcast. A failed server ends the wait, because NCCL itself would wait until its timeout."""
        if sent is None:
            return
        work = sent[1]
        while not work.is_completed():
            for update in updates:
                if update.done():
                    update.result()
            time.sleep(POLL_SECONDS)
        try:
            work.wait()
        except RuntimeError as error:
            urls = _urls(self.servers)
            raise RunError(f"engine.urls={urls}: lost during a weight sync ({in_one_line(error)})") from None

    def _join(self) -> list[str]:
        """Rebuild the group if a server has restarted. Returns the servers' instances. Rank 0 only."""
        infos = [server.wait_until_ready() for server in self.servers]
        instances = [info["instance"] for info in infos]
        if instances == self._joined:
            return instances
        for server, info in zip(self.servers, infos, strict=True):
            if (info["device"], info["dtype"]) != (self.world.device.type, infos[0]["dtype"]):
                advice = f"all servers need one --dtype and the trainer's device type, {self.world.device.type}"
                raise RunError(f"engine.urls={server.url}: computes in {info['dtype']} on {info['device']}; {advice}")
        if self._group is not None:
            self._group.close()
            self._group = None
        counts = [info["tensor_parallel_size"] for info in infos]
        # The server of each rank in the group, from rank 1; this process is rank 0.
        members = [server for server, count in zip(self.servers, counts, strict=True) for _ in range(count)]
        size, timeout = 1 + len(members), self.servers[0].timeout
        host = rendezvous.own_address(self.servers[0].host)
        store = rendezvous.serve_store(bind_store(host, 0), timeout)
        offer = {
            "address": host,
            "port": store.port,
            "group_size": size,
            "timeout": timeout,
            "trainer_ranks": self._num_shards,
            "prefix": self.prefix,
            "shapes": {name: list(parameter.shape) for name, parameter in self.parameters.items()},
        }
        accepted = [
            self._posts.submit(server.post_or_end, "/bridge/init", offer | {"first_rank": 1 + members.index(server)})
            for server in self.servers
        ]
        for each in accepted:
            each.result()  # the server now begins to join
        try:
            self._group = JoinedGroup(store, 0, size, self.world.device, timeout)
        except MissingMembers as error:
            urls = _urls([members[rank - 1] for rank in error.ranks])
            problem = f"did not join the weight sync within engine.server_timeout={timeout:g} s"
            raise RunError(f"engine.urls={urls}: {problem}; look into the log of the server") from None
        except RuntimeError as error:
            problem = f"did not join the weight sync ({in_one_line(error)})"
            raise RunError(f"engine.urls={_urls(members)}: {problem}") from None
        return instances


def _urls(servers: Sequence[EngineServer]) -> str:
    return ", ".join(dict.fromkeys(server.url for server in servers))


ADAPTER_NAME = "policy"


@dataclass(eq=False)
class AdapterSync:
    """Saves the adapter and loads it into every running server, beside the base weights."""

    export: Export
    target: Path
    """Must be readable by the servers. Each sync overwrites it."""
    servers: Sequence[EngineServer]

    def sync(self) -> None:
        """Save the adapter and load it into every server. Collective. Raises RunError on every rank."""
        self.export.write(self.target)
        world = self.export.world
        world.from_main(lambda: [server.until_answered(partial(self.restore, server)) for server in self.servers])

    def restore(self, server: EngineServer) -> bool:
        """Load the adapter of the last sync. Raises Unavailable, RequestRejected, or RunError if it is another."""
        body = {"adapter_path": str(self.target.absolute()), "adapter_name": ADAPTER_NAME}
        _require_same(server, server.post("/lora/load", body)["exported"], self.target)
        return True


@dataclass(eq=False)
class RestartSync:
    """Saves the model and restarts every server from it."""

    export: Export
    folder: Path
    """Must be readable by the servers."""
    servers: Sequence[EngineServer]
    base: str
    """The model at version 0, which servers may have loaded initially."""

    def __post_init__(self) -> None:
        # Two folders, used in turn: a server that crashes while the next model is written restarts from the last model.
        self._targets = [self.folder / "model_a", self.folder / "model_b"]
        self._current = self.base

    def sync(self) -> None:
        """Restart every server from the saved model, unless at version 0 all have the base model. Collective."""
        world = self.export.world
        if self.export.policy.version == 0 and world.from_main(self._have_base):
            return
        self._targets.reverse()
        self.export.write(self._targets[0])
        self._current = str(self._targets[0].absolute())
        with ThreadPoolExecutor(len(self.servers)) as pool:
            world.from_main(lambda: list(pool.map(self._restart, self.servers)))

    def _have_base(self) -> bool:
        infos = [server.wait_until_ready() for server in self.servers]
        return all(info["model"] == self.base and not info["has_received_weights"] for info in infos)

    def _restart(self, server: EngineServer) -> None:
        model = self._current
        former = server.wait_until_ready()["instance"]
        accepted: set[str] = set()
        """Instances that have accepted the restart request. If one crashes before it accepts, another starts."""

        def restarted() -> None:
            info = server.info()
            if (instance := info["instance"]) != former and info["model"] == model:
                _require_same(server, info["exported"], Path(model))
                return
            if instance not in accepted:
                server.post("/bridge/restart", {"model": model})
                accepted.add(instance)
            raise Unavailable(f"it has not restarted with {model} yet")

        server.until_answered(restarted)

    def restore(self, server: EngineServer) -> bool:
        """Return True if the restarted server has the model of the last sync. Raises Unavailable."""
        return server.info()["model"] == self._current


def _require_same(server: EngineServer, loaded: str | None, folder: Path) -> None:
    """Raise RunError unless the server has loaded the files in `folder`. loaded: the server's `exported_digest`."""
    if loaded != checksums.exported_digest(folder):
        problem = f"weight sync: the engine at {server.url} has loaded other files than {folder} holds here"
        raise RunError(f"{problem}: it does not see the folder as the trainer has written it")
