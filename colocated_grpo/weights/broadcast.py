"""Weight sync into engine servers: the trainer's ranks gather each bucket, and rank 0 broadcasts it to the servers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from colocated_grpo.errors import RunError, in_one_line
from colocated_grpo.rollout.engine_server import EngineServer
from colocated_grpo.runtime.addresses import own_address
from colocated_grpo.runtime.distributed import World
from colocated_grpo.runtime.stores import serve_store
from colocated_grpo.weights.buckets import gather, make_buckets
from colocated_grpo.weights.joined_group import JoinedGroup


class BroadcastSync:
    """Every method is collective over the trainer's ranks."""

    def __init__(
        self, parameters: Mapping[str, Tensor], prefix: str, servers: Sequence[EngineServer], world: World
    ) -> None:
        """parameters: sharded tensors by checkpoint name. prefix: the base model's, such as "model"."""
        self._parameters = parameters
        self._prefix = prefix
        self._servers = servers
        self._world = world
        self._posts = ThreadPoolExecutor(len(servers), thread_name_prefix="weight sync")
        self._joined = False
        self._group: JoinedGroup | None = None
        """On rank 0."""
        self._dtype: torch.dtype = getattr(torch, servers[0].info()["dtype"])
        shapes = {name: parameter.shape for name, parameter in parameters.items()}
        self._buckets = make_buckets(shapes, world.size, self._dtype)

    @torch.no_grad()
    def sync(self) -> None:
        """Return when all servers have written the weights. Raises RunError on every rank."""
        if not self._joined:
            self._world.from_main(self._join)
            self._joined = True
        updates = [self._post(server, "/bridge/update") for server in self._servers] if self._world.is_main else []
        last: tuple[Tensor, dist.Work] | None = None
        for bucket in self._buckets:
            gathered = gather(bucket, self._parameters, self._dtype, self._world.device)
            if self._group is not None:
                self._wait(last)  # two buckets are in memory at a time
                last = gathered, self._group.broadcast(gathered)
        self._wait(last)
        self._world.from_main(lambda: [update.result() for update in updates] and None)

    def _wait(self, sent: tuple[Tensor, dist.Work] | None) -> None:
        try:
            if sent is not None:
                sent[1].wait()
        except RuntimeError as error:
            urls = ", ".join(server.url for server in self._servers)
            raise RunError(f"engine.urls={urls}: lost during a weight sync ({in_one_line(error)})") from None

    def _post(self, server: EngineServer, path: str, body: Mapping[str, Any] | None = None) -> Future[Any]:
        return self._posts.submit(server.post_or_end, path, body)

    def _join(self) -> None:
        """Build a group of this rank and all ranks of all servers. Rank 0 only."""
        infos = [server.info() for server in self._servers]
        self._check(infos)
        size = 1 + sum(info["tensor_parallel_size"] for info in infos)
        timeout = self._servers[0].timeout
        host = own_address(self._servers[0].host)
        store, port = serve_store(host, 0, timeout)
        first_rank, offers = 1, []
        for server, info in zip(self._servers, infos, strict=True):
            offer = {
                "address": host,
                "port": port,
                "first_rank": first_rank,
                "group_size": size,
                "timeout": timeout,
                "trainer_ranks": self._world.size,
                "prefix": self._prefix,
                "shapes": {name: list(parameter.shape) for name, parameter in self._parameters.items()},
            }
            offers.append(self._post(server, "/bridge/init", offer))
            first_rank += info["tensor_parallel_size"]
        for offer in offers:
            offer.result()  # accepted: the server joins from now on
        self._group = JoinedGroup(store, 0, size, self._world.device, timeout)

    def _check(self, infos: Sequence[Mapping[str, Any]]) -> None:
        for server, info in zip(self._servers, infos, strict=True):
            if (info["device"], info["dtype"]) != (self._world.device.type, infos[0]["dtype"]):
                raise RunError(
                    f"engine.urls={server.url}: computes in {info['dtype']} on {info['device']}; all servers need one "
                    f"--dtype and the trainer's device type, {self._world.device.type}"
                )
