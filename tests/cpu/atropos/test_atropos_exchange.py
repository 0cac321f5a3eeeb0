"""What the embedded API server does better than it must, and whether it batches as atroposlib does."""

from __future__ import annotations

import gzip
import json
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from hypothesis import given
from hypothesis import settings as effort
from hypothesis import strategies as some

from colocated_grpo.atropos.exchange import Exchange
from colocated_grpo.atropos.grouping import choose_batch, parts_of_a_group
from colocated_grpo.atropos.wire import Registration, ScoredData
from tests.support.servers import EMBEDDED, ApiProcess

LIMIT = 20_000
NUMBER = some.integers() | some.floats() | some.none()
JSON = some.recursive(
    NUMBER | some.text() | some.booleans(),
    lambda inner: some.lists(inner) | some.dictionaries(some.text(), inner),
    max_leaves=12,
)
FIELDS = some.sampled_from(sorted(ScoredData.model_fields))


@pytest.fixture(scope="module")
def server():
    with ApiProcess([*EMBEDDED, "--max-body-bytes", str(LIMIT), "--max-queued", "64"]) as process:
        yield process


def call(url: str, body: bytes | None = None, **headers: str) -> tuple[int, bytes]:
    headers = {"Content-Type": "application/json", **headers}
    try:
        with urlopen(Request(url, body, headers), timeout=10) as answer:
            return answer.status, answer.read()
    except HTTPError as error:
        return error.code, error.read()


def post(server: ApiProcess, path: str, body: Any) -> int:
    return call(server.url + path, json.dumps(body).encode())[0]


def registration(**changes: Any) -> dict[str, Any]:
    numbers = {"batch_size": 8, "max_token_len": 64, "save_checkpoint_interval": 1, "starting_step": 0, "num_steps": 1}
    return {"wandb_group": "", "wandb_project": "", "checkpoint_dir": "", **numbers, **changes}


def group(size: int = 4) -> dict[str, Any]:
    return {"tokens": [[1, 2]] * size, "masks": [[-100, 2]] * size, "scores": [0.0] * size}


@pytest.fixture
def fresh(server):
    call(server.url + "/reset_data")
    return server


def test_a_group_that_comes_before_the_trainer_is_trained_on_later(fresh):
    assert post(fresh, "/scored_data", group(8)) == 200
    post(fresh, "/register", registration())
    assert json.loads(call(fresh.url + "/info")[1])["batch_size"] == 8
    assert len(json.loads(call(fresh.url + "/batch")[1])["batch"]) == 1


def test_after_a_reset_the_trainer_is_told_to_register(fresh):
    status, answer = call(fresh.url + "/batch")
    assert (status, json.loads(answer)["status"]) == (200, "error")


def test_an_unknown_environment_is_told_to_register(fresh):
    request = Request(fresh.url + "/status-env", b'{"env_id": 3}', {"Content-Type": "application/json"}, method="GET")
    with pytest.raises(HTTPError) as refused:
        urlopen(request, timeout=10)
    assert refused.value.code == 404
    assert "register again" in refused.value.read().decode()


def test_an_environment_without_a_name_is_let_in(fresh):
    post(fresh, "/register", registration())
    call(fresh.url + "/batch")
    env = {"max_token_length": 64, "desired_name": None, "weight": 1.0, "group_size": 4}
    status, answer = call(fresh.url + "/register-env", json.dumps(env).encode())
    assert (status, json.loads(answer)["wandb_name"]) == (200, "env_0")


@pytest.mark.parametrize(
    "wrong",
    [
        {"group_size": 0},
        {"max_token_length": 10**400},
        {"weight": 1e308},
        {"weight": -1.0},
        {"min_batch_allocation": 1e308},
        {"min_batch_allocation": -0.5},
    ],
)
def test_an_environment_whose_numbers_would_break_the_server_for_all_is_refused(fresh, wrong):
    post(fresh, "/register", registration())
    call(fresh.url + "/batch")
    env = {"max_token_length": 64, "desired_name": None, "weight": 1.0, "group_size": 4}
    assert post(fresh, "/register-env", {**env, **wrong}) == 422
    assert post(fresh, "/register-env", {**env, "min_batch_allocation": 1.0, "weight": 0.0}) == 200


@pytest.mark.parametrize("name", ["batch_size", "max_token_len"])
@pytest.mark.parametrize("number", [0, 2**31])
def test_a_trainer_whose_numbers_cannot_be_served_is_refused(fresh, name, number):
    assert post(fresh, "/register", registration(**{name: number})) == 422


def test_a_body_above_the_limit_is_refused(fresh):
    assert post(fresh, "/scored_data", {**group(), "padding": "x" * LIMIT}) == 413


