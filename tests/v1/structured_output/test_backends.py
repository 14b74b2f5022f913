"""The keyword tables, tried on the libraries: what is claimed is enforced."""

import json
import random
import re
from typing import Any

import jsonschema
import pytest

from tests.v1.structured_output.random_schemas import random_schema
from tests.v1.structured_output.walks import (
    EOS,
    accepts,
    make_grammar,
    next_ids,
    random_walk,
)
from vllm.exceptions import VLLMValidationError
from vllm.v1.structured_output.backend_types import GrammarError

BACKENDS = ("guidance", "xgrammar")
both_backends = pytest.mark.parametrize("backend", BACKENDS)

NODE = {
    "type": "object",
    "properties": {"v": {"type": "integer"}, "n": {"$ref": "#/$defs/n"}},
    "required": ["v"],
    "additionalProperties": False,
}
AB = {"a": {"type": "integer"}, "b": {"type": "integer"}}
# Schema, instances that are valid, instances that are not.
COMMON: list[tuple[Any, list[Any], list[Any]]] = [
    ({"type": "string"}, ["a", ""], [1]),
    ({"type": ["string", "null"]}, ["a", None], [1]),
    ({"type": "integer"}, [1, -3, 0], [1.5, "a"]),
    ({"type": "number"}, [1, -3.5, 1e5], ["a"]),
    ({"type": "boolean"}, [True, False], [0]),
    ({"enum": [1, "a", None]}, [1, "a", None], [2, "b"]),
    ({"const": "x"}, ["x"], ["y"]),
    ({"type": "string", "minLength": 2}, ["ab"], ["a"]),
    ({"type": "string", "maxLength": 2}, ["ab", "日本"], ["abc"]),
    ({"type": "string", "pattern": "^a+b$"}, ["ab"], ["b"]),
    ({"type": "string", "pattern": "^[^x]*$"}, ["ab"], ["x"]),
    ({"type": "string", "format": "date"}, ["2024-01-31"], ["2024-13-01"]),
    (
        {"type": "string", "format": "uuid"},
        ["123e4567-e89b-12d3-a456-426614174000"],
        [],
    ),
    ({"type": "string", "format": "email"}, ["a@b.co"], ["x"]),
    (
        {"type": "integer", "minimum": -5, "maximum": 20000000000},
        [7],
        [-6, 20000000001],
    ),
    ({"type": "integer", "exclusiveMinimum": 3}, [4], [3]),
    ({"type": "number", "minimum": 0, "maximum": 1}, [0.5, 1], [1.1, -0.1]),
    ({"type": "integer", "multipleOf": 5}, [10, 0], [3]),
    ({"type": "array", "items": {"type": "integer"}}, [[], [1, 2]], [["a"]]),
    ({"type": "array", "minItems": 1, "maxItems": 2}, [[1], [1, 2]], [[], [1, 2, 3]]),
    ({"prefixItems": [{"const": 1}], "items": False, "type": "array"}, [[1]], [[1, 2]]),
    (
        {"prefixItems": [{"const": 1}], "unevaluatedItems": False, "type": "array"},
        [[1]],
        [[1, 2]],
    ),
    ({"type": "object"}, [{}, {"a": [1]}], [1]),
    ({"type": "object", "properties": AB, "required": ["a"]}, [{"a": 1}], [{"b": 1}]),
    (
        {"type": "object", "properties": AB, "additionalProperties": False},
        [{"a": 1}, {}],
        [{"c": 1}],
    ),
    (
        {"type": "object", "additionalProperties": {"type": "integer"}},
        [{"k": 1}],
        [{"k": "x"}],
    ),
    ({"type": "object", "maxProperties": 1}, [{}, {"a": 1}], [{"a": 1, "b": 2}]),
    ({"type": "object", "minProperties": 1}, [{"a": 1}], [{}]),
    (
        {"type": "object", "patternProperties": {"^x[a-z]*$": {"type": "integer"}}},
        [{"xa": 1}],
        [{"xa": "s"}],
    ),
    ({"anyOf": [{"type": "integer"}, {"const": "a"}]}, [1, "a"], [None, "b"]),
    ({"oneOf": [{"const": 1}, {"const": 2}]}, [1, 2], [3]),
    (
        {"$ref": "#/$defs/n", "$defs": {"n": NODE}},
        [{"v": 1, "n": {"v": 2}}],
        [{"n": 1}],
    ),
    (True, [1, {"a": []}], []),
]
GUIDANCE_ONLY: list[tuple[Any, list[Any], list[Any]]] = [
    ({"minimum": 3}, [3, "a"], [2]),
    ({"type": "string", "pattern": "a"}, ["bab"], ["b"]),
    ({"type": "string", "pattern": "^a+$", "minLength": 3}, ["aaa"], ["aa"]),
    ({"type": "string", "format": "ipv4"}, ["1.2.3.4"], ["1.2.3.444"]),
    ({"type": "integer", "multipleOf": 5, "minimum": 12}, [15], [10]),
    ({"allOf": [{"type": "integer"}, {"minimum": 3}]}, [3], [2, "a"]),
    ({"type": "object", "required": ["z"]}, [{"z": 1}], [{"a": 1}]),
    ({"type": "object", "properties": AB}, [{"a": 1, "k": "x"}], [{"a": "x"}]),
    (
        {"type": "object", "properties": AB, "anyOf": [{"required": ["a"]}]},
        [{"a": 1}],
        [{"b": 1}],
    ),
    (
        {
            "oneOf": [
                {"type": "object", "properties": {"k": {"const": c}}, "required": ["k"]}
                for c in "ab"
            ]
        },
        [{"k": "a"}, {"k": "b"}],
        [{"k": "c"}],
    ),
    (
        {"$ref": "#/$defs/n", "$defs": {"n": {"type": "integer"}}, "minimum": 3},
        [3],
        [2],
    ),
    ({"$ref": "#n", "$defs": {"n": {"$anchor": "n", "type": "integer"}}}, [1], ["a"]),
    ({"type": "object", "properties": {"a": False, "b": {}}}, [{"b": 1}], [{"a": 1}]),
    (
        {"items": [{"type": "integer"}], "additionalItems": False, "type": "array"},
        [[1]],
        [["a"], [1, 2]],
    ),
]
XGRAMMAR_ONLY: list[tuple[Any, list[Any], list[Any]]] = [
    (
        {"type": "object", "propertyNames": {"pattern": "^a[a-z]*$"}},
        [{"ab": 1}],
        [{"b": 1}],
    ),
    ({"type": "string", "format": "json-pointer"}, ["/a"], ["a"]),
]
TABLE = [
    pytest.param(backend, *case, id=f"{backend}-{json.dumps(case[0])[:60]}")
    for backend, cases in (
        ("guidance", COMMON + GUIDANCE_ONLY),
        ("xgrammar", COMMON + XGRAMMAR_ONLY),
    )
    for case in cases
]


