"""Fakes of the engine and of a scorer that keep the contracts of the real ones."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from random import Random

from torch import Tensor, nn

from colocated_grpo.rollout.engine import Part, Request, TokenDelta
from colocated_grpo.types import Completion, Prompt, Score

VOCABULARY = 10


class FakeEngine:
    """A `RolloutEngine` whose completions are functions of their request's seed.

    `decode_steps(request)` is the number of steps a completion takes, which sets the order in which completions finish.
    By default it is the completion's length. Calls of other methods than submit and step are appended to `events`.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int = 64,
        decode_steps: Callable[[Request], int] | None = None,
        on_step: Callable[[], None] = lambda: None,
        events: list[str] | None = None,
        complete: Callable[[Request, int], Completion] | None = None,
    ) -> None:
        """complete: from a request and the policy version to its completion."""
        self.max_num_seqs = max_num_seqs
        self.admission_cost = 3
        self.transforms_weights = False
        self.tensor_parallel_rank = 0
        self.model = nn.Module()
        self.most_running = 0
        self.submitted: list[Request] = []
        self.running: dict[Hashable, tuple[int, Completion]] = {}
        self.events = [] if events is None else events
        self._decode_steps = decode_steps
        self._on_step = on_step
        self._complete = complete or completion_of
        self._policy_version = 0
        self._streaming: set[Hashable] = set()
        self._deltas: list[tuple[Hashable, TokenDelta]] = []

    def submit(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self.submitted.append(request)
            if request.stream:
                self._streaming.add(request.key)
            completion = self._complete(request, self._policy_version)
            steps = self._decode_steps(request) if self._decode_steps else len(completion.token_ids)
            self.running[request.key] = (steps, completion)
        self.most_running = max(self.most_running, len(self.running))

    def step(self) -> list[tuple[Hashable, Completion]]:
        self._on_step()
        finished = [(key, completion) for key, (steps, completion) in self.running.items() if steps <= 1]
        self._deltas = [
            (key, delta_of(completion, len(completion.token_ids) - steps))
            for key, (steps, completion) in self.running.items()
            if key in self._streaming and 1 < steps <= len(completion.token_ids)
        ]
        self.running = {key: (steps - 1, completion) for key, (steps, completion) in self.running.items() if steps > 1}
        return finished

    def deltas(self) -> list[tuple[Hashable, TokenDelta]]:
        return self._deltas

    def abort(self, keys: Collection[Hashable] | None = None) -> None:
        self.events.append("abort" if keys is None else f"abort {list(keys)}")
        for key in list(self.running) if keys is None else keys:
            self.running.pop(key, None)

    def sampled(self) -> list[tuple[Hashable, Completion]]:
        """Return the tokens that a completion of one token a step has by now."""
        return [
            (key, part_of(completion, len(completion.token_ids) - steps))
            for key, (steps, completion) in self.running.items()
            if steps < len(completion.token_ids)
        ]

    def top_logprobs(self, token_ids: Sequence[int], k: int) -> list[dict[int, float]]:
        """Return for each token its own log-probability, -1, and k others, -2 and less."""
        self.events.append(f"top {k}")
        if max(token_ids) >= VOCABULARY:
            raise ValueError("unknown token")
        others = lambda token: [t for t in range(VOCABULARY) if t != token][:k]  # noqa: E731
        return [{token: -1.0, **{t: -2.0 - i for i, t in enumerate(others(token))}} for token in token_ids[1:]]

    def load_weights(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        self.events.append(f"load {len(list(weights))}")

    def weights_changed(self, policy_version: int) -> None:
        self.events.append(f"weights changed {policy_version}")
        self._policy_version = policy_version

    def wake(self, part: Part) -> None:
        self.events.append(f"wake {part}")

    def sleep(self) -> None:
        self.events.append("sleep")

    def close(self) -> None:
        self.events.append("close")


def completion_of(request: Request, policy_version: int = 0) -> Completion:
    """Return the completion that FakeEngine gives for a request."""
    rng = Random(request.seed)
    length = rng.randint(1, request.sampling.max_tokens)
    return Completion(
        token_ids=rng.choices(range(VOCABULARY), k=length),
        sampling_logprobs=[-rng.random() for _ in range(length)],
        finish_reason="length" if length == request.sampling.max_tokens else "stop",
        policy_version=policy_version,
    )


def part_of(completion: Completion, tokens: int) -> Completion:
    return replace(
        completion,
        token_ids=completion.token_ids[:tokens],
        sampling_logprobs=completion.sampling_logprobs[:tokens],
        finish_reason="abort",
    )


def delta_of(completion: Completion, position: int) -> TokenDelta:
    """Return the token at `position` as a streamed delta."""
    token = slice(position, position + 1)
    return TokenDelta(completion.token_ids[token], completion.sampling_logprobs[token])


def text_of(token_ids: Sequence[int]) -> str:
    """Decode the tokens of a FakeEngine: their ids as numbers."""
    return " ".join(map(str, token_ids))


class Clock:
    """In the place of a module's `time`: a clock that a test moves, and that counts how often the main thread reads it.

    It begins at the real time, so that it may be compared to times from before.
    """

    def __init__(self) -> None:
        self.now = time.monotonic()
        self.num_reads = 0

    def monotonic(self) -> float:
        self.num_reads += threading.current_thread() is threading.main_thread()
        return self.now

    def move(self, seconds: float) -> None:
        """Move the clock, and wait until the main thread has seen it."""
        self.now += seconds
        goal = self.num_reads + 2
        while self.num_reads < goal:
            time.sleep(0.002)


class SumScorer:
    """Scores a completion with the sum of its tokens, so that swapped completions get wrong scores."""

    def score(self, prompt: Prompt, completions: Sequence[Completion], texts: Sequence[str]) -> list[Score]:
        return [Score(reward=float(sum(map(int, text.split())))) for text in texts]
