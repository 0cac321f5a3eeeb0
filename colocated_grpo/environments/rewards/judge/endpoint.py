"""Requests to a judge: an OpenAI-compatible chat endpoint, or one that scores."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from colocated_grpo.environments.rewards.scoring import NoReward
from colocated_grpo.web.client import JsonClient, RequestRejected, Unavailable

RETRIED_STATUS = {408, 409, 425, 429}
"""4xx responses that are about the moment, not about the request. All 5xx responses are retried too."""
MAX_WAIT = 10.0
"""Longest wait in seconds before a retry."""


class BudgetSpent(Exception):
    """The budget allows no further request."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Retries:
    """How often a failed request is sent again, and after how many seconds at first; the wait doubles."""

    count: int
    backoff: float

    def wait(self, attempt: int) -> float:
        """Return a random wait, so that requests that were refused together do not come back together."""
        return min(MAX_WAIT, self.backoff * 2**attempt) * random.uniform(0.5, 1.0)


class Endpoint:
    """Sends requests from a bounded number of threads. A wait before a retry holds none of them."""

    def __init__(self, client: JsonClient, path: str, *, concurrency: int, retries: Retries) -> None:
        self._client = client
        self._path = path
        self._retries = retries
        self._threads = ThreadPoolExecutor(concurrency, thread_name_prefix="judge")

    async def ask(self, body: object, take: Callable[[], bool]) -> object:
        """Return the JSON of the response. Raises BudgetSpent if `take`, called before each attempt, returns False.

        Raises NoReward if no attempt succeeds.
        """
        attempt = 0
        while True:
            if not take():
                raise BudgetSpent
            try:
                return await self._post(body)
            except Unavailable as error:
                if attempt == self._retries.count:
                    raise NoReward(f"the judge is unavailable, attempts: {attempt + 1}, the last: {error}") from None
            await asyncio.sleep(self._retries.wait(attempt))
            attempt += 1

    async def _post(self, body: object) -> object:
        """Send the request once. Raises Unavailable if another attempt may succeed, else NoReward."""
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._threads, self._client.post, self._path, body)
        except RequestRejected as error:
            if error.status in RETRIED_STATUS:
                raise Unavailable(str(error)) from None
            raise NoReward(f"the judge rejects the request: {error}") from None
