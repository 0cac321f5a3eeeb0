"""The built-in reward `judge`: a score from another model or a scoring server, over HTTP."""

import asyncio
import json
import math
import os
import random
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import Any, Self

from pydantic import Field, PrivateAttr, field_validator, model_validator

from colocated_grpo.environments.rewards.builtin import Completions, completion_texts
from colocated_grpo.environments.rewards.scoring import NoReward
from colocated_grpo.errors import shortened
from colocated_grpo.settings.base import FileName, NonNegative, Positive, Section
from colocated_grpo.types import JsonObject
from colocated_grpo.web.client import JsonClient, RequestRejected, Unavailable

RETRIED_STATUS = {408, 409, 425, 429}
"""4xx statuses of temporary failures. All 5xx responses are retried too."""
MAX_WAIT = 10.0
"""Maximum wait in seconds before a retry."""
PLACE = re.compile(r"\{\{|\}\}|\{(\w+)\}")
DEFAULT_PARSE = r"(?i)\bscore\b\W{0,9}(-?\d+(?:\.\d+)?)"
"""Matches `Score: 7`, `**Score**: 0.5` and `{"score": 1}`."""
SHOWN_CHARACTERS = 80

Outcome = float | NoReward | None
"""A score; the reason why there is no score; None if the budget is spent."""


class Judge(Section):
    """Reward: a score from a server. One request per distinct completion, all of a prompt at the same time."""

    url: str = Field(pattern=r"^https?://[^/]")
    """With `model`: base URL of an OpenAI-compatible API, such as http://localhost:8000/v1. Without `model`: the URL
    that answers a POST of {"prompt", "completion", <columns>} with {"score": number}."""
    model: str | None = None
    """Name of the chat model. Without a name, `url` is a scoring endpoint."""
    prompt: str | None = None
    """User message to the chat model. {prompt}, {completion} and {<column>} are replaced. {{ and }} are braces."""
    system: str | None = None
    """System message to the chat model."""
    parse: str = DEFAULT_PARSE
    """Regular expression with one group, a number. The last match in the chat model's answer is the score."""
    bounds: tuple[float, float] | None = None
    """Lowest and highest valid score. A score outside these bounds counts as unreadable."""
    columns: list[str] = []
    """Columns sent to a scoring endpoint."""
    request: JsonObject = {"temperature": 0.0, "max_tokens": 512}
    """Further fields of the chat request."""
    api_key_variable: str | None = None
    """Environment variable with the API key."""
    concurrency: Positive = 256
    """Maximum requests at a time, per rank."""
    timeout: float = Field(30.0, gt=0)
    """Time limit in seconds for one response."""
    retries: NonNegative = 3
    """Further attempts after a lost connection, a timeout, an unreadable body, and status 408, 409, 425, 429 or 5xx."""
    backoff: float = Field(0.5, ge=0)
    """Maximum seconds before the first retry. The maximum doubles with each retry, up to 10 s. The actual wait is
    random, between half of the maximum and the maximum."""
    cache_size: Positive = 100_000
    """Maximum scores kept in memory. An identical request is answered from memory."""
    cache_file: FileName | None = None
    """File that keeps scores for later runs."""
    max_requests: Positive | None = None
    """Maximum requests, per rank and start of the run. Afterwards, only completions with a cached score get rewards."""
    max_tokens: Positive | None = None
    """Maximum sum of `usage.total_tokens` over all responses. When this budget is spent, no further request is sent.
    Responses to requests that were already sent still count."""

    _client: JsonClient = PrivateAttr()
    _threads: ThreadPoolExecutor = PrivateAttr()
    _cache: "ScoreCache" = PrivateAttr()
    _requests: int = PrivateAttr(0)
    _tokens: int = PrivateAttr(0)

    @field_validator("parse")
    @classmethod
    def _has_one_group(cls, value: str) -> str:
        try:
            groups = re.compile(value).groups
        except re.error as error:
            raise ValueError(f"not a regular expression: {error}") from None
        if groups != 1:
            raise ValueError(f"must have one group, around the number; it has {groups}")
        return value

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if (self.model is None) != (self.prompt is None):
            raise ValueError("a chat model needs both model and prompt, a scoring endpoint neither")
        if self.prompt is not None and "completion" not in places(self.prompt):
            raise ValueError("prompt lacks {completion}")
        if self.model is not None and self.columns:
            raise ValueError("columns are for a scoring endpoint; with a chat model, name them in prompt as {column}")
        if self.api_key_variable is not None and not os.environ.get(self.api_key_variable):
            raise ValueError(f"api_key_variable={self.api_key_variable!r}: this environment variable is not set")
        return self

    def model_post_init(self, _context: object) -> None:
        key = os.environ.get(self.api_key_variable) if self.api_key_variable is not None else None
        self._client = JsonClient(self.url, timeout=self.timeout, api_key=key)
        self._threads = ThreadPoolExecutor(self.concurrency, thread_name_prefix="judge")
        self._cache = ScoreCache(self.cache_size, None if self.cache_file is None else Path(self.cache_file))

    @property
    def required_columns(self) -> set[str]:
        return set(self.columns) | (places(self.prompt or "") - {"prompt", "completion"})

    async def __call__(
        self,
        prompts: Sequence[str | list[JsonObject]],
        completions: Completions,
        log_metric: Callable[[str, float], None],
        **columns: Sequence[object],
    ) -> list[Outcome]:
        """Return the score of each completion. Logs the fractions without a request, and over the budget."""
        rows = zip(prompts, completion_texts(completions), strict=True)
        wanted = sorted(self.required_columns)
        bodies = [
            self._body(prompt, text, {name: columns[name][index] for name in wanted})
            for index, (prompt, text) in enumerate(rows)
        ]
        # A digest of everything that affects the response.
        keys = [sha256(json.dumps([self.url, body], sort_keys=True).encode()).hexdigest() for body in bodies]
        known = {key: score for key in keys if (score := self._cache.get(key)) is not None}
        unknown = {key: body for key, body in zip(keys, bodies, strict=True) if key not in known}
        outcomes = await asyncio.gather(*(self._outcome(key, body) for key, body in unknown.items()))
        by_key: dict[str, Outcome] = {**known, **dict(zip(unknown, outcomes, strict=True))}
        results = [by_key[key] for key in keys]
        log_metric("judge/cached", 1 - len(unknown) / len(keys))
        log_metric("judge/over_budget", sum(result is None for result in results) / len(results))
        return results

    def _body(self, prompt: str | list[JsonObject], completion: str, columns: Mapping[str, object]) -> JsonObject:
        if self.prompt is None:
            return {"prompt": prompt, "completion": completion, **columns}
        text = fill(self.prompt, {**columns, "prompt": plain_text(prompt), "completion": completion})
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return {**self.request, "model": self.model, "messages": [*system, {"role": "user", "content": text}]}

    async def _outcome(self, key: str, body: Mapping[str, object]) -> Outcome:
        path = "" if self.model is None else "/chat/completions"
        for attempt in count():
            if self._requests >= (self.max_requests or math.inf) or self._tokens >= (self.max_tokens or math.inf):
                return None
            self._requests += 1
            loop = asyncio.get_running_loop()
            try:
                score = self._score(await loop.run_in_executor(self._threads, self._client.post, path, body))
            except NoReward as failure:
                return failure
            except (RequestRejected, Unavailable) as error:
                if isinstance(error, RequestRejected) and error.status not in RETRIED_STATUS:
                    return NoReward(f"the judge rejects the request: {error}")
                if attempt == self.retries:
                    return NoReward(f"the judge is unavailable, attempts: {attempt + 1}, the last: {error}")
            else:
                self._cache.put(key, score)
                return score
            # Random, so that requests refused together are not retried together. The wait blocks no thread.
            await asyncio.sleep(min(MAX_WAIT, self.backoff * 2**attempt) * random.uniform(0.5, 1.0))

    def _score(self, response: Any) -> float:
        """Return the score in a response, and count its tokens. Raises NoReward."""
        try:
            if self.model is None:
                score = float(response["score"])
            else:
                self._tokens += int((response.get("usage") or {}).get("total_tokens") or 0)
                answer = response["choices"][0]["message"]["content"] or ""
                if not (found := re.findall(self.parse, answer)):
                    raise NoReward(f"no score in the judge's answer {shortened(answer, SHOWN_CHARACTERS)!r}")
                score = float(found[-1])
        except (LookupError, TypeError, AttributeError):
            raise NoReward(f"the judge's response has no {'score' if self.model is None else 'answer'}") from None
        except ValueError as error:
            raise NoReward(str(error)) from None
        low, high = self.bounds or (-math.inf, math.inf)
        if not low <= score <= high or math.isinf(score):
            raise NoReward(f"the judge's score {score:g} is outside bounds={[low, high]}")
        return score


