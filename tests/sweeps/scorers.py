"""Score good, empty, garbage and adversarial answers with every dataset of reasoning_gym and every game of textarena.

    python -m tests.sweeps.scorers --json sweep.json

Without network. Prints a line for each dataset or game that cannot be built, or with which something was not as it
should be: the reference answer without full reward, an unreadable answer, a failed reward, or a call that was slow.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import socket
import sys
import time
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from itertools import cycle, islice
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

from colocated_grpo.environments.adapters.textarena import MOVE, VARIANT_SUFFIXES
from colocated_grpo.environments.base import AnswerError, Task
from colocated_grpo.environments.registry import build_episode, build_task
from colocated_grpo.environments.user_code.loading import one_line
from tests.support.scores import score_text

ITEMS = 3
"""Questions of each dataset."""
SLOW_SECONDS = 5.0
GAME_SECONDS = 60
TURNS = 12
SEATS = (2, 1, 3, 4, 5, 6, 7, 8)
"""Numbers of players to try."""
GARBAGE = (
    *("", " ", "x", "0", "1", "-1", "nan", "inf", "1e999", "None", "true", "1/0", "(1", "[[", "[]", "{}", "\x00", "½"),
    *("٣", "[٣]", "[²]", "1,2,3", "1\n2\n3", "- -\n- -", "[[1,2],[3,4]]", '{"a": [1]}', "('a', 'b')", "def f(:"),
    *("x**2+", "1 \u00d7 2", "2 x 3 x", "9" * 5000, "[" + "9" * 5000 + "]", "a " * 10_000, "[" * 5000, "\ud800"),
    *(
        "[0]",
        "[-1]",
        "[99999]",
        "[a b c]",
        "[0 0]",
        "[1 2 3 4 5]",
        "[e2e4]",
        "[bet -5]",
        "[bid 1e9]",
        "[up]",
        "[A1 B2]",
    ),
    *("[Player 0]", "[vote 9]", "[1] [2]", "[call]", "[fold]", "[quit]", "[accept]", "[offer: 1 -> 2]", "(1,2)"),
)
Findings = dict[str, str]
"""Problem -> the first answer or error that showed it."""


class TooSlow(BaseException):
    """Not an Exception, so that no game takes it for its own."""


@contextmanager
def limited(seconds: float) -> Generator[None]:
    def expire(*_: object) -> None:
        raise TooSlow

    signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def without_network() -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("this sweep has no network")

    socket.socket.connect = socket.getaddrinfo = refuse  # type: ignore[assignment, method-assign]


def sweep_dataset(name: str) -> Findings:
    args = {"datasets": [{"name": "chain_sum"}]} if name == "composite" else {}
    task = build_task(f"reasoning_gym:{name}", args)
    findings: Findings = {}
    for item in islice(task.prompts(1, "train"), ITEMS):
        reference = item["answer"]
        if reference is None:
            findings["no reference answer"] = ""
        else:
            judge(task, item, str(reference), findings)
            if (reward := score_text(task, item, str(reference)).reward) != 1.0:
                findings.setdefault(f"the reference answer has reward {reward}", str(reference))
        text = str(reference)
        for answer in (*GARBAGE, f"The answer is {text}", text[: len(text) // 2], text * 2, f"{text}\n{text}"):
            judge(task, item, answer, findings)
    return findings


def judge(task: Task, item: dict[str, Any], answer: str, findings: Findings) -> None:
    began = time.monotonic()
    try:
        with limited(SLOW_SECONDS):
            score = score_text(task, item, answer)
    except TooSlow:
        findings.setdefault(f"takes more than {SLOW_SECONDS:g} s", answer)
        return
    if time.monotonic() - began > SLOW_SECONDS / 5:
        findings.setdefault(f"takes more than {SLOW_SECONDS / 5:g} s", answer)
    if score.unscorable:
        findings.setdefault("cannot read some answers", f"{answer[:20]}: {score.error}")
    elif score.failed:
        findings.setdefault(f"fails: {score.error}", answer)
    elif score.reward is None or not 0 <= score.reward <= 1:
        findings.setdefault(f"reward {score.reward}", answer)


class Model:
    """Gives an episode the replies of a function of the latest observation."""

    def __init__(self, prompt: str, reply: Callable[[str], str]) -> None:
        self.turns, self._read, self._reply = 0, prompt, reply

    async def generate(self, max_tokens: int | None = None) -> SimpleNamespace:
        self.turns += 1
        return SimpleNamespace(text=self._reply(self._read))

    def observe(self, text: str) -> None:
        self._read = text


def sweep_game(name: str) -> Findings:
    episode = built_game(name)
    findings: Findings = {}
    chance, garbage = Random(0), cycle(GARBAGE)

    def shown(read: str) -> str:
        return chance.choice(MOVE.findall(read) or ["I pass."])

    def mixed(read: str) -> str:
        return shown(read) if chance.random() < 0.7 else next(garbage)

    policies = [shown, mixed, *[lambda _: next(garbage)] * (len(GARBAGE) // 2)]
    for item, reply in zip(episode.prompts(0, "train"), policies, strict=False):
        try:
            asyncio.run(episode.run(item, Model(item["prompt"], reply)))
        except AnswerError as error:
            findings.setdefault("raises on some replies", str(error))
        except Exception as error:
            findings.setdefault(f"fails: {one_line(error)}", "")
    return findings


def built_game(name: str) -> Any:
    """Return the episode, with the first number of players that it takes. Raises the first error if it takes none."""
    errors = []
    for players in SEATS:
        try:
            return build_episode(f"textarena:{name}", {"players": players, "max_turns": TURNS})
        except Exception as error:
            errors.append(error)
    raise errors[0]


def sweep(kind: str, names: Sequence[str], one: Callable[[str], Findings]) -> dict[str, Findings]:
    found: dict[str, Findings] = {}
    for name in names:
        try:
            with limited(GAME_SECONDS):
                found[name] = one(name)
        except TooSlow:
            found[name] = {f"takes more than {GAME_SECONDS} s": ""}
        except Exception as error:
            found[name] = {f"not built: {one_line(error)}": ""}
        for finding, example in found[name].items():
            print(f"{kind}:{name}: {finding[:300]}" + (f" ({example[:120]!r})" if example else ""), flush=True)
    clean = sum(not findings for findings in found.values())
    print(f"{kind}: {len(found)} swept, {clean} without a finding", flush=True)
    return found


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="part of the names to sweep")
    parser.add_argument("--json", type=Path, help="write the findings to this file")
    options = parser.parse_args(arguments)
    without_network()
    warnings.simplefilter("ignore")
    from reasoning_gym.factory import DATASETS
    from textarena.envs.registration import ENV_REGISTRY

    games = [name for name in ENV_REGISTRY if not name.endswith(VARIANT_SUFFIXES)]
    found = {
        kind: sweep(kind, sorted(name for name in names if options.only in name), one)
        for kind, names, one in (("reasoning_gym", DATASETS, sweep_dataset), ("textarena", games, sweep_game))
    }
    if options.json is not None:
        shown = {kind: {name: list(each) for name, each in rows.items() if each} for kind, rows in found.items()}
        counts = {kind: len(rows) for kind, rows in found.items()}
        options.json.write_text(json.dumps({"swept": counts, "findings": shown}, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
