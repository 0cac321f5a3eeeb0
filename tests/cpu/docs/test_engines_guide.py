"""The guide to engine servers lists every route, and no other."""

from __future__ import annotations

import re
from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute

from tests.support.paths import ROOT
from tests.support.trainer_server import TrainerServer

GUIDE = (ROOT / "docs/guides/engines.md").read_text()


class Listing(TrainerServer):
    """A server with all routes, which it records."""

    def _add_routes(self, app: FastAPI, facts: dict[str, Any]) -> None:
        super()._add_routes(app, facts)
        routes = [route for route in app.routes if isinstance(route, APIRoute)]
        self.routes = {f"{method} {route.path}" for route in routes for method in route.methods}


def documented() -> set[str]:
    table = GUIDE.partition("## Routes")[2].partition("\n\nAn adapter")[0]
    routes = set(re.findall(r"`((?:GET|POST) /[^`\s]+)", table))
    [names] = re.findall(r"`POST` of (.*?) \|", table)
    return routes | {f"POST /engine/{name}" for name in re.findall(r"`(\w+)`", names)}


def test_the_guide_lists_every_route():
    with Listing() as server:
        served = server.routes
    assert documented() == served
