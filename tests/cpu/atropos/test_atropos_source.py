"""The trainer's side of Atropos' API, against the embedded server and atroposlib's own."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from colocated_grpo.atropos import source as source_module
from colocated_grpo.atropos.client import AtroposClient
from colocated_grpo.environments.base import EnvironmentSetupError
from colocated_grpo.errors import RunError
from colocated_grpo.web.client import Unavailable
from tests.support.atropos_trial import BATCH, TRAINER, Trial, ask, send
from tests.support.raw_server import raw_server, response
from tests.support.servers import APIS, EMBEDDED, UPSTREAM, ApiProcess, free_port, needs_atropos, until


@pytest.fixture(autouse=True)
def hurried(monkeypatch):
    monkeypatch.setattr(source_module, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(source_module, "LONGEST_PAUSE", 0.1)


def register_other(url: str, batch_size: int) -> None:
    numbers = {"max_token_len": 64, "save_checkpoint_interval": 1, "starting_step": 0, "num_steps": 1}
    words = {"wandb_group": "", "wandb_project": "", "checkpoint_dir": ""}
    ask(url, "/register", {**words, **numbers, "batch_size": batch_size})


def test_a_trainer_registers_and_lets_environments_in(url):
    Trial(url).start(5)
    assert ask(url, "/info") == {"batch_size": BATCH, "max_token_len": 64}
    env = {"max_token_length": 64, "desired_name": "toy", "weight": 1.0, "group_size": 4}
    answer = ask(url, "/register-env", env)
    assert (answer["status"], answer["starting_step"], answer["checkpoint_dir"]) == ("success", 5, "runs/a")


def test_groups_arrive(url):
    trial = Trial(url)
    trial.start()
    send(url, 1)
    (group,) = trial.source.wait_for_groups(0, 3, trial.stop)
    assert [rollout.score.reward for rollout in group.rollouts] == [0, 1, 2, 3]
    assert group.rollouts[0].policy_version == 3
    assert trial.notes == []
    metrics = trial.source.metrics()
    assert (metrics["atropos/dropped"], metrics["atropos/unknown_origin"]) == (0, 1)
    assert (metrics["atropos/current_step"], metrics["atropos/queue_size"]) == (1, 0)


def test_batches_formed_at_once_come_newest_first_and_none_is_lost(url):
    trial = Trial(url)
    trial.start()
    for mark in range(3):
        send(url, mark)
    assert [trial.marks() for _ in range(3)] == [[2], [1], [0]]


def test_a_batch_that_takes_long_to_write_is_waited_for():
    """The server has taken it off its queue: whoever gives up loses it."""
    written = threading.Event()

    class Slow(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            written.wait(5)
            with suppress(BrokenPipeError):
                self.wfile.write(response(b'{"batch": [1]}'))

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Slow)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    client = AtroposClient(f"http://127.0.0.1:{server.server_port}", TRAINER, may_reset=False, timeout=0.05)
    with ThreadPoolExecutor(1) as thread:
        batch = thread.submit(client.batch)
        for _ in range(2):  # patience for one answer passes twice
            with pytest.raises(Unavailable, match="timed out"):
                client.status()
        written.set()
        assert batch.result(5) == [1]
    server.shutdown()
    server.server_close()


def test_nothing_comes_until_it_is_told_to_stop(url):
    trial = Trial(url)
    trial.start()
    trial.stop.set()
    assert trial.marks() is None


def test_what_was_posted_before_a_restarted_trainer_is_still_there(url):
    Trial(url).start()
    send(url, 8)
    again = Trial(url)
    again.start(4)
    assert again.marks() == [8]
    assert again.notes == []


def test_a_batch_size_that_somebody_else_has_registered_is_refused_in_one_line(url):
    register_other(url, 6)
    with pytest.raises(
        EnvironmentSetupError, match=r"batch_size=6 .* needs batch_size=4 .* reset: true in the atropos entry"
    ):
        Trial(url).start()
    assert ask(url, "/info")["batch_size"] == 6


def test_a_reset_that_was_allowed_replaces_it(url):
    register_other(url, 6)
    trial = Trial(url, reset=True)
    trial.start()
    assert ask(url, "/info")["batch_size"] == BATCH
    send(url, 2)
    assert trial.marks() == [2]


@pytest.mark.parametrize(
    ("command", "kept"),
    [pytest.param(EMBEDDED, [1], id="embedded"), pytest.param(UPSTREAM, [], id="atroposlib", marks=needs_atropos)],
)
def test_a_group_posted_before_the_trainer_does_not_spoil_the_registration(command, kept):
    """On a server in its first minute; only the embedded one can still keep that group."""
    with ApiProcess(command) as fresh:
        send(fresh.url, 1)
        trial = Trial(fresh.url)
        trial.start()
        assert ask(fresh.url, "/info")["batch_size"] == BATCH
        send(fresh.url, 2)
        assert [trial.marks() for _ in range(len(kept) + 1)] == [*([mark] for mark in kept), [2]]


def test_a_reset_by_somebody_else_is_survived(url):
    trial = Trial(url)
    trial.start()
    ask(url, "/reset_data")
    thread = threading.Thread(target=lambda: results.append(trial.marks()))
    results: list[Any] = []
    thread.start()
    until(lambda: ask(url, "/info")["batch_size"] == BATCH)
    send(url, 3)
    thread.join(10)
    assert results == [[3]]
    assert any("registered again" in note for note in trial.notes)
    assert trial.source.metrics()["atropos/reconnects"] == 1


@pytest.mark.parametrize("command", APIS)
def test_a_killed_and_restarted_server_is_survived(command):
    with ApiProcess(command) as server:
        trial = Trial(server.url)
        trial.start()
        send(server.url, 1)
        assert trial.marks() == [1]
        server.kill()
        results: list[Any] = []
        thread = threading.Thread(target=lambda: results.append(trial.marks()))
        thread.start()
        until(lambda: trial.notes)
        server.start()
        until(lambda: ask(server.url, "/info")["batch_size"] == BATCH)
        send(server.url, 2)
        thread.join(10)
    assert results == [[2]]
    assert "no batch from" in trial.notes[0]
    assert len([note for note in trial.notes if "registered again" in note]) == 1


def test_a_server_that_goes_away_while_the_engines_are_built_is_survived():
    with ApiProcess(EMBEDDED) as server:
        trial = Trial(server.url)
        trial.source.connect()
        server.kill()
        trial.source.begin(0)
        assert "could not register" in trial.notes[0]
        server.start()
        with ThreadPoolExecutor(1) as thread:
            marks = thread.submit(trial.marks)
            until(lambda: ask(server.url, "/info")["batch_size"] == BATCH)
            send(server.url, 2)
            assert marks.result(10) == [2]


@pytest.mark.parametrize("queue_size", ["null", '"many"', "[]", "true", "1e999", "NaN", "-1", "1" + "0" * 400])
def test_a_status_without_numbers_is_no_answer(queue_size):
    body = f'{{"current_step": 1, "queue_size": {queue_size}}}'
    with raw_server(response(body.encode())) as url, pytest.raises(Unavailable, match="does not answer as Atropos"):
        AtroposClient(url, TRAINER, may_reset=False).status()


def test_no_server_at_all_is_said_in_one_line():
    trial = Trial(f"http://127.0.0.1:{free_port()}", connect_timeout=0.05)
    with pytest.raises(EnvironmentSetupError, match=r"no Atropos API there, within 0.05 s .* start run-api"):
        trial.start()


def test_bad_sequences_are_told_counted_and_left_out(url):
    trial = Trial(url)
    trial.start()
    send(url, 1, scores=[0.0, 1.0, 2.0])
    assert trial.marks() == [1]
    assert trial.notes == ["atropos: left out 1 sequences: 1 scores"]
    assert trial.source.metrics()["atropos/dropped/scores"] == 1


def test_a_batch_without_anything_usable_is_passed_over(url):
    trial = Trial(url)
    trial.start()
    send(url, 1)
    send(url, 2, images=["x"])
    assert trial.marks() == [1]
    assert [batch[0]["tokens"][0][0] for batch in trial.kept] == [2, 1], "as they came, what cannot be trained too"


def test_environments_that_never_send_anything_usable_end_the_run(url):
    trial = Trial(url)
    trial.start()
    for _ in range(source_module.UNUSABLE_BATCHES):
        send(url, 1, images=["x"])
    with pytest.raises(RunError, match=r"nothing that can be trained; .* 32 images"):
        trial.marks()


def test_a_queue_that_forms_no_batch_is_explained(url, monkeypatch):
    monkeypatch.setattr(source_module, "PATIENCE", 0.0)
    trial = Trial(url)
    trial.start()
    send(url, 1, size=3)
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(trial.marks()))
    thread.start()
    until(lambda: trial.notes)
    trial.stop.set()
    thread.join(10)
    assert "holds 1 groups; batches are made of whole groups" in trial.notes[0]


def test_a_checkpoint_of_other_environments_is_refused_in_one_line(url):
    with pytest.raises(EnvironmentSetupError, match="the checkpoint is of a run with other environments"):
        Trial(url).source.load_state_dict({"sampled": {}, "served": {}})


def test_the_count_of_groups_is_kept_over_a_restart(url):
    trial = Trial(url)
    trial.start()
    send(url, 1)
    trial.marks()
    again = Trial(url)
    again.source.load_state_dict(trial.source.state_dict())
    again.start(1)
    send(url, 2)
    (group,) = again.source.wait_for_groups(1, 0, again.stop)
    assert group.prompt.index == 1
