"""Settings of engine servers that contradict others end in one line, and those of a running server are left alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from colocated_grpo.settings.config_file import read_config
from colocated_grpo.settings.errors import ConfigError
from colocated_grpo.settings.rules import check_world
from colocated_grpo.settings.schema import Config
from tests.support.training_runs import settings

SERVER = ["--engine.placement", "server"]


def lines(tmp_path: Path, *overrides: str) -> list[str]:
    file = tmp_path / "run.yaml"
    file.write_text("model: {name: m}\nenvironments: [{type: task, name: sorting}]\n")
    try:
        read_config(str(file), list(overrides))
    except ConfigError as error:
        return str(error).splitlines()
    return []


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            ["--engine.urls", "[http://a:1, http://b:2]"],
            "engine.urls=http://a:1, http://b:2: must be empty unless engine.placement is server",
        ),
        (
            ["--rollout.max_staleness", "1"],
            "rollout.max_staleness=1: needs engine.placement: server; an engine inside a rank cannot generate while",
        ),
        (
            [*SERVER, "--engine.urls", "[localhost:9001]"],
            r"engine.urls.0='localhost:9001': must be http://HOST:PORT, or https",
        ),
        ([*SERVER, "--engine.urls", "[ftp://a]"], r"engine.urls.0='ftp://a': must be http://HOST:PORT, or https"),
        ([*SERVER, "--engine.urls", "[http://a:99999]"], "engine.urls.0='http://a:99999': must be http://HOST:PORT"),
        ([*SERVER, "--engine.urls", "[http://]"], r"engine.urls.0='http://': must be http://HOST:PORT, or https"),
        (
            [*SERVER, "--engine.urls", "[http://a:1, http://a:1]"],
            "engine.urls: repeats an address: http://a:1, http://a:1",
        ),
        ([*SERVER, "--weights", "shared"], "weights=shared: must be copied with engine.placement: server; there, "),
        (
            [*SERVER, "--engine.bridge", "adapter", "--policy.lora.base_dtype", "nf4"],
            "engine.bridge=adapter: needs policy.lora with base_dtype: auto; otherwise use broadcast or restart",
        ),
        (
            [*SERVER, "--engine.bridge", "adapter"],
            "engine.bridge=adapter: needs policy.lora with base_dtype: auto; otherwise use broadcast or restart",
        ),
        (
            [*SERVER, "--environments", "[{type: turns, name: town, opponent: {refresh_every: 5}}]"],
            "environments: opponent: needs engine.placement: colocated, whose engine holds a second set",
        ),
        (
            [*SERVER, "--engine.bridge", "shared", "--engine.urls", "[http://a:1, http://b:1]"],
            "engine.bridge=shared: needs one server of one GPU, not 2 of 1: FSDP2 shards every layer by rows",
        ),
        (
            [*SERVER, "--engine.bridge", "shared", "--rollout.max_staleness", "1"],
            "rollout.max_staleness=1: must be 0 with engine.bridge: shared, where an update changes both at once",
        ),
        (
            [*SERVER, "--rollout.max_staleness", "1", "--deterministic", "true"],
            "deterministic=true: not possible with rollout.max_staleness=1: a resumed run begins with a fresh batch",
        ),
        (
            [*SERVER, "--rollout.max_staleness", "1", "--environments", "[{type: atropos}]"],
            "rollout.max_staleness=1: must be 0 with an atropos environment, which samples on its own time",
        ),
        (
            [*SERVER, "--rollout.max_staleness", "1", "--sync_frequency", "4"],
            "rollout.max_staleness=1: must be 0 with sync_frequency=4, whose rollouts are older than one step",
        ),
        (
            [*SERVER, "--policy.routing_replay", "true"],
            "policy.routing_replay=true: needs engine.placement: colocated; a server does not send its routes",
        ),
        (
            ["--policy.routing_replay", "true", "--environments", "[{type: atropos}]"],
            "policy.routing_replay=true: not possible with an atropos environment, whose rollouts come without the ",
        ),
    ],
)
def test_contradictions_are_one_line(tmp_path, overrides, line):
    [found] = lines(tmp_path, *overrides)
    assert found.startswith(line)


@pytest.mark.parametrize(
    "overrides",
    [
        SERVER,
        [*SERVER, "--rollout.max_staleness", "1"],
        [*SERVER, "--engine.urls", "[http://localhost:9001, 'https://node:9001/']"],
        [*SERVER, "--engine.bridge", "adapter", "--policy.lora", "{rank: 8}"],
        [*SERVER, "--engine.bridge", "restart", "--sync_frequency", "4"],
        [*SERVER, "--engine.bridge", "shared"],
        [*SERVER, "--deterministic", "true"],
        ["--engine.bridge", "adapter"],  # of no effect, like all settings of servers
    ],
)
def test_these_fit_together(tmp_path, overrides):
    assert lines(tmp_path, *overrides) == []


def test_a_deterministic_run_with_servers_has_one_rank():
    config = Config.model_validate(settings(Path("m"), deterministic=True, engine={"placement": "server"}))
    check_world(config, 1)
    with pytest.raises(ConfigError, match=r"^deterministic=true: needs a single rank with .* server, not 2: requests"):
        check_world(config, 2)