@pytest.mark.parametrize(("backend", "schema", "valid", "invalid"), TABLE)
def test_a_keyword_in_the_table_is_enforced(backend, schema, valid, invalid):
    grammar = make_grammar(backend, json=schema)
    taken = [
        x
        for x in valid + invalid
        if accepts(grammar, json.dumps(x, ensure_ascii=False))
    ]
    assert taken == valid


@pytest.mark.parametrize(("backend", "schema", "valid", "invalid"), TABLE)
def test_random_walks_under_the_mask_validate(backend, schema, valid, invalid):
    grammar = make_grammar(backend, json=schema)
    rng = random.Random(0)
    has_item_list = isinstance(schema, dict) and isinstance(schema.get("items"), list)
    validator_class = (
        jsonschema.Draft7Validator if has_item_list else jsonschema.Draft202012Validator
    )
    validator = validator_class(schema)
    for _ in range(3):
        text, is_complete = random_walk(grammar, rng, max_tokens=60)
        if is_complete:
            validator.validate(json.loads(text))


@pytest.mark.slow
@both_backends
def test_walks_under_random_schemas_validate(backend):
    num_compiled = 0
    for seed in range(80):
        rng = random.Random(seed)
        schema = random_schema(rng)
        try:
            grammar = make_grammar(backend, json=schema)
        except (GrammarError, VLLMValidationError):
            continue
        num_compiled += 1
        for _ in range(2):
            text, is_complete = random_walk(grammar, rng, max_tokens=60)
            if is_complete:
                jsonschema.Draft202012Validator(schema).validate(json.loads(text))
    assert num_compiled > 30


@both_backends
@pytest.mark.parametrize(
    "pattern",
    ["[0-9]+", "^abc$", "a|ab", "a*?b", r"\w+ \w+", "[^a]{3}", r"\d{3}-\d{4}", r"é|\$"],
)
def test_walks_under_a_regex_match_it(backend, pattern):
    grammar = make_grammar(backend, regex=pattern)
    rng = random.Random(0)
    texts = [random_walk(grammar, rng, max_tokens=30) for _ in range(5)]
    assert all(re.fullmatch(pattern, text) for text, complete in texts if complete)


@both_backends
def test_choices_are_spelled_exactly(backend):
    choices = ["a", "ab", "日本", 'x "y"\n', "a.b", "(", "\\d"]
    grammar = make_grammar(backend, choice=choices)
    wrong = ["b", "axb", "d", "日", "ab "]
    assert [c for c in choices + wrong if accepts(grammar, c)] == choices