def test_a_small_body_that_unpacks_to_a_large_one_is_refused(fresh):
    bomb = gzip.compress(b" " * (LIMIT * 50))
    assert len(bomb) < LIMIT
    assert call(fresh.url + "/scored_data", bomb, **{"Content-Encoding": "gzip"})[0] == 413


def test_a_cut_off_gzip_body_is_refused(fresh):
    packed = gzip.compress(json.dumps(group()).encode())
    assert call(fresh.url + "/scored_data", packed[:-9], **{"Content-Encoding": "gzip"})[0] == 400


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999"])
@pytest.mark.parametrize("place", ['"scores": [%s]', '"scores": [0], "overrides": [{"temperature": %s}]'])
def test_what_json_cannot_carry_back_is_refused_at_the_door(fresh, number, place):
    body = '{"tokens": [[1]], "masks": [[1]], ' + place % number + "}"
    assert call(fresh.url + "/scored_data", body.encode())[0] == 422


def test_images_nested_too_deep_to_send_back_are_refused(fresh):
    assert post(fresh, "/scored_data", {**group(), "images": json.loads("[" * 200 + "]" * 200)}) == 422


def test_a_list_that_finds_no_room_is_not_kept_in_part(fresh):
    assert post(fresh, "/scored_data_list", [group(24)] * 3) == 503
    assert json.loads(call(fresh.url + "/status")[1])["queue_size"] == 0
    assert post(fresh, "/scored_data_list", [group(24)] * 2) == 200


def test_groups_without_sequences_do_not_fill_the_memory_either(fresh):
    assert post(fresh, "/scored_data_list", [group(0)] * 64) == 200
    assert post(fresh, "/scored_data", group(0)) == 503


def test_a_trainer_that_stays_away_does_not_fill_the_memory(fresh):
    assert [post(fresh, "/scored_data", group(32)) for _ in range(3)] == [200, 200, 503]


@given(body=JSON | some.dictionaries(FIELDS, JSON), path=some.sampled_from(["scored_data", "scored_data_list"]))
@effort(max_examples=150)
def test_no_body_makes_it_fail(server, body, path):
    call(server.url + "/reset_data")
    post(server, "/register", registration(batch_size=1))
    assert post(server, f"/{path}", body) in (200, 422, 503)
    status, answer = call(server.url + "/batch")
    assert status == 200
    json.loads(answer)


@given(raw=some.binary(max_size=200), packed=some.booleans(), path=some.sampled_from(["register", "register-env"]))
def test_no_bytes_make_it_fail(server, raw, packed, path):
    headers = {"Content-Encoding": "gzip"} if packed else {}
    assert call(f"{server.url}/{path}", raw, **headers)[0] in (400, 422)


QUEUE = some.lists(some.tuples(some.sampled_from([1, 2, 3, 4, 8]), some.sampled_from([None, 0, 1])), max_size=12)


@given(
    queue=QUEUE,
    batch_size=some.integers(1, 24),
    least=some.dictionaries(some.sampled_from([0, 1]), some.sampled_from([0.0, 0.3, 0.5, 0.9])),
)
@effort(max_examples=500)
def test_batches_are_formed_as_atroposlib_forms_them(queue, batch_size, least):
    upstream = pytest.importorskip("atroposlib.api.utils", reason="atroposlib is not installed")
    items = [{"tokens": [[0]] * size, "env_id": env, "position": index} for index, (size, env) in enumerate(queue)]
    envs = [{"registered_id": env, "connected": True, "min_batch_allocation": least.get(env)} for env in (0, 1)]
    expected, _ = upstream.grab_batch_with_minimum_allocations(items, batch_size, envs)
    in_order = dict(sorted(least.items()))
    chosen = choose_batch([size for size, _ in queue], [env for _, env in queue], batch_size, in_order)
    assert chosen == [item["position"] for item in expected or []]


@given(sizes=some.lists(some.integers(1, 9), max_size=8), wanted=some.integers(1, 12))
@effort(max_examples=300)
def test_parts_add_up_to_a_group_whenever_atroposlib_finds_some(sizes, wanted):
    upstream = pytest.importorskip("atroposlib.api.utils", reason="atroposlib is not installed")
    chosen = parts_of_a_group(sizes, wanted)
    expected = upstream.find_groups_summing_to_target([{"tokens": [[0]] * size} for size in sizes], wanted)
    assert bool(chosen) == bool(expected)
    assert not chosen or sum(sizes[position] for position in chosen) == wanted


def test_every_group_is_served_exactly_once():
    exchange = Exchange(max_queued=1000)
    exchange.register(Registration(**registration()))
    for index in range(20):
        exchange.post(ScoredData(tokens=[[index]] * 4, masks=[[index]] * 4, scores=[0.0] * 4).as_group())
    batches = [exchange.batch()["batch"] for _ in range(11)]
    assert batches.pop() is None
    assert sorted(item["tokens"][0][0] for batch in batches for item in batch) == list(range(20))
