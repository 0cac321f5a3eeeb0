"""The trainer's side of Atropos' API, against the embedded server and atroposlib's own."""

from __future__ import annotations

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from colocated_grpo.atropos import source as source_module
from colocated_grpo.atropos.reader import Origin
from colocated_grpo.atropos.source import AtroposClient
from colocated_grpo.environments.base import EnvironmentSetupError
from colocated_grpo.errors import NothingUsable
from colocated_grpo.web import server
from colocated_grpo.web.client import Unavailable
from tests.support.atropos_source import BATCH_SIZE, TRAINER, SourceHarness, call_api, post_group
from tests.support.raw_server import raw_server, response
from tests.support.servers import APIS, EMBEDDED, UPSTREAM, ApiProcess, free_port, needs_atropos, until


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(source_module, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(source_module, "MAX_RETRY_SECONDS", 0.1)


def register_other(url: str, batch_size: int) -> None:
    numbers = {"max_token_len": 64, "save_checkpoint_interval": 1, "starting_step": 0, "num_steps": 1}
    words = {"wandb_group": "", "wandb_project": "", "checkpoint_dir": ""}
    call_api(url, "/register", {**words, **numbers, "batch_size": batch_size})


def test_environments_can_register_once_the_trainer_has(url):
    SourceHarness(url).start(5)
    assert call_api(url, "/info") == {"batch_size": BATCH_SIZE, "max_token_len": 64}
    env = {"max_token_length": 64, "desired_name": "toy", "weight": 1.0, "group_size": 4}
    registered = call_api(url, "/register-env", env)
    assert (registered["status"], registered["starting_step"], registered["checkpoint_dir"]) == ("success", 5, "runs/a")


def test_a_posted_group_is_received_and_counted(url):
    harness = SourceHarness(url)
    harness.start()
    post_group(url, 1)
    (group,) = harness.source.wait_for_groups(0, 3, harness.stop)
    assert [rollout.score.reward for rollout in group.rollouts] == [0, 1, 2, 3]
    assert group.rollouts[0].policy_version == 3
    assert harness.notes == []
    metrics = harness.source.metrics()
    assert (metrics["atropos/dropped"], metrics["atropos/unknown_origin"]) == (0, 1)
    assert (metrics["atropos/current_step"], metrics["atropos/queue_size"]) == (1, 0)


def test_no_batch_of_a_queue_is_lost(url):
    harness = SourceHarness(url)
    harness.start()
    for mark in range(3):
        post_group(url, mark)
    assert sorted(harness.train_batch() for _ in range(3)) == [[0], [1], [2]]


def test_batches_have_a_longer_timeout_than_other_calls():
    """The server has removed the batch from its queue, so a client that times out loses it."""
    written = threading.Event()

    class Slow(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            written.wait(120)
            with suppress(BrokenPipeError):
                self.wfile.write(response(b'{"batch": [1]}'))

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Slow)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    client = AtroposClient(f"http://127.0.0.1:{server.server_port}", TRAINER, may_reset=False, timeout=0.05)
    with ThreadPoolExecutor(1) as thread:
        batch = thread.submit(client.batch)
        for _ in range(2):  # the timeout of other calls passes twice
            with pytest.raises(Unavailable, match="timed out"):
                client.status()
        written.set()
        assert batch.result(120) == [1]
    server.shutdown()
    server.server_close()


def test_waiting_ends_at_a_stop_request(url):
    harness = SourceHarness(url)
    harness.start()
    harness.stop.set()
    assert harness.train_batch() is None


def test_a_restarted_trainer_gets_what_was_posted_before(url):
    SourceHarness(url).start()
    post_group(url, 8)
    again = SourceHarness(url)
    again.start(4)
    assert again.train_batch() == [8]
    assert again.notes == []


def test_a_conflicting_registration_is_an_error_of_one_line(url):
    register_other(url, 6)
    with pytest.raises(
        EnvironmentSetupError, match=r"batch_size=6 .* needs batch_size=4 .* reset: true in the atropos entry"
    ):
        SourceHarness(url).start()
    assert call_api(url, "/info")["batch_size"] == 6


def test_reset_replaces_a_conflicting_registration(url):
    register_other(url, 6)
    harness = SourceHarness(url, reset=True)
    harness.start()
    assert call_api(url, "/info")["batch_size"] == BATCH_SIZE
    post_group(url, 2)
    assert harness.train_batch() == [2]


@pytest.mark.parametrize(
    ("command", "kept"),
    [
        pytest.param(EMBEDDED, [1], id="embedded"),
        pytest.param(UPSTREAM, [], id="atroposlib", marks=needs_atropos),
    ],
)
def test_a_group_posted_before_the_trainer_does_not_spoil_the_registration(command, kept):
    """On a server without an earlier trainer. Only the embedded one keeps that group."""
    with ApiProcess(command) as fresh:
        post_group(fresh.url, 1)
        harness = SourceHarness(fresh.url)
        harness.start()
        assert call_api(fresh.url, "/info")["batch_size"] == BATCH_SIZE
        post_group(fresh.url, 2)
        assert [harness.train_batch() for _ in range(len(kept) + 1)] == [*([mark] for mark in kept), [2]]


def test_the_trainer_registers_again_after_a_reset(url):
    harness = SourceHarness(url)
    harness.start()
    call_api(url, "/reset_data")
    thread = threading.Thread(target=lambda: results.append(harness.train_batch()))
    results: list[Any] = []
    thread.start()
    until(lambda: call_api(url, "/info")["batch_size"] == BATCH_SIZE)
    post_group(url, 3)
    thread.join(120)
    assert results == [[3]]
    assert any("registered again" in note for note in harness.notes)
    assert harness.source.metrics()["atropos/reconnects"] == 1


@pytest.mark.parametrize("command", APIS)
def test_the_trainer_registers_again_with_a_restarted_server(command):
    with ApiProcess(command) as server:
        harness = SourceHarness(server.url)
        harness.start()
        post_group(server.url, 1)
        assert harness.train_batch() == [1]
        server.kill()
        results: list[Any] = []
        thread = threading.Thread(target=lambda: results.append(harness.train_batch()))
        thread.start()
        until(lambda: harness.notes)
        server.start()
        until(lambda: call_api(server.url, "/info")["batch_size"] == BATCH_SIZE)
        post_group(server.url, 2)
        thread.join(120)
    assert results == [[2]]
    assert "no batch from" in harness.notes[0]
    assert len([note for note in harness.notes if "registered again" in note]) == 1


def test_a_server_may_be_down_when_the_trainer_begins():
    with ApiProcess(EMBEDDED) as server:
        harness = SourceHarness(server.url)
        harness.source.connect()
        server.kill()
        harness.source.fetch(0)
        assert "no batch from" in harness.notes[0]
        server.start()
        with ThreadPoolExecutor(1) as thread:
            trained = thread.submit(harness.train_batch)
            until(lambda: call_api(server.url, "/info")["batch_size"] == BATCH_SIZE)
            post_group(server.url, 2)
            assert trained.result(120) == [2]


@pytest.mark.parametrize("queue_size", ["null", '"many"', "[]", "true", "1e999", "NaN", "-1", "1" + "0" * 400])
def test_a_status_without_numbers_is_unavailable(queue_size):
    body = f'{{"current_step": 1, "queue_size": {queue_size}}}'
    with raw_server(response(body.encode())) as url, pytest.raises(Unavailable, match="is not that of Atropos' API"):
        AtroposClient(url, TRAINER, may_reset=False).status()


def test_a_missing_server_is_an_error_of_one_line():
    harness = SourceHarness(f"http://127.0.0.1:{free_port()}", connect_timeout=0.05)
    with pytest.raises(EnvironmentSetupError, match=r"no Atropos API there, within 0.05 s .* start run-api"):
        harness.start()


def test_dropped_sequences_are_logged_and_counted(url):
    harness = SourceHarness(url)
    harness.start()
    post_group(url, 1, scores=[0.0, 1.0, 2.0])
    assert harness.train_batch() == [1]
    assert harness.notes == ["atropos: dropped 1 sequences of a client without env_id: 1 scores"]
    assert harness.source.metrics()["atropos/dropped/scores"] == 1


def test_a_batch_without_a_valid_sequence_is_skipped(url):
    harness = SourceHarness(url)
    harness.start()
    post_group(url, 2, images=["x"])
    thread = threading.Thread(target=lambda: results.append(harness.train_batch()))
    results: list[Any] = []
    thread.start()
    until(lambda: harness.kept)
    post_group(url, 1)
    thread.join(120)
    assert results == [[1]]
    assert [batch[0]["tokens"][0][0] for batch in harness.kept] == [2, 1], "every batch as received"


def test_a_long_time_without_a_valid_sequence_ends_the_run(url):
    harness = SourceHarness(url, unusable_timeout=1e-9)
    harness.start()
    for _ in range(3):
        post_group(url, 1, images=["x"], env_id=3)
    with pytest.raises(NothingUsable, match=r"can be trained: dropped 8 sequences of environment 3: 8 images"):
        harness.train_batch()
    assert len(harness.source.state_dict()["taken"]) == 0, "a resumed run does not meet these batches again"


def test_a_long_time_without_logprobs_ends_the_run_with_the_sentence_of_atropos_own_trainer(url):
    harness = SourceHarness(url, unusable_timeout=1e-9)
    harness.start()
    for _ in range(2):
        post_group(url, 1, inference_logprobs=None)
    with pytest.raises(NothingUsable, match=r"^GRPO requires inference_logprobs for importance sampling! .*managed"):
        harness.train_batch()


def test_a_client_that_floods_the_server_with_invalid_groups_does_not_end_the_run(url, monkeypatch):
    monkeypatch.setattr(server, "NOTE_SECONDS", 3600.0)
    harness = SourceHarness(url, unusable_timeout=1e-9)
    harness.start()
    for mark in range(5):
        post_group(url, mark, inference_logprobs=None)
        post_group(url, mark)
    for _ in range(5):
        harness.train_batch()
    assert len(harness.notes) == 1, "one line in NOTE_SECONDS"
    assert harness.source.metrics()["atropos/dropped/missing_logprobs"] == 4


def test_a_queue_that_forms_no_batch_is_explained_in_the_log(url, monkeypatch):
    monkeypatch.setattr(source_module, "EXPLAIN_SECONDS", 0.0)
    harness = SourceHarness(url)
    harness.start()
    post_group(url, 1, size=2)
    assert "holds 1 groups; batches are made of whole groups" in first_note_while_waiting(harness)


def test_a_long_wait_is_reported_with_its_seconds_each_time_it_has_doubled(url, monkeypatch):
    clock = SimpleNamespace(monotonic=partial(next, count(0.0, 20.0)))
    harness = SourceHarness(url)
    harness.start()
    monkeypatch.setattr(source_module, "time", clock)
    first_note_while_waiting(harness, notes=3)
    waits = [re.search(r"no batch for (\d+) s; .* holds 0 groups", note)[1] for note in harness.notes[:3]]
    assert waits == ["80", "140", "260"]


def test_environments_that_sample_and_post_nothing_are_told_from_missing_ones(url, monkeypatch):
    monkeypatch.setattr(source_module, "EXPLAIN_SECONDS", 0.0)
    harness = SourceHarness(url)
    harness.start()
    origin = Origin(temperature=1.0, policy_version=0, finish_reason="stop")
    harness.source.reader.origins.remember([1], [2], origin)
    assert "environments have sampled here, but post no group: " in first_note_while_waiting(harness)


@needs_atropos
def test_a_group_that_blocks_run_api_is_explained_in_the_log(monkeypatch):
    monkeypatch.setattr(source_module, "EXPLAIN_SECONDS", 0.0)
    with ApiProcess(UPSTREAM) as api:
        harness = SourceHarness(api.url)
        harness.start()
        for _ in range(5):
            post_group(api.url, 1)
        post_group(api.url, 2, size=BATCH_SIZE + 1)
        note = first_note_while_waiting(harness)
    assert "holds 6 groups" in note
    assert "a group of another size" in note and "blocks all others" in note


def first_note_while_waiting(harness: SourceHarness, notes: int = 1) -> str:
    thread = threading.Thread(target=harness.train_batch)
    thread.start()
    until(lambda: len(harness.notes) >= notes)
    harness.stop.set()
    thread.join(120)
    return harness.notes[0]


def test_a_checkpoint_of_other_environments_is_an_error_of_one_line(url):
    with pytest.raises(EnvironmentSetupError, match="the checkpoint is from a run with other environments"):
        SourceHarness(url).source.load_state_dict({"sampled": {}, "served": {}})


def test_prompt_indices_continue_after_a_resume(url):
    harness = SourceHarness(url)
    harness.start()
    post_group(url, 1)
    harness.train_batch()
    again = SourceHarness(url)
    again.source.load_state_dict(harness.source.state_dict())
    again.start(1)
    post_group(url, 2)
    (group,) = again.source.wait_for_groups(1, 0, again.stop)
    assert group.prompt.index == 1
