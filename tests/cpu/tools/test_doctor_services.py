"""The doctor's checks of servers, against real ones: both Atropos APIs, an engine server, an OpenEnv environment."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from colocated_grpo.settings.schema import Config
from colocated_grpo.tools.doctor.run_checks import (
    check_atropos_api,
    check_atropos_environments,
    check_atropos_logprobs,
    check_engine_servers,
    check_environments,
    check_server_type,
    check_weight_bridge,
)
from tests.support.atropos_source import call_api, post_group
from tests.support.doctor import subject_of
from tests.support.engine_server import EngineServer
from tests.support.raw_server import raw_server, response
from tests.support.servers import APIS, ApiProcess, free_port

ATROPOS_CHECKS = {
    "api": check_atropos_api,
    "environments": check_atropos_environments,
    "server_type": check_server_type,
    "logprobs": check_atropos_logprobs,
}
SIZES = {"prompts_per_step": 2, "group_size": 4, "max_prompt_tokens": 32, "max_completion_tokens": 32}
REGISTRATION = {
    "wandb_group": "",
    "wandb_project": "p",
    "batch_size": 8,
    "max_token_len": 65,
    "checkpoint_dir": "runs",
    "save_checkpoint_interval": 1,
    "starting_step": 0,
    "num_steps": 9,
}


@pytest.fixture(scope="module", params=APIS)
def server(request: pytest.FixtureRequest) -> Iterator[ApiProcess]:
    """Atropos' API server: the embedded one, and atroposlib's own."""
    with ApiProcess(request.param) as process:
        yield process


@pytest.fixture
def url(server: ApiProcess) -> str:
    """The url of the server, which has just been reset."""
    call_api(server.url, "/reset_data")
    return server.url


def atropos_config(url: str, **settings) -> Config:
    entry = {"type": "atropos", "url": url, **settings}
    return Config.model_validate({"model": {"name": "none"}, "environments": [entry], "rollout": SIZES})


def statuses(url: str, **settings) -> dict[str, str]:
    config = atropos_config(url, **settings)
    subject = subject_of(config)
    return {name: check(subject).status for name, check in ATROPOS_CHECKS.items()}


def finding(name: str, url: str, **settings):
    config = atropos_config(url, **settings)
    return ATROPOS_CHECKS[name](subject_of(config))


def test_a_server_that_does_not_respond_is_one_failure():
    url = f"http://127.0.0.1:{free_port()}"
    skipped = {"environments": "skipped", "server_type": "skipped", "logprobs": "skipped"}
    assert statuses(url) == {"api": "failed", **skipped}
    assert f"--port {url.rpartition(':')[2]}" in finding("api", url).fix


def test_another_server_on_the_port_is_found():
    with raw_server(response(b"{}")) as url:
        assert finding("api", url).detail == f"{url}: the response of GET /status is not that of Atropos' API"


def test_a_server_without_environments_is_a_warning(url):
    assert statuses(url) == {"api": "ok", "environments": "warning", "server_type": "skipped", "logprobs": "skipped"}
    assert f"--env.rollout_server_url {url}" in finding("environments", url).fix


def test_a_good_group_passes(url):
    call_api(url, "/register", REGISTRATION)
    post_group(url, mark=5)
    assert set(statuses(url).values()) == {"ok"}
    assert finding("environments", url).detail == "1 groups are waiting; the latest has 4 sequences"


def test_the_registration_of_another_run_is_found(url):
    call_api(url, "/register", REGISTRATION | {"batch_size": 64})
    found = finding("api", url)
    assert found.status == "failed"
    assert "is registered with batch_size=64" in found.detail
    assert finding("api", url, reset=True).status == "ok"


def test_a_group_without_logprobs_is_found(url):
    post_group(url, mark=5, inference_logprobs=None)
    found = finding("logprobs", url)
    assert (found.status, found.detail) == ("failed", "the latest group has no inference_logprobs")
    assert finding("logprobs", url, missing_logprobs="recompute").status == "ok"


@pytest.mark.parametrize("logprobs", [[1.0, 0.5, -0.25], [1.0, -0.5]])
def test_positive_and_misaligned_logprobs_are_found(url, logprobs):
    post_group(url, mark=5, inference_logprobs=[logprobs] * 4)
    assert finding("logprobs", url).detail.startswith("inference_logprobs of 4 sequences: positive, or not one per")


def test_the_placeholders_of_openai_endpoints_are_found(url):
    """The values of atroposlib's DummyManagedServer, which are longer than this run's sequences."""
    tokens = list(range(128))
    masks = [-100, *tokens[1:]]
    post_group(url, 0, tokens=[tokens] * 4, masks=[masks] * 4, inference_logprobs=[[-0.5] * 128] * 4)
    found = finding("server_type", url)
    assert found.status == "failed"
    assert found.fix == "start the environment with --openai.server_type vllm"
    assert statuses(url)["logprobs"] == "ok"


@pytest.mark.parametrize("size", [3, 16])
def test_group_sizes_that_never_make_a_batch_are_found(url, size):
    post_group(url, mark=5, size=size)
    found = finding("environments", url)
    assert found.detail == f"groups of {size} sequences: their size must divide the batch of 8"


def test_sequences_that_a_run_would_drop_are_a_warning(url):
    long = list(range(2, 100))
    post_group(url, 5, tokens=[long] * 4, masks=[long] * 4, inference_logprobs=[[-0.5] * 98] * 4)
    assert finding("environments", url).detail == "4 for length of 4 sequences of the latest group would be dropped"


# Engine servers


def server_config(*urls: str, **engine) -> Config:
    settings = {"placement": "server", "urls": urls, **engine}
    task = {"type": "task", "name": "sorting"}
    return Config.model_validate({"model": {"name": "none"}, "environments": [task], "engine": settings})


def check_servers(*urls: str, environment: dict[str, str] | None = None, **engine):
    config = server_config(*urls, **engine)
    return check_engine_servers(subject_of(config, environment=environment))


def test_an_engine_server_that_returns_logprobs_passes():
    engine = EngineServer()
    try:
        assert check_servers(engine.url).status == "ok"
        closed = f"http://127.0.0.1:{free_port()}"
        found = check_servers(engine.url, closed)
    finally:
        engine.close()
    assert found.detail.startswith(f"engine.urls.1={closed}: ")
    assert "python -m colocated_grpo.servers" in found.fix
    assert check_servers().status == "skipped"


def test_an_engine_server_that_needs_a_key_is_called_with_it():
    engine = EngineServer(api_key="secret")
    try:
        found = check_servers(engine.url)
        assert found.fix == "set engine.api_key_variable to the variable with the server's key"
        with_key = {"environment": {"MY_KEY": "secret"}, "api_key_variable": "MY_KEY"}
        assert check_servers(engine.url, **with_key).status == "ok"
    finally:
        engine.close()


def test_a_server_without_generate_is_named():
    with raw_server(response(b"{}"), response(b'{"detail": "Not Found"}', status="404 Not Found")) as url:
        found = check_servers(url)
    assert found.detail == f"engine.urls.0={url}: POST /generate: 404 Not Found"
    assert "vLLM's own server has no /generate" in found.fix


def test_a_server_without_logprobs_is_found():
    with raw_server(response(b"{}"), response(b'{"text": ["1"]}')) as url:
        assert check_servers(url).detail == f"engine.urls.0={url}: POST /generate returns no log-probabilities"


def test_the_file_of_shared_weights_is_looked_up_as_documented(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LOGDIR", raising=False)
    config = server_config("http://localhost:9001", bridge="shared")

    def check(**variables: str):
        return check_weight_bridge(subject_of(config, environment=variables))

    assert "vllm_bridge_config.json: No such file or directory" in check().detail
    (tmp_path / "vllm_bridge_config.json").write_text('{"param_mappings": {}}')
    assert check().detail.endswith("param_mappings is empty")
    folder = tmp_path / "logs"
    folder.mkdir()
    (folder / "vllm_bridge_config.json").write_text(json.dumps({"param_mappings": {"lm_head.weight": {}}}))
    assert check(LOGDIR=str(folder)).detail == f"{folder}/vllm_bridge_config.json: 1 parameters"
    assert check_weight_bridge(subject_of(server_config())).status == "skipped"


# Environments


def test_an_environment_that_does_not_answer_is_found():
    def check(url: str):
        entry = {"type": "episode", "name": "openenv", "args": {"url": url}}
        config = Config.model_validate({"model": {"name": "none"}, "environments": [entry]})
        return check_environments(subject_of(config))

    with raw_server(response(b'{"status": "healthy"}')) as url:
        assert check(url).detail == "1 servers respond"
    found = check(url)
    assert found.status == "failed"
    assert found.detail.startswith(f"environments.0.args.url={url!r}: GET /health: ")
    assert check("no url").status == "failed"
