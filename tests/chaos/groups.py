"""10,000 bad groups posted to a real API server, among good ones: no run ends, and every good group is trained."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import ExitStack
from functools import reduce
from http.client import HTTPConnection
from operator import or_

import hypothesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from colocated_grpo.atropos.reader import ReceivedGroup
from colocated_grpo.tools.make_model import build_char_tokenizer
from colocated_grpo.tracking import files
from colocated_grpo.types import JsonObject
from tests.chaos.generators import schema_of, valid
from tests.chaos.trial import Trial
from tests.support.servers import EMBEDDED, HAS_ATROPOS, UPSTREAM, ApiProcess, free_port
from tests.support.training_runs import ForkedRun, Settings, TrainingRun, tiny_model
from tests.support.training_runs import settings as run_settings

TARGET = 10_000
SIZE = 4
GROUPS, GOOD = 64, 4
"""Groups of a batch, and the good ones among them."""
PROMPT, LENGTH = 2, 6
DIGITS = [build_char_tokenizer().convert_tokens_to_ids(digit) for digit in "0123456789"]
"""Tokens of which the completion of a good group consists: its number in decimal."""
LAST_SECONDS = 300.0
FILL_SECONDS = 0.05
ALL = list(HealthCheck)


def good(number: int) -> JsonObject:
    """Return a valid group whose completions consist of the digits of `number`, so that it is found again."""
    return _group([1, 2, *(DIGITS[int(digit)] for digit in f"{number:04d}")])


def _group(row: list[int]) -> JsonObject:
    return {
        "tokens": [row] * SIZE,
        "masks": [[-100] * PROMPT + row[PROMPT:]] * SIZE,
        "scores": [float(one) for one in range(SIZE)],
        "inference_logprobs": [[1.0] * PROMPT + [-2.0] * (LENGTH - PROMPT)] * SIZE,
        "env_id": None,
    }


UNNUMBERED = _group([1, 2, 3, 3, 3, 3])


def bad(sizes: Collection[int]) -> st.SearchStrategy[JsonObject]:
    """Return groups with up to three fields that have the types of `ReceivedGroup` and any other content.

    sizes: numbers of sequences.
    """
    schema = schema_of(ReceivedGroup)
    definitions = schema["$defs"]
    fields = definitions[ReceivedGroup.__name__]["properties"]

    def replaced(name: str) -> st.SearchStrategy[JsonObject]:
        return valid(fields[name], definitions).map(lambda value: {name: value})

    def one_replaced(name: str) -> st.SearchStrategy[JsonObject]:
        """The other sequences of the group stay good, and are trained."""
        return valid(fields[name], definitions).map(lambda rows: {name: [*rows[:1], *UNNUMBERED[name]][:SIZE]})

    changes = st.one_of(
        st.sampled_from(sorted(fields)).flatmap(replaced),
        st.sampled_from(["tokens", "masks", "scores"]).flatmap(one_replaced),
    )
    changed = st.lists(changes, min_size=1, max_size=3).map(lambda each: reduce(or_, each, UNNUMBERED))
    return changed.filter(lambda each: len(each["tokens"]) in sizes)


def attack(trial: Trial) -> JsonObject:
    """Post to both servers, to each for half of the time."""
    servers = {"run-api of atroposlib": UPSTREAM} if HAS_ATROPOS else {}
    servers |= {"python -m colocated_grpo.atropos.api": EMBEDDED}
    figures = {}
    for number, (name, command) in enumerate(servers.items()):
        until = trial.seconds_left() * (1 - 1 / (len(servers) - number))
        figures[name] = _attack(trial, name, command, until)
        trial.say(f"{name}: {json.dumps(figures[name])}")
    return {
        "what": f"generated groups, {GROUPS - GOOD} of each {GROUPS} groups in the queue, and the training on the rest",
        "target_bad_groups": TARGET,
        "servers": figures,
    }


def _attack(trial: Trial, name: str, command: list[str], until: float) -> JsonObject:
    """until: seconds that are left of the trial at the end."""
    # With atroposlib's server, a group of another size stops all batches for ever.
    sizes = [SIZE] if command is UPSTREAM else range(1, 2 * GROUPS)
    with ExitStack() as stack:
        api = stack.enter_context(ApiProcess(command))
        run = stack.enter_context(ForkedRun(trial.folder / f"groups-{api.port}", _settings(api.url)))
        feed = Feed(api.port, run)
        run.wait_until(lambda: feed.batch_size() == GROUPS * SIZE)

        @hypothesis.seed(trial.seed)
        @settings(max_examples=TARGET, database=None, deadline=None, phases=[Phase.generate], suppress_health_check=ALL)
        @given(bad(sizes))
        def post(group: JsonObject) -> None:
            if trial.seconds_left() > until or not feed.num_good:
                feed.bad(group)

        post()
        feed.finish()
        run.terminate()
        code = run.wait(LAST_SECONDS)
    trial.check(code == 0, f"{name}: the run ended with {code}\n{run.tail()}")
    missing = [number for number in range(feed.num_good) if feed.found()[f"{number:04d}"] != SIZE]
    trial.check(not missing, f"{name}: {len(missing)} good groups were not trained once: {missing[:5]}")
    rows = run.rows(files.TRAIN)
    dropped = Counter({key: 0.0 for row in rows for key in row if key.startswith("atropos/dropped/")})
    for row in rows:
        dropped.update({key: row.get(key, 0.0) for key in dropped})
    return {
        "bad_groups": feed.statuses.total(),
        "responses": dict(feed.statuses),
        "good_groups": feed.num_good,
        "good_groups_not_trained": len(missing),
        "steps": len(rows),
        "exit_code_after_sigterm": code,
        "dropped_sequences": {key.rpartition("/")[2]: int(count) for key, count in sorted(dropped.items())},
    }


class Feed:
    """Posts bad groups to a server, and a few good ones between them."""

    def __init__(self, port: int, run: TrainingRun) -> None:
        self._client = HTTPConnection("127.0.0.1", port, timeout=60)
        self._run = run
        self._num_queued = 0
        """Bad groups since the last good ones."""
        self.statuses: Counter[str] = Counter()
        self.num_good = 0

    def bad(self, group: JsonObject) -> None:
        status = self._post(group)
        self.statuses[status] += 1
        self._num_queued += status == "200"
        if self._num_queued == GROUPS - GOOD:
            self._num_queued = 0
            for number in range(self.num_good, self.num_good + GOOD):
                assert self._post(good(number)) == "200", f"good group {number} was refused"
            self.num_good += GOOD
            steps = self._num_steps()
            self._fill_up(lambda: self._num_steps() > steps)

    def finish(self) -> None:
        """Wait until all good groups are trained."""
        self._fill_up(
            lambda: len(self.found().keys() & {f"{each:04d}" for each in range(self.num_good)}) == self.num_good
        )

    def found(self) -> Counter[str]:
        """Return how many sequences of each good group were trained, by its number."""
        rollouts = files.read_rollouts(self._run.folder)
        return Counter(row["completion"] for row in rollouts if row["kind"] == files.TRAIN)

    def batch_size(self) -> int:
        """Return the batch size that the trainer has registered; -1 before."""
        self._client.request("GET", "/info")
        return json.loads(self._client.getresponse().read())["batch_size"]

    def _num_steps(self) -> int:
        return len(self._run.rows(files.TRAIN))

    def _fill_up(self, happened: Callable[[], bool]) -> None:
        """Post groups without a number until something has happened: generated ones may leave a batch incomplete."""
        deadline = time.monotonic() + LAST_SECONDS
        while not happened():
            assert time.monotonic() < deadline, f"no step for {LAST_SECONDS:g} s\n{self._run.tail()}"
            self._post(UNNUMBERED)
            time.sleep(FILL_SECONDS)

    def _post(self, group: JsonObject) -> str:
        """Post a group and return the status."""
        self._client.request("POST", "/scored_data", json.dumps(group), {"Content-Type": "application/json"})
        response = self._client.getresponse()
        response.read()
        if response.status == 500:
            self._client.close()  # as the server does then, without a word
        return str(response.status)


def _settings(url: str) -> Settings:
    entry = {"type": "atropos", "url": url, "server": {"port": free_port()}}
    return run_settings(
        tiny_model(),
        environments=[entry],
        rollout={"prompts_per_step": GROUPS, "group_size": SIZE},
        evaluation={"every": 0},
        checkpoint={"every": 0},
        tracking={"rollouts_per_step": GROUPS * SIZE},
        training_steps=100_000,
    )
