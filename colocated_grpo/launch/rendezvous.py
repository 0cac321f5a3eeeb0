"""torchrun's rendezvous for the ranks of one node, through a store that only this machine can reach.

torch's stores listen on every interface, and the state that torchrun keeps in one with `--standalone` is a pickle:
whoever reaches the port could run code.
"""

from __future__ import annotations

import argparse

from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters, rendezvous_handler_registry
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from colocated_grpo.runtime.stores import serve_store

BACKEND = "loopback"
HOST = "127.0.0.1"
TIMEOUT_SECONDS = 600


class LoopbackRendezvous(StaticTCPRendezvous):
    """One node's agent, at a free port of the loopback address."""

    def __init__(self, run_id: str) -> None:
        store, port = serve_store(HOST, 0, TIMEOUT_SECONDS)
        super().__init__(HOST, port, rank=0, world_size=1, run_id=run_id, timeout=TIMEOUT_SECONDS)
        self._store = store  # torch's class would make one that listens on every interface

    def get_backend(self) -> str:
        return BACKEND


def use_loopback(arguments: argparse.Namespace) -> None:
    """Replace the rendezvous of torchrun's `--standalone` by one on the loopback address, at any free port."""
    if arguments.standalone:
        rendezvous_handler_registry.register(BACKEND, _handler)
        arguments.standalone = False
        arguments.rdzv_backend, arguments.rdzv_endpoint = BACKEND, f"{HOST}:0"


def _handler(parameters: RendezvousParameters) -> RendezvousHandler:
    return LoopbackRendezvous(parameters.run_id)
