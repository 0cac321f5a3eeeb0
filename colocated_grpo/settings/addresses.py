"""Addresses that servers listen on: who reaches them, and warnings about those that anybody does."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from typing import TYPE_CHECKING

from colocated_grpo.settings.atropos import AtroposSourceConfig

if TYPE_CHECKING:
    from colocated_grpo.settings.schema import Config


def is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def is_wildcard(bound: str) -> bool:
    """True if a server bound to this address listens on all addresses of the machine."""
    return bound == "" or (is_address(bound) and ipaddress.ip_address(bound).is_unspecified)


def is_loopback(bound: str) -> bool:
    """True if only processes of this machine reach a server bound to this address."""
    return bound == "localhost" or (is_address(bound) and ipaddress.ip_address(bound).is_loopback)


def exposures(config: Config) -> Iterator[str]:
    """Yield a line for each server of a run that other machines reach without a key."""
    for index, source in enumerate(config.environments):
        if isinstance(source, AtroposSourceConfig):
            server = source.server
            if server.api_key_variable is None and not is_loopback(server.host):
                key = f"environments.{index}.server"
                yield (
                    f"{key}.host={server.host}: every machine that reaches port {server.port} can use the engines; set "
                    f"{key}.api_key_variable"
                )
