"""What is refused before a request reaches the engine, and how it is named."""

import subprocess
import sys
import time
from typing import Any

import pytest

from vllm.config import StructuredOutputsConfig
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.structured_output.grammar_spec import resolve_spec
from vllm.v1.structured_output.validation import validate_structured_outputs

AUTO = StructuredOutputsConfig()


def refusal(backend: str = "auto", **params: Any) -> VLLMValidationError:
    with pytest.raises(VLLMValidationError) as caught:
        validate_structured_outputs(
            StructuredOutputsParams(**params), StructuredOutputsConfig(backend=backend)
        )
    return caught.value


def nested(levels: int) -> str:
    return '{"items":' * levels + "{}" + "}" * levels


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ("{", "not JSON"),
        ("[1]", "an object or a boolean"),
        (False, "accepts nothing"),
        ('{"const": NaN}', "the schema holds NaN, which is not JSON"),
        ('{"minLength": 1e999}', "the schema holds the number 1e999"),
        ('{"type": "number", "const": -1e999}', "the number -1e999"),
        ('{"oneOf": [{"const": 1e999}, {"const": 1}]}', "the number 1e999"),
        ({"type": "foo"}, "#/type must be one or more of"),
        ({"type": []}, "#/type"),
        ({"properties": {"a": "x"}}, "#/properties/a must be a schema"),
        ({"properties": ["a"]}, "#/properties must be an object of schemas"),
        ({"anyOf": {"type": "string"}}, "#/anyOf must be a list"),
        ({"anyOf": []}, "#/anyOf must hold at least one"),
        ({"minLength": "2"}, "#/minLength must be a whole number"),
        ({"minItems": -1}, "#/minItems"),
        ({"maxLength": 10**7}, "#/maxLength"),
        ({"type": "number", "maximum": 1e30}, "#/maximum must be a number between"),
        ({"exclusiveMinimum": True}, "#/exclusiveMinimum must be a number"),
        ({"multipleOf": 0}, "#/multipleOf must be a number above 0"),
        ({"multipleOf": 999_983}, "#/multipleOf has too many digits"),
        ({"multipleOf": 0.1234567}, "#/multipleOf has too many digits"),
        ({"required": "a"}, "#/required must be a list"),
        ({"enum": []}, "#/enum must be a list with at least one value"),
        ({"enum": ["\x01"]}, "control character"),
        ({"pattern": "(a"}, "#/pattern has an unclosed ("),
        ({"pattern": "(?=a)"}, "lookaround"),
        ({"patternProperties": {"[a": {}}}, "#/patternProperties has an unclosed ["),
        ({"$ref": "#"}, "#/$ref refers to itself"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "to itself"),
        ({"$ref": "#/$defs/none"}, "there is nothing at #/$defs/none"),
        ({"x-guidance": {"lenient": True}}, "#/x-guidance"),
        ({"type": "object", "minProperties": 2}, "#/minProperties above 1 needs"),
        ({"type": "string", "format": "iri"}, "the format 'iri' is not supported"),
        (nested(10_000), "nests deeper than 100 levels"),
        ({"description": "x" * 300_000}, "larger than 262144 bytes"),
    ],
)
def test_a_bad_schema_is_refused_with_its_path(schema, message):
    error = refusal(json=schema)
    assert message in error.message
    assert error.parameter == "structured_outputs.json"


@pytest.mark.parametrize(
    "keyword",
    [
        {"not": {"type": "string"}},
        {"if": {"type": "string"}},
        {"contains": {"const": 1}},
        {"uniqueItems": True},
        {"dependentRequired": {"a": ["b"]}},
        {"dependentSchemas": {"a": {}}},
        {"dependencies": {"a": ["b"]}},
        {"$dynamicRef": "#a"},
        {"unevaluatedProperties": False, "anyOf": [{"type": "object"}]},
        {"unevaluatedItems": False, "allOf": [{"type": "array"}]},
    ],
    ids=lambda keyword: next(iter(keyword)),
)
def test_a_keyword_that_nothing_enforces_is_refused_by_name_and_path(keyword):
    name = next(iter(keyword))
    error = refusal(json={"properties": {"a": keyword}})
    assert f"#/properties/a/{name}" in error.message


