"""Validates received batches and converts their groups to trainable groups. Records how completions were sampled.

Any client may post. Inconsistent sequences are dropped and counted: an error would let any environment stop the run.
"""

import threading
from array import array
from base64 import b64decode, b64encode
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
import numpy as np

from colocated_grpo.rollout.engine import Request
from colocated_grpo.settings.generation import MIN_TEMPERATURE
from colocated_grpo.types import Completion, FinishReason, Group, Prompt, Rollout, Score

KEY_BYTES = 16


class Origin(NamedTuple):
    """How one completion was sampled."""

    temperature: float
    policy_version: int
    finish_reason: FinishReason


class Origins:
    """An LRU cache of the origins of the last `capacity` completions. Thread-safe."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._lock = threading.Lock()
        self._known: OrderedDict[bytes, Origin] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def record(self, request: Request, completion: Completion, temperature: float) -> None:
        origin = Origin(temperature, completion.policy_version, completion.finish_reason)
        self.remember(request.token_ids, completion.token_ids, origin)

    def remember(self, prompt: Sequence[int], completion: Sequence[int], origin: Origin) -> None:
        with self._lock:
            for key in (_key(prompt, completion), _key((), completion)):
                self._known[key] = origin
                self._known.move_to_end(key)
            self._evict()

    def find(self, prompt: Sequence[int], completion: Sequence[int]) -> Origin | None:
        """Look up prompt and completion, then only the completion, because a client may have retokenized the prompt."""
        with self._lock:
            for key in (_key(prompt, completion), _key((), completion)):
                if key in self._known:
                    self._known.move_to_end(key)
                    return self._known[key]
        return None

    def state_dict(self) -> list[list[object]]:
        """Return rows `[*origin, base64 of the concatenated keys]`, one per distinct origin, oldest first."""
        keys: dict[Origin, bytearray] = {}
        with self._lock:
            for key, origin in self._known.items():
                keys.setdefault(origin, bytearray()).extend(key)
        return [[*origin, b64encode(joined).decode()] for origin, joined in keys.items()]

    def load_state_dict(self, state: list[list[Any]]) -> None:
        """Insert the saved origins as the oldest, so that they are evicted before this process's origins."""
        known: OrderedDict[bytes, Origin] = OrderedDict()
        for *fields, joined in state:
            keys, origin = b64decode(joined), Origin(*fields)
            known.update((keys[start : start + KEY_BYTES], origin) for start in range(0, len(keys), KEY_BYTES))
        with self._lock:
            self._known = known | self._known
            self._evict()

    def _evict(self) -> None:
        while len(self._known) > 2 * self._capacity:  # two keys for each completion
            self._known.popitem(last=False)


def _key(prompt: Sequence[int], completion: Sequence[int]) -> bytes:
    digest = blake2b(array("q", prompt).tobytes(), digest_size=KEY_BYTES)
    digest.update(b"|")
    digest.update(array("q", completion).tobytes())
    return digest.digest()


T = TypeVar("T")

MASKED = -100
DUMMY_LOGPROB = -0.5
LOGPROB_SLACK = 1e-3
"""Positive log-probabilities up to this value are rounding errors and count as zero."""
MIN_LOGPROB = -87.0
"""Lower values are rejected: their exp() is subnormal in float32, and its inverse, an importance weight, overflows.
Samplers never return such values; low values are fillers such as -9999."""
MAX_MAGNITUDE = 1e6
"""Bound of scores and advantages. Much larger finite values cause an infinite gradient norm, which stops the run."""
MAX_TEMPERATURE = 100.0
"""Temperatures above this value, and positive ones below MIN_TEMPERATURE, are errors: logits are divided by them."""
MAX_NAMED = 5
"""Maximum environments named in a line about dropped sequences."""
MISSING_LOGPROBS = "missing_logprobs"
"""Reason for dropping a group without inference_logprobs."""


Count = Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
"""Bounded, because an overflow or division by zero in the shared state would fail all clients."""
Whole = Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)]
Name = Annotated[str, msgspec.Meta(max_length=4096)]


class Registration(msgspec.Struct, kw_only=True):
    """POST /register: the trainer. The server passes these values to every environment."""

    wandb_group: Name
    wandb_project: Name
    batch_size: Count
    max_token_len: Count
    """Environments drop groups with a sequence of this length or longer."""
    checkpoint_dir: Name
    save_checkpoint_interval: Whole
    starting_step: Whole = 0
    num_steps: Whole


class Overrides(msgspec.Struct, omit_defaults=True):
    """The entries of `overrides`, `generation_params` and `group_overrides` that this reader uses."""

    temperature: float | None = None
    set_advantage_to_zero: object = None


