"""JSON schemas before they are compiled: their shape, and what the backends enforce.

The tables here are the law: a keyword that changes which documents are valid is either
enforced by a backend or refused by name. Nothing is weakened.
"""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from vllm.v1.structured_output.common_regex import is_common_json_pattern
from vllm.v1.structured_output.regex_syntax import (
    describe_regex_fault,
    is_fully_anchored,
)

MAX_SCHEMA_BYTES = 256 * 1024
# Levels of nested objects and arrays in the schema's own text.
MAX_SCHEMA_DEPTH = 100
MAX_COUNT = 1_000_000
MAX_NAME_IN_PATH = 64
# Remainders are states of an automaton: beyond this it takes seconds to build.
MAX_MULTIPLE = 65_536
# Every subset of them may come, and the more so if they are counted.
MAX_OPTIONAL_PROPERTIES = 1000
MAX_COUNTED_PROPERTIES = 100
# Numeric bounds are turned into digits by 64-bit arithmetic.
MAX_BOUND = 9_000_000_000_000_000_000

TYPES = ("string", "number", "integer", "boolean", "null", "array", "object")
GUIDANCE_FORMATS = frozenset(
    {
        "date",
        "date-time",
        "duration",
        "email",
        "hostname",
        "ipv4",
        "ipv6",
        "time",
        "uri",
        "uuid",
    }
)
# Not ipv4: xgrammar lets leading zeros through.
XGRAMMAR_FORMATS = (GUIDANCE_FORMATS - {"ipv4"}) | frozenset(
    {"json-pointer", "relative-json-pointer", "uri-reference", "uri-template"}
)
REFUSED_KEYWORDS = frozenset(
    {
        "$dynamicRef",
        "$recursiveRef",
        "contains",
        "dependencies",
        "dependentRequired",
        "dependentSchemas",
        "else",
        "if",
        "maxContains",
        "minContains",
        "not",
        "then",
        "unevaluatedItems",
        "unevaluatedProperties",
        "uniqueItems",
    }
)

_STRING_KEYWORDS = frozenset(["minLength", "maxLength", "pattern", "format"])
_NUMBER_KEYWORDS = frozenset(
    ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"]
)
_ARRAY_KEYWORDS = frozenset(
    ["items", "prefixItems", "additionalItems", "minItems", "maxItems"]
)
_OBJECT_KEYWORDS = frozenset(
    {
        "additionalProperties",
        "maxProperties",
        "minProperties",
        "patternProperties",
        "properties",
        "propertyNames",
        "required",
    }
)
_KEYWORDS_OF_TYPE = {
    "string": _STRING_KEYWORDS,
    "number": _NUMBER_KEYWORDS,
    "integer": _NUMBER_KEYWORDS,
    "array": _ARRAY_KEYWORDS,
    "object": _OBJECT_KEYWORDS,
}
_TYPED_KEYWORDS = frozenset().union(*_KEYWORDS_OF_TYPE.values())
_IN_PLACE_KEYWORDS = ("$ref", "allOf", "anyOf", "oneOf")
_CONSTRAINTS = (
    _TYPED_KEYWORDS | {"type", "enum", "const", *_IN_PLACE_KEYWORDS} | REFUSED_KEYWORDS
)
_COUNT_KEYWORDS = (
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
    "minProperties",
    "maxProperties",
)
_BOUND_KEYWORDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")

_SCHEMA_KEYWORDS = (
    "additionalItems",
    "additionalProperties",
    "contains",
    "else",
    "if",
    "not",
    "propertyNames",
    "then",
    "unevaluatedItems",
    "unevaluatedProperties",
)
_SCHEMA_LIST_KEYWORDS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SCHEMA_MAP_KEYWORDS = (
    "properties",
    "patternProperties",
    "$defs",
    "definitions",
    "dependentSchemas",
)

Schema = dict[str, Any]


class SchemaFault(ValueError):
    """A schema that cannot be enforced; the message names the keyword and its path."""


