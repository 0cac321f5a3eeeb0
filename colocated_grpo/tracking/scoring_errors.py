"""Notes about completions whose scoring raised: once for each environment, with the first error."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from colocated_grpo.types import Group, Score


class ScoringErrors:
    """Remembers which environments have been reported. The metrics count every error."""

    def __init__(self) -> None:
        self._reported: set[tuple[str, bool]] = set()

    def check(self, step: int, groups: Sequence[Group]) -> Iterator[str]:
        """Yield a line for each environment with the first unreadable answers, or the first failed rewards."""
        scores: dict[str, list[Score]] = {}
        for group in groups:
            scores.setdefault(group.prompt.source, []).extend(rollout.score for rollout in group.rollouts)
        for name, own in scores.items():
            for failed in (False, True):
                raised = [score for score in own if (score.failed if failed else score.unscorable)]
                if raised and (name, failed) not in self._reported:
                    self._reported.add((name, failed))
                    yield _line(step, name, raised, len(own), failed)


def _line(step: int, name: str, raised: Sequence[Score], count: int, failed: bool) -> str:
    what = "have no reward, because scoring failed" if failed else "made a scorer raise and got no credit from it"
    metric = "reward_errors" if failed else "unscorable"
    return (
        f"step {step}: {len(raised)} of {count} completions of {name} {what} (metric {metric}; shown once); "
        f"the first: {raised[0].error}"
    )