class ReceivedGroup(msgspec.Struct):
    """One group of GET /batch, with one list entry per sequence. The lists may differ in length."""

    tokens: list[list[Whole]]
    masks: list[list[Whole]]
    scores: list[float]
    advantages: list[list[float]] | None = None
    ref_logprobs: list[list[float]] | None = None
    inference_logprobs: list[list[float]] | None = None
    generation_params: Overrides | None = None
    overrides: list[Overrides] | None = None
    group_overrides: Overrides | None = None
    images: object = None
    env_id: int | None = None


class InvalidSequence(Exception):
    """A sequence that cannot be trained. args[0] is the reason, as used in metric names."""


@dataclass(frozen=True, kw_only=True)
class GroupReader:
    """Converts received groups into `Group`."""

    source: str
    vocab_size: int
    max_tokens: int
    """Maximum sequence length, including the prompt."""
    recompute_logprobs: bool
    """Accept groups without inference_logprobs. Their rollouts have sampling_logprobs None."""
    origins: Origins
    decode: Callable[[Sequence[int]], str]

    def read(self, items: Sequence[object], first_index: int, policy_version: int) -> "ReadBatch":
        """Convert the groups of a batch, without invalid sequences. policy_version: for sequences of unknown origin."""
        batch = ReadBatch()
        for item in items:
            try:
                group = msgspec.convert(item, ReceivedGroup)
            except msgspec.ValidationError:
                batch.drop("malformed", item.get("env_id") if isinstance(item, dict) else None)
                continue
            if rollouts := self._rollouts(group, policy_version, batch):
                prompt_ids = rollouts[0].token_ids[: rollouts[0].prompt_length]
                text, index = self.decode(prompt_ids), first_index + len(batch.groups)
                row = {"prompt": text, "env_id": group.env_id}
                prompt = Prompt(index=index, token_ids=prompt_ids, text=text, item=row, source=self.source)
                batch.groups.append(Group(prompt=prompt, rollouts=rollouts))
        return batch

    def _rollouts(self, group: ReceivedGroup, policy_version: int, batch: "ReadBatch") -> list[Rollout]:
        num_sequences, images = len(group.tokens), group.images
        if any(image is not None for image in images) if isinstance(images, list) else images:
            batch.drop("images", group.env_id, num_sequences)
            return []
        if not group.inference_logprobs and not self.recompute_logprobs:
            batch.drop(MISSING_LOGPROBS, group.env_id, num_sequences)
            return []
        rollouts = []
        for index in range(num_sequences):
            try:
                rollout, origin = self._rollout(group, index, policy_version)
            except InvalidSequence as reason:
                batch.drop(reason.args[0], group.env_id)
            else:
                batch.num_unknown += origin is None
                rollouts.append(rollout)
        return rollouts

    def _rollout(self, group: ReceivedGroup, index: int, policy_version: int) -> tuple[Rollout, Origin | None]:
        tokens_T = np.asarray(group.tokens[index], dtype=np.int64)
        if not 2 <= len(tokens_T) <= self.max_tokens:
            raise InvalidSequence("length")
        if tokens_T.min() < 0 or tokens_T.max() >= self.vocab_size:
            raise InvalidSequence("tokens")
        trained_T = _trained(tokens_T, np.asarray(_row("masks", group.masks, index, len(tokens_T))))
        logprobs = _logprobs("inference_logprobs", group.inference_logprobs, index, trained_T)
        # atroposlib's placeholder (tokens 0, 1, 2, ...) for OpenAI endpoints, which return no tokens or logprobs.
        counted = tokens_T.tolist() == list(range(len(tokens_T)))
        if counted and logprobs and set(np.extract(trained_T, logprobs)) == {DUMMY_LOGPROB}:
            raise InvalidSequence("dummy_server")
        if index >= len(group.scores) or not abs(group.scores[index]) <= MAX_MAGNITUDE:
            raise InvalidSequence("scores")
        override = group.overrides[index] if group.overrides and index < len(group.overrides) else Overrides()
        origin = self._origin(tokens_T, trained_T)
        rollout = Rollout(
            token_ids=tokens_T.tolist(),
            loss_mask=trained_T.tolist(),
            sampling_logprobs=logprobs,
            prompt_length=int(trained_T.argmax()),
            text=self.decode(tokens_T[trained_T].tolist()),
            finish_reason=origin.finish_reason if origin else "stop",
            policy_version=origin.policy_version if origin else policy_version,
            temperature=_temperature([override, group.generation_params, group.group_overrides], origin),
            score=Score(reward=group.scores[index]),
            advantages=_advantages(group, index, trained_T, override),
            ref_logprobs=_logprobs("ref_logprobs", group.ref_logprobs, index, trained_T),
        )
        return rollout, origin

    def _origin(self, tokens_T: np.ndarray, trained_T: np.ndarray) -> Origin | None:
        """Return the origin of the last completion, with the oldest policy version; None if any has no known origin."""
        edges = np.flatnonzero(np.diff(np.concatenate([[False], trained_T, [False]])))
        found = [
            self.origins.find(tokens_T[:start].tolist(), tokens_T[start:end].tolist())
            for start, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)
        ]
        known = [origin for origin in found if origin is not None]
        if len(known) < len(found):
            return None
        return known[-1]._replace(policy_version=min(origin.policy_version for origin in known))


