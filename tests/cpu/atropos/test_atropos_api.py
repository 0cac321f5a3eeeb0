"""Atropos' API server: one contract for the embedded server and for atroposlib's own."""

from __future__ import annotations

import gzip
import json
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from colocated_grpo.atropos import api as api_module
from colocated_grpo.atropos.api import create_app
from colocated_grpo.web.server import Hosts, ServerThread

KEYS = {
    *("tokens", "masks", "scores", "advantages", "ref_logprobs", "messages", "generation_params"),
    *("inference_logprobs", "overrides", "group_overrides", "images", "env_id", "distill_token_ids"),
    "distill_logprobs",
}


class Client:
    """Calls of one server."""

    def __init__(self, url: str) -> None:
        self.url = url

    def call(self, method: str, path: str, body: Any = None, *, gzipped: bool = False) -> tuple[int, Any]:
        """Return the status and the parsed body. A body of bytes is sent as it is."""
        data = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        if gzipped:
            data, headers["Content-Encoding"] = gzip.compress(data), "gzip"
        try:
            with urlopen(Request(self.url + path, data, headers, method=method), timeout=60) as response:
                status, raw = response.status, response.read()
        except HTTPError as error:
            status, raw = error.code, error.read()
        try:
            return status, json.loads(raw)
        except ValueError:
            return status, raw.decode()

    def get(self, path: str, body: Any = None) -> Any:
        status, response = self.call("GET", path, body)
        assert status == 200, response
        return response

    def post(self, path: str, body: Any) -> Any:
        status, response = self.call("POST", path, body)
        assert status == 200, response
        return response

    def register(self, **changes: Any) -> Any:
        return self.post("/register", {**REGISTRATION, **changes})

    def start(self, **changes: Any) -> None:
        """Register a trainer and request a batch, which allows environments to register."""
        self.register(**changes)
        assert self.get("/batch") == {"batch": None}

    def add_env(self, group_size: int = 4, **changes: Any) -> int:
        settings = {"max_token_length": 512, "desired_name": "toy", "weight": 1.0, "group_size": group_size}
        return self.post("/register-env", {**settings, **changes})["env_id"]

    def send(self, size: int, env_id: int | None = None, mark: int = 0) -> Any:
        return self.post("/scored_data", group(size, env_id, mark))

    def batch_marks(self) -> list[int] | None:
        batch = self.get("/batch")["batch"]
        return batch and [item["tokens"][0][0] for item in batch]


REGISTRATION = {
    "wandb_group": "g",
    "wandb_project": "p",
    "batch_size": 8,
    "max_token_len": 512,
    "checkpoint_dir": "/tmp/checkpoints",
    "save_checkpoint_interval": 3,
    "starting_step": 0,
    "num_steps": 20,
}


def group(size: int, env_id: int | None = None, mark: int = 0) -> dict[str, Any]:
    rows = range(size)
    return {
        "tokens": [[mark, 7, 9] for _ in rows],
        "masks": [[-100, 7, 9] for _ in rows],
        "scores": [float(row) for row in rows],
        "env_id": env_id,
    }


@pytest.fixture
def api(server):
    client = Client(server.url)
    client.get("/reset_data")
    return client


def test_the_state_without_a_trainer(api):
    assert api.get("/info") == {"batch_size": -1, "max_token_len": -1}
    assert api.get("/wandb_info") == {"group": None, "project": None}
    assert api.get("/status") == {"current_step": 0, "queue_size": 0}
    assert api.get("/") == {"message": "AtroposLib API"}


def test_a_trainer_registers(api):
    assert isinstance(api.register()["uuid"], int)
    assert api.get("/info") == {"batch_size": 8, "max_token_len": 512}
    assert api.get("/wandb_info") == {"group": "g", "project": "p"}


def test_a_second_registration_changes_nothing(api):
    api.register()
    api.register(batch_size=6)
    assert api.get("/info")["batch_size"] == 8


