"""The built-in reward `run_code`: passed tests of real programs, and the limits on programs that misbehave."""

from __future__ import annotations

import json
import os
import sys

import psutil
import pytest

from colocated_grpo.environments.base import EnvironmentSetupError
from colocated_grpo.environments.rewards import run_code as run_code_module
from colocated_grpo.environments.rewards.functions import RewardInputs, build_rewards, scores_of
from colocated_grpo.settings.sources import RewardConfig
from tests.support.servers import until

RIGHT = "def add(a, b):\n    return a + b\n"
CHECKS = ["assert add(1, 2) == 3", "assert add(-1, 1) == 0"]


def build(**args):
    """Build the reward with a time limit that a busy machine keeps too."""
    [function] = build_rewards([RewardConfig(name="run_code", args={"timeout": 60, **args})], "k")
    return function


@pytest.fixture(scope="module")
def run_code():
    return build()


@pytest.fixture(scope="module")
def brief():
    function = build()  # runs a first program, which must end in time
    vars(function.function)["timeout"] = 2.0
    return function


def results(function, *programs, tests=CHECKS, raw=False):
    texts = list(programs) if raw else [f"So:\n```python\n{program}\n```\n" for program in programs]
    item = {"prompt": "Write add.", "tests": tests}
    inputs = RewardInputs(item=item, texts=texts, completion_ids=[[1]] * len(texts), global_step=0, max_steps=1)
    return scores_of(function, inputs)


def values(*arguments, **options):
    return [result.reward for result in results(*arguments, **options)]


def test_the_reward_is_the_fraction_of_passed_tests(run_code):
    assert values(run_code, RIGHT, "def add(a, b): return 3", "def add(a, b): return 9") == [1.0, 0.5, 0.0]


@pytest.mark.parametrize(
    "tests",
    [
        [{"input": "1 2\n", "output": "3\n"}, {"input": "5 5", "output": "10"}],
        {"inputs": ["1 2\n", "5 5"], "outputs": ["3", "10  \n"]},
        json.dumps({"inputs": [["1 2"], ["5 5"]], "outputs": [["3"], ["10"]]}),
    ],
)
def test_programs_are_tested_by_input_and_output(run_code, tests):
    reading = "print(sum(map(int, open(0).read().split())))\nexit()"
    assert values(run_code, reading, "print(3)", "print(3); exit(1)", tests=tests) == [1.0, 0.5, 0.0]


def test_tests_may_be_one_text_or_json_or_absent(run_code):
    assert values(run_code, RIGHT, tests="\n".join(CHECKS)) == [1.0]
    assert values(run_code, RIGHT, tests=json.dumps([*CHECKS, "assert False"])) == [pytest.approx(2 / 3)]
    assert values(run_code, RIGHT, tests=[]) == [None]
    [result] = results(run_code, RIGHT, tests=[3])
    assert (result.reward, "a test must be statements" in result.error) == (None, True)


def test_the_last_closed_code_block_is_run(run_code):
    wrong = "```python\ndef add(a, b): return 7\n```"
    last = f"First {wrong} then\n```py\n{RIGHT}```\nand an open ```python\nnothing"
    assert values(run_code, last, RIGHT, f"```python\n{RIGHT}", wrong, raw=True) == [1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    "program",
    [
        pytest.param("def add(a, b:", id="syntax error"),
        pytest.param(f"{RIGHT}\nraise SystemExit(0)", id="exit before the tests"),
        pytest.param(f"{RIGHT}\nimport os; os._exit(0)", id="exit without cleaning up"),
        pytest.param(f"{RIGHT}\nx = bytearray(2 << 30)", id="memory hog"),
        pytest.param(f"{RIGHT}\nwhile True: print('x' * 1000000)", id="output flood"),
        pytest.param(f"{RIGHT}\nwith open('f', 'wb') as f:\n  while True: f.write(bytes(1 << 20))", id="large file"),
        pytest.param(f"{RIGHT}\nimport os; os.fork()", id="fork"),
        pytest.param(f"{RIGHT}\nimport subprocess; subprocess.run(['true'])", id="another program"),
        pytest.param(f"{RIGHT}\nimport socket; socket.socket()", id="network"),
        pytest.param(f"{RIGHT}\nimport os; os.kill(os.getppid(), 9)", id="signal to another process"),
        pytest.param(f"{RIGHT}\nx = [open('/dev/null') for _ in range(1000)]", id="open files"),
    ],
)
def test_a_program_beyond_its_limits_fails_and_the_next_one_runs(run_code, program):
    assert values(run_code, program, RIGHT) == [0.0, 1.0]


PREPARED = """\
import ctypes, gc, os, pickle, re, struct, sys
libc, runner, trainer = ctypes.CDLL(None), os.getppid(), {trainer}
"""
TO_EVERY_DESCRIPTOR = """\
for number in range(64):
    descriptor = libc.syscall(438, os.pidfd_open(runner), number, 0)  # pidfd_getfd
    if descriptor >= 0:
        for response in (pickle.dumps(77), b"77"):
            os.write(descriptor, struct.pack("!i", len(response)) + response)
        stolen = True
"""
NONCE_IN_MEMORY = """\
frame, objects = sys._getframe(), gc.get_objects()
while frame := frame.f_back:
    objects.append(frame.f_locals)
[stolen] = {text for one in objects for text in gc.get_referents(one) if re.fullmatch("(q7){20}", str(text))}
"""


