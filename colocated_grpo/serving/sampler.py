"""From a wish to completions: the requests of one HTTP call, spread over the engines of all ranks."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from colocated_grpo.config.schema import COLDEST
from colocated_grpo.rollout.engine import Request, Sampling, TokenDelta
from colocated_grpo.rollout.inbox import OnDelta
from colocated_grpo.runtime.distributed import derive_seed
from colocated_grpo.serving.detokenizer import Spelling, before_stop
from colocated_grpo.serving.load_balancer import LeastBusy, outcome
from colocated_grpo.serving.origins import Origin, Origins
from colocated_grpo.serving.request_bodies import SamplingWish
from colocated_grpo.types import Completion

RESERVED_FOR_TEMPLATES = frozenset({"conversation", "chat_template", "tokenize", "return_dict", "return_tensors"})


class Tokenizer(Protocol):
    """The part of transformers' tokenizers that is used here."""

    chat_template: Any

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str: ...

    def apply_chat_template(self, conversation: list[dict[str, Any]], **settings: Any) -> Any: ...


class BadWish(Exception):
    """A request that is well-formed and cannot be served; its words go to the client with status 400."""


@dataclass(frozen=True, kw_only=True)
class Served:
    """One completion as clients see it."""

    completion: Completion
    text: str
    alternatives: list[dict[int, float]] | None = None
    """Of each token itself, first, and the likeliest ones, where they were asked for."""


@dataclass(frozen=True, kw_only=True)
class Bit:
    """The next part of one of the completions of a stream."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[float]
    served: Served | None = None
    """The whole completion, with its last bit."""


def _cancel(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Each one: cancelling what gathers them does nothing once one of them has failed."""
    for task in tasks:
        task.cancel()


@dataclass(frozen=True)
class Limits:
    """What the engine can take."""

    max_tokens: int
    """Longest prompt and completion together."""
    longest_token: int
    """Characters that one token stands for at most."""
    vocab_size: int
    stop_token_ids: tuple[int, ...]
    seed: int


