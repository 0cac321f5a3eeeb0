"""Several engines as one."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence

from colocated_grpo.rollout.engine import Finished, Part, Request, RolloutEngine, TokenDelta


class EngineGroup:
    """`RolloutEngine` that gives each request to the engine with the fewest running."""

    def __init__(self, engines: Sequence[RolloutEngine], max_num_seqs: int | None = None) -> None:
        """max_num_seqs: requests to submit at the same time. Default: what the engines decode together."""
        self._engines = engines
        self._running = [0] * len(engines)
        self._engine_of: dict[Hashable, int] = {}
        """By key, for running requests."""
        self.max_num_seqs = max_num_seqs or sum(engine.max_num_seqs for engine in engines)
        self.admission_cost = max(engine.admission_cost for engine in engines)

    def submit(self, requests: Iterable[Request]) -> None:
        for request in requests:
            chosen = min(range(len(self._engines)), key=self._running.__getitem__)
            self._engines[chosen].submit([request])
            self._engine_of[request.key] = chosen
            self._running[chosen] += 1

    def step(self) -> Finished:
        finished = [pair for engine in self._engines for pair in engine.step()]
        for key, _ in finished:
            self._forget(key)
        return finished

    def _forget(self, key: Hashable) -> None:
        self._running[self._engine_of.pop(key)] -= 1

    def deltas(self) -> list[tuple[Hashable, TokenDelta]]:
        return [pair for engine in self._engines for pair in engine.deltas()]

    def abort(self, keys: Collection[Hashable] | None = None) -> None:
        for engine in self._engines:
            engine.abort(keys)
        for key in list(self._engine_of) if keys is None else [key for key in keys if key in self._engine_of]:
            self._forget(key)

    def top_logprobs(self, token_ids: Sequence[int], k: int) -> list[dict[int, float]]:
        return self._engines[0].top_logprobs(token_ids, k)

    def weights_changed(self, policy_version: int) -> None:
        for engine in self._engines:
            engine.weights_changed(policy_version)

    def wake(self, part: Part) -> None:
        for engine in self._engines:
            engine.wake(part)

    def sleep(self) -> None:
        for engine in self._engines:
            engine.sleep()

    def close(self) -> None:
        for engine in self._engines:
            engine.close()
