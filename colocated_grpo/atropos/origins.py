"""Records how completions were sampled, because batches contain tokens without temperature and policy version."""

import threading
from array import array
from base64 import b64decode, b64encode
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

from colocated_grpo.rollout.engine import Request
from colocated_grpo.types import Completion, FinishReason

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
