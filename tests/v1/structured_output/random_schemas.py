"""Random JSON schemas over the keywords that some backend enforces."""

import random
from typing import Any

PATTERNS = ("^a+$", "^[a-c]{1,3}$", "^(x|yz)?$", "b", "^[^q]*$")
NAMES = ("a", "b", "key one", 'q"')
VALUES = (1, 2.5, "a", 'q"\n', None, True, [1, "a"], {"a": 1})


def random_schema(rng: random.Random, depth: int = 2) -> Any:
    """Return a schema, maybe one that is refused or that nothing satisfies."""
    kinds = ["string", "integer", "number", "enum", "boolean", "null"]
    if depth > 0:
        kinds += [
            "array",
            "object",
            "object",
            "anyOf",
            "oneOf",
            "allOf",
            "types",
            "any",
        ]
    kind = rng.choice(kinds)
    if kind in ("anyOf", "oneOf", "allOf"):
        branches = [random_schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]
        return {kind: branches}
    if kind == "enum":
        return {"enum": rng.sample(VALUES, rng.randint(1, 4))}
    if kind == "any":
        return rng.choice([{}, True])
    if kind == "types":
        schema = _typed(rng, rng.choice(["object", "array", "string"]), depth)
        schema["type"] = [schema["type"], "null"]
        return schema
    return _typed(rng, kind, depth)


def _typed(rng: random.Random, kind: str, depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": kind}
    if kind == "string":
        _maybe(rng, schema, "minLength", lambda: rng.randint(0, 3))
        _maybe(rng, schema, "maxLength", lambda: rng.randint(2, 6))
        _maybe(rng, schema, "pattern", lambda: rng.choice(PATTERNS))
    elif kind in ("integer", "number"):
        for key in ("minimum", "exclusiveMinimum"):
            _maybe(rng, schema, key, lambda: rng.choice([-20, -1, 0, 3, 7.5]))
        for key in ("maximum", "exclusiveMaximum"):
            _maybe(rng, schema, key, lambda: rng.choice([0, 5, 12.25, 1000]))
        _maybe(rng, schema, "multipleOf", lambda: rng.choice([1, 2, 5]))
    elif kind == "array":
        _maybe(rng, schema, "items", lambda: random_schema(rng, depth - 1))
        _maybe(rng, schema, "minItems", lambda: rng.randint(0, 3))
        _maybe(rng, schema, "maxItems", lambda: rng.randint(1, 4))
        prefix = [random_schema(rng, 0) for _ in range(rng.randint(1, 2))]
        _maybe(rng, schema, "prefixItems", lambda: prefix)
    elif kind == "object":
        names = rng.sample(NAMES, rng.randint(1, 3))
        properties = {name: random_schema(rng, depth - 1) for name in names}
        _maybe(rng, schema, "properties", lambda: properties)
        _maybe(rng, schema, "required", lambda: rng.sample(NAMES, rng.randint(0, 2)))
        closed = rng.choice([True, False, False, {"type": "integer"}])
        _maybe(rng, schema, "additionalProperties", lambda: closed)
        _maybe(rng, schema, "minProperties", lambda: rng.randint(0, 2))
        _maybe(rng, schema, "maxProperties", lambda: rng.randint(1, 3))
        patterns = {rng.choice(PATTERNS): random_schema(rng, 0)}
        if rng.random() < 0.2:
            schema["patternProperties"] = patterns
    return schema


def _maybe(rng: random.Random, schema: dict[str, Any], key: str, draw: Any) -> None:
    if rng.random() < 0.4:
        schema[key] = draw()
