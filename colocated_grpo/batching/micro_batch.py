"""Micro-batches: sequences packed side by side without padding, each common prefix of siblings stored once.

Only attention mixes tokens, and a token's hidden state does not depend on the tokens after it. The keys and values of a
prefix can therefore serve all sequences that begin with it: the completions of a prompt, the turns of an episode.

Shapes: T packed tokens, E keys that the queries see (T, plus the copies of the prefix keys), N scored tokens (the
tokens that the policy sampled), L layers with experts, K experts per token, P ranks of a context-parallel group.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from colocated_grpo.losses.inputs import LossInputs
from colocated_grpo.types import ContextGroup, Routes

PADDING_TOKENS = [0] * 4
"""Tokens of a padding micro-batch, one of them scored and masked out. With fewer tokens, another graph would be
compiled: torch.compile specializes on sizes below two."""
MIN_ROWS = 2
"""Minimum rows per rank of a context-parallel group: torch.compile specializes on sizes of 1."""


@dataclass(frozen=True, kw_only=True)
class TrainSequence:
    """One rollout converted to arrays, on the rank that trains it.

    Planning uses `Outline` instead: every rank plans all rollouts, but converts only its own.
    The fields are arrays, because torch converts lists one number at a time.
    """

    token_ids: np.ndarray
    scored: np.ndarray
    """Positions of sampled tokens, ascending; position 0 is never scored."""
    sampling_logprobs: np.ndarray
    """One per scored token; NaN where the sampler gave none."""
    advantages: np.ndarray
    """One per scored token."""
    temperature: float
    trained: bool
    plain: bool = False
    """See `Rollout.plain`."""
    routes: "Routes | None" = None
    """Routes of the first tokens; the policy chooses the experts of all other tokens."""
    ref_logprobs: np.ndarray | None = None
    """One per scored token, from the environment. None: the environment gives none."""
    group: int = 0
    prefix_length: int = 0
    """Number of leading tokens that equal those of the sequence before it in the micro-batch, if of the same group."""

    @property
    def length(self) -> int:
        return len(self.token_ids)


class PrefixKeys(NamedTuple):
    """Keys that the queries see in a micro-batch with common prefixes.

    There are E keys for T packed rows: those of each whole sequence, which repeat the keys of its prefix.
    Example: two sequences of 5 and 3 tokens with the first 2 in common give T = 6 and E = 5 + 3.
    """

    rows_E: Tensor
    """Row of T that each key is computed from."""
    keys_E: Tensor
    """Indices in E of all keys, in the order of their rows."""
    starts_E: Tensor
    """[E + 1] Where the keys of each row start in keys_E, then where those of the last row end: T + 1 numbers, then
    padding, because torch.compile would unify sizes that happen to be equal."""
    cu_seqlens: Tensor
    """Boundaries in E of the keys of each run in `PackedTokens.cu_seqlens`."""
    max_seqlen: int


class PackedRoutes(NamedTuple):
    """Experts with which the packed tokens were sampled."""

    experts_LTK: Tensor
    """Experts of each token, by layer with experts; zeros where nothing is recorded."""
    recorded_T: Tensor
    """bool"""


@dataclass(frozen=True, kw_only=True)
class PackedTokens:
    """Input of one forward pass: the model predicts `targets_N` at rows `source_N`.

    Example: two rollouts of 5 and 3 tokens give T = 8 and cu_seqlens = [0, 5, 8]. With their first 2 tokens in common,
    T = 6 and cu_seqlens = [0, 5, 6].
    """

    input_ids_T: Tensor
    position_ids_T: Tensor
    cu_seqlens: Tensor
    """int32 boundaries of the runs of consecutive tokens: each sequence without the prefix that is packed before it."""
    max_seqlen: int
    """Tokens of the longest run."""
    source_N: Tensor
    """Row whose hidden state predicts the scored token: the row of the token before it."""
    targets_N: Tensor
    temperature_N: Tensor
    prefix_keys: PrefixKeys | None = None
    """None: there are no common prefixes, and each run sees only its own keys."""
    routes: PackedRoutes | None = None
    """None: the policy chooses all experts."""
    padding: bool = False
    """True for a padding micro-batch: the tokens belong to no sequence."""
    context: ContextGroup | None = None
    """If set, T counts this rank's rows; cu_seqlens and prefix_keys still index the rows of all ranks of the group."""

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids_T)

    @property
    def num_rows(self) -> int:
        """Rows of all ranks of the context-parallel group."""
        return len(self.input_ids_T) * (1 if self.context is None else self.context.size)

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest sequence, its prefix included."""
        return self.max_seqlen if self.prefix_keys is None else self.prefix_keys.max_seqlen


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Inputs of one forward pass on one rank, and of the loss."""

    tokens: PackedTokens
    loss_inputs: LossInputs

    def with_inputs(self, **inputs: Any) -> "MicroBatch":
        """Return the micro-batch with other inputs of the loss."""
        return replace(self, loss_inputs=replace(self.loss_inputs, **inputs))


