"""Validation of received batches, and conversion of their groups to trainable ones.

Anyone who can reach the server can post to it, and it checks types but not lengths. An inconsistent sequence is
dropped and counted by reason and sender. Raising an error instead would let any environment stop the trainer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeGuard

import numpy as np

from colocated_grpo.atropos.origins import Origin, Origins
from colocated_grpo.atropos.wire import ReceivedGroup
from colocated_grpo.settings.schema import MIN_TEMPERATURE
from colocated_grpo.types import Group, JsonObject, Prompt, Rollout, Score

Column = Literal["tokens", "masks", "inference_logprobs", "advantages", "ref_logprobs"]
"""Keys whose values have one list per sequence, with one number per token."""

MASKED = -100
DUMMY_LOGPROB = -0.5
LOGPROB_SLACK = 1e-3
"""Positive log-probabilities up to this value are rounding errors and count as zero."""
MIN_LOGPROB = -87.0
"""Lower values are rejected: in float32 their exp() is subnormal, and its inverse, an importance weight, overflows.
Samplers never return such values; they are fillers such as -9999."""
MAX_MAGNITUDE = 1e6
"""Bound of scores and advantages. Much larger finite values make the gradient norm infinite, which stops the run."""
MAX_TEMPERATURE = 100.0
"""Temperatures above it, and positive ones below MIN_TEMPERATURE, are errors: the trainer divides logits by them."""
MISSING_LOGPROBS = "missing_logprobs"
"""Reason for dropping a group without inference_logprobs."""


class InvalidSequence(Exception):
    """A sequence that cannot be trained. args[0] is the reason, as it appears in metric names."""


@dataclass(frozen=True, kw_only=True)
class GroupReader:
    """Converts received groups into `Group`."""

    source: str
    vocab_size: int
    max_tokens: int
    """Longest sequence, prompt included."""
    recompute_logprobs: bool
    """Accept groups without inference_logprobs; the sampling_logprobs of their rollouts are None."""
    origins: Origins
    decode: Callable[[Sequence[int]], str]

    def read(self, items: Sequence[object], first_index: int, policy_version: int) -> ReadBatch:
        """Convert the groups of one batch, dropping invalid sequences.

        first_index: prompt index of the first group. policy_version: the current one, for sequences of unknown
        origin.
        """
        batch = ReadBatch()
        for item in items:
            if not _is_group(item):
                batch.drop("malformed", None)
            elif rollouts := self._rollouts(item, policy_version, batch):
                batch.groups.append(self._group(item, rollouts, first_index + len(batch.groups)))
        return batch

    def _rollouts(self, group: ReceivedGroup, policy_version: int, batch: ReadBatch) -> list[Rollout]:
        num_sequences = len(group["tokens"])
        if _has_images(group.get("images")):
            batch.drop("images", group, num_sequences)
            return []
        if not group.get("inference_logprobs") and not self.recompute_logprobs:
            batch.drop(MISSING_LOGPROBS, group, num_sequences)
            return []
        rollouts = []
        for index in range(num_sequences):
            try:
                rollout, origin = self._rollout(group, index, policy_version)
            except InvalidSequence as reason:
                batch.drop(reason.args[0], group)
            else:
                batch.num_unknown += origin is None
                rollouts.append(rollout)
        return rollouts

    def _rollout(self, group: ReceivedGroup, index: int, policy_version: int) -> tuple[Rollout, Origin | None]:
        tokens_T = _row(group, "tokens", index, kinds="iu")
        length = len(tokens_T)
        if not 2 <= length <= self.max_tokens:
            raise InvalidSequence("length")
        if tokens_T.min() < 0 or tokens_T.max() >= self.vocab_size:
            raise InvalidSequence("tokens")
        trained_T = _trained(tokens_T, _row(group, "masks", index, kinds="iu", length=length))
        logprobs = self._sampling_logprobs(group, index, tokens_T, trained_T)
        reward = _score(group, index)
        override = _override(group, index)
        origin = self._origin(tokens_T, trained_T)
        rollout = Rollout(
            token_ids=tokens_T.tolist(),
            loss_mask=trained_T.tolist(),
            sampling_logprobs=logprobs,
            prompt_length=int(trained_T.argmax()),
            text=self.decode(tokens_T[trained_T].tolist()),
            finish_reason=origin.finish_reason if origin else "stop",
            policy_version=origin.policy_version if origin else policy_version,
            temperature=_temperature(group, override, origin),
            score=Score(reward=reward),
            advantages=_advantages(group, index, trained_T, override, reward),
            ref_logprobs=_ref_logprobs(group, index, trained_T),
        )
        return rollout, origin

    def _sampling_logprobs(
        self, group: ReceivedGroup, index: int, tokens_T: np.ndarray, trained_T: np.ndarray
    ) -> list[float] | None:
        if not group.get("inference_logprobs"):
            return None
        logprobs_T = _logprobs(group, "inference_logprobs", index, trained_T)
        # atroposlib's placeholder (tokens 0, 1, 2, ...) for OpenAI endpoints, which return no tokens or logprobs.
        if (np.arange(len(tokens_T)) == tokens_T).all() and (logprobs_T[trained_T] == DUMMY_LOGPROB).all():
            raise InvalidSequence("dummy_server")
        return logprobs_T.tolist()

    def _origin(self, tokens_T: np.ndarray, trained_T: np.ndarray) -> Origin | None:
        """Return how the sequence was sampled: its last completion's origin with its oldest policy version.

        None when any of its completions was not served by this run's engines.
        """
        edges = np.flatnonzero(np.diff(np.concatenate([[False], trained_T, [False]])))
        found = [
            self.origins.find(tokens_T[:start].tolist(), tokens_T[start:end].tolist())
            for start, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)
        ]
        known = [origin for origin in found if origin is not None]
        if len(known) < len(found):
            return None
        return known[-1]._replace(policy_version=min(origin.policy_version for origin in known))

    def _group(self, group: ReceivedGroup, rollouts: list[Rollout], index: int) -> Group:
        prompt_ids = rollouts[0].token_ids[: rollouts[0].prompt_length]
        text = self.decode(prompt_ids)
        item = {"prompt": text, "env_id": group.get("env_id")}
        prompt = Prompt(index=index, token_ids=prompt_ids, text=text, item=item, source=self.source)
        return Group(prompt=prompt, rollouts=rollouts)


@dataclass
class ReadBatch:
    """The valid groups of one received batch, and counts of its sequences."""

    groups: list[Group] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    """Dropped sequences by reason."""
    senders: Counter[str] = field(default_factory=Counter)
    """The same by environment."""
    num_unknown: int = 0
    """Accepted sequences of unknown origin: sampled elsewhere, or evicted from the cache of origins."""

    def drop(self, reason: str, group: ReceivedGroup | None, count: int = 1) -> None:
        if count:
            self.dropped[reason] += count
            self.senders[_sender(group)] += count

    def update(self, other: ReadBatch) -> None:
        """Add the counts of another batch."""
        self.dropped.update(other.dropped)
        self.senders.update(other.senders)
        self.num_unknown += other.num_unknown


def _is_group(item: object) -> TypeGuard[ReceivedGroup]:
    return isinstance(item, dict) and isinstance(item.get("tokens"), list)


def _sender(group: ReceivedGroup | None) -> str:
    env = None if group is None else group.get("env_id")
    return f"environment {env}" if isinstance(env, int) else "a client without env_id"


def _has_images(images: object) -> bool:
    return any(image is not None for image in images) if isinstance(images, list) else bool(images)


def _entry(values: object, index: int) -> object:
    """Return `values[index]`; None when that does not exist."""
    return values[index] if isinstance(values, list) and index < len(values) else None


def _row(group: ReceivedGroup, name: Column, index: int, *, kinds: str, length: int | None = None) -> np.ndarray:
    """Return the numbers of sequence `index` in a column, as an array [T]. Raises InvalidSequence(name).

    kinds: accepted numpy dtype kinds. length: required T, if given.
    """
    row = _entry(group.get(name), index)
    if not isinstance(row, list):
        raise InvalidSequence(name)
    try:
        values = np.asarray(row)
    except (ValueError, OverflowError):  # ragged, or beyond every integer type
        raise InvalidSequence(name) from None
    if values.dtype.kind not in kinds or values.ndim != 1 or len(values) != (len(row) if length is None else length):
        raise InvalidSequence(name)
    return values


def _token_values(group: ReceivedGroup, name: Column, index: int, trained_T: np.ndarray) -> np.ndarray:
    """Return one float per token, bounded by MAX_MAGNITUDE; 0 on untrained tokens, which may have any filler."""
    values = _row(group, name, index, kinds="fiu", length=len(trained_T))
    values_T = np.where(trained_T, values, 0.0).astype(np.float64)
    if not (np.abs(values_T) <= MAX_MAGNITUDE).all():  # also False for NaN
        raise InvalidSequence(name)
    return values_T


def _logprobs(group: ReceivedGroup, name: Column, index: int, trained_T: np.ndarray) -> np.ndarray:
    values_T = _token_values(group, name, index, trained_T)
    if values_T.max() > LOGPROB_SLACK or values_T.min() < MIN_LOGPROB:
        raise InvalidSequence(name)
    return np.minimum(values_T, 0.0)


def _trained(tokens_T: np.ndarray, masks_T: np.ndarray) -> np.ndarray:
    """Return a bool array: True where the mask repeats the token. Never the first token: nothing predicts it."""
    trained_T = masks_T != MASKED
    if (masks_T[trained_T] != tokens_T[trained_T]).any():
        raise InvalidSequence("masks")
    trained_T[0] = False
    if not trained_T.any():
        raise InvalidSequence("nothing_trained")
    return trained_T


def _number(value: object) -> float | None:
    """Return a bounded number as float; None for anything else, booleans and NaN included."""
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MAX_MAGNITUDE:
        return float(value)
    return None


def _score(group: ReceivedGroup, index: int) -> float:
    score = _number(_entry(group.get("scores"), index))
    if score is None:
        raise InvalidSequence("scores")
    return score


def _override(group: ReceivedGroup, index: int) -> JsonObject:
    override = _entry(group.get("overrides"), index)
    return override if isinstance(override, dict) else {}


def _temperature(group: ReceivedGroup, override: JsonObject, origin: Origin | None) -> float:
    """Return the sampling temperature, 1 for greedy sampling.

    Precedence: the sequence's override, generation_params, group_overrides, the temperature it was served at, 1.
    """
    for settings in (override, group.get("generation_params"), group.get("group_overrides")):
        if isinstance(settings, dict) and settings.get("temperature") is not None:
            temperature = _number(settings["temperature"])
            if temperature is None or temperature > MAX_TEMPERATURE or 0 < temperature < MIN_TEMPERATURE:
                raise InvalidSequence("temperature")
            return temperature if temperature > 0 else 1.0
    return 1.0 if origin is None else origin.temperature


def _advantages(
    group: ReceivedGroup, index: int, trained_T: np.ndarray, override: JsonObject, reward: float
) -> list[float] | None:
    """Return one advantage per trained token; None when they are to be computed from the group's rewards."""
    if override.get("set_advantage_to_zero") is True:
        return [0.0] * int(trained_T.sum())
    if group.get("advantages"):
        return _token_values(group, "advantages", index, trained_T)[trained_T].tolist()
    if len(group["tokens"]) == 1:
        # Without siblings there is no baseline. As in Atropos' own trainer, the score itself is the advantage.
        return [reward] * int(trained_T.sum())
    return None


def _ref_logprobs(group: ReceivedGroup, index: int, trained_T: np.ndarray) -> list[float] | None:
    return _logprobs(group, "ref_logprobs", index, trained_T).tolist() if group.get("ref_logprobs") else None
