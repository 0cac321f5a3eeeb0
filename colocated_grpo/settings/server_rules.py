"""Rules for engines in processes of their own. Each rule yields one error line per violation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

from colocated_grpo.settings.schema import Config

Lines = Iterator[str]


def _settings_of_servers_need_servers(config: Config) -> Lines:
    engine = config.engine
    if engine.placement == "server":
        return
    if engine.urls:
        yield f"engine.urls={', '.join(engine.urls)}: must be empty unless engine.placement is server"
    if config.rollout.max_staleness:
        yield (
            f"rollout.max_staleness={config.rollout.max_staleness}: needs engine.placement: server; an engine inside a "
            "rank cannot generate while the rank trains"
        )


def _addresses_are_urls(config: Config) -> Lines:
    for url in config.engine.urls:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            yield f"engine.urls={url!r}: must be an address like http://localhost:9001"
    if len(set(config.engine.urls)) < len(config.engine.urls):
        yield f"engine.urls: repeats an address: {', '.join(config.engine.urls)}"


def _weights_travel_by_the_bridge(config: Config) -> Lines:
    if config.engine.placement == "server" and config.weights == "shared":
        yield "weights=shared: must be copied with engine.placement: server; there, engine.bridge: shared is the same"


def _adapters_travel_as_files(config: Config) -> Lines:
    served = config.engine.placement == "server"
    if served and config.engine.bridge == "adapter" and config.policy.lora is None:
        yield "engine.bridge=adapter: needs policy.lora; without an adapter use broadcast or restart"


def _opponents_live_in_the_ranks(config: Config) -> Lines:
    if config.engine.placement == "server" and config.opponent is not None:
        yield (
            "environments: opponent: needs engine.placement: colocated, where a second set of weights is written into "
            "the engine"
        )


def _one_copy_has_one_server(config: Config) -> Lines:
    engine = config.engine
    if engine.placement != "server" or engine.bridge != "shared":
        return
    if len(engine.urls) > 1 or engine.tensor_parallel_size > 1:
        yield (
            f"engine.bridge=shared: needs one server of one GPU, not {max(len(engine.urls), 1)} of "
            f"{engine.tensor_parallel_size}: FSDP2 shards every layer by rows, tensor parallelism some by columns"
        )
    if config.rollout.max_staleness:
        yield "rollout.max_staleness=1: must be 0 with engine.bridge: shared, where an update changes both at once"


def _routes_stay_in_the_ranks(config: Config) -> Lines:
    if not config.policy.routing_replay:
        return
    if config.engine.placement == "server":
        yield "policy.routing_replay=true: needs engine.placement: colocated; a server does not send its routes"
    if config.atropos is not None:
        yield (
            "policy.routing_replay=true: not possible with an atropos environment, whose rollouts come without the "
            "experts that the engine chose"
        )


def _stale_batches_are_not_repeatable(config: Config) -> Lines:
    if not config.rollout.max_staleness:
        return
    if config.deterministic:
        yield "deterministic=true: not possible with rollout.max_staleness=1: a resumed run begins with a fresh batch"
    if config.atropos is not None:
        yield (
            "rollout.max_staleness=1: must be 0 with an atropos environment, which samples on its own time; a limit "
            "on its staleness is not needed for the next batch to be ready"
        )
    if config.sync_frequency > 1:
        yield (
            f"rollout.max_staleness=1: must be 0 with sync_frequency={config.sync_frequency}, whose rollouts are older "
            "than one step"
        )


def _runs_of_one_rank_repeat(config: Config, world_size: int) -> Lines:
    if config.engine.placement == "server" and config.deterministic and world_size > 1:
        yield (
            f"deterministic=true: needs a single rank with engine.placement: server, not {world_size}: requests of "
            "several ranks reach a server in an order that varies, and with it the rounding"
        )


SERVER_RULES: tuple[Callable[[Config], Lines], ...] = (
    _settings_of_servers_need_servers,
    _addresses_are_urls,
    _weights_travel_by_the_bridge,
    _adapters_travel_as_files,
    _opponents_live_in_the_ranks,
    _one_copy_has_one_server,
    _routes_stay_in_the_ranks,
    _stale_batches_are_not_repeatable,
)
SERVER_WORLD_RULES: tuple[Callable[[Config, int], Lines], ...] = (_runs_of_one_rank_repeat,)
