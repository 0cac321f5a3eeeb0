"""The requests of one agent, stored as training sequences of the tokens that the policy read and sampled.

An agent sends the whole conversation with every request. A prompt that extends an earlier sequence continues it, in
that sequence's own tokens; any other prompt begins a new sequence. A sampled token is trained in one sequence only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from colocated_grpo.environments.base import AgentLimits
from colocated_grpo.environments.chat import ChatCodec, ContextExhausted, continued_routes
from colocated_grpo.types import Completion, Prompt, Rollout, Routes, Score

SampleAgent = Callable[[list[int], int, Sequence[str]], Awaitable[Completion]]
"""Samples one completion. Arguments: the prompt, the maximum number of tokens to sample, strings that end it."""


class TooManyRequests(Exception):
    """The agent has used up its requests."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sequence:
    """Tokens of consecutive requests, each of whose prompts extends the tokens before it."""

    token_ids: list[int]
    loss_mask: list[bool]
    logprobs: list[float]
    prompt_length: int
    last: Completion
    text: str
    """Decoded text of all tokens."""
    routes: Routes | None = None

    def continued(self, prompt: list[int], completion: Completion, text: str) -> _Sequence:
        """Return the sequence after one more request. prompt: begins with all tokens of this sequence."""
        observed, sampled = len(prompt) - len(self.token_ids), len(completion.token_ids)
        return replace(
            self,
            token_ids=[*prompt, *completion.token_ids],
            loss_mask=[*self.loss_mask, *[False] * observed, *[True] * sampled],
            logprobs=[*self.logprobs, *[0.0] * observed, *completion.sampling_logprobs],
            last=completion,
            text=text,
            routes=continued_routes(self.routes, completion.routes),
        )


class AgentConversation:
    """Requests of an agent with the answers of the policy. They may overlap. Used on one event loop."""

    def __init__(self, prompt: Prompt, codec: ChatCodec, limits: AgentLimits, sample: SampleAgent) -> None:
        self._prompt = prompt
        self._codec = codec
        self._limits = limits
        self._sample = sample
        # Sequences are replaced whole and never modified, since rollout() may run in another thread at the same time.
        self._sequences: list[_Sequence] = []
        self.requests = 0
        """Requests that arrived, including rejected ones. Counted by the HTTP server."""
        self.exhausted = False
        """True if a request did not fit the context or what was left of `max_requests`."""
        self._requested = 0
        """Completions requested, including failed ones."""

    async def complete(
        self, prompt: list[int], max_tokens: int | None = None, n: int = 1, stop: Sequence[str] = ()
    ) -> list[Completion]:
        """Sample `n` completions of a rendered prompt, of at most `max_tokens` tokens or as many as fit.

        Raises ContextExhausted if no token fits, TooManyRequests, and ValueError if the engine rejects the prompt.
        """
        self._count(n)
        position, prompt = self._continued_by(prompt)
        room = self._limits.max_tokens - len(prompt)
        if room < 1:
            self._exhaust(position)
            raise ContextExhausted(
                f"the prompt has {len(prompt)} tokens; with at least one sampled token it must fit into the maximum "
                f"context length of {self._limits.max_tokens} "
                "(rollout.max_prompt_tokens + rollout.max_completion_tokens)"
            )
        limit = room if max_tokens is None else min(max_tokens, room)
        completions = await asyncio.gather(*(self._sample(prompt, limit, stop) for _ in range(n)))
        for completion in completions:
            self._store(prompt, completion)
        return completions

    def reject(self, text: str) -> None:
        """Note that a rendered prompt is too long to be encoded."""
        self._exhaust(next((place for place, one in self._longest_first() if text.startswith(one.text)), None))

    def rollout(self, score: Score, temperature: float, *, plain: bool = False) -> Rollout:
        """Return all sequences as a training rollout. plain: see `Rollout.plain`."""
        first, *further = [self._rollout(one, score, temperature, plain) for one in self._sequences] or [
            Rollout(
                token_ids=self._prompt.token_ids,
                loss_mask=[False] * len(self._prompt.token_ids),
                sampling_logprobs=[0.0] * len(self._prompt.token_ids),
                prompt_length=len(self._prompt.token_ids),
                text="",
                finish_reason="abort",
                policy_version=0,
                temperature=temperature,
                score=score,
            )
        ]
        return replace(first, further=further)

    def _rollout(self, one: _Sequence, score: Score, temperature: float, plain: bool) -> Rollout:
        return Rollout(
            token_ids=one.token_ids,
            loss_mask=one.loss_mask,
            sampling_logprobs=one.logprobs,
            prompt_length=one.prompt_length,
            text=self._codec.transcript(one.token_ids[one.prompt_length :]),
            finish_reason=one.last.finish_reason,
            policy_version=one.last.policy_version,
            temperature=temperature,
            score=score,
            plain=plain,
            routes=one.routes,
        )

    def _count(self, n: int) -> None:
        """Count `n` more completions. Raises TooManyRequests, and counts none, if they exceed the limit."""
        most = self._limits.max_requests
        if self._requested + n > most:
            # A request that could never be served is an error of the agent, which must not pass as reward 0.
            self.exhausted = self.exhausted or n <= most
            raise TooManyRequests(f"max_requests={most}: n={n} more after {self._requested} completions exceed it")
        self._requested += n

    def _exhaust(self, position: int | None) -> None:
        """Note that a prompt did not fit. The sequence that it extends, if any, counts as cut by the length."""
        self.exhausted = True
        if position is not None:
            one = self._sequences[position]
            self._sequences[position] = replace(one, last=replace(one.last, finish_reason="length"))

    def _store(self, prompt: list[int], completion: Completion) -> None:
        """Add a completion to the sequence that its prompt extends token by token, or as a new one.

        Looked up again: a request that ran at the same time may have continued or begun a sequence.
        """
        text = self._codec.transcript([*prompt, *completion.token_ids])
        position, tokens = self._continued_by(prompt)
        if position is not None and tokens == prompt:
            self._sequences[position] = self._sequences[position].continued(prompt, completion, text)
            return
        begin = _Sequence(token_ids=[], loss_mask=[], logprobs=[], prompt_length=len(prompt), last=completion, text="")
        self._sequences.append(begin.continued(prompt, completion, text))

    def _continued_by(self, prompt: list[int]) -> tuple[int | None, list[int]]:
        """Return the position of the longest sequence that the prompt extends, and the prompt in its tokens.

        Encoding a sampled message again may give other tokens for the same text. The sampled ones are kept.
        """
        whole = self._codec.transcript(prompt)
        for position, one in self._longest_first():
            if prompt[: len(one.token_ids)] == one.token_ids:
                return position, prompt
            if whole.startswith(one.text):
                tokens = [*one.token_ids, *self._codec.encode(whole[len(one.text) :])]
                if self._codec.transcript(tokens) == whole:
                    return position, tokens
        return None, prompt

    def _longest_first(self) -> list[tuple[int, _Sequence]]:
        """Return all sequences with their positions."""
        return sorted(enumerate(self._sequences), key=lambda pair: -len(pair[1].token_ids))