def test_a_reset_discards_all_state(api):
    api.start()
    api.send(8)
    assert api.get("/reset_data") == "Reset successful"
    assert api.get("/info")["batch_size"] == -1
    api.start(batch_size=4)
    assert api.get("/info")["batch_size"] == 4


@pytest.mark.parametrize("wrong", [{"wandb_group": None}, {"batch_size": "many"}, {"num_steps": None}])
def test_a_malformed_registration_is_rejected(api, wrong):
    assert api.call("POST", "/register", {**REGISTRATION, **wrong})[0] == 422


def test_environments_can_register_after_the_first_request_for_a_batch(api):
    settings = {"max_token_length": 512, "desired_name": "toy", "weight": 1.0, "group_size": 4}
    assert api.post("/register-env", settings) == {"status": "wait for trainer to start"}
    api.register(starting_step=5)
    assert api.post("/register-env", settings) == {"status": "wait for trainer to start"}
    api.get("/batch")
    assert api.post("/register-env", settings) == {
        "status": "success",
        "env_id": 0,
        "wandb_name": "toy_0",
        "checkpoint_dir": "/tmp/checkpoints",
        "starting_step": 5,
        "checkpoint_interval": 3,
        "num_steps": 20,
    }
    assert api.post("/register-env", settings)["wandb_name"] == "toy_1"
    assert api.post("/register-env", {**settings, "desired_name": "other"})["wandb_name"] == "other_0"


def test_the_status_of_an_environment_counts_its_groups(api):
    api.start()
    first, second = api.add_env(), api.add_env(weight=3.0)
    assert api.get("/status-env", {"env_id": first}) == {
        "current_step": 0,
        "queue_size": 0,
        "unallocated_fraction": 1.0,
        "self_queue_size": 0,
        "max_group_size": 1,
        "env_weight": 0.25,
    }
    api.send(4, second)
    status = api.get("/status-env", {"env_id": first})
    assert (status["queue_size"], status["self_queue_size"], status["max_group_size"]) == (1, 0, 4)
    assert api.get("/status-env", {"env_id": second})["self_queue_size"] == 1
    assert api.call("GET", f"/status-env?env_id={first}")[0] == 422


def test_reserved_sequences_are_left_out_of_the_queue_size_of_others(api):
    api.start(batch_size=16)
    reserved, other = api.add_env(min_batch_allocation=0.5), api.add_env()
    for _ in range(3):
        api.send(4, reserved)
    assert api.get("/status-env", {"env_id": other}) | {"env_weight": 0} == {
        "current_step": 0,
        "queue_size": 1,
        "unallocated_fraction": 0.5,
        "self_queue_size": 0,
        "max_group_size": 4,
        "env_weight": 0,
    }


def test_a_disconnected_environment_has_no_weight(api):
    api.start()
    first, second = api.add_env(), api.add_env(weight=3.0)
    assert api.post("/disconnect-env", {"env_id": second}) == {"status": "success"}
    assert api.get("/status-env", {"env_id": first})["env_weight"] == 1.0
    assert api.post("/disconnect-env", {"env_id": 9})["status"] == "failure"


def test_the_groups_of_a_batch_have_every_key(api):
    api.start()
    for mark in (1, 2):
        assert api.send(4, mark=mark) == {"status": "received"}
    batch = api.get("/batch")["batch"]
    assert [set(item) for item in batch] == [KEYS, KEYS]
    assert batch[0]["tokens"] == [[1, 7, 9]] * 4
    assert batch[0]["inference_logprobs"] is None
    assert api.get("/batch") == {"batch": None}


def test_every_batch_of_a_queue_is_sent_and_counted(api):
    """The embedded server sends the oldest first; atroposlib forms three at once and sends the newest first."""
    api.start()
    for mark in range(6):
        api.send(4, mark=mark)
    assert api.get("/status") == {"current_step": 0, "queue_size": 6}
    batches = [api.batch_marks() for _ in range(4)]
    assert batches.pop() is None
    assert sorted(batches) == [[0, 1], [2, 3], [4, 5]]
    assert api.get("/status") == {"current_step": 3, "queue_size": 0}


