"""Execute docs/examples/quickstart.ipynb in a kernel and store its outputs: `python -m tests.support.execute_notebook`.

Needs nbclient and ipykernel, which nothing else needs, and the model of `make quickstart` in runs/.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from tests.support.notebook import NOTEBOOK
from tests.support.paths import ROOT


def joined(outputs: list[Any]) -> list[Any]:
    """Return the outputs with the printed lines of a cell in one output, as a notebook shows them."""
    lines: list[Any] = []
    for output in outputs:
        if output.output_type == "stream" and lines and lines[-1].output_type == "stream":
            lines[-1].text += output.text
        else:
            lines.append(output)
    return lines


def main() -> int:
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(notebook, timeout=900, resources={"metadata": {"path": str(NOTEBOOK.parent)}}).execute()
    notebook.metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    for cell in notebook.cells:
        cell.metadata = {}
        if cell.cell_type == "code":
            cell.outputs = joined([output for output in cell.outputs if output.get("name") != "stderr"])
            for output in cell.outputs:
                # The report names this machine, and GitHub shows no frames.
                if output.get("data", {}).get("text/html", "").startswith("<iframe"):
                    del output.data["text/html"]
    # Paths of this machine, relative to the folder of the notebook.
    text = json.dumps(notebook, indent=1).replace(f"{NOTEBOOK.parent}/../../", "../../").replace(f"{ROOT}/", "../../")
    NOTEBOOK.write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