@dataclass
class ReadBatch:
    """The valid groups of one received batch, and counts of its sequences."""

    groups: list[Group] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    """Number of dropped sequences by reason."""
    senders: Counter[str] = field(default_factory=Counter)
    """Number of dropped sequences by environment."""
    num_unknown: int = 0
    """Accepted sequences of unknown origin: sampled elsewhere, or evicted from the cache of origins."""

    def drop(self, reason: str, env_id: object, count: int = 1) -> None:
        if count:
            self.dropped[reason] += count
            self.senders["a client without env_id" if env_id is None else f"environment {env_id}"] += count

    def update(self, other: "ReadBatch") -> None:
        """Replace the groups by the groups of a later batch, and add the counts of that batch."""
        self.groups = other.groups
        self.dropped.update(other.dropped)
        self.senders.update(other.senders)
        self.num_unknown += other.num_unknown

    def description(self) -> str:
        """Return text about dropped sequences: number, environments and reasons."""
        reasons = ", ".join(f"{count} {reason}" for reason, count in self.dropped.most_common())
        senders = [sender for sender, _ in self.senders.most_common(MAX_NAMED)]
        others = [f"{len(self.senders) - MAX_NAMED} others"] if len(self.senders) > MAX_NAMED else []
        return f"{self.dropped.total()} sequences of {', '.join([*senders, *others])}: {reasons}"


def _row(name: str, rows: list[list[T]], index: int, length: int) -> list[T]:
    """Return a row with one value per token. Raises InvalidSequence(name)."""
    if index >= len(rows) or len(rows[index]) != length:
        raise InvalidSequence(name)
    return rows[index]


def _trained(tokens_T: np.ndarray, masks_T: np.ndarray) -> np.ndarray:
    """Return a bool array: True where the mask repeats the token; False for the first, which is not predicted."""
    trained_T = masks_T != MASKED
    if (masks_T[trained_T] != tokens_T[trained_T]).any():
        raise InvalidSequence("masks")
    trained_T[0] = False
    if not trained_T.any():
        raise InvalidSequence("nothing_trained")
    return trained_T


def _token_values(name: str, rows: list[list[float]], index: int, trained_T: np.ndarray) -> np.ndarray:
    """Return one float per token, bounded by MAX_MAGNITUDE; 0 for untrained tokens, which may contain any filler."""
    values_T = np.where(trained_T, _row(name, rows, index, len(trained_T)), 0.0)
    if not (np.abs(values_T) <= MAX_MAGNITUDE).all():  # also False for NaN
        raise InvalidSequence(name)
    return values_T


def _logprobs(name: str, rows: list[list[float]] | None, index: int, trained_T: np.ndarray) -> list[float] | None:
    """Return the log-probabilities of trained tokens; None if the group has none."""
    if not rows:
        return None
    values_T = _token_values(name, rows, index, trained_T)
    if values_T.max() > LOGPROB_SLACK or values_T.min() < MIN_LOGPROB:
        raise InvalidSequence(name)
    return np.minimum(values_T, 0.0).tolist()


def _temperature(settings: Sequence[Overrides | None], origin: Origin | None) -> float:
    """Return the first temperature in `settings`, else the temperature of the origin, else 1. Greedy sampling: 1."""
    for each in settings:
        if each is not None and (temperature := each.temperature) is not None:
            if not temperature <= MAX_TEMPERATURE or 0 < temperature < MIN_TEMPERATURE:
                raise InvalidSequence("temperature")
            return temperature if temperature > 0 else 1.0
    return 1.0 if origin is None else origin.temperature


def _advantages(group: ReceivedGroup, index: int, trained_T: np.ndarray, override: Overrides) -> list[float] | None:
    """Return one advantage per trained token; None if they must be computed from the group's rewards."""
    if override.set_advantage_to_zero is True:
        return [0.0] * int(trained_T.sum())
    if group.advantages:
        return _token_values("advantages", group.advantages, index, trained_T)[trained_T].tolist()
    if len(group.tokens) == 1:
        # A single sequence has no baseline. As in Atropos' own trainer, its score is the advantage.
        return [group.scores[index]] * int(trained_T.sum())
    return None
