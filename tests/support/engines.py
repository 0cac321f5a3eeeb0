"""A policy and a real engine beside it. Only for ranks started by `run_on_ranks`, never for pytest's own process."""

from __future__ import annotations

import os
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from colocated_grpo.batching import TrainSequence, build_micro_batch
from colocated_grpo.config import Config
from colocated_grpo.launch.cli import library_environment
from colocated_grpo.policy.model import read_model_config
from colocated_grpo.policy.policy import Policy
from colocated_grpo.rollout.engine import Request, Sampling
from colocated_grpo.runtime.distributed import World
from colocated_grpo.types import Completion
from tests.support.training_runs import settings

if TYPE_CHECKING:
    from colocated_grpo.rollout.vllm.engine import VLLMEngine

PROBE = [5, 40, 17, 62, 8, 33, 21, 54, 12, 70, 3, 29]


class Pair:
    """A policy, its engine, and the sync between them, built as the trainer builds them. Collective."""

    def __init__(self, world: World, model: Path, **changes: Any) -> None:
        os.environ.update(library_environment("INFO"))
        # The engine's own imports read the variables above.
        from colocated_grpo.build.policy import build_engine, build_opponent, build_sync, read_opponent

        self.world = world
        self.config = Config.model_validate(settings(model, **changes))
        hf_config = read_model_config(self.config.model, model)
        self.policy = Policy(self.config, hf_config, model, world)
        frozen = read_opponent(self.config, hf_config, world)
        self.engine: VLLMEngine = build_engine(self.config, self.policy, model, world)
        self.sync = build_sync(self.policy, self.engine, world)
        self.opponent = build_opponent(self.config.opponent, frozen, self.policy, self.engine, self.sync, world)

    def write(self) -> None:
        """The policy's weights into the engine."""
        self.sync.sync()
        self.engine.weights_changed(self.policy.version)

    @torch.no_grad()
    def change_weights(self) -> None:
        """Every weight of the policy moves by an amount of its own, the same for any number of ranks."""
        for index, parameter in enumerate(self.policy.parameters().values()):
            parameter.mul_(1.0 + 0.02 * (index % 7 - 3)).add_(0.004 * (index % 3 - 1))
        self.policy.weights.publish()

    def disagreement(self, tokens: Sequence[int] = PROBE) -> float:
        """Largest |engine - policy| of the tokens' log-probabilities. Collective."""
        expected = self.policy_logprobs(tokens, first=1, temperature=1.0)
        actual = self.engine.score(tokens)
        return max(abs(a - b) for a, b in zip(actual, expected, strict=True))

    def policy_logprobs(self, tokens: Sequence[int], *, first: int, temperature: float) -> list[float]:
        """Of tokens[first:], by the policy. Collective."""
        unused = np.zeros(len(tokens) - first, np.float32)
        sequence = TrainSequence(
            token_ids=np.array(tokens),
            scored=np.arange(first, len(tokens)),
            sampling_logprobs=unused,
            advantages=unused,
            temperature=temperature,
            trained=False,
        )
        return self.policy.score(build_micro_batch([sequence])).tolist()

    def sampling_error(self, prompt: Sequence[int], completion: Completion, temperature: float) -> float:
        """Largest |sampling logprob - policy's| of a completion. Collective."""
        expected = self.policy_logprobs([*prompt, *completion.token_ids], first=len(prompt), temperature=temperature)
        return max(abs(a - b) for a, b in zip(completion.sampling_logprobs, expected, strict=True))

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """In the order of the requests."""
        self.engine.submit(requests)
        done: dict[Hashable, Completion] = {}
        while len(done) < len(requests):
            done.update(self.engine.step())
        return [done[request.key] for request in requests]


def request_of(
    number: int, seed: int, prompt: Sequence[int] = PROBE, pattern: str | None = None, **sampling: Any
) -> Request:
    draw = Sampling(**{"temperature": 0.7, "max_tokens": 8, **sampling})
    return Request(key=(number, 0), token_ids=list(prompt), seed=seed, sampling=draw, pattern=pattern)