@dataclass
class CheckedSchema:
    """A well-formed schema, normalised, and which backends cannot enforce it.

    Args:
        text: the schema in one canonical spelling.
        objections: backend -> why it does not enforce the schema.
    """

    text: str
    objections: dict[str, str] = field(default_factory=dict)


def check_schema(value: Any, *, close_objects: bool = False) -> CheckedSchema:
    """Check a schema and bring it into the form that is compiled.

    Args:
        value: the schema as text, object or boolean.
        close_objects: add additionalProperties false where a schema does not say.

    Raises:
        SchemaFault: it is malformed, too large, or no backend enforces it.
    """
    schema = _parse(value)
    for node, path in iter_subschemas(schema):
        _check_shape(node, path)
        _normalise(node, close_objects)
    _check_references(schema)
    _check_joined_multiples(schema)
    # Only now: normalising removes what means nothing.
    checked = CheckedSchema(json.dumps(schema, ensure_ascii=False))
    for node, path in iter_subschemas(schema):
        _check_refused(node, path)
        for backend, find_objection in _OBJECTIONS.items():
            objection = find_objection(node)
            if objection is not None:
                checked.objections.setdefault(backend, f"{path}: {objection}")
    return checked


def close_declared_objects(text: str) -> str:
    """Return the schema with every object closed that declares properties.

    That is narrower than JSON Schema. xgrammar would otherwise take a declared name,
    spelled with an escape, for an additional property of any kind.
    """
    schema = json.loads(text)
    for node, _ in iter_subschemas(schema):
        if "properties" in node or "patternProperties" in node:
            node.setdefault("additionalProperties", False)
    return json.dumps(schema, ensure_ascii=False)


def iter_subschemas(schema: Schema) -> Iterator[tuple[Schema, str]]:
    """Yield every object schema with its path, parents first, without recursion.

    Raises:
        SchemaFault: something that must be a schema is not one.
    """
    stack: list[tuple[Any, str]] = [(schema, "#")]
    while stack:
        node, path = stack.pop()
        if isinstance(node, bool):
            continue
        if not isinstance(node, dict):
            raise SchemaFault(f"{path} must be a schema: an object or a boolean")
        yield node, path
        stack.extend(_children(node, path))


def _children(node: Schema, path: str) -> list[tuple[Any, str]]:
    found = [(node[key], f"{path}/{key}") for key in _SCHEMA_KEYWORDS if key in node]
    for key in (*_SCHEMA_LIST_KEYWORDS, "items"):
        if key not in node:
            continue
        if isinstance(node[key], list):
            items = enumerate(node[key])
            found.extend((item, f"{path}/{key}/{index}") for index, item in items)
        elif key == "items":
            found.append((node[key], f"{path}/items"))
        else:
            raise SchemaFault(f"{path}/{key} must be a list of schemas")
    for key in _SCHEMA_MAP_KEYWORDS:
        if key not in node:
            continue
        if not isinstance(node[key], dict):
            raise SchemaFault(f"{path}/{key} must be an object of schemas")
        found.extend(
            (item, f"{path}/{key}/{_clip_name(name)}")
            for name, item in node[key].items()
        )
    return found


def _clip_name(name: str) -> str:
    """Shorten a name in a path: every schema below it repeats the path."""
    if len(name) <= MAX_NAME_IN_PATH:
        return name
    return name[:MAX_NAME_IN_PATH] + "..."


def _parse(value: Any) -> Schema:
    """Return the schema as a fresh object, of bounded size and depth."""
    if not isinstance(value, str):
        _check_depth(value)
        try:
            value = json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise SchemaFault(f"the schema is not JSON: {error}") from error
    if len(value.encode(errors="replace")) > MAX_SCHEMA_BYTES:
        raise SchemaFault(f"the schema is larger than {MAX_SCHEMA_BYTES} bytes")
    _check_text_depth(value)
    try:
        schema = json.loads(
            value, parse_constant=_refuse_constant, parse_float=_parse_float
        )
    except SchemaFault:
        raise
    except ValueError as error:
        raise SchemaFault(f"the schema is not JSON: {error}") from error
    if schema is True:
        return {}
    if schema is False:
        raise SchemaFault("the schema false accepts nothing")
    if not isinstance(schema, dict):
        raise SchemaFault("the schema must be an object or a boolean")
    return schema


