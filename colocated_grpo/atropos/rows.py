"""From what an API server sends to groups that may be trained. Nothing in it is believed.

Environments of other people post here, and the server checks types but no lengths. A sequence that contradicts itself
is left out and counted by reason: training on it would be wrong, ending the run over it would hand every environment
a switch to turn the trainer off.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from colocated_grpo.config.schema import COLDEST
from colocated_grpo.errors import RunError
from colocated_grpo.serving.origins import Origin, Origins
from colocated_grpo.types import Group, Prompt, Rollout, Score

MASKED = -100
DUMMY_LOGPROB = -0.5
ABOVE_ZERO = 1e-3
"""A log-probability may round to just above zero; further up it is none."""
LEAST_LOGPROB = -87.0
"""Below it a probability is no normal float32 and its inverse, an importance weight, overflows. Nothing samples such a
token: it is a filler, -9999 for instance."""
LARGEST = 1e6
"""For scores and advantages. Much larger ones, though finite, make the gradient's norm infinite, which ends the run."""
HOTTEST = 100.0
"""Temperatures above it, and those between 0 and COLDEST, are typing errors: logits divided by them would vanish or
overflow."""
MISSING_LOGPROBS = "GRPO requires inference_logprobs for importance sampling!"


class BadRow(Exception):
    """A sequence, or a whole group, that cannot be trained; args[0] is the reason, one word of the metrics."""


@dataclass(frozen=True, kw_only=True)
class Reader:
    """Turns items of a batch into groups."""

    source: str
    vocab_size: int
    max_tokens: int
    """Longest sequence, prompt included."""
    recompute_logprobs: bool
    """Whether groups without inference_logprobs are accepted; their sampling_logprobs are then None."""
    origins: Origins
    decode: Callable[[Sequence[int]], str]

    def read(self, items: Sequence[Any], first_index: int, policy_version: int) -> Reading:
        """policy_version: of the weights now, for sequences that this engine has not served."""
        reading = Reading()
        for item in items:
            rollouts = self._rollouts(item, policy_version, reading)
            if rollouts:
                reading.groups.append(self._group(item, rollouts, first_index + len(reading.groups)))
        return reading

    def _rollouts(self, item: Any, policy_version: int, reading: Reading) -> list[Rollout]:
        rows = item.get("tokens") if isinstance(item, dict) else None
        if not isinstance(rows, list):
            reading.dropped["malformed"] += 1
            return []
        if _has_images(item.get("images")):
            reading.dropped["images"] += len(rows)
            return []
        if rows and not item.get("inference_logprobs") and not self.recompute_logprobs:
            raise RunError(
                f"{MISSING_LOGPROBS} {_sender(item)} sent none: let it sample through its managed_server with "
                "server_type vllm, or set missing_logprobs: recompute in the atropos entry"
            )
        rollouts = []
        for index in range(len(rows)):
            try:
                rollout, origin = self._rollout(item, index, policy_version)
            except BadRow as reason:
                reading.dropped[reason.args[0]] += 1
            else:
                reading.unknown += origin is None
                rollouts.append(rollout)
        return rollouts

    def _rollout(self, item: dict[str, Any], index: int, policy_version: int) -> tuple[Rollout, Origin | None]:
        tokens = _numbers(item, "tokens", index, kinds="iu")
        length = len(tokens)
        if not 2 <= length <= self.max_tokens:
            raise BadRow("length")
        if tokens.min() < 0 or tokens.max() >= self.vocab_size:
            raise BadRow("tokens")
        trained = _trained(tokens, _numbers(item, "masks", index, kinds="iu", length=length))
        logprobs = self._logprobs(item, index, tokens, trained)
        reward = _score(item, index)
        override = _override(item, index)
        origin = self._origin(tokens, trained)
        rollout = Rollout(
            token_ids=tokens.tolist(),
            loss_mask=trained.tolist(),
            sampling_logprobs=logprobs,
            prompt_length=int(trained.argmax()),
            text=self.decode(tokens[trained].tolist()),
            finish_reason=origin.finish_reason if origin else "stop",
            policy_version=origin.policy_version if origin else policy_version,
            temperature=_temperature(item, override, origin),
            score=Score(reward=reward),
            advantages=_advantages(item, index, trained, override, reward),
            ref_logprobs=_ref_logprobs(item, index, trained),
        )
        return rollout, origin

    def _logprobs(
        self, item: dict[str, Any], index: int, tokens: np.ndarray, trained: np.ndarray
    ) -> list[float] | None:
        if not item.get("inference_logprobs"):
            return None
        logprobs = _log_probabilities(item, "inference_logprobs", index, trained)
        # What upstream puts in place of an OpenAI endpoint, which knows neither tokens nor log-probabilities.
        if (np.arange(len(tokens)) == tokens).all() and (logprobs[trained] == DUMMY_LOGPROB).all():
            raise BadRow("dummy_server")
        return logprobs.tolist()

    def _origin(self, tokens: np.ndarray, trained: np.ndarray) -> Origin | None:
        """Of the oldest of its completions; None as soon as one of them is not ours."""
        edges = np.flatnonzero(np.diff(np.concatenate([[False], trained, [False]])))
        found = [
            self.origins.find(tokens[:start].tolist(), tokens[start:end].tolist())
            for start, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)
        ]
        known = [origin for origin in found if origin is not None]
        if len(known) < len(found):
            return None
        return found[-1]._replace(policy_version=min(origin.policy_version for origin in known))

    def _group(self, item: dict[str, Any], rollouts: list[Rollout], index: int) -> Group:
        before = rollouts[0].token_ids[: rollouts[0].prompt_length]
        text = self.decode(before)
        described = {"prompt": text, "env_id": item.get("env_id")}
        prompt = Prompt(index=index, token_ids=before, text=text, item=described, source=self.source)
        return Group(prompt=prompt, rollouts=rollouts)