@both_backends
def test_gbnf_grammars_run_on_both(backend):
    rules = 'root ::= term ("+" term)*\nterm ::= [0-9]+ | "(" root ")"'
    grammar = make_grammar(backend, grammar=rules)
    texts = ["1+2", "(1+2)+3", "1+", "(1"]
    assert [accepts(grammar, text) for text in texts] == [True, True, False, False]


def test_lark_grammars_run_on_guidance():
    grammar = make_grammar(grammar='start: "a" NUM\nNUM: /[0-9]+/')
    assert [accepts(grammar, text) for text in ("a12", "a")] == [True, False]


@both_backends
def test_a_declared_name_cannot_be_smuggled_in_with_an_escape(backend):
    grammar = make_grammar(backend, json={"type": "object", "properties": AB})
    assert not accepts(grammar, '{"\\u0061": "no integer"}')


@both_backends
def test_control_characters_stay_out_of_strings(backend):
    grammar = make_grammar(backend, json={"type": "string", "maxLength": 3})
    assert not accepts(grammar, '"\x0b"')


@both_backends
def test_an_empty_array_can_be_produced(backend):
    grammar = make_grammar(backend, json={"type": "array", "items": {"type": "string"}})
    assert accepts(grammar, "[]")


@both_backends
@pytest.mark.parametrize(
    ("text", "is_taken"),
    [
        ('{"a":1,"b":2}', True),
        ('{"a": 1, "b": 2}', True),
        ('{\n  "a": 1,\n  "b": 2\n}', True),
        ('{"a":' + " " * 40 + "1}", False),
        ('{"a":1}\n', False),
        ('\n{"a":1}', False),
    ],
)
def test_whitespace_runs_are_bounded(backend, text, is_taken):
    grammar = make_grammar(backend, json={"type": "object", "properties": AB})
    assert accepts(grammar, text) is is_taken


@both_backends
def test_whitespace_can_be_switched_off(backend):
    grammar = make_grammar(backend, json_object=True, disable_any_whitespace=True)
    texts = ['{"a":1,"b":[2]}', '{"a": 1}', '{"a":1, "b":2}']
    assert [accepts(grammar, text) for text in texts] == [True, False, False]


def test_a_whitespace_pattern_replaces_the_default():
    grammar = make_grammar(json_object=True, whitespace_pattern="  ")
    texts = ['{"a":  1}', '{"a": 1}', '{"a":1}']
    assert [accepts(grammar, text) for text in texts] == [True, False, True]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"json": {"allOf": [{"$ref": "#"}]}}, "no text satisfies"),
        ({"json": {"type": "integer", "minimum": 5, "maximum": 2}}, "greater than"),
        ({"json": {"oneOf": [{"minimum": 1}, {"maximum": 5}]}}, "oneOf"),
        ({"json": {"$ref": "http://example.com/x"}}, "nothing is fetched"),
        ({"regex": "a{0}"}, "no text but the empty one"),
        ({"regex": "a**b{2"}, "regex"),
        ({"regex": "(?i"}, "unclosed"),
        ({"grammar": "start: missing"}, "unknown name"),
        ({"grammar": 'root ::= "a'}, "could not compile"),
    ],
)
def test_what_the_compiler_refuses_is_an_error_for_the_client(params, message):
    with pytest.raises((GrammarError, VLLMValidationError), match=message):
        make_grammar("guidance", **params)


def test_arrays_of_arrays_compile_in_linear_time():
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(22):
        schema = {"type": "array", "items": schema}
    assert accepts(make_grammar(json=schema), "[" * 22 + "1" + "]" * 22)


def test_a_large_length_limit_compiles():
    schema = {"type": "string", "maxLength": 65536}
    assert accepts(make_grammar(json=schema), '"short"')


def test_a_grammar_past_its_limits_closes_its_rows_and_fails_its_request():
    # Compiles at once; its automaton outgrows the limit after the first token.
    grammar = make_grammar(regex="(a|aa|aaa){500}")
    for _ in range(20):
        row_ids = next_ids(grammar)
        if grammar.failure is not None:
            break
        grammar.accept_tokens([max(row_ids)])
    assert grammar.failure is not None
    assert next_ids(grammar) == [EOS]
    assert not grammar.accept_tokens([EOS])


def test_a_thousand_optional_properties_are_walked_in_any_subset():
    properties = {f"p{i}": {"type": "boolean"} for i in range(1000)}
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    grammar = make_grammar("guidance", json=schema)
    assert accepts(grammar, '{"p3": true, "p500": false, "p999": true}')
    assert grammar.failure is None
