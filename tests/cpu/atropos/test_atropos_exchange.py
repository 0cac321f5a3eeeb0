"""The embedded API server: defects of atroposlib that it fixes, its limits, and parity of its batching."""

from __future__ import annotations

import gzip
import json
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colocated_grpo.atropos.api import PostedGroup
from colocated_grpo.atropos.exchange import Exchange, ScoredGroup, choose_batch, choose_parts
from colocated_grpo.atropos.reader import Registration
from tests.support.servers import EMBEDDED, ApiProcess

LIMIT = 20_000
HUGE = "9" * 5_000
NUMBER = st.integers() | st.floats() | st.none()
JSON = st.recursive(
    NUMBER | st.text() | st.booleans(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=12,
)
FIELDS = st.sampled_from([*PostedGroup.__struct_fields__, "messages", "distill_token_ids"])


@pytest.fixture(scope="module")
def server():
    with ApiProcess([*EMBEDDED, "--max-body-bytes", str(LIMIT), "--max-queued", "64"]) as process:
        yield process


def call(url: str, body: bytes | None = None, **headers: str) -> tuple[int, bytes]:
    headers = {"Content-Type": "application/json", **headers}
    try:
        with urlopen(Request(url, body, headers), timeout=60) as response:
            return response.status, response.read()
    except HTTPError as error:
        return error.code, error.read()


def post(server: ApiProcess, path: str, body: Any) -> int:
    return call(server.url + path, json.dumps(body).encode())[0]


def registration(**changes: Any) -> dict[str, Any]:
    numbers = {"batch_size": 8, "max_token_len": 64, "save_checkpoint_interval": 1, "starting_step": 0, "num_steps": 1}
    return {"wandb_group": "", "wandb_project": "", "checkpoint_dir": "", **numbers, **changes}


def group(size: int = 4) -> dict[str, Any]:
    return {"tokens": [[1, 2]] * size, "masks": [[-100, 2]] * size, "scores": [0.0] * size}


def posted(size: int, env_id: int | None = None, mark: int = 0) -> ScoredGroup:
    return ScoredGroup(size, env_id, (str(mark).encode(),))


def marks_of(batches: list[list[ScoredGroup]]) -> list[int]:
    return [int(text) for batch in batches for group in batch for text in group.texts]


@pytest.fixture
def fresh(server):
    call(server.url + "/reset_data")
    return server


def test_a_group_posted_before_the_trainer_registers_is_in_its_first_batch(fresh):
    assert post(fresh, "/scored_data", group(8)) == 200
    post(fresh, "/register", registration())
    assert json.loads(call(fresh.url + "/info")[1])["batch_size"] == 8
    assert len(json.loads(call(fresh.url + "/batch")[1])["batch"]) == 1


def test_a_request_for_a_batch_after_a_reset_is_an_error(fresh):
    status, response = call(fresh.url + "/batch")
    assert (status, json.loads(response)["status"]) == (200, "error")


def test_an_unknown_environment_gets_an_instruction_to_register(fresh):
    request = Request(fresh.url + "/status-env", b'{"env_id": 3}', {"Content-Type": "application/json"}, method="GET")
    with pytest.raises(HTTPError) as rejected:
        urlopen(request, timeout=60)
    assert rejected.value.code == 404
    assert "register again" in rejected.value.read().decode()


def test_an_environment_without_a_name_gets_one(fresh):
    post(fresh, "/register", registration())
    call(fresh.url + "/batch")
    env = {"max_token_length": 64, "desired_name": None, "weight": 1.0, "group_size": 4}
    status, response = call(fresh.url + "/register-env", json.dumps(env).encode())
    assert (status, json.loads(response)["wandb_name"]) == (200, "env_0")


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
def test_an_environment_with_numbers_that_break_the_arithmetic_is_rejected(fresh, wrong):
    post(fresh, "/register", registration())
    call(fresh.url + "/batch")
    env = {"max_token_length": 64, "desired_name": None, "weight": 1.0, "group_size": 4}
    assert post(fresh, "/register-env", {**env, **wrong}) == 422
    assert post(fresh, "/register-env", {**env, "min_batch_allocation": 1.0, "weight": 0.0}) == 200


@pytest.mark.parametrize("name", ["batch_size", "max_token_len"])
@pytest.mark.parametrize("number", [0, 2**31])
def test_a_trainer_with_numbers_out_of_range_is_rejected(fresh, name, number):
    assert post(fresh, "/register", registration(**{name: number})) == 422


def test_a_body_above_the_limit_is_rejected(fresh):
    assert post(fresh, "/scored_data", {**group(), "padding": "x" * LIMIT}) == 413


def test_the_body_limit_applies_after_decompression(fresh):
    bomb = gzip.compress(b" " * (LIMIT * 50))
    assert len(bomb) < LIMIT
    assert call(fresh.url + "/scored_data", bomb, **{"Content-Encoding": "gzip"})[0] == 413


def test_a_truncated_gzip_body_is_rejected(fresh):
    compressed = gzip.compress(json.dumps(group()).encode())
    assert call(fresh.url + "/scored_data", compressed[:-9], **{"Content-Encoding": "gzip"})[0] == 400


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999"])
@pytest.mark.parametrize("place", ['"scores": [%s]', '"scores": [0], "overrides": [{"temperature": %s}]'])
def test_numbers_that_json_cannot_represent_are_rejected(fresh, number, place):
    body = '{"tokens": [[1]], "masks": [[1]], ' + place % number + "}"
    assert call(fresh.url + "/scored_data", body.encode())[0] == 422


@pytest.mark.parametrize(("depth", "status"), [(36, 200), (200, 400)])
def test_fields_nested_too_deep_are_rejected(fresh, depth, status):
    assert post(fresh, "/scored_data", {**group(), "images": json.loads("[" * depth + "]" * depth)}) == status


@pytest.mark.parametrize("name", ["images", "messages", "distill_token_ids", "distill_logprobs", "unknown"])
def test_fields_that_no_trainer_reads_are_not_kept(fresh, name):
    """The trainer's parser rejects an integer of 5,000 digits, and with it the whole batch."""
    post(fresh, "/register", registration())
    body = json.dumps({**group(8), name: 0}).replace(f'"{name}": 0', f'"{name}": {HUGE}').encode()
    assert call(fresh.url + "/scored_data", body)[0] == 200
    (kept,) = json.loads(call(fresh.url + "/batch")[1])["batch"]
    assert kept.get(name) is (True if name == "images" else None), "of images only that there are some"


@pytest.mark.parametrize(
    "column", ['"tokens": [[%s]]', '"overrides": [{"temperature": %s}]', '"images": [], "env_id": %s']
)
def test_a_group_that_the_trainer_cannot_parse_is_rejected(fresh, column):
    body = '{"masks": [[1]], "scores": [0], "tokens": [[1]], ' + column % HUGE + "}"
    assert call(fresh.url + "/scored_data", body.encode())[0] == 422


@pytest.mark.parametrize("column", ["tokens", "masks", "advantages", "ref_logprobs", "inference_logprobs"])
def test_a_sequence_that_the_trainer_would_drop_is_rejected(fresh, column):
    """Gzipped, a few KiB would take as much of the queue as a whole batch of honest groups."""
    post(fresh, "/register", registration(max_token_len=64))
    assert post(fresh, "/scored_data", {**group(8), column: [[1] * 64] * 8}) == 200
    body = json.dumps({**group(8), column: [[1] * 65] * 8}).encode()
    status, response = call(fresh.url + "/scored_data", body)
    assert (status, json.loads(response)) == (422, {"detail": f"{column}: sequence 0: more than 64 numbers"})


def test_millions_of_empty_lists_are_rejected():
    with ApiProcess(EMBEDDED) as server:
        body = b'{"masks": [[1]], "scores": [0], "tokens": [[1]], "distill_token_ids": [' + b"[]," * (1 << 20) + b"[]]}"
        status, response = call(server.url + "/scored_data", body)
    assert (status, b"more than 1048576 lists and objects" in response) == (400, True)


def test_a_list_above_the_queue_limit_is_rejected_as_a_whole(fresh):
    assert post(fresh, "/scored_data_list", [group(24)] * 3) == 503
    assert json.loads(call(fresh.url + "/status")[1])["queue_size"] == 0
    assert post(fresh, "/scored_data_list", [group(24)] * 2) == 200


def test_parts_of_a_group_are_served_together_and_as_they_were_posted(fresh):
    """atroposlib serves nothing: parts of 3 and 5 make no pack of 8."""
    post(fresh, "/register", registration(batch_size=16))
    call(fresh.url + "/batch")
    env = {"max_token_length": 64, "desired_name": "toy", "weight": 1.0, "group_size": 8}
    assert post(fresh, "/register-env", env) == 200
    for size in (3, 5, 5, 3):
        assert post(fresh, "/scored_data", {**group(size), "env_id": 0}) == 200
    batch = json.loads(call(fresh.url + "/batch")[1])["batch"]
    assert [len(part["scores"]) for part in batch] == [3, 5, 5, 3]


def test_a_group_without_sequences_is_rejected(fresh):
    assert post(fresh, "/scored_data", group(0)) == 422


def test_posts_above_the_queue_limit_are_rejected(fresh):
    assert [post(fresh, "/scored_data", group(32)) for _ in range(3)] == [200, 200, 503]


@given(body=JSON | st.dictionaries(FIELDS, JSON), path=st.sampled_from(["scored_data", "scored_data_list"]))
@settings(max_examples=150)
def test_no_json_body_makes_the_server_fail(server, body, path):
    call(server.url + "/reset_data")
    post(server, "/register", registration(batch_size=1))
    assert post(server, f"/{path}", body) in (200, 422, 503)
    status, response = call(server.url + "/batch")
    assert status == 200
    json.loads(response)


@given(raw=st.binary(max_size=200), compressed=st.booleans(), path=st.sampled_from(["register", "register-env"]))
def test_no_bytes_make_the_server_fail(server, raw, compressed, path):
    headers = {"Content-Encoding": "gzip"} if compressed else {}
    assert call(f"{server.url}/{path}", raw, **headers)[0] in (400, 422)


QUEUE = st.lists(st.tuples(st.sampled_from([1, 2, 3, 4, 8]), st.sampled_from([None, 0, 1])), max_size=12)


@given(queue=QUEUE, batch_size=st.integers(1, 24))
@settings(max_examples=500)
def test_batches_equal_those_of_atroposlib(queue, batch_size):
    upstream = pytest.importorskip("atroposlib.api.utils", reason="atroposlib is not installed")
    items = [{"tokens": [[0]] * size, "env_id": env, "position": index} for index, (size, env) in enumerate(queue)]
    expected, _ = upstream.grab_batch_with_minimum_allocations(items, batch_size, [])
    sizes = [size for size, _ in queue]
    chosen = choose_batch(sizes, [env for _, env in queue], batch_size, {})
    if expected:
        assert chosen == [item["position"] for item in expected]
    else:  # atroposlib stalls on some queues whose smaller groups make a batch
        assert sum(sizes[position] for position in chosen) in (0, batch_size)


@given(queue=QUEUE, batch_size=st.integers(1, 24), reserved=st.dictionaries(st.sampled_from([0, 1]), st.integers(1, 8)))
@settings(max_examples=500)
def test_reserved_parts_are_in_every_batch(queue, batch_size, reserved):
    sizes, envs = [size for size, _ in queue], [env for _, env in queue]
    chosen = choose_batch(sizes, envs, batch_size, reserved)
    assert sum(sizes[position] for position in chosen) in (0, batch_size)
    assert len(set(chosen)) == len(chosen)
    for env in reserved if chosen and sum(reserved.values()) + 2 * max(sizes) <= batch_size else ():
        assert env in {envs[position] for position in chosen}


@given(sizes=st.lists(st.integers(1, 9), max_size=8), group_size=st.integers(1, 12))
@settings(max_examples=300)
def test_parts_add_up_to_a_group_whenever_they_do_in_atroposlib(sizes, group_size):
    upstream = pytest.importorskip("atroposlib.api.utils", reason="atroposlib is not installed")
    chosen = choose_parts(sizes, group_size)
    expected = upstream.find_groups_summing_to_target([{"tokens": [[0]] * size} for size in sizes], group_size)
    assert bool(chosen) == bool(expected)
    assert not chosen or sum(sizes[position] for position in chosen) == group_size


def test_every_group_is_served_exactly_once():
    exchange = Exchange(1000, 1 << 20)
    exchange.register(Registration(**registration()))
    for index in range(20):
        exchange.post([posted(4, mark=index)])
    batches = [exchange.batch() for _ in range(11)]
    assert batches.pop() is None
    assert sorted(marks_of(batches)) == list(range(20))