@pytest.mark.parametrize(
    "attack",
    [
        pytest.param(TO_EVERY_DESCRIPTOR, id="result socket"),
        pytest.param("stolen = open(f'/proc/{runner}/mem', 'r+b')", id="memory of the runner"),
        pytest.param("stolen = os.readlink(f'/proc/{runner}/fd/0')", id="descriptors of the runner"),
        pytest.param("stolen = open(f'/proc/{trainer}/mem', 'r+b')", id="memory of the trainer"),
        pytest.param("stolen = open(f'/proc/{trainer}/environ').read()", id="environment of the trainer"),
        pytest.param(NONCE_IN_MEMORY, id="nonce"),
        pytest.param(
            "stolen = not libc.syscall({'x86_64': 234}.get(os.uname().machine, 131), runner, runner, 9)", id="tgkill"
        ),
    ],
)
def test_a_program_has_no_access_to_other_processes(monkeypatch, run_code, attack):
    monkeypatch.setattr("secrets.token_hex", lambda: "q7" * 20)
    program = PREPARED.format(trainer=os.getpid()) + attack
    assert values(run_code, program, tests=["assert stolen"]) == [0.0]
    assert values(run_code, RIGHT) == [1.0]


@pytest.mark.parametrize("response", [["another job", 2], [None, 2], ["q7", 77], ["q7", -1], ["q7", 1.5], 77], ids=str)
def test_a_response_that_does_not_answer_the_job_is_no_reward(monkeypatch, tmp_path, response):
    monkeypatch.setattr("secrets.token_hex", lambda: "q7")
    function = build()
    function.function._runners.close()
    forging = tmp_path / "forging.py"
    forging.write_text(
        "import sys, time\nfrom multiprocessing.connection import Connection\n"
        f"Connection(int(sys.argv[1])).send_bytes({json.dumps(response).encode()!r})\ntime.sleep(600)\n"
    )
    with monkeypatch.context() as patch:
        patch.setattr(function.function._runners, "_command", [sys.executable, str(forging)])
        [result] = results(function, RIGHT)
        assert (result.reward, result.error) == (None, "run_code: the worker process sent an invalid response")
        function.function._runners.close()
    assert values(function, RIGHT) == [1.0]


@pytest.mark.parametrize(
    "program",
    [
        pytest.param("while True: pass", id="infinite loop"),
        pytest.param("x = 9 ** 9 ** 9", id="one long operation"),
        pytest.param(
            "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass", id="fork bomb that catches errors"
        ),
        pytest.param(
            "import signal\nfor n in (2, 14, 15): signal.signal(n, print)\nwhile True: signal.pause()", id="signals"
        ),
    ],
)
def test_a_program_that_does_not_end_is_killed(brief, program):
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    [result] = results(brief, program)
    assert (result.reward, result.error) == (0.0, None)
    until(lambda: {child.pid for child in psutil.Process().children(recursive=True)} <= before)


def test_tests_that_were_passed_before_the_timeout_count():
    assert values(build(timeout=5), RIGHT, tests=[CHECKS[0], "while True: pass", CHECKS[1]]) == [pytest.approx(1 / 3)]


def test_programs_see_no_secrets_and_leave_no_files(monkeypatch, tmp_path):
    monkeypatch.setenv("MY_API_KEY", "secret")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    program = "import os\nopen('left', 'w').write('x')"
    tests = ["assert 'MY_API_KEY' not in os.environ", f"assert os.getcwd().startswith({str(tmp_path)!r})"]
    assert values(build(), program, tests=tests) == [1.0]
    assert list(tmp_path.iterdir()) == []


def test_threads_are_allowed(run_code):
    program = f"{RIGHT}\nimport threading\nt = threading.Thread(target=add, args=[1, 2]); t.start(); t.join()"
    assert values(run_code, program) == [1.0]


def test_a_runner_that_ends_costs_one_completion_its_reward_and_is_replaced():
    function = build()
    runner = function.function._runners._idle.get_nowait()
    function.function._runners._idle.put(runner)
    runner.kill()
    runner.process.wait()
    [first] = results(function, RIGHT)
    assert (first.reward, first.error) == (
        None,
        "run_code: the worker process was ended by SIGKILL",
    )
    assert values(function, RIGHT) == [1.0]


def test_a_runner_that_does_not_answer_is_killed(monkeypatch, tmp_path):
    function = build()
    runner = function.function._runners._idle.get_nowait()
    # Waits 0.2 s in all. With a short `timeout`, a loaded machine fails the check of the limits.
    monkeypatch.setattr(run_code_module, "GRACE", 0.2 - function.function.timeout)
    silent = tmp_path / "silent.py"
    silent.write_text("import time\ntime.sleep(600)\n")
    monkeypatch.setattr(function.function._runners, "_command", [sys.executable, str(silent)])
    [result] = results(function, RIGHT)
    assert result.error == "run_code: the worker process does not answer"
    runner.kill()


def test_the_column_of_the_tests_must_be_in_the_rows():
    with pytest.raises(EnvironmentSetupError, match="reward 'run_code' needs the column 'test_list'"):
        build(tests_column="test_list").check_columns({"tests"})


def test_limits_that_cannot_hold_are_refused_at_the_start():
    with pytest.raises(EnvironmentSetupError, match="k: run_code: args: the limits cannot be set here"):
        build(memory_mb=1)
