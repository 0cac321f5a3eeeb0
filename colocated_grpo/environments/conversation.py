"""One conversation between the policy and an environment, as the tokens that the policy read and wrote."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from colocated_grpo.environments.chat import ChatCodec, Message
from colocated_grpo.types import Completion, FinishReason, Prompt, Rollout, Score

Sample = Callable[[list[int], int], Awaitable[Completion]]
"""(tokens so far, most tokens to sample) -> one turn of the policy."""


class OutOfRoom(Exception):
    """The next observation or turn does not fit rollout.max_completion_tokens. Let it pass: the episode ends with 0.

    An episode whose score has parts catches it, or their means would leave out the conversations that ran out of room.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """What the policy said. Example: Turn(text="4", token_ids=[20, 5], finish_reason="stop")"""

    text: str
    """Special tokens left out."""
    token_ids: list[int]
    finish_reason: FinishReason
    """length: cut at max_tokens, or where the conversation's room ended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Piece:
    """Consecutive tokens from one side."""

    token_ids: list[int]
    logprobs: list[float]
    sampled: bool


class Conversation:
    """The handle that an episode talks to the policy with. Turns alternate: generate, observe, generate ...

    Token in, token out: what was sampled is trained as it was sampled, and nothing is tokenised twice.
    """

    def __init__(self, prompt: Prompt, codec: ChatCodec, room: int, sample: Sample) -> None:
        """room: most tokens after the prompt, sampled and observed together."""
        self._codec = codec
        self._sample = sample
        self._end = len(prompt.token_ids) + room
        # Pieces are whole and never change: another thread may read a conversation that goes on.
        self._pieces = [_piece(prompt.token_ids)]
        self._last: Completion | None = None
        self._is_full = False
        self.turns = 0
        """Taken by the policy so far."""

    @property
    def room(self) -> int:
        """Tokens that may still be sampled or observed."""
        return self._end - sum(len(piece.token_ids) for piece in self._pieces)

    async def generate(self, max_tokens: int | None = None) -> Turn:
        """Sample one turn of the policy, of at most `max_tokens` tokens and never more than there is room for."""
        if max_tokens is not None and max_tokens < 1:
            raise ValueError(f"generate(max_tokens={max_tokens}): must be at least 1")
        room = self.room
        if room < 1:
            raise self._out_of_room("a turn")
        completion = await self._sample(self._token_ids(), room if max_tokens is None else min(max_tokens, room))
        self._pieces.append(_Piece(token_ids=completion.token_ids, logprobs=completion.sampling_logprobs, sampled=True))
        self._last = completion
        self.turns += 1
        return Turn(
            text=self._codec.turn_text(completion.token_ids),
            token_ids=completion.token_ids,
            finish_reason=completion.finish_reason,
        )

    def observe(self, said: str | Sequence[Message]) -> None:
        """Append what the environment answers to the policy's turn: text (one user message) or chat messages.

        These tokens are read and not trained. Raises OutOfRoom, and appends nothing, where no further turn would fit.
        """
        if not self._pieces[-1].sampled:
            raise RuntimeError("observe() answers a turn: call generate() first, and give all messages in one call")
        token_ids = self._codec.observation(said, self._last.token_ids[-1])
        if len(token_ids) >= self.room:
            raise self._out_of_room(f"an observation of {len(token_ids)} tokens and a turn")
        self._pieces.append(_piece(token_ids))

    def rollout(self, score: Score, temperature: float) -> Rollout:
        """The conversation as it stands, for training."""
        pieces, last = list(self._pieces), self._last
        token_ids = [token for piece in pieces for token in piece.token_ids]
        prompt_length = len(pieces[0].token_ids)
        return Rollout(
            token_ids=token_ids,
            loss_mask=[piece.sampled for piece in pieces for _ in piece.token_ids],
            sampling_logprobs=[logprob for piece in pieces for logprob in piece.logprobs],
            prompt_length=prompt_length,
            text=self._codec.transcript(token_ids[prompt_length:]),
            finish_reason="abort" if last is None else "length" if self._is_full else last.finish_reason,
            policy_version=0 if last is None else last.policy_version,
            temperature=temperature,
            score=score,
        )

    def _token_ids(self) -> list[int]:
        return [token for piece in self._pieces for token in piece.token_ids]

    def _out_of_room(self, wanted: str) -> OutOfRoom:
        self._is_full = True
        return OutOfRoom(f"no room for {wanted}: {self.room} of rollout.max_completion_tokens are left")


def _piece(token_ids: list[int]) -> _Piece:
    return _Piece(token_ids=token_ids, logprobs=[0.0] * len(token_ids), sampled=False)
