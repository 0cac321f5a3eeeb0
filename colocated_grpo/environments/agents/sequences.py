"""Stores the requests of one agent as training sequences: the tokens that the policy read and sampled.

An agent sends the whole conversation with every request. A prompt that extends a sequence is appended to it, any other
begins a new one. Every sampled token is trained in one sequence only.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from colocated_grpo.environments.base import AgentLimits
from colocated_grpo.environments.chat import ChatCodec, ContextExhausted, Tokens
from colocated_grpo.types import Completion, Prompt, Rollout, Score

SampleAgent = Callable[[list[int], int, Sequence[str]], Awaitable[Completion]]
"""Samples one completion. Arguments: the prompt, the maximum number of tokens to sample, stop strings."""


class TooManyRequests(Exception):
    """A request exceeds the rest of the agent's `max_requests`."""


@dataclass(frozen=True, slots=True)
class _Sequence:
    """Tokens of consecutive requests. The prompt of each request extends the tokens of the previous request."""

    tokens: Tokens
    text: str
    cut: bool = False
    """True if a prompt that extends this sequence did not fit."""


class AgentConversation:
    """Requests of an agent, with the completions that the policy returned. All but rollout() runs on one event loop."""

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
        """True if a request did not fit into the context or into the rest of `max_requests`."""
        self._requested = 0
        """Completions requested, including failed ones."""

    async def complete(
        self, prompt: list[int], max_tokens: int | None = None, n: int = 1, stop: Sequence[str] = ()
    ) -> list[Completion]:
        """Sample `n` completions of a rendered prompt. Each has at most `max_tokens` tokens; None: as many as fit.

        Raises ContextExhausted if none fits, TooManyRequests, and ValueError if the engine rejects the prompt.
        """
        most = self._limits.max_requests
        if self._requested + n > most:
            # If n alone exceeds the limit, no request could succeed: an error of the agent, which reward 0 would hide.
            self.exhausted = self.exhausted or n <= most
            raise TooManyRequests(f"max_requests={most}: n={n} more after {self._requested} completions exceed it")
        self._requested += n
        position, prompt = self._continued_by(prompt)
        room = self._limits.max_tokens - len(prompt)
        if room < 1:
            self._exhaust(position)
            longest = f"{self._limits.max_tokens} (rollout.max_prompt_tokens + rollout.max_completion_tokens)"
            rule = f"with at least one sampled token it must fit into the maximum context length of {longest}"
            raise ContextExhausted(f"the prompt has {len(prompt)} tokens; {rule}")
        limit = room if max_tokens is None else min(max_tokens, room)
        completions = await asyncio.gather(*(self._sample(prompt, limit, stop) for _ in range(n)))
        for completion in completions:
            self._store(prompt, completion)
        return completions

    def reject(self, text: str) -> None:
        """Record that the text of a rendered prompt is too long to be encoded."""
        self._exhaust(next((place for place, one in self._longest_first() if text.startswith(one.text)), None))

    def rollout(self, score: Score, temperature: float, *, plain: bool = False) -> Rollout:
        """Return all sequences as a training rollout. plain: see `Rollout.plain`."""
        sequences = self._sequences or [_Sequence(Tokens.of_prompt(self._prompt.token_ids), "")]
        parts = [one.tokens.rollout(self._codec, score, temperature, cut=one.cut, plain=plain) for one in sequences]
        return replace(parts[0], further=parts[1:], text="\n".join(one.text for one in parts))

    def _exhaust(self, position: int | None) -> None:
        """Record that a prompt did not fit. position: the sequence that it extends, if any, which counts as cut."""
        self.exhausted = True
        if position is not None:
            self._sequences[position] = replace(self._sequences[position], cut=True)

    def _store(self, prompt: list[int], completion: Completion) -> None:
        """Append a completion to the sequence that its prompt extends by now, or to a new one: requests may overlap."""
        text = self._codec.transcript([*prompt, *completion.token_ids])
        position, tokens = self._continued_by(prompt)
        if position is None or tokens != prompt:
            self._sequences.append(_Sequence(Tokens.of_prompt(prompt).sampled(completion), text))
            return
        before = self._sequences[position].tokens
        after = before.observed(prompt[len(before.token_ids) :]).sampled(completion)
        self._sequences[position] = _Sequence(after, text)

    def _continued_by(self, prompt: list[int]) -> tuple[int | None, list[int]]:
        """Return the position of the longest sequence that the prompt extends, if any, and the prompt in its tokens.

        Encoding a sampled message again may give other tokens for the same text, so the sampled tokens are kept.
        """
        whole = self._codec.transcript(prompt)
        for position, one in self._longest_first():
            if prompt[: len(one.tokens.token_ids)] == one.tokens.token_ids:
                return position, prompt
            if whole.startswith(one.text):
                tokens = [*one.tokens.token_ids, *self._codec.encode(whole[len(one.text) :])]
                if self._codec.transcript(tokens) == whole:
                    return position, tokens
        return None, prompt

    def _longest_first(self) -> list[tuple[int, _Sequence]]:
        return sorted(enumerate(self._sequences), key=lambda pair: -len(pair[1].tokens.token_ids))
