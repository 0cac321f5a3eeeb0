"""Where served tokens came from. Environments drop the temperature and never knew the policy's version."""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

from colocated_grpo.types import FinishReason


class Origin(NamedTuple):
    """How one completion was sampled."""

    temperature: float
    policy_version: int
    finish_reason: FinishReason


class Origins:
    """The last `capacity` completions that were served. Thread-safe."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._lock = threading.Lock()
        self._known: OrderedDict[bytes, Origin] = OrderedDict()

    def remember(self, prompt: Sequence[int], completion: Sequence[int], origin: Origin) -> None:
        with self._lock:
            for key in (_key(prompt, completion), _key((), completion)):
                self._known[key] = origin
                self._known.move_to_end(key)
            while len(self._known) > 2 * self._capacity:
                self._known.popitem(last=False)

    def find(self, prompt: Sequence[int], completion: Sequence[int]) -> Origin | None:
        """By prompt and completion; else by the completion alone, as an environment may tokenise the prompt anew."""
        with self._lock:
            for key in (_key(prompt, completion), _key((), completion)):
                if key in self._known:
                    self._known.move_to_end(key)
                    return self._known[key]
        return None


def _key(prompt: Sequence[int], completion: Sequence[int]) -> bytes:
    digest = blake2b(array("q", prompt).tobytes(), digest_size=16)
    digest.update(b"|")
    digest.update(array("q", completion).tobytes())
    return digest.digest()