@pytest.mark.parametrize(
    "schema",
    [
        {"uniqueItems": False},
        {"unevaluatedProperties": True},
        {"minContains": 2},
        {"then": {"type": "string"}},
        {"propertyNames": True},
    ],
    ids=lambda schema: next(iter(schema)),
)
def test_a_keyword_that_means_nothing_is_no_reason_to_refuse(schema):
    assert resolve_spec(StructuredOutputsParams(json=schema), AUTO).text == "{}"


def test_unknown_keywords_are_annotations_as_json_schema_says():
    schema = {"type": "integer", "x-order": 1, "title": "Age"}
    validate_structured_outputs(StructuredOutputsParams(json=schema), AUTO)


def test_one_of_with_distinct_values_becomes_any_of():
    schema = {"oneOf": [{"const": 1}, {"enum": [2, "a"]}]}
    text = resolve_spec(StructuredOutputsParams(json=schema), AUTO).text
    assert text == '{"anyOf": [{"const": 1}, {"enum": [2, "a"]}]}'


def test_one_of_with_a_shared_value_stays_exclusive():
    schema = {"oneOf": [{"const": 1}, {"const": 1.0}]}
    assert "oneOf" in resolve_spec(StructuredOutputsParams(json=schema), AUTO).text


def test_unevaluated_properties_alone_are_additional_properties():
    schema = {"properties": {"a": {}}, "unevaluatedProperties": False}
    text = resolve_spec(StructuredOutputsParams(json=schema), AUTO).text
    assert text == '{"properties": {"a": {}}, "additionalProperties": false}'


@pytest.mark.parametrize("of_config", [False, True])
def test_additional_properties_can_be_closed_by_request_and_by_config(of_config):
    params = StructuredOutputsParams(
        json={"properties": {"a": {"type": "object", "additionalProperties": True}}},
        disable_additional_properties=not of_config,
    )
    config = StructuredOutputsConfig(disable_additional_properties=of_config)
    assert resolve_spec(params, config).text == (
        '{"properties": {"a": {"type": "object", "additionalProperties": true}}, '
        '"additionalProperties": false}'
    )


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"allOf": [{"type": "string"}]}, "allOf"),
        ({"minimum": 3}, "minimum without the type"),
        ({"type": "string", "pattern": "a"}, "patterns of the form ^...$"),
        ({"type": "string", "pattern": "^a$", "minLength": 1}, "at a time"),
        ({"type": "string", "enum": ["a", 1]}, "beside enum"),
        ({"type": "number", "multipleOf": 0.5}, "multipleOf"),
        ({"type": "object", "required": ["z"]}, "required"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {}}, "minimum": 1}, "beside $ref"),
    ],
)
def test_what_xgrammar_would_ignore_is_refused_for_it(schema, message):
    assert message in refusal("xgrammar", json=schema).message


def test_auto_gives_to_xgrammar_what_only_xgrammar_enforces():
    schema = {"type": "string", "format": "json-pointer"}
    spec = resolve_spec(StructuredOutputsParams(json=schema), AUTO)
    assert spec.backends == ("xgrammar",)


@pytest.mark.parametrize(
    ("params", "parameter", "message"),
    [
        ({"regex": "("}, "structured_outputs.regex", "unclosed ("),
        ({"regex": "(" * 50_000}, "structured_outputs.regex", "longer than"),
        ({"regex": "a(?<=b)"}, "structured_outputs.regex", "lookaround"),
        ({"choice": ["a"] * 10_001}, "structured_outputs.choice", "at most 10000"),
        ({"choice": ["a" * 300_000]}, "structured_outputs.choice", "262144 bytes"),
        ({"grammar": "a: b"}, "structured_outputs.grammar", "start:"),
        (
            {"grammar": "start: " + "a" * 200_000},
            "structured_outputs.grammar",
            "131072",
        ),
    ],
)
def test_other_constraints_name_their_field(params, parameter, message):
    error = refusal(**params)
    assert error.parameter == parameter
    assert message in error.message


@pytest.mark.parametrize("pattern", ["[ ]*", r"\s?", "x?", "([ ]{9}){9}", "( "])
def test_a_whitespace_pattern_is_whitespace_and_bounded(pattern):
    error = refusal(json_object=True, whitespace_pattern=pattern)
    assert "whitespace_pattern" in error.message


