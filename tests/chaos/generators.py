"""Hypothesis strategies of hostile requests, from the routes of an application and the schemas of their bodies.

Routes and schemas are read from the application: a new route, or a new field of a body, is attacked without a change
here.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce
from itertools import islice
from operator import or_
from typing import Any, NamedTuple
from unittest.mock import MagicMock, patch

import msgspec
from fastapi import FastAPI
from fastapi.routing import APIRoute
from hypothesis import strategies as st
from pydantic import BaseModel, TypeAdapter

from tests.chaos.sent import HEADERS, LARGEST, Again, Json, Repeated, Sent, text_of

PLACES = 50
"""Entries of each list or object that may be changed."""
CASES_PER_ROUTE, CASES_PER_FIELD = 20, 10
OPTIONAL_FIELDS = 4
"""Most optional fields of an object: each further one could make the body invalid."""


class Endpoint(NamedTuple):
    """A route with one of its methods."""

    method: str
    path: str
    schema: dict[str, Any] | None
    """JSON schema of the body; None for a route that reads none."""
    query: dict[str, Any]
    """JSON schema of each parameter of the query."""

    @property
    def name(self) -> str:
        return f"{self.method} {self.path}"

    @property
    def num_cases(self) -> int:
        """Cases of one round."""
        fields = len(self.query) + len(_fields(self.schema or {}))
        return CASES_PER_ROUTE + CASES_PER_FIELD * fields


def endpoints_of(create_app: Callable[..., Any], *adders: Callable[..., None]) -> list[Endpoint]:
    """Return the endpoints of an application, and of the routes that `adders` add to it.

    Only the routes are used: the arguments of the functions are mocks.
    """
    app = create_app(**_arguments(create_app))
    while not isinstance(app, FastAPI):  # inside its guards
        app = app.app if hasattr(app, "app") else app._app
    for add in adders:
        add(**_arguments(add) | {"app": app})
    routes = [route for route in app.routes if isinstance(route, APIRoute)]
    return [
        Endpoint(method, route.path, _schema(route.endpoint), _query(route))
        for route in routes
        for method in sorted(route.methods)
    ]


def _arguments(function: Callable[..., Any]) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters.values()
    needed = [parameter for parameter in parameters if parameter.default is parameter.empty]
    return {each.name: 1 if each.annotation == "int" else MagicMock() for each in needed}


def _schema(endpoint: Callable[..., Any]) -> dict[str, Any] | None:
    """Return the schema of the model or decoder that the function reads its body with."""
    names = inspect.getclosurevars(endpoint)
    for value in [*names.nonlocals.values(), *names.globals.values()]:
        if isinstance(value, msgspec.json.Decoder):
            return schema_of(value.type)
        if isinstance(value, type) and issubclass(value, BaseModel):
            return value.model_json_schema()
    assert "read_json" not in names.globals, f"{endpoint}: the schema of its body is not among its names"
    return None


def schema_of(kind: Any) -> dict[str, Any]:
    """Return the JSON schema of a msgspec type."""
    with patch("msgspec._json_schema.to_builtins", return_value=None):  # it raises for a default of type Raw
        return msgspec.json.schema(kind, schema_hook=lambda kind: {"title": "any"})


def _query(route: APIRoute) -> dict[str, Any]:
    parameters = route.dependant.query_params
    return {each.name: TypeAdapter(each.field_info.annotation).json_schema() for each in parameters}


def weighted(*choices: tuple[int, st.SearchStrategy[Any]]) -> st.SearchStrategy[Any]:
    """Return one of several strategies, by weight. `one_of` would give equal weights, also to parts of a part."""
    indices = [index for index, (weight, _) in enumerate(choices) for _ in range(weight)]
    return st.sampled_from(indices).flatmap(lambda index: choices[index][1])


def _closed(unit: str, count: int) -> Repeated:
    count = min(count, LARGEST // 8)
    return Repeated("", unit, count, "]" * count)


# Strategies are built once: building one for each draw takes as long as the requests.
counts = weighted((3, st.integers(0, 8)), (3, st.integers(0, 1 << 13)), (1, st.integers(0, 1 << 22)))
integers = st.one_of(st.integers(-2, 9), st.integers(), st.integers(0, 80).map(lambda bits: (1 << bits) - 1))
numbers = st.one_of(integers, st.floats(), st.integers(0, 400).map(lambda digits: 10**digits))
unicode = st.characters(codec="utf-8")
texts = st.one_of(st.text(st.characters(), max_size=20), st.sampled_from(["null", "NaN", "../..", "%s%n", "{{7*7}}"]))
scalars = st.one_of(st.none(), st.booleans(), numbers, texts)
nested = st.recursive(
    scalars, lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(texts, inner, max_size=4))
)
units = nested.map(text_of)
starts = st.sampled_from(['"', '"\U0001f600'])
characters = st.sampled_from(["a", "\U0001f600", "\\ud83d\\ude00", "\\ud83d", "\\\\", '\\"', "\\u0000"])
digits = weighted((1, st.integers(0, 400)), (2, st.integers(4000, 9000)))
bombs = weighted(
    (3, st.builds(Repeated, st.just("1"), st.sampled_from(["9", "0", "e9"]), digits, st.just(""))),
    (1, st.builds(Repeated, st.just("1"), st.sampled_from(["9", "-", "0.", " "]), counts, st.just(""))),
    (1, st.builds(lambda unit, count: Repeated("[", f"{unit},", count, f"{unit}]"), units, counts)),
    (1, st.builds(lambda unit, count: Repeated("{", f'"#":{unit},', count, f'"":{unit}}}'), units, counts)),
    (1, st.builds(Repeated, st.just(""), st.sampled_from(["[", '{"":', "[[],", "[{},"]), counts, st.just(""))),
    (1, st.builds(_closed, st.sampled_from(["[", "[{},"]), counts)),
    (1, st.builds(Repeated, starts, characters, counts, st.just('"'))),
)
hostile = weighted((3, scalars), (2, nested), (4, bombs))


def valid(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> st.SearchStrategy[Json]:
    """Return values that fit a JSON schema, as pydantic and msgspec write it. Only its types and bounds are read."""
    if reference := schema.get("$ref"):
        return valid(definitions[reference.rpartition("/")[2]], definitions)
    if choices := schema.get("anyOf"):
        return st.one_of(*(valid(choice, definitions) for choice in choices))
    if "enum" in schema or "const" in schema:
        return st.sampled_from(schema.get("enum") or [schema["const"]])
    match schema.get("type"):
        case "object":
            return _objects(schema, definitions)
        case "array":
            entries = valid(schema.get("items", {}), definitions)
            least = schema.get("minItems", 0)
            return st.lists(entries, min_size=least, max_size=min(schema.get("maxItems", 4), least + 3))
        case "integer":
            return _integers(schema)
        case "number":
            return _floats(schema)
        case "string":
            least, most = max(1, schema.get("minLength", 1)), schema.get("maxLength", 40)
            words = st.sampled_from(["user", "assistant"] if least == 1 else ["a" * least])
            return st.one_of(words, st.text(unicode, min_size=least, max_size=min(most, least + 8)))
        case "boolean":
            return st.booleans()
        case "null":
            return st.none()
        case _:
            return nested


def _integers(schema: Mapping[str, Any]) -> st.SearchStrategy[int]:
    """Return integers within the bounds, most of them close to the lower one: as tokens, they are in a vocabulary."""
    least = schema.get("minimum", schema.get("exclusiveMinimum", -1) + 1)
    most = schema.get("maximum", schema.get("exclusiveMaximum", 1 << 80) - 1)
    is_bounded = "minimum" in schema or "exclusiveMinimum" in schema
    first = max(least, min(most - 8, -1)) if least < 0 else least
    nearest, near = (st.integers(first, min(most, first + distance)) for distance in (1, 8))
    return weighted((4, nearest), (4, near), (1, st.integers(least if is_bounded else None, most)))


def _floats(schema: Mapping[str, Any]) -> st.SearchStrategy[float]:
    low, high = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    least, most = schema.get("minimum", low), schema.get("maximum", high)
    within = [each for each in (0.0, 0.25, 1.0) if least is None or least <= each]
    within = [each for each in within if most is None or each <= most]
    usual = [each for each in within if each not in (low, high)]
    anywhere = st.floats(
        least, most, exclude_min=low is not None, exclude_max=high is not None, allow_nan=False, allow_infinity=False
    )
    return weighted((3, st.sampled_from(usual)), (1, anywhere)) if usual else anywhere


def _objects(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> st.SearchStrategy[Json]:
    properties = {name: valid(each, definitions) for name, each in schema.get("properties", {}).items()}
    others = schema.get("additionalProperties")
    if not properties:
        entries = valid(others, definitions) if isinstance(others, dict) else nested
        return st.dictionaries(texts, entries, min_size=1, max_size=3)
    required = [name for name in properties if name in schema.get("required", ())]
    optional = st.lists(st.sampled_from(sorted(properties)), unique=True, max_size=OPTIONAL_FIELDS)
    return _chosen(properties, required, optional)


@st.composite
def _chosen(
    draw: st.DrawFn,
    properties: Mapping[str, st.SearchStrategy[Json]],
    required: Sequence[str],
    optional: st.SearchStrategy[list[str]],
) -> Json:
    return {name: draw(properties[name]) for name in dict.fromkeys([*required, *draw(optional)])}


def bodies(schema: Json, example: Json) -> st.SearchStrategy[Json]:
    """Return bodies: valid, or with some of their parts replaced, removed or added, or no valid body at all.

    example: a valid body that the schema cannot express, such as lists of equal lengths; None if there is none.
    """
    sources = [(5, valid(schema, schema.get("$defs", {}))), (1, hostile)]
    sources += [] if example is None else [(4, st.just(example))]
    return _changed(weighted(*sources), {name: valid(*each) for name, each in _fields(schema).items()})


num_changes = st.sampled_from([0, 0, 1, 1, 1, 2])
kinds_of_change = st.sampled_from(["replace", "replace", "replace", "choose", "choose", "remove", "add", "repeat"])


@st.composite
def _changed(draw: st.DrawFn, sources: st.SearchStrategy[Json], fields: Mapping[str, st.SearchStrategy[Json]]) -> Json:
    body = copy.deepcopy(draw(sources))
    for _ in range(draw(num_changes)):
        places = [*_places(body), *((body, name) for name in fields if isinstance(body, dict))]
        if not places:
            return draw(hostile)
        holder, key = draw(st.sampled_from(places))
        match draw(kinds_of_change):
            case "choose" if key in fields:
                holder[key] = draw(fields[key])
            case "replace" | "choose":
                holder[key] = draw(hostile)
            case "remove" if isinstance(holder, list) or key in holder:
                del holder[key]
            case "repeat" if isinstance(holder, dict) and key in fields:
                holder[Again(key)] = draw(fields[key])
            case _ if isinstance(holder, list):
                holder.insert(key, draw(hostile))
            case _:
                holder[draw(texts)] = draw(hostile)
    return body


def _fields(schema: Json, definitions: Json = None) -> dict[str, tuple[Json, Json]]:
    """Return the schema of each field of a schema, at any depth, and its definitions."""
    definitions = schema.get("$defs", {}) if definitions is None else definitions
    parts = schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ()
    own = schema.get("properties", {}) if isinstance(schema, dict) else {}
    found = {name: (each, definitions) for name, each in own.items() if isinstance(each, dict)}
    return reduce(or_, (_fields(part, definitions) for part in parts), found)


def _places(content: Json) -> Iterator[tuple[Any, Any]]:
    """Yield (container, key) of the entries below `content`."""
    pairs = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, entry in islice(pairs, PLACES):
        yield content, key
        yield from islice(_places(entry), PLACES)


odd_headers = st.sampled_from(
    [
        ("Origin", "https://evil.example"), ("Content-Type", "text/plain"), ("Expect", "100-continue"),
        ("Content-Encoding", "br"), ("Content-Encoding", "gzip, gzip"), ("Sec-Fetch-Site", "cross-site"),
        ("Authorization", "Bearer wrong"), ("Authorization", "Basic ??"), ("X", "a" * 70_000), ("Host", "evil.example"),
        ("Connection", "upgrade"), ("Accept-Encoding", "gzip"), ("Transfer-Encoding", "gzip"), ("\x00", "\x00"),
    ]
)  # fmt: skip


def requests(endpoint: Endpoint, example: Json) -> st.SearchStrategy[Sent]:
    """Return requests to an endpoint. Most are whole and have usual headers, so that the body counts."""

    def rarely(usual: st.SearchStrategy[Any], others: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        return weighted((15, usual), (1, others))

    query = {name: st.one_of(valid(schema, {}), texts) for name, schema in endpoint.query.items()}
    target = st.fixed_dictionaries(query).map(lambda values: endpoint.path + encoded_query(values))
    body = bodies(endpoint.schema or {}, example)
    return st.builds(
        Sent,
        method=rarely(st.just(endpoint.method), st.sampled_from(["GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD"])),
        target=rarely(target, st.text("abc/%.?&=0", max_size=30).map(lambda text: endpoint.path + text)),
        headers=rarely(st.just([]), st.lists(odd_headers, min_size=1, max_size=2)).map(lambda odd: (*HEADERS, *odd)),
        has_key=rarely(st.just(True), st.just(False)),
        body=rarely(weighted((5, st.none()), (1, body)) if endpoint.schema is None else body, st.binary(max_size=200)),
        framing=rarely(
            st.just("length"), st.sampled_from(["chunked", "both", "2 5", "-5", "999999999", "9" * 40, "0", "x"])
        ),
        gzipped=rarely(st.just(False), st.just(True)),
        share=rarely(st.just(1.0), st.floats(0, 1)),
        pauses=rarely(st.just([]), st.lists(st.floats(0, 0.02), max_size=5)).map(tuple),
        ending=rarely(st.just("read"), st.sampled_from(["close", "reset", "half", "hold", "hold"])),
    )


def encoded_query(values: Mapping[str, Json]) -> str:
    """Return the query of a target, with its question mark if it is not empty."""
    texts = {name: value if isinstance(value, str) else text_of(value) for name, value in values.items()}
    pairs = [
        f"{name}={''.join(f'%{byte:02x}' for byte in text.encode('utf-8', 'surrogatepass'))}"
        for name, text in texts.items()
    ]
    return "?" * bool(pairs) + "&".join(pairs)


def cases(endpoints: Sequence[Endpoint], examples: Mapping[str, Json]) -> dict[str, st.SearchStrategy[list[Sent]]]:
    """Return cases of each endpoint by its name: requests to it, some of them after requests to others."""
    alone = {each.name: requests(each, examples.get(each.path)) for each in endpoints}
    before = st.lists(st.one_of(*alone.values()), min_size=1, max_size=2)
    first = weighted((3, st.just([])), (1, before))
    return {name: st.builds(lambda sent, last: [*sent, last], first, last) for name, last in alone.items()}