def build_micro_batch(sequences: Sequence[TrainSequence], ranks: int = 1) -> MicroBatch:
    """Concatenate sequences. Sequences with a common prefix must be adjacent.

    An empty list yields a padding micro-batch, so that a rank without work still joins the collectives.
    ranks: size of a context-parallel group. The rows are padded to a multiple of it, with a run that no other run sees.
    """
    padding, sequences = not sequences, list(sequences) or [_blank(len(PADDING_TOKENS), scored=1)]
    num_sequences = len(sequences)
    before = [None, *(seq.group for seq in sequences[:-1])]
    pairs = [(s, s.prefix_length if group == s.group else 0) for s, group in zip(sequences, before, strict=True)]
    total = sum(seq.length - prefix for seq, prefix in pairs)
    if ranks > 1 and (missing := max(MIN_ROWS, -(-total // ranks)) * ranks - total):
        pairs.append((_blank(missing), 0))
        sequences.append(pairs[-1][0])
    rows = _rows(pairs)
    lengths = np.array([seq.length - prefix for seq, prefix in pairs])
    scored = [len(seq.scored) for seq in sequences]
    tokens = PackedTokens(
        input_ids_T=_concatenated([seq.token_ids[prefix:] for seq, prefix in pairs]),
        position_ids_T=_concatenated([np.arange(prefix, seq.length) for seq, prefix in pairs]),
        cu_seqlens=torch.from_numpy(np.cumsum([0, *lengths]).astype(np.int32)),
        max_seqlen=int(lengths.max()),
        source_N=_concatenated([own[seq.scored - 1] for seq, own in zip(sequences, rows, strict=True)]),
        targets_N=_concatenated([seq.token_ids[seq.scored] for seq in sequences]),
        temperature_N=_repeated(np.array([seq.temperature for seq in sequences], np.float32), scored),
        prefix_keys=_prefix_keys(rows) if any(prefix for _, prefix in pairs) else None,
        routes=_packed_routes(sequences, rows, int(lengths.sum())),
        padding=padding,
    )
    loss_inputs = LossInputs(
        sequence_N=_repeated(np.arange(len(sequences)), scored),
        num_sequences=num_sequences,
        loss_mask_N=_repeated(np.array([seq.trained for seq in sequences]), scored),
        plain_N=_repeated(np.array([seq.plain for seq in sequences]), scored),
        advantages_N=_concatenated([seq.advantages for seq in sequences]),
        sampling_logprobs_N=_concatenated([seq.sampling_logprobs for seq in sequences]),
        ref_logprobs_N=_given_ref_logprobs(sequences),
    )
    return MicroBatch(tokens=tokens, loss_inputs=loss_inputs)


def _blank(length: int, scored: int = 0) -> TrainSequence:
    """Return tokens that belong to no rollout and have no loss. scored: how many are scored."""
    unused = np.zeros(scored, np.float32)
    return TrainSequence(
        token_ids=np.zeros(length, np.int64),
        scored=np.arange(1, 1 + scored),
        sampling_logprobs=unused,
        advantages=unused,
        temperature=1.0,
        trained=False,
    )


def _rows(pairs: Sequence[tuple[TrainSequence, int]]) -> list[np.ndarray]:
    """Return the rows of each sequence's tokens. Those of its prefix, of this length, belong to the one before it."""
    rows: list[np.ndarray] = [np.arange(0)]
    start = 0
    for seq, prefix in pairs:
        end = start + seq.length - prefix
        rows.append(np.concatenate([rows[-1][:prefix], np.arange(start, end)]))
        start = end
    return rows[1:]


def _prefix_keys(rows: Sequence[np.ndarray]) -> PrefixKeys:
    """Return the keys that each run sees: those of its whole sequence. rows: of each sequence."""
    lengths = [len(own) for own in rows]
    rows_E = np.concatenate(rows)
    keys_E = np.argsort(rows_E, kind="stable")
    return PrefixKeys(
        rows_E=torch.from_numpy(rows_E),
        keys_E=torch.from_numpy(keys_E),
        starts_E=torch.from_numpy(np.searchsorted(rows_E[keys_E], np.arange(len(rows_E) + 1))),
        cu_seqlens=torch.from_numpy(np.cumsum([0, *lengths]).astype(np.int32)),
        max_seqlen=max(lengths),
    )


def _packed_routes(sequences: Sequence[TrainSequence], rows: Sequence[np.ndarray], total: int) -> PackedRoutes | None:
    """Return the routes of all rows; None if no sequence has any. Rows of a common prefix have one sibling's routes."""
    known = [(seq.routes, own) for seq, own in zip(sequences, rows, strict=True) if seq.routes is not None]
    if not known:
        return None
    first, _ = known[0]
    experts_TLK = np.zeros((total, *first.shape[1:]), first.dtype)
    recorded_T = np.zeros(total, bool)
    for routes, own in known:
        target = own[: len(routes)]
        experts_TLK[target], recorded_T[target] = routes, True
    experts_LTK = np.ascontiguousarray(experts_TLK.swapaxes(0, 1))
    return PackedRoutes(torch.from_numpy(experts_LTK), torch.from_numpy(recorded_T))


def _given_ref_logprobs(sequences: Sequence[TrainSequence]) -> Tensor | None:
    if all(seq.ref_logprobs is None for seq in sequences):
        return None
    unknown = lambda seq: np.full(len(seq.scored), math.nan, np.float32)  # noqa: E731
    return _concatenated([unknown(seq) if seq.ref_logprobs is None else seq.ref_logprobs for seq in sequences])


def _concatenated(arrays: Sequence[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.concatenate(arrays))


def _repeated(values: np.ndarray, counts: Sequence[int]) -> Tensor:
    return torch.from_numpy(np.repeat(values, counts))


def local_rows(micro_batch: MicroBatch, context: ContextGroup | None) -> MicroBatch:
    """Return this rank's T / P consecutive rows, and the scored tokens that these rows predict.

    `cu_seqlens` and `prefix_keys` still index all rows. A rank whose rows predict no token gets one token without loss.
    Returns the whole micro-batch if `context` is None. T must be a multiple of P: `build_micro_batch` pads to one.
    """
    if context is None:
        return micro_batch
    tokens, inputs = micro_batch.tokens, micro_batch.loss_inputs
    count, remainder = divmod(len(tokens.input_ids_T), context.size)
    assert remainder == 0
    rows = slice(context.rank * count, (context.rank + 1) * count)
    own = torch.nonzero(tokens.source_N // count == context.rank).flatten()
    if len(own) == 0:
        own = torch.zeros(1, dtype=torch.int64)
        inputs = replace(inputs, loss_mask_N=torch.zeros_like(inputs.loss_mask_N))
    routes = tokens.routes
    return MicroBatch(
        tokens=replace(
            tokens,
            input_ids_T=tokens.input_ids_T[rows],
            position_ids_T=tokens.position_ids_T[rows],
            source_N=tokens.source_N[own] % count,
            targets_N=tokens.targets_N[own],
            temperature_N=tokens.temperature_N[own],
            # A copy: a view would keep the routes of all rows.
            routes=routes and PackedRoutes(routes.experts_LTK[:, rows].clone(), routes.recorded_T[rows]),
            context=context,
        ),
        loss_inputs=inputs.at(own),
    )
