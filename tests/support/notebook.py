"""Run the cells of the example notebook without a kernel. A stand-in for IPython takes what they display."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from tests.support.paths import ROOT
from tests.support.programs import without_launcher

NOTEBOOK = ROOT / "docs/examples/quickstart.ipynb"


def code_cells() -> list[dict[str, Any]]:
    return [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]


class Outputs:
    """Output of one cell: printed text, displayed HTML (the last version of each), and the value of its end."""

    def __init__(self) -> None:
        self.text = ""
        self.html: list[str] = []
        self.value: Any = None


def run_cells(folder: Path, steps: int) -> list[tuple[str, list[str], str]]:
    """Run the cells in `folder` with `steps` training steps. Return text, HTML and the last value's HTML of each."""
    os.chdir(folder)
    current = [Outputs()]
    sys.modules |= _ipython(current)
    names: dict[str, Any] = {"__name__": "__main__"}
    shown = []
    for cell in code_cells():
        current[0] = Outputs()
        source = "".join(cell["source"]).replace("STEPS = 20", f"STEPS = {steps}")
        with without_launcher(), contextlib.redirect_stdout(io.StringIO()) as printed:
            _run(source, names, current[0])
        value = current[0].value
        shown.append(
            (printed.getvalue(), current[0].html, value._repr_html_() if hasattr(value, "_repr_html_") else "")
        )
    return shown


def _run(source: str, names: dict[str, Any], outputs: Outputs) -> None:
    body = ast.parse(source).body
    last = body.pop() if isinstance(body[-1], ast.Expr) else None
    exec(compile(ast.Module(body, []), "<cell>", "exec"), names)
    if last is not None:
        outputs.value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), names)


def _ipython(current: list[Outputs]) -> dict[str, ModuleType]:
    """Return modules with the functions of IPython that show HTML in a kernel."""

    class Handle:
        def __init__(self, html: str) -> None:
            self._outputs = current[0]
            self._index = len(self._outputs.html)
            self._outputs.html.append(html)

        def update(self, html: str) -> None:
            self._outputs.html[self._index] = html

    ipython, display = ModuleType("IPython"), ModuleType("IPython.display")
    kernel = SimpleNamespace(kernel=object())
    vars(ipython)["get_ipython"] = lambda: kernel
    vars(display).update(HTML=str, display=lambda html, display_id: Handle(html))
    return {"IPython": ipython, "IPython.display": display}
