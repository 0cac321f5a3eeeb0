from __future__ import annotations

from collections.abc import Iterator
from urllib.request import urlopen

import pytest

from tests.support.servers import APIS, ApiProcess


@pytest.fixture(scope="module", params=APIS)
def server(request: pytest.FixtureRequest) -> Iterator[ApiProcess]:
    """Atropos' API server: the embedded one, and atroposlib's own."""
    with ApiProcess(request.param) as process:
        yield process


@pytest.fixture
def url(server: ApiProcess) -> str:
    """The url of the server, which has just been reset."""
    urlopen(f"{server.url}/reset_data", timeout=60).close()
    return server.url
