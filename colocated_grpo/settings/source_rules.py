"""Rules about environments and the settings that depend on their kinds. Each yields a line per violation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from colocated_grpo.settings.atropos import AtroposSourceConfig, is_loopback
from colocated_grpo.settings.generation import RolloutConfig
from colocated_grpo.settings.sources import (
    AgentSourceConfig,
    ColumnCurriculumConfig,
    EnvironmentConfig,
    EpisodeSourceConfig,
    RowsSourceConfig,
)
from colocated_grpo.settings.turns import FROZEN, TurnsSourceConfig

Lines = Iterator[str]
Sources = Sequence[EnvironmentConfig]


def exposures(sources: Sources) -> Lines:
    """Yield a line for each server of a run that other machines reach without a key."""
    for index, source in enumerate(sources):
        if not isinstance(source, AtroposSourceConfig):
            continue
        key, server = f"environments.{index}.server", source.server
        if server.api_key_variable is None and not is_loopback(server.host):
            yield (
                f"{key}.host={server.host}: every machine that reaches port {server.port} can use the engines; set "
                f"{key}.api_key_variable"
            )


def one_atropos_entry(sources: Sources) -> Lines:
    count = sum(isinstance(source, AtroposSourceConfig) for source in sources)
    if count > 1:
        yield f"environments: {count} entries of type atropos; keep one and connect all environments to its API server"


def atropos(source: AtroposSourceConfig | None, rollout: RolloutConfig, per_engine: int, deterministic: bool) -> Lines:
    """The engines of the ranks are independent of each other."""
    if source is None:
        return
    if per_engine > 1:
        yield (
            f"engine.tensor_parallel_size={per_engine}: must be 1 with an atropos "
            "environment, whose requests arrive at each engine at different times"
        )
    if rollout.generation == "replicated":
        yield "rollout.generation=replicated: must be sharded with an atropos environment; each request is sampled once"
    if deterministic:
        yield "deterministic=true: not possible with an atropos environment, which decides what is sampled and when"
    ports = [source.server.port, *source.server.more_ports]
    if len(set(ports)) < len(ports):
        yield f"environments: atropos: server: port and more_ports repeat a port: {', '.join(map(str, ports))}"


def atropos_share(source: AtroposSourceConfig | None, share: float, prompts: int, entries: int) -> Lines:
    if source is not None and entries > 1 and (abs(share - round(share)) > 1e-6 or not 1 <= round(share) < prompts):
        yield (
            f"environments: weight={source.weight:g} of the atropos entry gives it {share:.4g} of "
            f"rollout.prompts_per_step={prompts}; it and the other entries need a whole number of prompts, at least 1"
        )


def single_rank_engines(sources: dict[str, EnvironmentConfig], per_engine: int) -> Lines:
    for key, source in sources.items():
        if per_engine > 1 and isinstance(source, EpisodeSourceConfig | AgentSourceConfig):
            yield (
                f"{key}.type={source.type}: needs engine.tensor_parallel_size=1, not {per_engine}, because "
                "the ranks of an engine would have to submit every turn at the same step"
            )


def opponents(sources: Sources, has_atropos: bool, served: bool) -> Lines:
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


def dynamic_sampling(sources: Sources, rollout: RolloutConfig) -> Lines:
    """Only prompts that the run draws itself are replaced or skipped."""
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


def curricula(sources: Sources, training_steps: int) -> Lines:
    for index, source in enumerate(sources):
        curriculum = source.curriculum if isinstance(source, RowsSourceConfig) else None
        if isinstance(curriculum, ColumnCurriculumConfig) and (curriculum.steps or 0) >= training_steps:
            yield (
                f"environments.{index}.curriculum.steps={curriculum.steps}: must be below training_steps="
                f"{training_steps}, or the hardest rows would never be drawn"
            )
