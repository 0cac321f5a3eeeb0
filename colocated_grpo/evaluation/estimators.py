"""Estimators of evaluation metrics. Plain numbers in, plain floats out."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Hashable, Sequence


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """Return the unbiased estimate of the probability that at least one of k samples passes.

    Chen et al. 2021, "Evaluating Large Language Models Trained on Code", equation 1: 1 - C(n - c, k) / C(n, k).
    """
    return 1.0 - math.comb(samples - passed, k) / math.comb(samples, k)


def majority(answers: Sequence[Hashable | None], passed: Sequence[bool]) -> float:
    """Return the fraction of passed samples among those with the most frequent answer; 0 if no sample has an answer.

    Answers that are equally frequent share the vote, so the order of the samples does not matter.
    """
    votes: dict[Hashable, list[bool]] = defaultdict(list)
    for answer, ok in zip(answers, passed, strict=True):
        if answer is not None:
            votes[answer].append(ok)
    most = max(map(len, votes.values()), default=0)
    leading = [sum(found) / most for found in votes.values() if len(found) == most]
    return sum(leading) / len(leading) if leading else 0.0


def mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
    """Return the mean over prompts and its standard error; None as the error of a single prompt.

    One value per prompt: completions of one prompt are not independent of each other.
    """
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return math.fsum(values) / len(values), error
