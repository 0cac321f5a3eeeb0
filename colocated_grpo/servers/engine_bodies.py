"""Bodies of the routes /engine/*, with which a trainer uses the engine as its own."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Annotated

from pydantic import ConfigDict, Field

from colocated_grpo.rollout.engine import Request, Sampling
from colocated_grpo.servers.request_bodies import StrictBody, TokenIds

MAX_REQUESTS_PER_POST = 4096
SEED_LIMIT = 1 << 63

ClientName = Annotated[str, Field(min_length=16, max_length=64)]
Number = Annotated[int, Field(ge=0, lt=SEED_LIMIT)]


class RequestBody(StrictBody):
    """A request as `rollout.wire.request_message` writes it, under the number that its client gives it."""

    model_config = ConfigDict(allow_inf_nan=False)
    id: Number
    token_ids: TokenIds
    seed: int = Field(ge=-SEED_LIMIT, lt=SEED_LIMIT)
    sampling: Sampling
    pattern: str | None
    stream: bool

    def request(self, key: Hashable) -> Request:
        return Request(
            key=key,
            token_ids=self.token_ids,
            seed=self.seed,
            sampling=self.sampling,
            pattern=self.pattern,
            stream=self.stream,
        )


class RequestsBody(StrictBody):
    client: ClientName
    policy_version: int
    """Version of the weights that must sample the requests."""
    requests: list[RequestBody] = Field(max_length=MAX_REQUESTS_PER_POST, fail_fast=True)


class AbortBody(StrictBody):
    client: ClientName
    ids: list[Number] = Field(fail_fast=True)


class VersionBody(StrictBody):
    policy_version: int


class TopLogprobsBody(StrictBody):
    token_ids: Annotated[TokenIds, Field(min_length=2)]
    k: int = Field(ge=0)
