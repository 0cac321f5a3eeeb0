"""Run the cells of the example notebook without a kernel. A stand-in for IPython says that there is one."""

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


def run_cells(folder: Path, steps: int) -> list[tuple[str, str]]:
    """Run the cells in `folder` with `steps` training steps. Return the text and the last value's HTML of each."""
    os.chdir(folder)
    ipython = ModuleType("IPython")
    vars(ipython)["get_ipython"] = lambda: SimpleNamespace(kernel=object())
    sys.modules["IPython"] = ipython
    names: dict[str, Any] = {"__name__": "__main__"}
    shown = []
    for cell in code_cells():
        source = "".join(cell["source"]).replace("STEPS = 20", f"STEPS = {steps}")
        with without_launcher(), contextlib.redirect_stdout(io.StringIO()) as printed:
            value = _run(source, names)
        shown.append((printed.getvalue(), value._repr_html_() if hasattr(value, "_repr_html_") else ""))
    return shown


def _run(source: str, names: dict[str, Any]) -> Any:
    """Run a cell. Return the value of its last expression."""
    body = ast.parse(source).body
    last = body.pop() if isinstance(body[-1], ast.Expr) else None
    exec(compile(ast.Module(body, []), "<cell>", "exec"), names)
    return None if last is None else eval(compile(ast.Expression(last.value), "<cell>", "eval"), names)
