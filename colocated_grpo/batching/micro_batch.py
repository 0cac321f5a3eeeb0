"""One forward pass: rollouts side by side without padding, and of siblings that share their beginning that part once.

Attention is all that mixes tokens, so a token's hidden state depends on what comes before it and not on who reads it: a
prompt's keys and values serve every completion.

Shapes: T packed tokens, E keys that they see (T, and a copy of a shared beginning for each of its readers), U tokens of
shared beginnings, R readers of the most read one, N scored tokens (the ones that the policy sampled).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

PADDING_TOKENS = [0, 0]
"""What a rank without work of its own runs: two tokens, one of them scored and masked out."""


@dataclass(frozen=True, kw_only=True)
class TrainSequence:
    """One rollout ready for training.

    Arrays, one conversion a rollout: of a list torch would read every Python number by itself.
    """

    token_ids: np.ndarray
    scored: np.ndarray
    """Positions of sampled tokens, ascending; position 0 is never scored."""
    sampling_logprobs: np.ndarray
    """Of the scored tokens, as `advantages`; NaN where the sampler's are not known."""
    advantages: np.ndarray
    temperature: float
    trained: bool
    ref_logprobs: np.ndarray | None = None
    """From the environment; None: not given."""
    group: int = 0
    shared: int = 0
    """Tokens at the beginning, none of them scored, that are those of every sequence beside it of the same group."""

    @property
    def length(self) -> int:
        return len(self.token_ids)


class SharedKeys(NamedTuple):
    """Which keys queries see where rollouts share their beginning. Example: 5 and 3 tokens that share 2 give E = 10."""

    rows_E: Tensor
    """Row that each key comes from."""
    keys_of_T: Tensor
    """Where each row's own key is among them."""
    copies_UR: Tensor
    """Where the further copies of the first U rows' keys are; -1 where there are fewer."""
    cu_seqlens: Tensor
    """Borders of the keys that each run sees: those of its shared beginning, then its own."""
    max_seqlen: int


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """One forward pass of one rank. Example: two rollouts of 5 and 3 tokens give T = 8, cu_seqlens = [0, 5, 8].

    Of two that share their first 2 tokens: T = 6, cu_seqlens = [0, 2, 5, 6].
    """

    input_ids_T: Tensor
    position_ids_T: Tensor
    cu_seqlens: Tensor
    """Borders of the runs of consecutive tokens: whole rollouts, or shared beginnings and then what follows each."""
    max_seqlen: int
    source_N: Tensor
    """Row whose hidden state predicts the scored token, that of the token before it."""
    targets_N: Tensor
    temperature_N: Tensor
    sequence_N: Tensor
    num_sequences: int
    loss_mask_N: Tensor
    advantages_N: Tensor
    sampling_logprobs_N: Tensor
    old_logprobs_N: Tensor | None = None
    ref_logprobs_N: Tensor | None = None
    """As packed: from the environment, NaN where it gave none."""
    shared_keys: SharedKeys | None = None
    """None: nothing is shared, and the keys of each run are its own tokens'."""

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids_T)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, its shared beginning included."""
        return self.max_seqlen if self.shared_keys is None else self.shared_keys.max_seqlen


@dataclass(frozen=True, kw_only=True)
class _Rows:
    """Where a sequence's tokens are: its own from `start` on, those of its shared beginning from `prompt` on."""

    prompt: int
    shared: int
    start: int
    length: int

    def of(self, positions: np.ndarray) -> np.ndarray:
        return np.where(positions < self.shared, self.prompt, self.start - self.shared) + positions


