from __future__ import annotations

import pytest

from colocated_grpo.tools.doctor import subject
from colocated_grpo.tools.doctor.subject import Imports, import_libraries

_known: dict[str, Imports] = {}
"""Value of PYTHONPATH -> imports of this test session."""


@pytest.fixture(autouse=True)
def _import_libraries_once(monkeypatch) -> None:
    """Import torch and transformers once for each PYTHONPATH, not for each subject: it takes seconds."""

    def import_once(environment: dict[str, str]) -> Imports:
        path = environment.get("PYTHONPATH", "")
        if path not in _known:
            _known[path] = import_libraries(environment)
        return _known[path]

    monkeypatch.setattr(subject, "import_libraries", import_once)
