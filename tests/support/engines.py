"""A policy with a real engine. Use it in ranks started by `run_on_ranks`, never in the pytest process."""

from __future__ import annotations

import os
from collections.abc import Hashable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from colocated_grpo.batching.micro_batch import TrainSequence, build_micro_batch
from colocated_grpo.policy.model import read_model_config
from colocated_grpo.policy.policy import Policy
from colocated_grpo.rollout.engine import Request, RolloutEngine, Sampling
from colocated_grpo.rollout.vllm.spec import EngineSpec
from colocated_grpo.runtime.distributed import World
from colocated_grpo.runtime.program import library_environment
from colocated_grpo.settings.schema import Config
from colocated_grpo.types import Completion
from tests.support.training_runs import settings

if TYPE_CHECKING:
    from colocated_grpo.rollout.vllm.vllm_engine import VLLMEngine

PROBE = [5, 40, 17, 62, 8, 33, 21, 54, 12, 70, 3, 29]


def reading_spec(folder: Path, **arguments: Any) -> EngineSpec:
    """Return an engine that reads the weights in `folder`. arguments: of vLLM."""
    return EngineSpec(
        folder=folder,
        dtype=torch.float32,
        max_model_len=96,
        max_num_seqs=16,
        reads_weights=True,
        sleep=False,
        args=arguments,
    )


class Pair:
    """A policy, its engine and the weight sync, built like the trainer's. Collective."""

    def __init__(self, world: World, model: Path, **changes: Any) -> None:
        os.environ.update(library_environment("INFO"))
        # Imported here, because the engine's modules read these variables on import.
        from colocated_grpo.assembly.engines import (
            build_colocated,
            build_opponent,
            engine_spec,
            fetch_opponent,
            read_opponent,
        )
        from colocated_grpo.policy.model_loader import ModelLoader

        self.world = world
        self.config = Config.model_validate(settings(model, **changes))
        hf_config = read_model_config(self.config.model, model)
        self.policy = Policy(self.config, hf_config, model, world)
        opponent_folder = fetch_opponent(self.config.opponent_model, world)
        loader = None if opponent_folder is None else ModelLoader(self.config, hf_config, opponent_folder, world)
        frozen = read_opponent(loader, world.device)
        spec, shared = engine_spec(self.config, model, world.size, world.device), self.config.weights == "shared"
        every = self.config.freshness.every
        engines = build_colocated(spec, self.policy, world, ExitStack(), shared=shared, check_every=every)
        self.engine = cast("VLLMEngine", engines.engine)
        self.sync = engines.sync
        self.opponent = build_opponent(self.config.opponent, frozen, self.policy, engines, world, 1)

    def write(self) -> None:
        """Write the policy's weights into the engine. Collective."""
        self.sync.sync()
        self.engine.weights_changed(self.policy.version)

    @torch.no_grad()
    def change_weights(self) -> None:
        """Change every parameter of the policy, by amounts that do not depend on the number of ranks."""
        for index, parameter in enumerate(self.policy.parameters().values()):
            parameter.mul_(1.0 + 0.02 * (index % 7 - 3)).add_(0.004 * (index % 3 - 1))
        self.policy.weights.publish()

    def disagreement(self, tokens: Sequence[int] = PROBE) -> float:
        """Return the largest |engine - policy| over the tokens' log-probabilities. Collective."""
        expected = self.policy_logprobs(tokens, first=1, temperature=1.0)
        actual = self.engine_logprobs(tokens)
        return max(abs(a - b) for a, b in zip(actual, expected, strict=True))

    def engine_logprobs(self, tokens: Sequence[int] = PROBE) -> list[float]:
        """Return the engine's log-probabilities of tokens[1:], computed as a prefill."""
        return prefill_logprobs(self.engine, tokens)

    def policy_logprobs(self, tokens: Sequence[int], *, first: int, temperature: float) -> list[float]:
        """Return the policy's log-probabilities of tokens[first:]. Collective."""
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
        """Return the largest |sampling logprob - policy logprob| of a completion. Collective."""
        expected = self.policy_logprobs([*prompt, *completion.token_ids], first=len(prompt), temperature=temperature)
        return max(abs(a - b) for a, b in zip(completion.sampling_logprobs, expected, strict=True))

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Return the completions in the order of the requests."""
        self.engine.submit(requests)
        done: dict[Hashable, Completion] = {}
        while len(done) < len(requests):
            done.update(self.engine.step())
        return [done[request.key] for request in requests]


def prefill_logprobs(engine: RolloutEngine, tokens: Sequence[int]) -> list[float]:
    """Return an engine's log-probabilities of tokens[1:] at temperature 1."""
    return [next(iter(entry.values())) for entry in engine.top_logprobs(tokens, 0)]


def request_of(
    number: int, seed: int, prompt: Sequence[int] = PROBE, pattern: str | None = None, **sampling: Any
) -> Request:
    """Return a request with the key (number, 0). `sampling` overrides fields of Sampling."""
    parameters = Sampling(**{"temperature": 0.7, "max_tokens": 8, **sampling})
    return Request(key=(number, 0), token_ids=list(prompt), seed=seed, sampling=parameters, pattern=pattern)
