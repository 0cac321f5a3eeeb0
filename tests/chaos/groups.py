"""10,000 bad groups posted to a real API server, among good ones: no run ends, and every good group is trained.

Some are consistent, with numbers at the bounds of what is trained. Some of those for our own server are hostile JSON;
atroposlib's server, which has no bounds, gets only groups that it can send to the trainer.
"""

from __future__ import annotations

import json
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from itertools import chain

import hypothesis
import msgspec
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Flaky

from colocated_grpo.atropos.api import NOT_KEPT
from colocated_grpo.atropos.reader import (
    DUMMY_LOGPROB,
    LOGPROB_SLACK,
    MASKED,
    MAX_MAGNITUDE,
    MAX_TEMPERATURE,
    MIN_LOGPROB,
    ReceivedGroup,
)
from colocated_grpo.settings.generation import MIN_TEMPERATURE
from colocated_grpo.tools.make_model import build_char_tokenizer
from colocated_grpo.tracking import files
from colocated_grpo.types import JsonObject
from tests.chaos.generators import bodies, schema_of, valid, weighted
from tests.chaos.promises import MEMORY_MIB, SHOWN, TRACEBACK, family, forget_peaks, memory, peak_memory
from tests.chaos.sent import Json, Sent, call
from tests.chaos.trial import Trial
from tests.support.servers import EMBEDDED, HAS_ATROPOS, UPSTREAM, ApiProcess, free_port
from tests.support.training_runs import ForkedRun, Settings, TrainingRun, tiny_model
from tests.support.training_runs import settings as run_settings

TARGET, TURN = 10_000, 250
"""Bad groups for each server, and those between two looks at the clock."""
SIZE = 4
GROUPS, GOOD = 64, 4
"""Groups of a batch, and the good ones among them. One good group follows each 15 bad ones."""
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


@st.composite
def bad(draw: st.DrawFn, sizes: Collection[int]) -> JsonObject:
    """Draw a group with up to three fields that have the types of `ReceivedGroup` and any other content.

    sizes: numbers of sequences.
    """
    group = UNNUMBERED
    for kind, name in draw(st.lists(st.sampled_from(CHANGES), min_size=1, max_size=3)):
        value = draw(FIELDS[name])
        # The other sequences of the group stay good, and are trained.
        group = group | {name: [*value[:1], *UNNUMBERED[name]][:SIZE] if kind == "one sequence" else value}
    hypothesis.assume(len(group["tokens"]) in sizes)
    return group


SCHEMA = schema_of(ReceivedGroup)
PROPERTIES = SCHEMA["$defs"][ReceivedGroup.__name__]["properties"]
FIELDS = {name: valid(each, SCHEMA["$defs"]) for name, each in PROPERTIES.items()}
CHANGES = [("field", name) for name in FIELDS] + [("one sequence", name) for name in ("tokens", "masks", "scores")]
PROPERTIES |= {name: {} for name in msgspec.json.decode(b"{" + NOT_KEPT[1:])}
hostile = bodies(SCHEMA, UNNUMBERED)
"""Bodies of any type, size, nesting and order, with repeated and missing fields."""

BOUNDS = [0.0, -1e-45, LOGPROB_SLACK, MIN_LOGPROB, DUMMY_LOGPROB, MIN_TEMPERATURE, MAX_TEMPERATURE, MAX_MAGNITUDE]
numbers = weighted((3, st.floats(-4, 0)), (3, st.sampled_from([*BOUNDS, -MAX_MAGNITUDE])), (1, st.floats()))
overrides = st.fixed_dictionaries({}, optional={"temperature": numbers, "set_advantage_to_zero": st.booleans()})
MOST_TOKENS = 34
"""More than a sequence of the run."""


@st.composite
def consistent(draw: st.DrawFn, sizes: Sequence[int]) -> JsonObject:
    """Draw a group whose lists have equal lengths, and some of whose numbers are at bounds: most are trained."""
    size, length = draw(st.sampled_from(sizes)), draw(st.integers(2, MOST_TOKENS))
    names = draw(st.lists(st.sampled_from(["advantages", "ref_logprobs"]), unique=True))
    rows = {name: [[-1.0] * length for _ in range(size)] for name in ["inference_logprobs", *names]}
    for name in draw(st.lists(st.sampled_from(sorted(rows)), max_size=3)):
        rows[name][draw(st.integers(0, size - 1))][draw(st.integers(0, length - 1))] = draw(numbers)
    texts = draw(st.lists(st.integers(0, 10**length - 1), min_size=size, max_size=size))
    tokens = [[DIGITS[int(digit)] for digit in f"{text:0{length}d}"] for text in texts]
    trained = f"{draw(st.integers(1, 2**length - 1)):0{length}b}"
    hypothesis.assume(trained[1:].count("1") != LENGTH - PROMPT)  # or it could have the completion of a good group
    optional = {
        "generation_params": overrides,
        "overrides": st.lists(overrides, min_size=size, max_size=size),
        "group_overrides": overrides,
        "env_id": st.integers(-1, 1 << 40),
    }
    return {
        "tokens": tokens,
        "masks": [[token if bit == "1" else MASKED for token, bit in zip(row, trained, strict=True)] for row in tokens],
        "scores": draw(st.lists(numbers, min_size=size, max_size=size)),
        **rows,
        **draw(st.fixed_dictionaries({}, optional=optional)),
    }


