"""Conversations between policy and environment: chat messages, their tokens, and the tokens that were sampled."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Self, cast

import numpy as np

from colocated_grpo.types import Completion, FinishReason, JsonObject, Prompt, Rollout, Routes, Score

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = JsonObject
"""A chat message. Example: {"role": "user", "content": "3+4="}"""


class ChatCodec:
    """Decodes sampled messages and encodes the observations between them. Sampled text is never encoded again."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._tokenizer = tokenizer

    @cached_property
    def longest_token(self) -> int:
        """Number of characters of the longest token."""
        return max(map(len, self._tokenizer.get_vocab()))

    def message_text(self, token_ids: Sequence[int]) -> str:
        """Decode an assistant message without its special tokens."""
        return cast(str, self._tokenizer.decode(list(token_ids), skip_special_tokens=True))  # a list for a batch only

    def transcript(self, token_ids: Sequence[int]) -> str:
        """Decode every token. Special tokens show where a message begins and ends."""
        return cast(str, self._tokenizer.decode(list(token_ids), skip_special_tokens=False))

    def encode(self, text: str) -> list[int]:
        """Return the tokens of text that a chat template has rendered."""
        return self._tokenizer.encode(text, add_special_tokens=False)

    def observation(
        self, messages: str | Sequence[Message], last_token: int, template: JsonObject | None = None
    ) -> list[int]:
        """Return the tokens between two assistant messages: the end of the first, `messages`, the start of the second.

        Text is one user message. If `last_token` has ended the first message, its closing token is omitted. Without a
        chat template, the plain text is encoded. template: further arguments of the prompt's chat template.
        """
        if self._tokenizer.chat_template is None:
            return self.encode(plain_text(messages))
        chat = [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)
        token_ids = self._after_assistant_message(chat, template or {})
        return token_ids[1:] if token_ids and token_ids[0] == last_token else token_ids

    def _after_assistant_message(self, messages: list[Message], template: JsonObject) -> list[int]:
        """Return the common suffix of two conversations that differ only in the text of one assistant message.

        Templates insert text earlier, such as a system message or the date, and some special tokens have no text form.
        """
        question = {"role": "user", "content": "q"}
        one, other = (
            render_tokens(self._tokenizer, [question, {"role": "assistant", "content": content}, *messages], template)
            for content in ("a", "b")
        )
        length = 0
        while length < min(len(one), len(other)) and one[-1 - length] == other[-1 - length]:
            length += 1
        return one[len(one) - length :]


def render_tokens(tokenizer: "PreTrainedTokenizerBase", messages: list[Message], template: JsonObject) -> list[int]:
    """Return the tokens of a chat and of the start of a reply. template: further arguments of the chat template."""
    token_ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False, **template)
    return list(cast("list[int]", token_ids))  # annotated as a union of all return types


def plain_text(messages: str | Sequence[Message]) -> str:
    """Return text unchanged, and messages as their contents joined by newlines."""
    return messages if isinstance(messages, str) else "\n".join(str(each.get("content") or "") for each in messages)


SampleFn = Callable[[list[int], int], Awaitable[Completion]]
"""Samples one assistant message. Arguments: the tokens so far, the maximum number of tokens to sample."""


class ContextExhausted(Exception):
    """The next observation or message does not fit rollout.max_completion_tokens.

    If the episode does not catch the exception, the episode ends with reward 0 and without named parts. An episode with
    named parts should catch it: otherwise truncated conversations are missing from the means of the parts.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class AssistantMessage:
    """A message from the policy. Example: AssistantMessage(text="4", token_ids=[20, 5], finish_reason="stop")"""

    text: str
    """Decoded text without special tokens."""
    token_ids: list[int]
    finish_reason: FinishReason
    """'length' if the message was cut at max_tokens or at the end of the conversation's token budget, 'repetition' if
    rollout.repetition_detection ended it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tokens:
    """Consecutive tokens: a prompt, sampled messages and the observations between them. Replaced, never modified."""

    token_ids: list[int]
    loss_mask: list[bool]
    """True for sampled tokens."""
    logprobs: list[float]
    prompt_length: int
    last: Completion | None = None
    """The last sampled message."""
    versions: tuple[tuple[int, int], ...] = ()
    """(start, policy_version) of each run of messages that the same weights sampled. start: position in token_ids."""
    routes: "Routes | None" = None

    @classmethod
    def of_prompt(cls, token_ids: list[int]) -> Self:
        return cls(token_ids=[], loss_mask=[], logprobs=[], prompt_length=len(token_ids)).observed(token_ids)

    def observed(self, token_ids: list[int]) -> Self:
        return replace(
            self,
            token_ids=[*self.token_ids, *token_ids],
            loss_mask=[*self.loss_mask, *[False] * len(token_ids)],
            logprobs=[*self.logprobs, *[0.0] * len(token_ids)],
        )

    def sampled(self, completion: Completion) -> Self:
        version = completion.policy_version
        is_new = not self.versions or version != self.versions[-1][1]
        return replace(
            self,
            token_ids=[*self.token_ids, *completion.token_ids],
            loss_mask=[*self.loss_mask, *[True] * len(completion.token_ids)],
            logprobs=[*self.logprobs, *completion.sampling_logprobs],
            last=completion,
            versions=(*self.versions, (len(self.token_ids), version)) if is_new else self.versions,
            routes=_continued(self.routes, completion.routes),
        )

    def rollout(self, codec: ChatCodec, score: Score, temperature: float, *, cut: bool, plain: bool) -> Rollout:
        """Return the training rollout. cut: a message or an observation did not fit. plain: see `Rollout.plain`."""
        last = self.last
        return Rollout(
            token_ids=self.token_ids,
            loss_mask=self.loss_mask,
            sampling_logprobs=self.logprobs,
            prompt_length=self.prompt_length,
            text=codec.transcript(self.token_ids[self.prompt_length :]),
            finish_reason="abort" if last is None else "length" if cut else last.finish_reason,
            policy_version=self.versions[0][1] if self.versions else 0,
            newer_versions=list(self.versions[1:]),
            temperature=temperature,
            score=score,
            plain=plain and last is not None,  # without a sampled token, its version says nothing
            routes=self.routes,
        )


