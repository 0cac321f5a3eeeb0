"""Rewards and episodes under the rank's guard process, which ends the rank if they block all of its threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from colocated_grpo.environments.base import Item, Playable, Scorer
from colocated_grpo.settings.schema import Config
from colocated_grpo.settings.sources import AgentSourceConfig, EpisodeSourceConfig
from colocated_grpo.types import Completion, Prompt, Score

Guarded = Callable[[], AbstractContextManager[None]]


def user_code_limit(config: Config) -> tuple[float, str]:
    """Return for how many seconds user code may block a rank, and the setting that says so, for error lines.

    The longer of rollout.reward_timeout and, with episodes or agents, rollout.tool_timeout. RankGuard raises it to 5 s.
    """
    limits = {"rollout.reward_timeout": config.rollout.reward_timeout}
    sources = [*config.environments, *(entry.source for entry in config.evaluation.sets)]
    if any(isinstance(entry, EpisodeSourceConfig | AgentSourceConfig) for entry in sources):
        limits["rollout.tool_timeout"] = config.rollout.tool_timeout
    name = max(limits, key=lambda name: limits[name])
    return limits[name], f"{name}={limits[name]:g}"


class GuardedScorer:
    """A scorer whose calls are guarded."""

    def __init__(self, scorer: Scorer, guarded: Guarded) -> None:
        self._scorer, self._guarded = scorer, guarded

    def score(self, prompt: Prompt, completions: Sequence[Completion], texts: Sequence[str]) -> list[Score]:
        with self._guarded():
            return self._scorer.score(prompt, completions, texts)


class GuardedEpisode:
    """An episode that is guarded while it runs."""

    def __init__(self, episode: Playable, guarded: Guarded) -> None:
        self._episode, self._guarded = episode, guarded

    async def run(self, item: Item, model: Any) -> Any:
        with self._guarded():
            return await self._episode.run(item, model)