def _can_be_sent(group: JsonObject) -> bool:
    """Return False for NaN, infinity, surrogates: atroposlib's server accepts them, and loses each batch with one."""
    try:
        json.dumps(group, allow_nan=False, ensure_ascii=False).encode()
    except ValueError:
        return False
    return True


def attack(trial: Trial) -> JsonObject:
    """Post to both servers, to each for half of the time."""
    servers = {"run-api of atroposlib": UPSTREAM} if HAS_ATROPOS else {}
    servers |= {"python -m colocated_grpo.atropos.api": EMBEDDED}
    servers = {name: command for name, command in servers.items() if trial.only in name}
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
    groups = weighted((2, bad(range(1, 2 * GROUPS))), (1, consistent([1, 2, SIZE])), (1, hostile))
    if command is UPSTREAM:  # a group of another size stops all its batches for ever
        groups = weighted((2, bad([SIZE])), (1, consistent([SIZE]))).filter(_can_be_sent)
    log = trial.folder / f"{name.split()[-1]}.log"
    with ExitStack() as stack:
        api = stack.enter_context(ApiProcess(command, log=log))
        run = stack.enter_context(ForkedRun(trial.folder / f"groups-{api.port}", _settings(api.url)))
        feed = Feed(api.port, run)
        run.wait_until(lambda: feed.batch_size() == GROUPS * SIZE)
        for _ in range(GROUPS - GOOD):
            feed.bad(UNNUMBERED)
        feed.statuses.clear()
        processes = {"API": family(api.process.pid), "run": run.processes()}
        before = {each: memory(processes[each]) for each in processes}
        forget_peaks(chain(*processes.values()))
        posting = settings(
            max_examples=TURN, database=None, deadline=None, phases=[Phase.generate], suppress_health_check=ALL
        )(given(groups)(feed.bad))
        peaks: dict[str, float] = {}
        try:
            for turn in range(TARGET // TURN):
                if trial.seconds_left() > until:
                    hypothesis.seed(f"{trial.seed} {turn}")(posting)()
            feed.finish()
            peaks |= {each: round(peak_memory(processes[each]) - before[each], 1) for each in processes}
        except (AssertionError, OSError, Flaky) as error:
            trial.check(False, f"{name}: {error}; the last groups: {str([*feed.last][::-1])[:SHOWN]}")
        run.terminate()
        code = run.wait(LAST_SECONDS)
    trial.check(code == 0, f"{name}: the run ended with {code}\n{run.tail()}")
    trial.check(TRACEBACK not in run.stderr, f"{name}: a traceback of the run\n{run.tail()}")
    if command is EMBEDDED:
        trial.check(TRACEBACK not in log.read_text(), f"{name}: a traceback of the API\n{log.read_text()[-SHOWN:]}")
        others = [status for status in feed.statuses if status[0] not in "24"]
        trial.check(not others, f"{name}: responses {others}")
        trial.check(
            max(peaks.values(), default=0.0) <= MEMORY_MIB,
            f"{name}: MiB above the memory after the first step: {peaks}",
        )
    found = feed.found()
    missing = [number for number in range(feed.num_good) if found[f"{number:04d}"] != SIZE]
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
        "memory_mib_above_first_step": peaks,
        "dropped_sequences": {key.rpartition("/")[2]: int(count) for key, count in sorted(dropped.items())},
    }


class Feed:
    """Posts bad groups to a server, and a few good ones between them."""

    def __init__(self, port: int, run: TrainingRun) -> None:
        self._port = port
        self._run = run
        self._num_queued = 0
        """Bad groups since the last good ones."""
        self.statuses: Counter[str] = Counter()
        self.last: deque[Json] = deque(maxlen=GROUPS)
        """The bad groups that were posted last."""
        self.num_good = 0

    def bad(self, group: Json) -> None:
        self.last.append(group)
        status = self._post(group)
        self.statuses[status] += 1
        if status != "200":
            return
        self._num_queued += 1
        if self._num_queued % (GROUPS // GOOD - 1) == 0:
            assert self._post(good(self.num_good)) == "200", f"good group {self.num_good} was refused"
            self.num_good += 1
        if self._num_queued == GROUPS - GOOD:
            self._num_queued = 0
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
        return call(self._port, "GET", "/info")[1]["batch_size"]

    def _num_steps(self) -> int:
        return len(self._run.rows(files.TRAIN))

    def _fill_up(self, happened: Callable[[], bool]) -> None:
        """Post groups without a number until something has happened: generated ones may leave a batch incomplete."""
        deadline = time.monotonic() + LAST_SECONDS
        while not happened():
            assert time.monotonic() < deadline, f"no step for {LAST_SECONDS:g} s\n{self._run.tail()}"
            self._post(UNNUMBERED)
            time.sleep(FILL_SECONDS)

    def _post(self, group: Json) -> str:
        """Post a group and return the status."""
        sent = Sent("POST", "/scored_data", body=group)
        return sent.outcome(sent.send(self._port, "", {}))


def _settings(url: str) -> Settings:
    entry = {"type": "atropos", "url": url, "server": {"port": free_port()}}
    return run_settings(
        tiny_model(),
        environments=[entry],
        rollout={"prompts_per_step": GROUPS, "group_size": SIZE},
        loss={"kl": {"coef": 0.01}},  # or reference log-probabilities would not be read
        evaluation={"every": 0},
        checkpoint={"every": 0},
        tracking={"rollouts_per_step": GROUPS * SIZE},
        training_steps=100_000,
    )