class ScoreCache:
    """Cache of the `size` most recently used scores. A file, if given, keeps every score as one line of JSON."""

    def __init__(self, size: int, file: Path | None) -> None:
        """file: read first if it exists; new scores are appended. Several processes may use it. Raises OSError."""
        self._size = size
        self._file = file
        self._scores: OrderedDict[str, float] = OrderedDict()
        if file is not None:
            file.open("ab").close()  # fails at the start if the file cannot be written
            for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
                with suppress(ValueError, TypeError):  # an unfinished line of a killed process
                    key, score = json.loads(line)
                    self._remember(str(key), float(score))

    def get(self, key: str) -> float | None:
        if key in self._scores:
            self._scores.move_to_end(key)
        return self._scores.get(key)

    def put(self, key: str, score: float) -> None:
        self._remember(key, score)
        if self._file is not None:
            # One unbuffered write to a file opened for appending, so that lines of several processes do not mix.
            with self._file.open("ab", buffering=0) as file:
                file.write((json.dumps([key, score]) + "\n").encode())

    def _remember(self, key: str, score: float) -> None:
        self._scores[key] = score
        self._scores.move_to_end(key)
        if len(self._scores) > self._size:
            self._scores.popitem(last=False)


def places(template: str) -> set[str]:
    return {name for name in PLACE.findall(template) if name}


def fill(template: str, values: Mapping[str, object]) -> str:
    """Replace each {name} by its value. {{ and }} become single braces; other braces stay as they are."""
    return PLACE.sub(lambda found: str(values[found[1]]) if found[1] else found[0][0], template)


def plain_text(prompt: str | list[JsonObject]) -> str:
    """Return a prompt as text: the content of a single message, else `role: content` for each message."""
    if isinstance(prompt, str):
        return prompt
    if len(prompt) == 1:
        return str(prompt[0]["content"])
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in prompt)