@pytest.mark.parametrize("pattern", [" ?", r"[ \n]{0,8}", r"(?: |\n)?", "  "])
def test_bounded_whitespace_patterns_are_taken(pattern):
    params = StructuredOutputsParams(json_object=True, whitespace_pattern=pattern)
    assert resolve_spec(params, AUTO).whitespace_pattern == pattern


def test_json_options_beside_a_regex_are_refused():
    error = refusal(regex="a", disable_any_whitespace=True)
    assert "disable_any_whitespace has no meaning beside regex" in error.message


def test_response_format_is_named_when_the_schema_came_from_there():
    with pytest.raises(VLLMValidationError) as caught:
        validate_structured_outputs(
            StructuredOutputsParams(json={"type": "foo"}), AUTO, "response_format"
        )
    assert caught.value.parameter == "response_format.json_schema.schema"


def test_hostile_input_is_refused_within_a_second():
    started = time.monotonic()
    refusal(json=nested(10_000))
    refusal(json={"pattern": "(" * 50_000})
    refusal(json='{"a":' * 40_000)
    assert time.monotonic() - started < 1


def test_deep_parsed_schemas_do_not_recurse():
    schema: dict[str, Any] = {}
    for _ in range(100_000):
        schema = {"items": schema}
    assert "nests deeper" in refusal(json=schema).message


def test_the_check_imports_neither_torch_nor_a_grammar_library():
    script = (
        "import sys, vllm.v1.structured_output.validation;"
        "bad = {'torch', 'llguidance', 'xgrammar', 'transformers'} & set(sys.modules);"
        "sys.exit(str(bad) if bad else 0)"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr


def test_a_long_chain_of_references_is_checked_in_linear_time():
    chain = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(5000)}
    schema = {"$defs": chain | {"a5000": {"type": "string"}}, "$ref": "#/$defs/a0"}
    start = time.monotonic()
    validate_structured_outputs(StructuredOutputsParams(json=schema), AUTO)
    assert time.monotonic() - start < 2.0


def test_a_long_property_name_is_not_repeated_whole_in_the_path_of_each_child():
    inner = {"properties": {str(i): {} for i in range(1000)} | {"z": {"type": "foo"}}}
    fault = refusal(json={"properties": {"x" * 100_000: inner}})
    assert "x.../properties/z/type must be one or more of" in fault.message
    assert len(fault.message) < 300


def many_properties(num: int, **keywords: Any) -> dict[str, Any]:
    properties = {f"p{i}": {"type": "boolean"} for i in range(num)}
    return {
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
        **keywords,
    }


@pytest.mark.parametrize(("num", "keywords"), [(1001, {}), (101, {"minProperties": 1})])
def test_more_optional_properties_than_can_be_enforced_are_refused(num, keywords):
    message = refusal(json=many_properties(num, **keywords)).message
    assert f"#/properties declares {num} optional properties" in message


def test_required_properties_are_not_counted_among_the_optional():
    schema = many_properties(1500, required=[f"p{i}" for i in range(1000)])
    validate_structured_outputs(StructuredOutputsParams(json=schema), AUTO)


@pytest.mark.parametrize("multiple", [0.001, 0.25, 7, 65_536, 36_000_000, 1e10])
def test_multiples_of_few_digits_are_taken(multiple):
    schema = {"type": "number", "multipleOf": multiple}
    validate_structured_outputs(StructuredOutputsParams(json=schema), AUTO)


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [{"multipleOf": 9999}, {"multipleOf": 9998}]},
        {"multipleOf": 9999, "anyOf": [{"multipleOf": 9998}, {"type": "string"}]},
        {
            "$ref": "#/$defs/a",
            "multipleOf": 9999,
            "$defs": {"a": {"multipleOf": 9998}},
        },
        {
            "properties": {"x": {"multipleOf": 9999}},
            "anyOf": [{"properties": {"x": {"multipleOf": 9998}}}],
        },
    ],
)
def test_multiples_that_would_have_to_hold_at_once_are_refused(schema):
    assert "several multipleOf" in refusal(json=schema).message


def test_multiples_that_do_not_meet_are_taken():
    fields = {"a": {"multipleOf": 9999}, "b": {"multipleOf": 9998}}
    schema = {"type": "object", "properties": fields}
    validate_structured_outputs(StructuredOutputsParams(json=schema), AUTO)