@pytest.mark.parametrize(("batch_size", "sizes"), [(6, [4] * 6), (8, [3, 3, 3]), (8, [4, 3, 3])])
def test_group_sizes_that_cannot_fill_a_batch_are_never_served(api, batch_size, sizes):
    """atroposlib keeps them for ever; the embedded server refuses those that no batch can hold."""
    api.start(batch_size=batch_size)
    for size in sizes:
        assert api.call("POST", "/scored_data", group(size))[0] in (200, 422)
    assert api.batch_marks() is None


def test_smaller_groups_are_packed_to_the_size_of_the_largest(api):
    api.start()
    for mark, size in enumerate([2, 4, 1, 2, 1, 1, 1, 4]):
        api.send(size, mark=mark)
    batches = [api.batch_marks() for _ in range(3)]
    assert batches.pop() is None
    assert sorted(batches) == [[1, 0, 3], [2, 4, 5, 6, 7]]


def test_a_batch_waits_for_an_environment_with_a_reserved_part(api):
    api.start()
    reserved, other = api.add_env(min_batch_allocation=0.5), api.add_env()
    for env, mark in ((other, 1), (reserved, 2), (other, 3)):
        api.send(4, env, mark)
    assert api.batch_marks() == [2, 1]
    api.send(4, other, 4)
    assert api.batch_marks() is None
    api.send(4, reserved, 5)
    assert api.batch_marks() == [5, 3]


def test_the_reserved_part_of_a_disconnected_environment_is_ignored(api):
    api.start()
    reserved, other = api.add_env(min_batch_allocation=0.5), api.add_env()
    for mark in (1, 2):
        api.send(4, other, mark)
    api.post("/disconnect-env", {"env_id": reserved})
    assert api.batch_marks() == [1, 2]


def test_allocations_above_one_are_scaled_down(api):
    api.start(batch_size=8)
    envs = [api.add_env(min_batch_allocation=0.9), api.add_env(min_batch_allocation=0.9)]
    for mark in range(4):
        api.send(4, envs[mark % 2], mark)
    assert sorted([api.batch_marks(), api.batch_marks()]) == [[0, 1], [2, 3]]


def test_parts_of_a_group_are_buffered_until_they_are_complete(api):
    api.start()
    env = api.add_env()
    assert api.send(2, env, 1) == {"status": "buffered", "buffer_size": 2}
    assert api.send(3, env, 2) == {"status": "buffered", "buffer_size": 5}
    assert api.get("/status")["queue_size"] == 0
    assert api.send(2, env, 3) == {"status": "buffered", "buffer_size": 3}
    assert api.get("/status")["queue_size"] == 2
    assert api.send(1, env, 4) == {"status": "buffered", "buffer_size": 0}
    assert api.get("/status")["queue_size"] == 4


def test_groups_can_be_posted_as_a_list(api):
    api.start()
    env = api.add_env()
    response = api.post("/scored_data_list", [group(4, env), group(3, env), group(4, env)])
    assert response == {"status": "received", "groups_processed": 3, "buffered": 1, "last_buffer_size": 3}
    assert api.post("/scored_data_list", [group(4)]) == {"status": "received", "groups_processed": 1}
    assert api.get("/status")["queue_size"] == 3


def test_the_latest_example_is_the_last_group(api):
    api.start()
    api.send(4, mark=1)
    api.send(4, mark=2)
    assert api.get("/latest_example")["tokens"][0][0] == 2


def test_lengths_are_not_checked(api):
    api.start()
    uneven = {"tokens": [[1], [2]], "masks": [[1, 2, 3]], "scores": [0, 1, 2]}
    assert api.post("/scored_data", uneven) == {"status": "received"}


