"""OpenEnv's protocol over loopback: one session for each episode, and failures that cost one episode only."""

from __future__ import annotations

import asyncio
import json
import re
import sys

import pytest

from colocated_grpo.environments import EnvironmentSetupError
from colocated_grpo.environments.adapters import openenv
from colocated_grpo.environments.registry import build_episode
from tests.support.adapter_play import items, items_from, observations, played, playing, saying
from tests.support.openenv_server import NUMBER_ACTION, Guess, Server
from tests.support.raw_server import raw_server, response
from tests.support.servers import free_port


@pytest.fixture
def server():
    with Server() as server:
        yield server


def env(server: Server, **args):
    return build_episode("openenv", {"url": server.url, "observation": "text", **args})


def secret_of(item) -> str:
    game = Guess()
    game.reset(item["seed"])
    return str(game.secret)


def test_an_episode_is_one_session_and_its_reward_the_sum_of_the_steps(server):
    episode = env(server, instruction="Guess my number.")
    item = items(episode, 1)[0]
    assert re.fullmatch(r"Guess my number\.\n\n1 to 9, (odd|even)", item["prompt"])
    rollout = played(episode, item, saying("0", "0", f"<think>0?</think> {secret_of(item)}"))
    assert list(observations(rollout)) == ["no", "no"]
    assert rollout.score.reward == 1 - 2 * 0.125
    assert rollout.score.parts == {"return": 0.75, "invalid": 0, "finished": 1}
    assert server.sessions == 1
    assert server.all_sessions_ended()


def test_concurrent_episodes_have_separate_sessions_and_wait_for_a_free_one():
    async def all_of(episode, chosen):
        games = (playing(episode, item, saying("0", "0", secret_of(item))) for item in chosen)
        return await asyncio.gather(*games)

    with Server(capacity=3) as server:
        episode = env(server)
        rollouts = asyncio.run(all_of(episode, items(episode, 8)))
        assert [rollout.score.reward for rollout in rollouts] == [0.75] * 8
        assert (server.most_open, server.sessions) == (3, 8)
        assert server.all_sessions_ended()


def test_items_are_reproducible_and_held_out_seeds_are_disjoint(server):
    episode = env(server, options={"highest": 90})
    assert items(episode, 4) == items(env(server, options={"highest": 90}), 4)
    assert items(episode, 4)[0]["prompt"].startswith("1 to 90")
    assert {item["seed"] % 2 for item in items(episode, 5)} == {0}
    assert {item["seed"] % 2 for item in items(episode, 5, split="held_out")} == {1}


def test_prompts_from_starts_anywhere_without_requests_for_earlier_prompts(server):
    episode = env(server)
    assert items_from(episode, 3, 2) == items(episode, 5)[3:]
    assert len(items_from(episode, 10**9, 1)) == 1


def test_actions_without_a_text_field_are_json_objects_and_invalid_ones_cost_a_turn():
    with Server(NUMBER_ACTION) as server:
        episode = env(server, max_turns=5, invalid_reward=-0.5)
        item = items(episode, 1)[0]
        assert '"number"' in item["prompt"] and "JSON object" in item["prompt"]
        policy = saying("7", '{"numbr": 7}', '{"number": 0}', f'{{"number": {secret_of(item)}}}')
        rollout = played(episode, item, policy)
        observed = list(observations(rollout))
        assert observed[0] == "Invalid action: not a JSON object"
        assert "wrong fields" in observed[1]
        assert observed[2:] == ["no"]
        assert rollout.score.reward == 0.875 - 2 * 0.5
        assert rollout.score.parts == {"return": 0.875, "invalid": 0.5, "finished": 1}


def test_without_a_named_field_the_whole_observation_is_shown_as_json(server):
    episode = build_episode(f"openenv:{server.url}", {"action": "message"})
    assert re.fullmatch(r'\{"text": "1 to 9, \w+", "steps": 0\}', items(episode, 1)[0]["prompt"])


@pytest.mark.parametrize(
    ("reply", "message"),
    [("crash", "EXECUTION_ERROR: the environment crashed"), ("hang up", "the server ended the session")],
)
def test_a_server_error_costs_the_episode_and_frees_its_session(server, reply, message):
    episode = env(server)
    item = items(episode, 1)[0]
    with pytest.raises((openenv.ServerError, ConnectionError), match=message):
        played(episode, item, saying(reply))
    assert played(episode, item, saying(secret_of(item))).score.reward == 1
    assert server.all_sessions_ended()


def test_a_cancelled_episode_frees_its_session(server):
    episode = env(server)
    item = items(episode, 1)[0]

    async def cancelled() -> None:
        async with asyncio.timeout(0.2):
            await playing(episode, item, saying("hang"))

    with pytest.raises(TimeoutError):
        asyncio.run(cancelled())
    assert played(episode, item, saying(secret_of(item))).score.reward == 1
    assert server.all_sessions_ended()


def test_an_environment_that_is_not_reproducible_fails_the_episode(server):
    episode = env(server)
    item = items(episode, 1)[0]
    server.repeatable = False
    with pytest.raises(RuntimeError, match="is not reproducible from its seed"):
        played(episode, item, saying("1"))


def test_an_episode_that_runs_out_of_turns_or_tokens_keeps_its_rewards(server):
    short, cramped = env(server, max_turns=2), env(server)
    item = items(short, 1)[0]
    assert played(short, item, saying("0")).score.parts == {"return": -0.25, "invalid": 0, "finished": 0}
    rollout = played(cramped, item, saying("0"), room=20)
    assert rollout.score.parts["finished"] == 0
    assert rollout.finish_reason == "length"


def test_an_unreachable_or_unhealthy_server_is_reported_in_one_line():
    for args, message in [
        ({"url": f"http://127.0.0.1:{free_port()}"}, "no OpenEnv server answers /health"),
        ({"url": "localhost:8000"}, "args.url='localhost:8000': String should match"),
        ({}, "args.url"),
    ]:
        with pytest.raises(EnvironmentSetupError, match=re.escape(message)) as caught:
            build_episode("openenv", args)
        assert "\n" not in str(caught.value)
    with (
        Server(health="unhealthy") as server,
        pytest.raises(EnvironmentSetupError, match="reports its health as unhealthy"),
    ):
        env(server)


def test_a_server_that_restarts_during_a_run_is_retried(monkeypatch, server):
    monkeypatch.setattr(openenv, "RETRY_INTERVAL", 0.001)
    first = json.dumps({"observation": {"text": "1 to 9"}, "reward": None, "done": False}).encode()
    with raw_server(b"", response(b"{}", status="503 Busy"), response(first)) as url:
        item = next(env(server).model_copy(update={"url": url}).prompts(0, "train"))
    assert "1 to 9" in item["prompt"]


def test_an_invalid_response_during_a_run_is_reported_in_one_line(monkeypatch, server):
    monkeypatch.setattr(openenv, "RESTART_TIMEOUT", 0.0)
    episode = env(server)
    for raw in (b"220 a mail server\r\n", response(b"[]"), response(b"{}", status="500 Crashed")):
        with raw_server(raw) as url:
            prompts = episode.model_copy(update={"url": url}).prompts(0, "train")
            with pytest.raises(EnvironmentSetupError, match="no OpenEnv server answers /reset: ") as caught:
                next(prompts)
        assert "\n" not in str(caught.value)


def test_a_missing_client_names_the_pip_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    with pytest.raises(EnvironmentSetupError, match="pip install aiohttp"):
        build_episode("openenv:http://127.0.0.1:1", {})
