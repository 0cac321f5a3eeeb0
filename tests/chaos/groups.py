"""10,000 bad groups posted to a real API server, among good ones: no run ends, and every good group is trained."""

from __future__ import annotations

import copy
import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from http.client import HTTPConnection
from typing import Any

from colocated_grpo.tools.make_model import build_char_tokenizer
from colocated_grpo.tracking import files
from colocated_grpo.types import JsonObject
from tests.chaos.trial import Trial
from tests.support.servers import EMBEDDED, HAS_ATROPOS, UPSTREAM, ApiProcess, free_port
from tests.support.training_runs import ForkedRun, Settings, TrainingRun, settings, tiny_model

TARGET = 10_000
SIZE = 4
GROUPS, GOOD = 64, 4
"""Groups of a batch, and the good ones among them."""
STEPS_AT_ONCE = 10
PROMPT, LENGTH = 2, 6
DIGITS = [build_char_tokenizer().convert_tokens_to_ids(digit) for digit in "0123456789"]
"""Tokens of which the completion of a good group consists: its number in decimal."""
LAST_SECONDS = 300.0


def good(number: int) -> JsonObject:
    """Return a valid group whose completions consist of the digits of `number`, so that it is found again."""
    row = [1, 2, *(DIGITS[int(digit)] for digit in f"{number:04d}")]
    return {
        "tokens": [row] * SIZE,
        "masks": [[-100] * PROMPT + row[PROMPT:]] * SIZE,
        "scores": [float(one) for one in range(SIZE)],
        "inference_logprobs": [[1.0] * PROMPT + [-2.0] * (LENGTH - PROMPT)] * SIZE,
        "env_id": None,
    }


Change = Callable[[JsonObject, random.Random], Any]


def _rows(name: str, row: Sequence[Any]) -> Change:
    return lambda group, chance: group.update({name: [list(row)] * SIZE})


def _key(name: str, value: Any) -> Change:
    return lambda group, chance: group.update({name: value})


def _one_row(name: str, row: Sequence[Any]) -> Change:
    """Change one sequence: the other three of the group stay good, and are trained."""

    def change(group: JsonObject, chance: random.Random) -> None:
        group[name] = [*group[name]]
        group[name][chance.randrange(SIZE)] = list(row)

    return change


CHANGES: dict[str, Change] = {
    "no log-probabilities": _key("inference_logprobs", None),
    "log-probabilities of no sequence": _key("inference_logprobs", []),
    "log-probabilities of one sequence": lambda group, chance: group.update(
        inference_logprobs=[group["inference_logprobs"][0]]
    ),
    "short log-probabilities": _rows("inference_logprobs", [-1.0]),
    "positive log-probabilities": _rows("inference_logprobs", [5.0] * LENGTH),
    "filled log-probabilities": _rows("inference_logprobs", [-9999.0] * LENGTH),
    "huge log-probabilities": _rows("inference_logprobs", [-1e308] * LENGTH),
    "negative tokens": _rows("tokens", [-1] * LENGTH),
    "tokens beyond the vocabulary": _rows("tokens", [1 << 40] * LENGTH),
    "tokens beyond every integer": _rows("tokens", [1 << 70] * LENGTH),
    "no tokens": _rows("tokens", []),
    "long sequences": _rows("tokens", [3] * 5000),
    "other masks": _rows("masks", [-100, -100, 4, 5, 6, 7]),
    "nothing trained": _rows("masks", [-100] * LENGTH),
    "short masks": _rows("masks", [-100]),
    "no masks": _key("masks", []),
    "no scores": _key("scores", []),
    "too few scores": _key("scores", [1.0]),
    "huge scores": _key("scores", [1e300] * SIZE),
    "scores of text": _key("scores", ["a"] * SIZE),
    "advantages of one sequence": _key("advantages", [[1.0] * LENGTH]),
    "huge advantages": _rows("advantages", [1e300] * LENGTH),
    "short reference": _rows("ref_logprobs", [-1.0]),
    "odd temperature": _key("generation_params", {"temperature": -3}),
    "temperature of text": _key("group_overrides", {"temperature": "hot"}),
    "overrides of one sequence": _key("overrides", [{"temperature": 1e9}]),
    "images": _key("images", ["data:image/png;base64,AAAA"] * SIZE),
    "messages without content": _key("messages", [[{"role": "user"}]] * SIZE),
    "an unknown environment": _key("env_id", 12345),
    "a negative environment": _key("env_id", -7),
    "tokens of text": _key("tokens", "abc"),
    "nested tokens": _key("tokens", [[[1]]] * SIZE),
    "null": _key("tokens", None),
    "one sequence too many": lambda group, chance: [
        group[name].append(group[name][0]) for name in ("tokens", "masks", "scores", "inference_logprobs")
    ],
    "one bad sequence": _one_row("tokens", [-1] * LENGTH),
    "one short sequence": _one_row("inference_logprobs", [-1.0]),
}
STALLING = "one sequence too many"
"""Not for atroposlib's server, where a group of five stops all batches of 256 sequences for ever."""


