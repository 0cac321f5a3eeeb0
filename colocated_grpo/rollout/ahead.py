"""Sampling of the next step while the current one trains, for engines in processes of their own."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

from colocated_grpo.environments.base import BatchResult
from colocated_grpo.rollout.collect import Gather, Stopped
from colocated_grpo.rollout.supply import Order, PromptSupply
from colocated_grpo.types import Group


class AheadSupply:
    """`Supply` whose completions were sampled with the weights of one step before.

    Sampling of step n + 1 starts when step n is settled, and ends before the weights of step n + 1 reach the engine.
    The first step of a run, also of a resumed one, is sampled with its own weights.
    """

    def __init__(self, supply: PromptSupply, num_steps: int) -> None:
        """num_steps: of the whole run; nothing is sampled for a step after the last."""
        self._supply = supply
        self._num_steps = num_steps
        self._step = 0
        self._stopped = False
        self._ahead: Future[Gather] | None = None

    def order(self, step: int) -> Order:
        """Wait until all ranks have sampled the step's completions, and gather their groups."""
        self._step = step
        if self._stopped:
            raise Stopped
        if self._ahead is None:
            return self._supply.order(step)
        sampled, self._ahead = self._ahead, None
        gather = sampled.result()
        # Before the sync: a server that receives weights serves no requests, so no rank may still be sampling.
        groups = gather()
        return lambda: groups

    def settle(self, groups: list[Group]) -> BatchResult:
        settled = self._supply.settle(groups)
        if not settled.finished and self._step + 1 < self._num_steps:
            self._start(self._step + 1)
        return settled

    def _start(self, step: int) -> None:
        try:
            job = self._supply.job(step)
        except Stopped:  # the current step is complete and is trained first
            self._stopped = True
            return
        sampled: Future[Gather] = Future()

        def sample() -> None:
            try:
                sampled.set_result(self._supply.sample(job))
            except BaseException as error:
                sampled.set_exception(error)  # raised by `order`

        # A daemon: an error of the training thread must not wait for the completions.
        threading.Thread(target=sample, name="sampling ahead", daemon=True).start()
        self._ahead = sampled

    def release_engine(self) -> None:
        """Wait until all ranks have sampled the step ahead, whose groups are discarded."""
        if self._ahead is not None:
            self._ahead.result()
            self._ahead = None
            # A server may still be sampling for another rank, and a server that receives weights serves no requests.
            self._supply.wait_for_ranks()

    def state_dict(self) -> dict[str, Any] | None:
        """Position before the prompts that are being sampled ahead, which a resumed run draws again."""
        return self._supply.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._supply.load_state_dict(state)

    def close(self) -> None:
        self._supply.close()