def _continued(routes: "Routes | None", longer: "Routes | None") -> "Routes | None":
    """Return `routes`, extended by `longer` of a later turn: a token keeps the experts with which it was sampled."""
    if routes is None or longer is None:
        return longer if routes is None else routes
    return np.concatenate([routes, longer[len(routes) :]])


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
        self._tokens = Tokens.of_prompt(prompt.token_ids)  # rollout() may read the tokens in another thread
        self._exhausted = False
        self._generating = False
        self.turns = 0
        """Messages sampled so far."""

    @property
    def room(self) -> int:
        """Tokens that can still be sampled or observed."""
        return self._max_tokens - len(self._tokens.token_ids)

    async def generate(self, max_tokens: int | None = None) -> AssistantMessage:
        """Sample one message of at most min(max_tokens, room) tokens. Raises ContextExhausted if room is 0."""
        if max_tokens is not None and max_tokens < 1:
            raise ValueError(f"generate(max_tokens={max_tokens}): must be at least 1")
        if self._generating:
            raise RuntimeError("generate() was called while another turn of the same episode is being sampled")
        if (room := self.room) < 1:
            raise self._context_exhausted("a message")
        self._generating = True
        try:
            tokens = list(self._tokens.token_ids)
            completion = await self._sample(tokens, room if max_tokens is None else min(max_tokens, room))
        finally:
            self._generating = False
        self._tokens = self._tokens.sampled(completion)
        self.turns += 1
        return AssistantMessage(
            text=self._codec.message_text(completion.token_ids),
            token_ids=completion.token_ids,
            finish_reason=completion.finish_reason,
        )

    def observe(self, messages: str | Sequence[Message]) -> None:
        """Append the environment's response: text (one user message) or chat messages.

        The appended tokens are not trained. Raises ContextExhausted, and appends nothing, if no token would be left for
        the next message, and TypeError for anything else, such as a number.
        """
        if (last := self._tokens.last) is None or not self._tokens.loss_mask[-1]:
            raise RuntimeError("observe() must follow generate(); pass all messages in one call")
        try:
            chat = messages if isinstance(messages, str) else list(messages)
            # Text that cannot fit is not encoded: for megabytes this takes minutes, in which no other episode runs.
            fewest = len(plain_text(chat)) // self._codec.longest_token
            token_ids = [] if fewest >= self.room else self._codec.observation(chat, last.token_ids[-1], self._template)
        except Exception as error:  # a template is third-party code and may raise anything
            rule = "it takes text, or a list of chat messages whose content is text"
            raise TypeError(f"observe({messages!r:.60}): {error}; {rule}") from error
        if (needed := max(fewest, len(token_ids))) >= self.room:
            raise self._context_exhausted(f"an observation of at least {needed} tokens and a message")
        self._tokens = self._tokens.observed(token_ids)

    def rollout(self, score: Score, temperature: float, *, plain: bool = False) -> Rollout:
        """Return the conversation so far as a training rollout. plain: see `Rollout.plain`."""
        return self._tokens.rollout(self._codec, score, temperature, cut=self._exhausted, plain=plain)

    def _context_exhausted(self, needed: str) -> ContextExhausted:
        self._exhausted = True
        return ContextExhausted(f"rollout.max_completion_tokens: {self.room} tokens left, too few for {needed}")
