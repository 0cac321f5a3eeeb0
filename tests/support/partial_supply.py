"""Steps of a supply with partial rollouts over a fake engine whose weights change before each step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from random import Random
from typing import Any

from colocated_grpo.environments.base import BatchResult, Episode
from colocated_grpo.environments.chat import ChatCodec
from colocated_grpo.rollout.collect import Collector
from colocated_grpo.rollout.engine import Request, Sampling
from colocated_grpo.rollout.episodes import EpisodeRunner
from colocated_grpo.rollout.inbox import Driver, Inbox
from colocated_grpo.rollout.partial import PartialSupply
from colocated_grpo.rollout.prompt_queue import engine_place, static_dispatch
from colocated_grpo.rollout.supply import PromptSupply, Supply
from colocated_grpo.runtime.distributed import World
from colocated_grpo.settings.generation import PartialConfig, RolloutConfig
from colocated_grpo.tools.make_model import build_char_tokenizer
from colocated_grpo.types import Completion, Group, Prompt, Score
from tests.support.fakes import FakeEngine, SumScorer, text_of
from tests.support.ranks import single_rank_world

LIMIT, WANTED, GROUP, STEPS = 60, 6, 2, 12
CONTINUES = 0.9
"""Probability that a token is not the last one."""


class Prompts:
    def __init__(self, item: dict[str, Any] | None = None, sources: Sequence[str] = ("own",)) -> None:
        self.given = 0
        self.item = item or {}
        self.sources = sources
        """Names of the environments, in turn."""

    def next(self, n: int) -> list[Prompt]:
        first, self.given = self.given, self.given + n
        source_of = lambda index: self.sources[index % len(self.sources)]  # noqa: E731
        return [
            Prompt(index=i, token_ids=[3, i], text="", item={**self.item, "number": i}, source=source_of(i))
            for i in range(first, first + n)
        ]

    def record(self, groups: Sequence[Group]) -> BatchResult:
        return BatchResult(trained_now=list(range(len(groups))))

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.given = state["given"]


def memoryless(request: Request, policy_version: int) -> Completion:
    """Return a completion whose rest has the same distribution of lengths wherever it is interrupted."""
    rng = Random(request.seed)
    tokens = [rng.randrange(10)]
    while len(tokens) < request.sampling.max_tokens and rng.random() < CONTINUES:
        tokens.append(rng.randrange(10))
    return Completion(
        token_ids=tokens,
        sampling_logprobs=[-token / 8 for token in tokens],
        finish_reason="length" if len(tokens) == request.sampling.max_tokens else "stop",
        policy_version=policy_version,
    )


class Run:
    """Steps of a supply over a fake engine whose weights change before each step."""

    def __init__(
        self,
        world: World,
        partial: PartialConfig | None,
        prompts: Prompts | None = None,
        steps: int = STEPS,
        ranks_per_engine: int = 1,
        wanted: int = WANTED,
        limit: int = LIMIT,
        episodes: Mapping[str, Episode] | None = None,
    ) -> None:
        self.engine = FakeEngine(complete=memoryless, on_step=self._count)
        self.decode_steps = 0
        self.scored: Counter[int] = Counter()
        self.stop_at: int | None = None
        inbox = Inbox()
        driver = Driver(self.engine, inbox)
        self.collector = collector = Collector(
            driver,
            EpisodeRunner(episodes or {}, ChatCodec(build_char_tokenizer()), inbox, seed=0, tool_timeout=30.0),
            {"own": self},
            text_of,
            world,
            static_dispatch(world.rank, world.size),
            seed=0,
            reward_workers=2,
            reward_timeout=30.0,
            stop_requested=self._stopped,
        )
        config = RolloutConfig(prompts_per_step=wanted, group_size=GROUP)
        source: Any = (prompts or Prompts()) if world.is_main else None
        sampling = Sampling(temperature=1.0, max_tokens=limit)
        self.supply: Supply = PromptSupply(source, collector, config, sampling)
        if partial is not None:
            place = engine_place(world, ranks_per_engine)
            self.supply = PartialSupply(self.supply, partial, self.engine.sampled, place, steps)

    def score(self, prompt: Prompt, completions: Sequence[Completion], texts: Sequence[str]) -> list[Score]:
        self.scored[prompt.index] += 1
        return SumScorer().score(prompt, completions, texts)

    def _count(self) -> None:
        self.decode_steps += 1

    def _stopped(self) -> bool:
        return self.stop_at is not None and self.decode_steps >= self.stop_at

    def step(self, step: int) -> list[Group]:
        self.engine.weights_changed(step)
        groups = self.supply.order(step)()
        assert not self.engine.running, "the engine may sleep"
        self.metrics = self.supply.settle(groups).metrics
        return groups

    def steps(self, first: int = 0, last: int = STEPS) -> Iterator[list[Group]]:
        return (self.step(step) for step in range(first, last))


def partial_run(**settings: Any) -> Run:
    return Run(single_rank_world(), PartialConfig(**settings))
