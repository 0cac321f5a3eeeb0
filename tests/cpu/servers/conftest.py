from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.engine_server import EngineServer


@pytest.fixture
def server() -> Iterator[EngineServer]:
    """A server of this test alone."""
    server = EngineServer()
    yield server
    server.close()


@pytest.fixture(scope="module")
def module_server() -> Iterator[EngineServer]:
    """One server for the tests of a file that leave it as it was."""
    server = EngineServer()
    yield server
    server.close()
