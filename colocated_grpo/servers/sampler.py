"""Sampling for HTTP: prompts and sampling parameters become requests to the engines of all ranks."""

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial

from colocated_grpo.rollout.engine import Request, TokenDelta
from colocated_grpo.runtime.distributed import derive_seed
from colocated_grpo.servers.rank_links import LoadBalancer, result_of
from colocated_grpo.servers.request_bodies import SamplingParameters
from colocated_grpo.servers.text import Detokenizer, TextCodec, before_stop
from colocated_grpo.settings.generation import MIN_TEMPERATURE
from colocated_grpo.types import Completion, FinishReason

TopLogprobs = list[dict[int, float]]
"""Most likely tokens and their log-probabilities at each position, the actual token first."""
OnSampled = Callable[[Request, Completion, float], None]
"""Called with a completion and the temperature of its log-probabilities."""


@dataclass(frozen=True, kw_only=True)
class CompletionPart:
    """The next part of a streamed completion, or a whole completion."""

    index: int
    """Position of the completion within the HTTP request."""
    text: str
    """The text ends before a stop string."""
    token_ids: list[int]
    logprobs: list[float]
    start: int = 0
    """Tokens of the completion before this part."""
    finish_reason: FinishReason | None = None
    """None before the last part."""
    top_logprobs: TopLogprobs | None = None
    """None unless requested. If requested, the completion is a single part."""

    @property
    def token_logprobs(self) -> list[tuple[int, float]]:
        return list(zip(self.token_ids, self.logprobs, strict=True))

    @classmethod
    def whole(
        cls, index: int, completion: Completion, text: str, top_logprobs: TopLogprobs | None = None
    ) -> "CompletionPart":
        return cls(
            index=index,
            text=text,
            token_ids=completion.token_ids,
            logprobs=completion.sampling_logprobs,
            finish_reason=completion.finish_reason,
            top_logprobs=top_logprobs,
        )


class _Growing:
    """A completion that is being sampled. The tokens that its client has not taken yet, however many, are one part."""

    def __init__(self, index: int, detokenizer: Detokenizer, ready: "asyncio.Queue[_Growing | None]") -> None:
        """ready: receives this object when there is something to take, once until it is taken."""
        self.index = index
        self._detokenizer = detokenizer
        self._ready = ready
        self._is_ready = False
        self._so_far = CompletionPart(index=index, text="", token_ids=[], logprobs=[])
        """All tokens; with the text and the finish reason once the completion has ended."""
        self._taken = 0
        """Tokens in earlier parts."""

    def add(self, new: TokenDelta) -> None:
        self._so_far.token_ids.extend(new.token_ids)
        self._so_far.logprobs.extend(new.sampling_logprobs)
        self._announce()

    def end(self, whole: CompletionPart) -> None:
        self._so_far = whole
        self._announce()

    def _announce(self) -> None:
        if not self._is_ready:
            self._is_ready = True
            self._ready.put_nowait(self)

    def take(self) -> CompletionPart | None:
        """Return the part after the last one; None if the new tokens have no whole characters yet."""
        self._is_ready = False
        part, start = self._so_far, self._taken
        if part.finish_reason is not None:
            text = part.text[self._detokenizer.emitted :]
        elif not (text := self._detokenizer.increment(part.token_ids)):
            return None
        self._taken = len(part.token_ids)
        return replace(part, text=text, token_ids=part.token_ids[start:], logprobs=part.logprobs[start:], start=start)


