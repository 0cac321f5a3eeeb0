"""Imports of slow libraries run without garbage collection, which is on again afterwards."""

from __future__ import annotations

import gc

import pytest

from colocated_grpo.runtime.program import frozen_imports


def test_imports_are_excluded_from_a_garbage_collection_that_is_off_meanwhile():
    with frozen_imports():
        assert not gc.isenabled()
        imported = [object]
    assert gc.isenabled()
    assert not any(each is imported for each in gc.get_objects())


def test_a_failing_import_leaves_garbage_collection_on():
    with pytest.raises(ImportError), frozen_imports():
        raise ImportError
    assert gc.isenabled()