def attack(trial: Trial) -> JsonObject:
    """Post to both servers, to each for half of the time."""
    servers = {"run-api of atroposlib": UPSTREAM} if HAS_ATROPOS else {}
    servers |= {"python -m colocated_grpo.atropos.api": EMBEDDED}
    figures = {}
    for number, (name, command) in enumerate(servers.items()):
        figures[name] = _attack(trial, name, command, trial.seconds_left() / (len(servers) - number))
        trial.say(f"{name}: {json.dumps(figures[name])}")
    return {
        "what": f"bad groups of {len(CHANGES)} kinds, {GROUPS - GOOD} of each {GROUPS} groups in the queue, and the "
        "training on the rest",
        "target_bad_groups": TARGET,
        "servers": figures,
    }


def _attack(trial: Trial, name: str, command: list[str], seconds: float) -> JsonObject:
    kinds = [kind for kind in CHANGES if command is not UPSTREAM or kind != STALLING]
    statuses: Counter[str] = Counter()
    num_good = 0
    deadline = trial.seconds_left() - seconds
    with ExitStack() as stack:
        api = stack.enter_context(ApiProcess(command))
        client = HTTPConnection("127.0.0.1", api.port, timeout=60)
        run = stack.enter_context(ForkedRun(trial.folder / f"groups-{api.port}", _settings(api.url)))
        run.wait_until(lambda: _batch_size(client) == GROUPS * SIZE)
        while statuses.total() < TARGET and (trial.seconds_left() > deadline or not num_good):
            for _ in range(STEPS_AT_ONCE):
                num_queued = 0
                while num_queued < GROUPS - GOOD:
                    status = _post(client, _bad(trial.random.choice(kinds), trial.random))
                    statuses[status] += 1
                    num_queued += status == "200"
                for number in range(num_good, num_good + GOOD):
                    trial.check(_post(client, good(number)) == "200", f"{name}: good group {number} was refused")
                num_good += GOOD
            run.wait_until(lambda steps=num_good // GOOD: len(run.rows(files.TRAIN)) >= steps)
            client.close()  # the server closes idle connections; the next request opens another
        run.terminate()
        code = run.wait(LAST_SECONDS)
    trial.check(code == 0, f"{name}: the run ended with {code}\n{run.tail()}")
    found = _good_groups(run)
    missing = [number for number in range(num_good) if found[f"{number:04d}"] != SIZE]
    trial.check(not missing, f"{name}: {len(missing)} good groups were not trained once: {missing[:5]}")
    rows = run.rows(files.TRAIN)
    dropped = Counter({key: 0.0 for row in rows for key in row if key.startswith("atropos/dropped/")})
    for row in rows:
        dropped.update({key: row.get(key, 0.0) for key in dropped})
    return {
        "bad_groups": statuses.total(),
        "responses": dict(statuses),
        "good_groups": num_good,
        "good_groups_not_trained": len(missing),
        "steps": len(rows),
        "exit_code_after_sigterm": code,
        "dropped_sequences": {key.rpartition("/")[2]: int(count) for key, count in sorted(dropped.items())},
    }


def _settings(url: str) -> Settings:
    entry = {"type": "atropos", "url": url, "server": {"port": free_port()}}
    return settings(
        tiny_model(),
        environments=[entry],
        rollout={"prompts_per_step": GROUPS, "group_size": SIZE},
        evaluation={"every": 0},
        checkpoint={"every": 0},
        tracking={"rollouts_per_step": GROUPS * SIZE},
        training_steps=100_000,
    )


def _bad(kind: str, chance: random.Random) -> JsonObject:
    group = copy.deepcopy(good(0))
    row = [1, 2, 3, 3, 3, 3]
    group["tokens"] = [row] * SIZE
    group["masks"] = [[-100] * PROMPT + row[PROMPT:]] * SIZE
    CHANGES[kind](group, chance)
    return group


def _post(client: HTTPConnection, group: JsonObject) -> str:
    """Post a group and return the status."""
    client.request("POST", "/scored_data", json.dumps(group), {"Content-Type": "application/json"})
    response = client.getresponse()
    response.read()
    if response.status == 500:
        client.close()  # as the server does then, without a word
    return str(response.status)


def _batch_size(client: HTTPConnection) -> int:
    """Return the batch size that the trainer has registered; -1 before."""
    client.request("GET", "/info")
    return json.loads(client.getresponse().read())["batch_size"]


def _good_groups(run: TrainingRun) -> Counter[str]:
    """Return how many sequences of each good group were trained, by its number."""
    return Counter(row["completion"] for row in files.read_rollouts(run.folder) if row["kind"] == files.TRAIN)
