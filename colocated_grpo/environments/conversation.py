"""One conversation between policy and environment, stored as the tokens that the policy read and sampled."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import numpy as np

from colocated_grpo.environments.chat import ChatCodec, Message
from colocated_grpo.types import Completion, FinishReason, Prompt, Rollout, Routes, Score

SampleFn = Callable[[list[int], int], Awaitable[Completion]]
"""Samples one assistant message. Arguments: the tokens so far, the maximum number of tokens to sample."""


class ContextExhausted(Exception):
    """The next observation or message does not fit rollout.max_completion_tokens.

    If not caught, the episode ends with reward 0. An episode that returns named parts should catch the exception:
    otherwise truncated conversations are missing from the means of its parts.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class AssistantMessage:
    """A message sampled from the policy.

    Example: AssistantMessage(text="4", token_ids=[20, 5], finish_reason="stop")
    """

    text: str
    """Without special tokens."""
    token_ids: list[int]
    finish_reason: FinishReason
    """length: cut at max_tokens or at the end of the conversation's token budget."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Segment:
    """Consecutive tokens, either all sampled or all observed."""

    token_ids: list[int]
    logprobs: list[float]
    sampled: bool


class Conversation:
    """An episode's interface to the policy. Calls alternate: generate, observe, generate, ...

    Token in, token out: sampled tokens are trained on as they are and never retokenized.
    """

    def __init__(self, prompt: Prompt, codec: ChatCodec, room: int, sample: SampleFn) -> None:
        """room: token budget after the prompt, for sampled and observed tokens together."""
        self._codec = codec
        self._template = prompt.template
        self._sample = sample
        self._max_tokens = len(prompt.token_ids) + room
        # Segments are appended whole and never modified, since rollout() may run in another thread at the same time.
        self._segments = [_observed(prompt.token_ids)]
        self._last: Completion | None = None
        self._routes: Routes | None = None
        self._exhausted = False
        self._generating = False
        self.turns = 0
        """Messages sampled so far."""

    @property
    def room(self) -> int:
        """Tokens that can still be sampled or observed."""
        return self._max_tokens - sum(len(segment.token_ids) for segment in self._segments)

    async def generate(self, max_tokens: int | None = None) -> AssistantMessage:
        """Sample one message of at most min(max_tokens, room) tokens. Raises ContextExhausted if room is 0."""
        if max_tokens is not None and max_tokens < 1:
            raise ValueError(f"generate(max_tokens={max_tokens}): must be at least 1")
        if self._generating:
            raise RuntimeError("generate() was called while another turn of the same episode is being sampled")
        room = self.room
        if room < 1:
            raise self._context_exhausted("a message")
        self._generating = True
        try:
            completion = await self._sample(self._token_ids(), room if max_tokens is None else min(max_tokens, room))
        finally:
            self._generating = False
        self._segments.append(
            _Segment(token_ids=completion.token_ids, logprobs=completion.sampling_logprobs, sampled=True)
        )
        self._last = completion
        self._routes = continued_routes(self._routes, completion.routes)
        self.turns += 1
        return AssistantMessage(
            text=self._codec.message_text(completion.token_ids),
            token_ids=completion.token_ids,
            finish_reason=completion.finish_reason,
        )

    def observe(self, messages: str | Sequence[Message]) -> None:
        """Append the environment's response: text (one user message) or chat messages. These tokens are not trained.

        Raises ContextExhausted, and appends nothing, if no token would be left for the next message.
        """
        if self._last is None or not self._segments[-1].sampled:
            raise RuntimeError("observe() must follow generate(); pass all messages in one call")
        token_ids = self._codec.observation(messages, self._last.token_ids[-1], self._template)
        if len(token_ids) >= self.room:
            raise self._context_exhausted(f"an observation of {len(token_ids)} tokens and a message")
        self._segments.append(_observed(token_ids))

    def rollout(self, score: Score, temperature: float, *, plain: bool = False) -> Rollout:
        """Return the conversation so far as a training rollout. plain: see `Rollout.plain`."""
        segments, last = list(self._segments), self._last
        token_ids = [token for segment in segments for token in segment.token_ids]
        prompt_length = len(segments[0].token_ids)
        return Rollout(
            token_ids=token_ids,
            loss_mask=[segment.sampled for segment in segments for _ in segment.token_ids],
            sampling_logprobs=[logprob for segment in segments for logprob in segment.logprobs],
            prompt_length=prompt_length,
            text=self._codec.transcript(token_ids[prompt_length:]),
            finish_reason="abort" if last is None else "length" if self._exhausted else last.finish_reason,
            policy_version=0 if last is None else last.policy_version,
            temperature=temperature,
            score=score,
            plain=plain,
            routes=self._routes,
        )

    def _token_ids(self) -> list[int]:
        return [token for segment in self._segments for token in segment.token_ids]

    def _context_exhausted(self, needed: str) -> ContextExhausted:
        self._exhausted = True
        return ContextExhausted(f"rollout.max_completion_tokens: {self.room} tokens left, too few for {needed}")


def continued_routes(routes: Routes | None, longer: Routes | None) -> Routes | None:
    """Return `routes`, continued by those of a later turn for the tokens after them.

    A token keeps the experts with which it was sampled, even if later turns were sampled with newer weights.
    """
    if routes is None or longer is None:
        return longer if routes is None else routes
    return np.concatenate([routes, longer[len(routes) :]])


def _observed(token_ids: list[int]) -> _Segment:
    return _Segment(token_ids=token_ids, logprobs=[0.0] * len(token_ids), sampled=False)