@dataclass(eq=False)
class Sampler:
    """Completions from the engines of all ranks, for one event loop."""

    engines: LoadBalancer
    codec: TextCodec
    note: Callable[[str], None]
    on_sampled: OnSampled = lambda request, completion, temperature: None
    """Called with every completion before it is returned to its client."""

    def __post_init__(self) -> None:
        self.limits = self.codec.limits
        self._noted = False
        self._request_numbers = itertools.count()

    async def sample(
        self, prompts: Sequence[list[int]], parameters: SamplingParameters, num_top_logprobs: int = 0
    ) -> list[CompletionPart]:
        """Return `parameters.n` completions of each prompt, in order, or none. Raises as `stream` does."""
        parts = [part async for part in self.stream(prompts, parameters, num_top_logprobs, whole=True)]
        return sorted(parts, key=lambda part: part.index)

    async def stream(
        self,
        prompts: Sequence[list[int]],
        parameters: SamplingParameters,
        num_top_logprobs: int = 0,
        *,
        whole: bool = False,
    ) -> AsyncGenerator[CompletionPart]:
        """Yield the completions of all prompts in parts, as they are sampled. Raises InvalidRequest or ServerClosing.

        whole: in a single part each, as are completions with top log-probabilities, which are computed at the end.
        """
        stream = not whole and not num_top_logprobs
        requests = [request for prompt in prompts for request in self._requests(prompt, parameters, stream=stream)]
        ready: asyncio.Queue[_Growing | None] = asyncio.Queue()
        decode = partial(self.codec.decode, skip_special_tokens=parameters.skip_special_tokens)
        stop = [] if parameters.include_stop_str_in_output else parameters.stop
        growing = [_Growing(index, Detokenizer(decode, stop), ready) for index in range(len(requests))]
        tasks = [
            asyncio.ensure_future(self._sample_one(one, request, parameters, num_top_logprobs))
            for one, request in zip(growing, requests, strict=True)
        ]
        all_done = asyncio.gather(*tasks)

        def end(done: asyncio.Future[list[None]]) -> None:
            done.exception()  # marks it as retrieved, else asyncio logs it when the client has disconnected
            ready.put_nowait(None)

        all_done.add_done_callback(end)
        try:
            while (one := await ready.get()) is not None:
                if (part := one.take()) is not None:
                    yield part
            await all_done
        finally:
            for task in tasks:  # cancelling `all_done` has no effect once a task has failed
                task.cancel()

    def _requests(self, prompt: list[int], parameters: SamplingParameters, *, stream: bool) -> list[Request]:
        sampling = parameters.for_engine(prompt, self.limits)
        self._note_renormalization(parameters)
        ends = () if parameters.ignore_eos else self.limits.stop_token_ids
        sampling = replace(sampling, stop_token_ids=tuple(sorted({*sampling.stop_token_ids, *ends})))
        number = next(self._request_numbers)
        seed = (self.limits.seed, "http", number) if parameters.seed is None else ("http", parameters.seed)
        request = partial(Request, token_ids=prompt, sampling=sampling, stream=stream)
        return [request(key=("http", number, i), seed=derive_seed(*seed, i)) for i in range(parameters.n)]

    async def _sample_one(
        self, growing: _Growing, request: Request, parameters: SamplingParameters, num_top_logprobs: int
    ) -> None:
        """Sample a completion into `growing`."""
        loop = asyncio.get_running_loop()
        scored: list[Future[TopLogprobs]] = []

        def score(completion: Completion) -> None:
            sequence = [*request.token_ids, *completion.token_ids][: self.limits.max_tokens - 1]
            scored.append(self.engines.top_logprobs(sequence, num_top_logprobs))

        def on_delta(tokens: TokenDelta) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(growing.add, tokens)

        completion = await self.engines.send(
            request, on_delta if request.stream else None, score if num_top_logprobs else None
        )
        entries = [entry for future in scored for entry in await result_of(future)]
        # Greedy log-probabilities are at temperature 1. vLLM raises other temperatures to at least MIN_TEMPERATURE.
        temperature = max(parameters.temperature, MIN_TEMPERATURE) if parameters.temperature else 1.0
        self.on_sampled(request, completion, temperature)
        text = self.codec.decode(completion.token_ids, skip_special_tokens=parameters.skip_special_tokens)
        if not parameters.include_stop_str_in_output:
            text = before_stop(text, parameters.stop)
        entries = entries[len(request.token_ids) - 1 :]
        top_logprobs = _at_temperature(completion, temperature, entries) if num_top_logprobs else None
        growing.end(CompletionPart.whole(growing.index, completion, text, top_logprobs))

    async def prompt_logprobs(self, prompt: list[int], k: int) -> list[dict[int, float] | None]:
        """Return log-probabilities at temperature 1 of each prompt token and the k most likely; None for the first."""
        self.limits.check_prompt(prompt)
        if len(prompt) < 2:
            return [None]
        return [None, *await result_of(self.engines.top_logprobs(prompt, k))]

    def _note_renormalization(self, parameters: SamplingParameters) -> None:
        """Log once that a client samples from a truncated or penalized distribution."""
        neutral = {"top_p": (1.0,), "top_k": (0, -1), "min_p": (0.0,), "repetition_penalty": (1.0,)}
        values = {name: getattr(parameters, name) for name in neutral}
        changed = [f"{name}={value:g}" for name, value in values.items() if value not in neutral[name]]
        if changed and not self._noted:
            self._noted = True
            rule = "its log-probabilities are renormalized over the tokens kept"
            effect = "training on them increases the sampler-trainer KL"
            self.note(f"serving: a client samples with {', '.join(changed)}: {rule}; {effect}")


def _at_temperature(completion: Completion, temperature: float, entries: TopLogprobs) -> TopLogprobs:
    """Return the top log-probabilities of each completion token at its sampling temperature.

    entries: those at temperature 1, from one forward pass. Differences to the sampled token's entry, divided by the
    temperature, are added to its sampling log-probability. The last token of a sequence of maximum length has no entry.
    """
    top_logprobs: TopLogprobs = []
    for position, (token, value) in enumerate(zip(completion.token_ids, completion.sampling_logprobs, strict=True)):
        entry = entries[position] if position < len(entries) else {token: 0.0}
        differences = {other: (logprob - entry[token]) / temperature for other, logprob in entry.items()}
        top_logprobs.append({token: value} | {other: value + difference for other, difference in differences.items()})
    return top_logprobs