def _refuse_constant(name: str) -> None:
    raise SchemaFault(f"the schema holds {name}, which is not JSON")


def _parse_float(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise SchemaFault(
            f"the schema holds the number {text[:40]}, which is too large"
        )
    return number


def _check_depth(value: Any) -> None:
    """Count the nesting of parsed JSON, without recursion."""
    stack = [(value, 1)]
    while stack:
        item, depth = stack.pop()
        if isinstance(item, (dict, list, tuple)):
            _refuse_depth(depth)
            children = item.values() if isinstance(item, dict) else item
            stack.extend((child, depth + 1) for child in children)


def _check_text_depth(text: str) -> None:
    """Count the nesting of JSON text, without parsing: a parser recurses."""
    depth = 0
    in_string = is_escaped = False
    for char in text:
        if in_string:
            in_string = is_escaped or char != '"'
            is_escaped = char == "\\" and not is_escaped
        elif char == '"':
            in_string = True
        elif char in "{[":
            depth += 1
            _refuse_depth(depth)
        elif char in "}]":
            depth -= 1


def _refuse_depth(depth: int) -> None:
    if depth > MAX_SCHEMA_DEPTH:
        raise SchemaFault(f"the schema nests deeper than {MAX_SCHEMA_DEPTH} levels")


def _check_shape(node: Schema, path: str) -> None:
    """Refuse a keyword whose value is of the wrong kind."""
    if "x-guidance" in node:
        raise SchemaFault(f"{path}/x-guidance would change how the schema is enforced")
    if "type" in node:
        types = node["type"] if isinstance(node["type"], list) else [node["type"]]
        if not types or not all(isinstance(t, str) and t in TYPES for t in types):
            raise SchemaFault(f"{path}/type must be one or more of {', '.join(TYPES)}")
    _check_numbers(node, path)
    for key in ("pattern", "format", "$ref"):
        if key in node and not isinstance(node[key], str):
            raise SchemaFault(f"{path}/{key} must be a string")
    for pattern_path, pattern in _patterns(node, path):
        fault = describe_regex_fault(pattern)
        if fault is not None:
            raise SchemaFault(f"the pattern at {pattern_path} {fault}")
    _check_values(node, path)


def _check_numbers(node: Schema, path: str) -> None:
    for key in _COUNT_KEYWORDS:
        if key in node and not _is_count(node[key]):
            raise SchemaFault(
                f"{path}/{key} must be a whole number from 0 to {MAX_COUNT}"
            )
    for key in _BOUND_KEYWORDS:
        if key in node and not (_is_number(node[key]) and abs(node[key]) <= MAX_BOUND):
            raise SchemaFault(
                f"{path}/{key} must be a number between -{MAX_BOUND} and {MAX_BOUND}"
            )
    if "multipleOf" in node and not (
        _is_number(node["multipleOf"]) and 0 < node["multipleOf"] <= MAX_BOUND
    ):
        raise SchemaFault(f"{path}/multipleOf must be a number above 0")
    if "multipleOf" in node and _significand(node["multipleOf"]) > MAX_MULTIPLE:
        raise SchemaFault(
            f"{path}/multipleOf has too many digits: without its zeros and its point "
            f"it must be at most {MAX_MULTIPLE}"
        )


def _check_values(node: Schema, path: str) -> None:
    """Check lists of names and values, and that JSON text can spell them."""
    required = node.get("required", [])
    if not isinstance(required, list) or not all(isinstance(n, str) for n in required):
        raise SchemaFault(f"{path}/required must be a list of property names")
    if "enum" in node and not (isinstance(node["enum"], list) and node["enum"]):
        raise SchemaFault(f"{path}/enum must be a list with at least one value")
    for key in ("anyOf", "oneOf", "allOf"):
        if key in node and not node[key]:
            raise SchemaFault(f"{path}/{key} must hold at least one schema")
    spelled = [node.get("enum"), node.get("const"), required]
    spelled.append(list(node.get("properties", {})))
    if any(_has_control_character(value) for value in spelled):
        raise SchemaFault(
            f"{path} names a text with a control character, which is not generated"
        )


def _normalise(node: Schema, close_objects: bool) -> None:
    """Remove what means nothing and say the rest in keywords that are enforced."""
    for key in _COUNT_KEYWORDS:
        if key in node:
            node[key] = int(node[key])
    no_ops = (
        ("uniqueItems", node.get("uniqueItems") is False),
        ("unevaluatedItems", node.get("unevaluatedItems") in (True, {})),
        ("unevaluatedProperties", node.get("unevaluatedProperties") in (True, {})),
        ("propertyNames", node.get("propertyNames") in (True, {})),
        ("minContains", "contains" not in node),
        ("maxContains", "contains" not in node),
        ("then", "if" not in node),
        ("else", "if" not in node),
        ("$dynamicAnchor", True),
    )
    for key, means_nothing in no_ops:
        if means_nothing:
            node.pop(key, None)
    if not any(key in node for key in _IN_PLACE_KEYWORDS):
        # Nothing else evaluates: "unevaluated" is then what is left over.
        for key, plain in (
            ("unevaluatedProperties", "additionalProperties"),
            ("unevaluatedItems", "items"),
        ):
            if key in node:
                rest = node.pop(key)
                node.setdefault(plain, rest)
    if isinstance(node.get("propertyNames"), dict):
        # A key is always a string.
        node["propertyNames"].setdefault("type", "string")
    if "oneOf" in node and "anyOf" not in node and _is_disjoint(node["oneOf"]):
        node["anyOf"] = node.pop("oneOf")
    is_object = "properties" in node or "object" in _types(node)
    if close_objects and is_object:
        node.setdefault("additionalProperties", False)


def _check_joined_multiples(schema: Schema) -> None:
    """Refuse multiples that can hold at once and whose common ones are too many.

    Their automaton is as large as their product: a few digits keep a compiler busy for
    minutes. Which of them meet is not worked out; a schema that joins any counts all.
    """
    significands: set[int] = set()
    is_joined = False
    for node, _ in iter_subschemas(schema):
        if "multipleOf" in node:
            significands.add(_significand(node["multipleOf"]))
        has_in_place = any(key in node for key in _IN_PLACE_KEYWORDS)
        num_constraints = sum(key in _CONSTRAINTS for key in node)
        is_joined |= "allOf" in node or (has_in_place and num_constraints > 1)
    if is_joined and math.prod(significands) > MAX_MULTIPLE:
        raise SchemaFault(
            "several multipleOf in a schema that joins subschemas: their product must "
            f"be at most {MAX_MULTIPLE}, without zeros and points"
        )


def _check_references(schema: Schema) -> None:
    """Refuse a `$ref` within the document that leads nowhere or only to itself."""
    # A part of the schema may have an address of its own, which a `$ref` can name.
    has_id = any("$id" in node for node, _ in iter_subschemas(schema))
    # Each reference is followed once, however many chains run through it.
    followed: set[str] = set()
    for node, path in iter_subschemas(schema):
        target: Any = node
        seen: set[str] = set()
        while isinstance(target, dict) and isinstance(target.get("$ref"), str):
            reference = target["$ref"]
            if reference in seen:
                raise SchemaFault(f"{path}/$ref refers to itself and to nothing else")
            if reference in followed:
                break
            if reference.partition("#")[0] and not has_id:
                raise SchemaFault(
                    f"{path}/$ref must stay within the schema (begin with #): "
                    "nothing is fetched"
                )
            if reference != "#" and not reference.startswith("#/"):
                break
            seen.add(reference)
            target = _resolve_pointer(schema, reference, path, has_id)
        followed |= seen


def _resolve_pointer(schema: Schema, reference: str, path: str, has_id: bool) -> Any:
    target: Any = schema
    for part in reference[1:].split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(target, list) and name.isdecimal() and int(name) < len(target):
            target = target[int(name)]
        elif isinstance(target, dict) and name in target:
            target = target[name]
        elif "%" in reference or has_id:
            # Percent escapes and moved base addresses are the compiler's to resolve.
            return None
        else:
            raise SchemaFault(f"{path}/$ref: there is nothing at {reference}")
    return target


def _check_refused(node: Schema, path: str) -> None:
    for key in node:
        if key in REFUSED_KEYWORDS:
            raise SchemaFault(f"{path}/{key}: the keyword {key} is not supported")
    if "format" in node and _can_be(node, "string"):
        name = node["format"]
        if name not in GUIDANCE_FORMATS | XGRAMMAR_FORMATS:
            raise SchemaFault(f"{path}/format: the format {name!r} is not supported")
    num_optional = len(set(node.get("properties", {})) - set(node.get("required", [])))
    limit = MAX_OPTIONAL_PROPERTIES
    if node.get("minProperties", 0) > 0:
        limit = MAX_COUNTED_PROPERTIES
    if num_optional > limit:
        beside = " beside minProperties" if "minProperties" in node else ""
        raise SchemaFault(
            f"{path}/properties declares {num_optional} optional properties; at most "
            f"{limit} can be enforced{beside}"
        )
    is_open = node.get("additionalProperties") is not False
    if node.get("minProperties", 0) > 1 and (is_open or "patternProperties" in node):
        raise SchemaFault(
            f"{path}/minProperties above 1 needs additionalProperties false, because "
            "a repeated key would be counted twice"
        )


def _guidance_objection(node: Schema) -> str | None:
    if "propertyNames" in node:
        return "the keyword propertyNames is not enforced by guidance"
    name = node.get("format", "date")
    if _can_be(node, "string") and name not in GUIDANCE_FORMATS:
        return f"the format {name!r} is not enforced by guidance"
    return None


def _xgrammar_objection(node: Schema) -> str | None:
    """Say why xgrammar would ignore something here: it does so silently."""
    keys = [key for key in node if key in _CONSTRAINTS]
    for key in ("allOf", "oneOf"):
        if key in keys:
            return f"the keyword {key} is not enforced by xgrammar"
    for key in ("$ref", "anyOf", "const", "enum"):
        if key not in keys:
            continue
        others = [other for other in keys if other != key]
        if key in ("const", "enum") and others == ["type"]:
            values = node["enum"] if key == "enum" else [node["const"]]
            if all(_matches_type(value, _types(node)) for value in values):
                return None
        if others:
            return f"xgrammar does not enforce {others[0]} beside {key}"
        if key == "$ref" and node[key] != "#" and not node[key].startswith("#/"):
            return "xgrammar resolves only references that begin with #/"
        return None
    return _xgrammar_typed_objection(node, keys)


def _xgrammar_typed_objection(node: Schema, keys: list[str]) -> str | None:
    typed = [key for key in keys if key != "type"]
    types = _types(node)
    for key in typed:
        if not any(key in _KEYWORDS_OF_TYPE.get(name, ()) for name in types):
            return f"xgrammar does not enforce {key} without the type it belongs to"
    if node.get("format", "date") not in XGRAMMAR_FORMATS:
        return f"the format {node['format']!r} is not enforced by xgrammar"
    string_keys = [key for key in typed if key in _STRING_KEYWORDS]
    if ("pattern" in node or "format" in node) and len(string_keys) > 1:
        return f"xgrammar enforces one of {', '.join(string_keys)} at a time"
    if any(not is_fully_anchored(p) for _, p in _patterns(node, "")):
        return "xgrammar needs patterns of the form ^...$"
    if not all(is_common_json_pattern(p) for _, p in _patterns(node, "")):
        return "xgrammar may read a part of the pattern in another way"
    if "multipleOf" in node and (
        types != ["integer"] or any(key in node for key in _BOUND_KEYWORDS)
    ):
        return "xgrammar enforces multipleOf for integers without bounds only"
    if isinstance(node.get("items"), list) or "additionalItems" in node:
        return "xgrammar enforces prefixItems, not a list of items"
    return _xgrammar_object_objection(node)


def _xgrammar_object_objection(node: Schema) -> str | None:
    properties = node.get("properties", {})
    if not set(node.get("required", [])) <= set(properties):
        return "xgrammar enforces required for declared properties only"
    groups = [
        k for k in ("properties", "patternProperties", "propertyNames") if k in node
    ]
    if len(groups) > 1:
        return f"xgrammar does not enforce {groups[1]} beside {groups[0]}"
    if groups and groups != ["propertyNames"] and node.get("additionalProperties"):
        return f"xgrammar does not keep additional properties apart from {groups[0]}"
    names = node.get("propertyNames", {})
    if not isinstance(names, dict) or not set(names) <= {"pattern", "type"}:
        return "xgrammar enforces only a pattern in propertyNames"
    if any(schema is False for schema in properties.values()):
        return "xgrammar does not take the schema false for a property"
    return None


_OBJECTIONS: dict[str, Callable[[Schema], str | None]] = {
    "guidance": _guidance_objection,
    "xgrammar": _xgrammar_objection,
}


def _patterns(node: Schema, path: str) -> list[tuple[str, str]]:
    found = []
    if isinstance(node.get("pattern"), str):
        found.append((f"{path}/pattern", node["pattern"]))
    if isinstance(node.get("patternProperties"), dict):
        found.extend(
            (f"{path}/patternProperties", p) for p in node["patternProperties"]
        )
    return found


def _types(node: Schema) -> list[str]:
    types = node.get("type", [])
    return types if isinstance(types, list) else [types]


def _can_be(node: Schema, type_name: str) -> bool:
    return "type" not in node or type_name in _types(node)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _significand(value: float) -> int:
    """Return the digits of a number without its point and its outer zeros."""
    digits = Decimal(repr(value)).normalize().as_tuple().digits
    return int("".join(map(str, digits)))


def _is_count(value: Any) -> bool:
    return _is_number(value) and value == int(value) and 0 <= value <= MAX_COUNT


def _matches_type(value: Any, types: list[str]) -> bool:
    if isinstance(value, bool):
        return "boolean" in types
    if isinstance(value, (int, float)):
        is_integer = value == int(value)
        return "number" in types or ("integer" in types and is_integer)
    names = {str: "string", type(None): "null", list: "array", dict: "object"}
    return names[type(value)] in types


def _has_control_character(value: Any) -> bool:
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            if any(char < " " and char not in "\b\f\n\r\t" for char in item):
                return True
        elif isinstance(item, dict):
            stack.extend([*item, *item.values()])
        elif isinstance(item, list):
            stack.extend(item)
    return False


def _is_disjoint(branches: Any) -> bool:
    """Whether every branch lists its values and no value is in two of them."""
    seen: set[str] = set()
    for branch in branches:
        if not isinstance(branch, dict) or ("enum" in branch) == ("const" in branch):
            return False
        values = branch["enum"] if "enum" in branch else [branch["const"]]
        if not isinstance(values, list):
            return False
        spelled = {_spell(value) for value in values}
        if spelled & seen:
            return False
        seen |= spelled
    return True


def _spell(value: Any) -> str:
    """Return one text for values that JSON Schema calls equal (1 and 1.0)."""
    if isinstance(value, float) and value == int(value):
        value = int(value)
    return json.dumps(value, sort_keys=True)