class Sampler:
    def __init__(
        self,
        engines: LeastBusy,
        top_logprobs: Callable[[list[int], int], Future[list[dict[int, float]]]],
        tokenizer: Tokenizer,
        origins: Origins,
        limits: Limits,
        note: Callable[[str], None],
    ) -> None:
        self._engines = engines
        self._top_logprobs = top_logprobs
        self._tokenizer = tokenizer
        self._origins = origins
        self._limits = limits
        self._note = note
        self._noted = False
        self._numbers = itertools.count()

    async def sample(self, prompts: Sequence[list[int]], wish: SamplingWish, alternatives: int = 0) -> list[Served]:
        """wish.n completions of each prompt. Raises BadWish, or Unserved when the run ends before they are there.

        Where one prompt is bad none is sampled, and where one completion fails the others leave the engine.
        """
        requests = [request for prompt in prompts for request in self._requests(prompt, wish, stream=False)]
        tasks = [asyncio.ensure_future(self._sample_one(request, wish, alternatives)) for request in requests]
        try:
            return await asyncio.gather(*tasks)
        finally:
            _cancel(tasks)

    async def stream(
        self, prompts: Sequence[list[int]], wish: SamplingWish, alternatives: int = 0
    ) -> AsyncGenerator[Bit]:
        """The completions of all prompts bit by bit, as they are sampled. Raises and gives up as `sample` does.

        With alternatives, which are only known at the end, a completion is one bit.
        """
        requests = [request for prompt in prompts for request in self._requests(prompt, wish, stream=not alternatives)]
        bits: asyncio.Queue[Bit | None] = asyncio.Queue()
        ones = [self._stream_one(i, request, wish, alternatives, bits) for i, request in enumerate(requests)]
        tasks = [asyncio.ensure_future(one) for one in ones]
        everything = asyncio.gather(*tasks)

        def end(done: asyncio.Future[list[None]]) -> None:
            done.exception()  # looked at: asyncio would log it where the client has left and nobody awaits it
            bits.put_nowait(None)

        everything.add_done_callback(end)
        try:
            while (bit := await bits.get()) is not None:
                yield bit
            await everything
        finally:
            _cancel(tasks)

    def _requests(self, prompt: list[int], wish: SamplingWish, *, stream: bool) -> list[Request]:
        self._check(prompt)
        number, sampling = next(self._numbers), self._sampling(prompt, wish)
        return [
            Request(
                key=("http", number, i),
                token_ids=prompt,
                seed=self._seed(wish, number, i),
                sampling=sampling,
                stream=stream,
            )
            for i in range(wish.n)
        ]

    async def _sample_one(
        self, request: Request, wish: SamplingWish, alternatives: int, listen: OnDelta | None = None
    ) -> Served:
        scored: list[Future[list[dict[int, float]]]] = []

        def ask_for_alternatives(completion: Completion) -> None:
            sequence = [*request.token_ids, *completion.token_ids][: self._limits.max_tokens - 1]
            scored.append(self._top_logprobs(sequence, alternatives))

        try:
            completion = await self._engines.send(request, listen, ask_for_alternatives if alternatives else None)
            entries = [entry for one in scored for entry in await outcome(one)]
        except ValueError as error:
            raise BadWish(str(error)) from None
        # Greedy log-probabilities are taken at temperature 1, and vLLM raises what lies between to its smallest.
        temperature = max(wish.temperature, COLDEST) if wish.temperature else 1.0
        origin = Origin(temperature, completion.policy_version, completion.finish_reason)
        self._origins.remember(request.token_ids, completion.token_ids, origin)
        text = self.decode(completion.token_ids, skip_special_tokens=wish.skip_special_tokens)
        return Served(
            completion=completion,
            text=text if wish.include_stop_str_in_output else before_stop(text, wish.stop),
            alternatives=_alternatives(completion, temperature, entries[len(request.token_ids) - 1 :])
            if alternatives
            else None,
        )

    async def _stream_one(
        self, index: int, request: Request, wish: SamplingWish, alternatives: int, bits: asyncio.Queue[Bit | None]
    ) -> None:
        loop = asyncio.get_running_loop()
        stop = () if wish.include_stop_str_in_output else wish.stop
        spelling = Spelling(partial(self.decode, skip_special_tokens=wish.skip_special_tokens), stop)
        heard, told = TokenDelta([], []), 0

        def hear(piece: TokenDelta) -> None:
            nonlocal told
            heard.token_ids.extend(piece.token_ids)
            heard.sampling_logprobs.extend(piece.sampling_logprobs)
            if text := spelling.add(piece.token_ids):
                new = slice(told, None)
                bits.put_nowait(
                    Bit(index=index, text=text, token_ids=heard.token_ids[new], logprobs=heard.sampling_logprobs[new])
                )
                told = len(heard.token_ids)

        def listen(piece: TokenDelta) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(hear, piece)

        served = await self._sample_one(request, wish, alternatives, listen if request.stream else None)
        rest = {
            "text": served.text[spelling.given :],
            "token_ids": served.completion.token_ids[told:],
            "logprobs": served.completion.sampling_logprobs[told:],
        }
        bits.put_nowait(Bit(index=index, **rest, served=served))

    async def prompt_logprobs(self, prompt: list[int], k: int) -> list[dict[int, float] | None]:
        """For each token of the prompt itself and the k likeliest; None for the first, which nothing predicts."""
        self._check(prompt)
        if len(prompt) < 2:
            return [None]
        try:
            return [None, *await outcome(self._top_logprobs(prompt, k))]
        except ValueError as error:
            raise BadWish(str(error)) from None

    def _check(self, prompt: list[int]) -> None:
        if not prompt:
            raise BadWish("the prompt is empty")
        if len(prompt) >= self._limits.max_tokens:
            raise BadWish(
                f"the prompt has {len(prompt)} tokens; with at least one sampled it must fit into "
                f"{self._limits.max_tokens} (rollout.max_prompt_tokens + rollout.max_completion_tokens)"
            )
        self._check_known(prompt)

    def _check_known(self, token_ids: Sequence[int], where: str = "") -> None:
        """The engine's thread looks tokens up in tables of this size, and not every version of vLLM checks before."""
        if token_ids and max(token_ids) >= self._limits.vocab_size:
            raise BadWish(f"{where}token {max(token_ids)} is not in the vocabulary of {self._limits.vocab_size}")

    def _sampling(self, prompt: list[int], wish: SamplingWish) -> Sampling:
        changed = [f"{name}={value:g}" for name, value in _renormalising(wish).items()]
        if changed and not self._noted:
            self._noted = True
            self._note(
                f"atropos: an environment samples with {', '.join(changed)}: the engine's log-probabilities are "
                "renormalised over the tokens it keeps, the trainer's are not; expect a larger sampler/trainer KL"
            )
        room = self._limits.max_tokens - len(prompt)
        own = set(wish.stop_token_ids or [])
        self._check_known(sorted(own), "stop_token_ids: ")
        return Sampling(
            temperature=wish.temperature,
            max_tokens=min(wish.max_tokens or room, room),
            top_p=wish.top_p,
            top_k=max(wish.top_k, 0),
            min_p=wish.min_p,
            repetition_penalty=wish.repetition_penalty,
            stop=tuple(wish.stop),
            stop_token_ids=tuple(sorted(own if wish.ignore_eos else own | set(self._limits.stop_token_ids))),
        )

    def _seed(self, wish: SamplingWish, number: int, index: int) -> int:
        if wish.seed is None:
            return derive_seed(self._limits.seed, "http", number, index)
        return derive_seed("http", wish.seed, index)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Raises BadWish for a text that cannot fit, which would take seconds in which nobody else is served."""
        if len(text) > self._limits.max_tokens * self._limits.longest_token:
            raise BadWish(
                f"a prompt of {len(text)} characters cannot fit into {self._limits.max_tokens} tokens "
                "(rollout.max_prompt_tokens + rollout.max_completion_tokens)"
            )
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def encode_chat(self, messages: list[dict[str, Any]], settings: dict[str, Any]) -> list[int]:
        """Through the model's chat template. Raises BadWish where it has none or does not like the messages."""
        if not self._tokenizer.chat_template:
            raise BadWish("this model has no chat template; use /v1/completions or set model.chat_template")
        if reserved := RESERVED_FOR_TEMPLATES & settings.keys():
            raise BadWish(f"chat_template_kwargs: {', '.join(sorted(reserved))} cannot be set")
        try:
            text = self._tokenizer.apply_chat_template(messages, tokenize=False, **settings)
        except Exception as error:  # a template is a program that came with the model, run on what a stranger sent
            raise BadWish(f"the chat template refuses these messages: {error}") from None
        return self.encode(text, add_special_tokens=False)

    def spell(self, token_ids: Sequence[int]) -> str:
        """Special tokens too: as a name for tokens."""
        return self.decode(token_ids, skip_special_tokens=False)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)


def _renormalising(wish: SamplingWish) -> dict[str, float]:
    neutral = {"top_p": (1.0,), "top_k": (0, -1), "min_p": (0.0,), "repetition_penalty": (1.0,)}
    return {name: getattr(wish, name) for name, values in neutral.items() if getattr(wish, name) not in values}


def _alternatives(
    completion: Completion, temperature: float, entries: Sequence[dict[int, float]]
) -> list[dict[int, float]]:
    """Of each token of the completion itself, first, and the likeliest, at the temperature that it was sampled at.

    entries: the same at temperature 1, from one pass over the finished sequence. Distances there, divided by the
    temperature, are those of the sampling, where the token's own value is known. The last token of a sequence that
    fills the engine has no place in that pass, and only itself.
    """
    named: list[dict[int, float]] = []
    for place, (token, value) in enumerate(zip(completion.token_ids, completion.sampling_logprobs, strict=True)):
        entry = entries[place] if place < len(entries) else {token: 0.0}
        distances = {other: (logprob - entry[token]) / temperature for other, logprob in entry.items()}
        named.append({token: value} | {other: value + distance for other, distance in distances.items()})
    return named
