"""Bounds on the structure of JSON text, counted on its bytes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.exceptions import HTTPException

from colocated_grpo.web.bodies import BodyShape

JSON = st.recursive(
    st.none() | st.integers() | st.text(alphabet='"\\[]{},:a\n', max_size=6),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(alphabet='"\\[]{},a', max_size=4), inner),
    max_leaves=20,
)


def measures(value: Any) -> tuple[int, int, int, int]:
    """Return the numbers of values, containers and strings, and the depth, as `BodyShape` counts them."""
    if isinstance(value, str):
        return 0, 0, 1, 0
    if not isinstance(value, list | dict):
        return 0, 0, 0, 0
    inner = [measures(child) for child in (value.values() if isinstance(value, dict) else value)]
    keys = len(value) if isinstance(value, dict) else 0
    commas = max(0, len(value) - 1)
    values, containers, strings, depths = zip(*inner, strict=True) if inner else ((0,),) * 4
    return 1 + commas + sum(values), 1 + sum(containers), keys + sum(strings), 1 + max(depths)


@given(value=JSON)
@settings(max_examples=500)
def test_the_structure_is_counted_exactly_and_strings_do_not_count(value):
    text = json.dumps(value).encode()
    exact = dict(zip(("values", "containers", "strings", "depth"), measures(value), strict=True))
    BodyShape(**exact).check(text)
    for name, count in exact.items():
        if count > 0:
            with pytest.raises(HTTPException, match=f"more than {count - 1} "):
                BodyShape(**{**exact, name: count - 1}).check(text)
