"""Metrics of one evaluation set: estimators, and the answers that a majority vote compares."""

import logging
import math
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from decimal import Decimal

from colocated_grpo.environments.rewards import builtin
from colocated_grpo.environments.user_code.loading import load_function, one_line
from colocated_grpo.settings.evaluation import MEAN
from colocated_grpo.summaries import mean_and_error
from colocated_grpo.types import CUT_REASONS, STDERR, Group


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """Return the unbiased estimate of the probability that at least one of k samples passes.

    Chen et al. 2021, "Evaluating Large Language Models Trained on Code", equation 1: 1 - C(n - c, k) / C(n, k).
    """
    return 1.0 - math.comb(samples - passed, k) / math.comb(samples, k)


def majority(answers: Sequence[Hashable | None], passed: Sequence[bool]) -> float:
    """Return the fraction of passed samples among those with the most frequent answer.

    If several answers are equally frequent, the result is the mean of their fractions, so the order of the samples does
    not matter. The result is 0 if no sample has an answer.
    """
    votes: dict[Hashable, list[bool]] = defaultdict(list)
    for answer, ok in zip(answers, passed, strict=True):
        if answer is not None:
            votes[answer].append(ok)
    most = max(map(len, votes.values()), default=0)
    leading = [sum(found) / most for found in votes.values() if len(found) == most]
    return sum(leading) / len(leading) if leading else 0.0


logger = logging.getLogger(__name__)

Answer = Callable[[str], Hashable | None]
BOX = "\\boxed{"
LAYOUT = re.compile(r"\\(?:left|right|displaystyle|[,;:! ])|[$\s]")
"""TeX that changes only the layout of an answer."""


def final_answer(text: str) -> str | None:
    """Return the content of the last <answer>...</answer>, else the text without its thoughts; None if empty."""
    return builtin.final_answer(text) or None


def boxed(text: str) -> Hashable | None:
    r"""Return the content of the last \boxed{...} without TeX's layout, else the last number."""
    if (start := text.rfind(BOX)) < 0:
        return builtin.marked_number(text)
    if (inside := _balanced(text, start + len(BOX))) is None:
        return None
    plain = LAYOUT.sub("", inside).replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac").rstrip(".")
    if builtin.NUMBER.fullmatch(plain):
        return Decimal(plain.replace(",", ""))  # 1.50 and 1.5 are the same answer
    return plain or None


def _balanced(text: str, start: int) -> str | None:
    """Return the text from `start` to the matching closing brace; None if there is no such brace."""
    depth = 1
    for position in range(start, len(text)):
        depth += (text[position] == "{") - (text[position] == "}")
        if depth == 0:
            return text[start:position]
    return None


BUILT_IN: dict[str, Answer] = {"final_answer": final_answer, "last_number": builtin.marked_number, "boxed": boxed}


def answer_function(name: str, key: str) -> Answer:
    """Return the built-in or user function of this name. Raises EnvironmentSetupError."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    function, logged = load_function(name, key), set[str]()

    def answer(text: str) -> Hashable | None:
        try:
            found = function(text)
            hash(found)
        except Exception as error:  # user code: a completion without an answer does not end a run
            if (line := one_line(error)) not in logged:  # else a set has one line per completion
                logged.add(line)
                logger.warning("%s=%r: %s", key, name, line)
            return None
        return found

    return answer


def set_metrics(
    prefix: str,
    groups: Sequence[Group],
    pass_ks: Sequence[int],
    pass_reward: float,
    answer: Callable[[str], Hashable | None] | None,
) -> dict[str, float]:
    """Return the metrics of the groups under names that begin with `prefix`.

    answer: extracts the answers that maj@k compares; None: no maj@k. A completion with reward None counts as not
    passed. `errors` counts the completions whose scoring reported an error.
    """
    by_prompt: dict[str, list[float]] = defaultdict(list)
    for group in groups:
        rewards = [rollout.score.reward for rollout in group.rollouts]
        scored = [reward for reward in rewards if reward is not None]
        passed = [reward is not None and reward >= pass_reward for reward in rewards]
        if scored:
            by_prompt[MEAN].append(sum(scored) / len(scored))
        for k in pass_ks:
            by_prompt[f"pass@{k}"].append(pass_at_k(len(passed), sum(passed), k))
        if answer is not None and len(passed) > 1:
            found = [answer(rollout.text) for rollout in group.rollouts]
            by_prompt[f"maj@{len(passed)}"].append(majority(found, passed))
        by_prompt["length"].append(statistics.fmean(rollout.completion_tokens for rollout in group.rollouts))
        ends = [one.finish_reason for rollout in group.rollouts for one in rollout.sequences]
        by_prompt["truncated"].append(sum(end in CUT_REASONS for end in ends) / len(ends))
    row: dict[str, float] = {}
    for name, values in by_prompt.items():
        mean, error = mean_and_error(values)
        row[f"{prefix}/{name}"] = mean
        if error is not None:
            row[f"{prefix}/{name}{STDERR}"] = error
    errors = sum(rollout.score.error is not None for group in groups for rollout in group.rollouts)
    return {**row, f"{prefix}/errors": float(errors)}
