"""Rules about environments and the settings that depend on their kinds. Each rule yields a line per violation."""

from collections.abc import Iterator, Sequence

from colocated_grpo.settings.atropos import AtroposSourceConfig, is_loopback
from colocated_grpo.settings.schema import Config, RolloutConfig
from colocated_grpo.settings.sources import AgentSourceConfig, EnvironmentConfig, EpisodeSourceConfig
from colocated_grpo.settings.turns import FROZEN, TurnsSourceConfig

Lines = Iterator[str]
Sources = Sequence[EnvironmentConfig]


def exposures(sources: Sources) -> Lines:
    """Yield a line for each server of a run that is reachable from other machines without a key."""
    for index, source in enumerate(sources):
        if not isinstance(source, AtroposSourceConfig):
            continue
        key, server = f"environments.{index}.server", source.server
        if server.api_key_variable is None and not is_loopback(server.host):
            yield (
                f"{key}.host={server.host}: every machine that reaches port {server.port} can use the engines; set "
                f"{key}.api_key_variable"
            )


def problems(config: Config) -> Lines:
    """Yield a line for each contradiction among environments, or between them and other settings."""
    sources, rollout, per_engine = config.environments, config.rollout, config.ranks_per_engine
    found = [source for source in sources if isinstance(source, AtroposSourceConfig)]
    if len(found) > 1:
        yield (
            f"environments: {len(found)} entries of type atropos; keep one and connect all environments to its API "
            "server"
        )
    if found:
        yield from _atropos(found[0], rollout, per_engine, config.deterministic)
    share, prompts = config.atropos_share, rollout.prompts_per_step
    is_whole = abs(share - round(share)) <= 1e-6 and 1 <= round(share) < prompts
    if found and len(sources) > 1 and not is_whole:
        yield (
            f"environments: weight={found[0].weight:g} of the atropos entry gives it {share:.4g} of "
            f"rollout.prompts_per_step={prompts}; it and the other entries need a whole number of prompts, at least 1"
        )
    entries = {f"environments.{index}": source for index, source in enumerate(sources)}
    entries |= {f"evaluation.sets.{i}.source": entry.source for i, entry in enumerate(config.evaluation.sets)}
    for key, source in entries.items():
        if per_engine > 1 and isinstance(source, EpisodeSourceConfig | AgentSourceConfig):
            yield (
                f"{key}.type={source.type}: needs engine.tensor_parallel_size=1, not {per_engine}, because "
                "the ranks of an engine would have to submit every turn at the same step"
            )
    yield from _opponents(sources, bool(found), config.engine.placement == "server")
    yield from _dynamic_sampling(sources, rollout)


def _atropos(source: AtroposSourceConfig, rollout: RolloutConfig, ranks_per_engine: int, deterministic: bool) -> Lines:
    if ranks_per_engine > 1:
        yield (
            f"engine.tensor_parallel_size={ranks_per_engine}: must be 1 with an atropos "
            "environment, whose requests arrive at each engine at different times"
        )
    if rollout.generation == "replicated":
        yield "rollout.generation=replicated: must be sharded with an atropos environment; each request is sampled once"
    if deterministic:
        yield "deterministic=true: not possible with an atropos environment, which decides what is sampled and when"
    ports = [source.server.port, *source.server.more_ports]
    if len(set(ports)) < len(ports):
        yield f"environments: atropos: server: port and more_ports repeat a port: {', '.join(map(str, ports))}"


def _opponents(sources: Sources, has_atropos: bool, served: bool) -> Lines:
    games = {index: source for index, source in enumerate(sources) if isinstance(source, TurnsSourceConfig)}
    first = next((game.opponent for game in games.values() if game.opponent is not None), None)
    for index, game in games.items():
        if game.opponent is not None and has_atropos:
            yield (
                f"environments.{index}.opponent: not supported beside an atropos entry, whose requests it would answer"
            )
        if game.opponent is not None and game.opponent != first:
            yield f"environments.{index}.opponent: must equal the opponent of the other entries; a run has only one"
        players = game.args.get("players")
        if game.opponent is None and isinstance(players, list) and FROZEN in players:
            yield (
                f"environments.{index}.args.players: {FROZEN!r} needs a model; set "
                f"environments.{index}.opponent: {{name: initial}}"
            )
    if served and first is not None:
        yield (
            "environments: opponent: needs engine.placement: colocated, where a second set of weights is written into "
            "the engine"
        )


def _dynamic_sampling(sources: Sources, rollout: RolloutConfig) -> Lines:
    """Yield a line for each source whose prompts the run cannot replace or skip, because the source draws its own
    prompts."""
    for index, source in enumerate(sources):
        if not isinstance(source, AtroposSourceConfig | TurnsSourceConfig):
            continue
        entry, why = f"environments.{index} of type {source.type}", "where each turn continues a game;"
        if isinstance(source, AtroposSourceConfig):
            why = "whose environments decide what is sampled; filter there, or"
        if rollout.resample is not None:
            yield f"rollout.resample: not possible with {entry}, {why} set rollout.resample: null"
        if rollout.skip_solved is not None:
            yield (
                f"rollout.skip_solved: not possible with {entry}, whose prompts are "
                "not drawn from a list; set rollout.skip_solved: null"
            )