def build_micro_batch(sequences: Sequence[TrainSequence]) -> MicroBatch:
    """Concatenate sequences; those of one group come one after the other. None: a stand-in, for aligned collectives."""
    if not sequences:
        return _stand_in()
    rows = _place(sequences)
    prompts = {r.prompt: seq.token_ids[: r.shared] for seq, r in zip(sequences, rows, strict=True) if r.shared}
    pieces = [*prompts.values(), *(seq.token_ids[r.shared :] for seq, r in zip(sequences, rows, strict=True))]
    begins = [0] * len(prompts) + [r.shared for r in rows]
    scored = [len(seq.scored) for seq in sequences]
    lengths = np.array([len(piece) for piece in pieces])
    return MicroBatch(
        input_ids_T=_joined(pieces),
        position_ids_T=_joined([np.arange(begin, begin + len(p)) for begin, p in zip(begins, pieces, strict=True)]),
        cu_seqlens=torch.from_numpy(np.cumsum([0, *lengths]).astype(np.int32)),
        max_seqlen=int(lengths.max()),
        source_N=_joined([r.of(seq.scored - 1) for seq, r in zip(sequences, rows, strict=True)]),
        targets_N=_joined([seq.token_ids[seq.scored] for seq in sequences]),
        temperature_N=_repeated(np.array([seq.temperature for seq in sequences], np.float32), scored),
        sequence_N=_repeated(np.arange(len(sequences)), scored),
        num_sequences=len(sequences),
        loss_mask_N=_repeated(np.array([seq.trained for seq in sequences]), scored),
        advantages_N=_joined([seq.advantages for seq in sequences]),
        sampling_logprobs_N=_joined([seq.sampling_logprobs for seq in sequences]),
        ref_logprobs_N=_given_ref_logprobs(sequences),
        shared_keys=_shared_keys(rows, [*map(len, prompts.values())]) if prompts else None,
    )


def _place(sequences: Sequence[TrainSequence]) -> list[_Rows]:
    """Shared beginnings first, then what is each sequence's own. A sequence without siblings here shares nothing."""
    groups = [list(members) for _, members in groupby(sequences, key=lambda seq: seq.group)]
    shared = [members[0].shared if len(members) > 1 else 0 for members in groups]
    prompts = np.cumsum([0, *shared]).tolist()
    start, rows = prompts[-1], []
    for members, prompt, length in zip(groups, prompts, shared, strict=False):
        for seq in members:
            rows.append(_Rows(prompt=prompt, shared=length, start=start, length=seq.length))
            start += seq.length - length
    return rows


def _shared_keys(rows: Sequence[_Rows], prompts: Sequence[int]) -> SharedKeys:
    """prompts: lengths of the shared beginnings, in the order of their rows."""
    lengths = [*prompts, *(r.length for r in rows)]
    begins = np.cumsum([0, *lengths])
    shared = sum(prompts)
    key_rows = np.concatenate([np.arange(shared), *(r.of(np.arange(r.length)) for r in rows)])
    _, keys_of = np.unique(key_rows, return_index=True)  # the first of each row: copies come after it
    readers: dict[int, list[int]] = {}
    for r, begin in zip(rows, begins[len(prompts) :].tolist(), strict=False):
        if r.shared:
            readers.setdefault(r.prompt, []).append(begin)
    copies = np.full((shared, max(map(len, readers.values()))), -1)
    for length, (prompt, copied_to) in zip(prompts, readers.items(), strict=True):
        copies[prompt : prompt + length, : len(copied_to)] = np.arange(length)[:, None] + copied_to
    return SharedKeys(
        rows_E=torch.from_numpy(key_rows),
        keys_of_T=torch.from_numpy(keys_of),
        copies_UR=torch.from_numpy(copies),
        cu_seqlens=torch.from_numpy(begins.astype(np.int32)),
        max_seqlen=max(lengths),
    )


def _given_ref_logprobs(sequences: Sequence[TrainSequence]) -> Tensor | None:
    if all(seq.ref_logprobs is None for seq in sequences):
        return None
    unknown = lambda seq: np.full(len(seq.scored), math.nan, np.float32)  # noqa: E731
    return _joined([unknown(seq) if seq.ref_logprobs is None else seq.ref_logprobs for seq in sequences])


def _joined(arrays: Sequence[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.concatenate(arrays))


def _repeated(values: np.ndarray, counts: Sequence[int]) -> Tensor:
    return torch.from_numpy(np.repeat(values, counts))


def _stand_in() -> MicroBatch:
    nothing = torch.zeros(1)
    return MicroBatch(
        input_ids_T=torch.tensor(PADDING_TOKENS),
        position_ids_T=torch.arange(2),
        cu_seqlens=torch.tensor([0, 2], dtype=torch.int32),
        max_seqlen=2,
        source_N=torch.tensor([0]),
        targets_N=torch.tensor([0]),
        temperature_N=torch.ones(1),
        sequence_N=torch.tensor([0]),
        num_sequences=1,
        loss_mask_N=torch.tensor([False]),
        advantages_N=nothing,
        sampling_logprobs_N=nothing,
    )