@dataclass
class Reading:
    """What became of a batch."""

    groups: list[Group] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    """Sequences left out, by reason."""
    unknown: int = 0
    """Sequences kept that this engine has not served, or that came back too late to remember."""


def _sender(item: dict[str, Any]) -> str:
    env = item.get("env_id")
    return "An environment" if env is None else f"Environment {env}"


def _has_images(images: Any) -> bool:
    return any(image is not None for image in images) if isinstance(images, list) else bool(images)


def _numbers(item: dict[str, Any], name: str, index: int, *, kinds: str, length: int | None = None) -> np.ndarray:
    """Row `index` of a list of lists as a vector, of `length` where given. Raises BadRow(name)."""
    rows = item.get(name)
    row = rows[index] if isinstance(rows, list) and index < len(rows) else None
    if not isinstance(row, list):
        raise BadRow(name)
    try:
        values = np.asarray(row)
    except (ValueError, OverflowError):  # ragged, or larger than any number type
        raise BadRow(name) from None
    if values.dtype.kind not in kinds or values.ndim != 1 or len(values) != (len(row) if length is None else length):
        raise BadRow(name)
    return values


def _per_token(item: dict[str, Any], name: str, index: int, trained: np.ndarray) -> np.ndarray:
    """Sane numbers aligned with the tokens, 0 where nothing is trained: fillers there may be anything."""
    values = _numbers(item, name, index, kinds="fiu", length=len(trained))
    values = np.where(trained, values, 0.0).astype(np.float64)
    if not (np.abs(values) <= LARGEST).all():  # NaN fails too
        raise BadRow(name)
    return values


def _log_probabilities(item: dict[str, Any], name: str, index: int, trained: np.ndarray) -> np.ndarray:
    values = _per_token(item, name, index, trained)
    if values.max() > ABOVE_ZERO or values.min() < LEAST_LOGPROB:
        raise BadRow(name)
    return np.minimum(values, 0.0)


def _trained(tokens: np.ndarray, masks: np.ndarray) -> np.ndarray:
    """bool: where the mask repeats the token. The first token is never trained: nothing predicts it."""
    trained = masks != MASKED
    if (masks[trained] != tokens[trained]).any():
        raise BadRow("masks")
    trained[0] = False
    if not trained.any():
        raise BadRow("nothing_trained")
    return trained


def _score(item: dict[str, Any], index: int) -> float:
    scores = item.get("scores")
    score = scores[index] if isinstance(scores, list) and index < len(scores) else None
    if not _is_number(score):
        raise BadRow("scores")
    return float(score)


def _is_number(value: Any) -> bool:
    """A number that can be trained on; True and False are none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST


def _override(item: dict[str, Any], index: int) -> dict[str, Any]:
    overrides = item.get("overrides")
    override = overrides[index] if isinstance(overrides, list) and index < len(overrides) else None
    return override if isinstance(override, dict) else {}


def _temperature(item: dict[str, Any], override: dict[str, Any], origin: Origin | None) -> float:
    """What the environment says, closest to the sequence first; then what we served; then 1. Greedy counts as 1."""
    served = {} if origin is None else {"temperature": origin.temperature}
    for settings in (override, item.get("generation_params"), item.get("group_overrides"), served):
        if isinstance(settings, dict) and settings.get("temperature") is not None:
            temperature = settings["temperature"]
            if not _is_number(temperature) or temperature > HOTTEST or 0 < temperature < COLDEST:
                raise BadRow("temperature")
            return float(temperature) if temperature > 0 else 1.0
    return 1.0


def _advantages(
    item: dict[str, Any], index: int, trained: np.ndarray, override: dict[str, Any], reward: float
) -> list[float] | None:
    """One for each trained token where the environment has decided them, else None."""
    if override.get("set_advantage_to_zero") is True:
        return [0.0] * int(trained.sum())
    if item.get("advantages"):
        return _per_token(item, "advantages", index, trained)[trained].tolist()
    if len(item["tokens"]) == 1:
        return [reward] * int(trained.sum())  # no siblings, no baseline: the score itself, as in Atropos' own trainer
    return None


def _ref_logprobs(item: dict[str, Any], index: int, trained: np.ndarray) -> list[float] | None:
    return _log_probabilities(item, "ref_logprobs", index, trained).tolist() if item.get("ref_logprobs") else None