@pytest.mark.parametrize(
    "wrong",
    [
        {"tokens": "text"},
        {"tokens": [["a"]]},
        {"scores": None},
        {"inference_logprobs": [0.5]},
        {"overrides": [1]},
    ],
)
def test_malformed_groups_are_rejected(api, wrong):
    api.start()
    assert api.call("POST", "/scored_data", {**group(4), **wrong})[0] == 422
    assert api.get("/status")["queue_size"] == 0


def test_request_bodies_may_be_gzipped(api):
    api.start()
    assert api.call("POST", "/scored_data", group(8), gzipped=True) == (200, {"status": "received"})
    headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
    with pytest.raises(HTTPError) as refused:
        urlopen(Request(api.url + "/scored_data", b"no gzip at all", headers), timeout=60)
    assert refused.value.code == 400


def test_long_responses_are_gzipped_on_request(api):
    api.start(batch_size=64)
    api.send(64, mark=5)
    with urlopen(Request(api.url + "/batch", headers={"Accept-Encoding": "gzip"}), timeout=60) as response:
        assert response.headers["Content-Encoding"] == "gzip"
        body = json.loads(gzip.decompress(response.read()))
    assert body["batch"][0]["tokens"][0] == [5, 7, 9]


@pytest.mark.parametrize("text", [b'"\\ud800"', b'"\xff"', b'"\xed\xa0\x80"'])
def test_text_that_utf_8_cannot_encode_is_rejected_where_it_is_kept(text):
    server = ServerThread(create_app(hosts=Hosts("127.0.0.1")), "127.0.0.1", [0])
    api = Client(f"http://127.0.0.1:{server.ports[0]}")
    body = json.dumps({**REGISTRATION, "wandb_group": 0}).replace('"wandb_group": 0', '"wandb_group": %s').encode()
    assert api.call("POST", "/register", body.replace(b"%s", text))[0] == 422
    api.start(batch_size=4)
    body = json.dumps({**group(4, mark=1), "messages": 0}).replace('"messages": 0', '"messages": %s').encode()
    status, _ = api.call("POST", "/scored_data", body.replace(b"%s", text))
    assert status in (200, 422), "messages are not kept"
    api.send(4, mark=2)
    assert api.batch_marks() == [1 if status == 200 else 2]
    server.close()


def test_a_rejection_is_printed_at_most_every_ten_seconds(capfd):
    server = ServerThread(create_app(hosts=Hosts("127.0.0.1")), "127.0.0.1", [0])
    api = Client(f"http://127.0.0.1:{server.ports[0]}")
    api.start(batch_size=8)
    for _ in range(2):
        assert api.call("POST", "/scored_data", group(3))[0] == 422
    server.close()
    [line] = capfd.readouterr().err.splitlines()
    assert line.startswith("rejected POST /scored_data with 422: a group of 3 sequences can never be served")


@pytest.mark.parametrize(("host", "warns"), [("0.0.0.0", True), ("10.0.0.7", True), ("127.0.0.1", False)])
def test_a_server_for_other_machines_without_a_key_warns(monkeypatch, capsys, host, warns):
    monkeypatch.setattr(api_module.uvicorn, "run", lambda *_, **settings: None)
    api_module.main(["--host", host])
    assert (f"warning: --host={host}: every machine" in capsys.readouterr().err) == warns
    monkeypatch.setenv("API_KEY", "x")
    api_module.main(["--host", host, "--api-key-variable", "API_KEY"])
    assert capsys.readouterr().err == ""


def test_a_key_that_is_not_set_is_an_error_of_one_line(monkeypatch, capsys):
    monkeypatch.delenv("API_KEY", raising=False)
    with pytest.raises(SystemExit):
        api_module.main(["--api-key-variable", "API_KEY"])
    assert capsys.readouterr().err == "error: --api-key-variable=API_KEY: this environment variable is not set\n"


def test_true_and_false_are_scores(api):
    api.start()
    assert api.post("/scored_data", {**group(8), "scores": [True, False] * 4}) == {"status": "received"}
    assert api.get("/batch")["batch"][0]["scores"] == [1.0, 0.0] * 4
