"""A request's constraint in the form that is compiled and cached."""

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.structured_output.common_regex import is_common_regex
from vllm.v1.structured_output.json_schema import SchemaFault, check_schema
from vllm.v1.structured_output.regex_syntax import (
    describe_regex_fault,
    escape_regex,
    has_inner_anchor,
    is_fully_anchored,
    narrow_classes,
)

if TYPE_CHECKING:
    from vllm.config.structured_outputs import StructuredOutputsConfig

MAX_CHOICES = 10_000
MAX_CHOICES_BYTES = 256 * 1024
MAX_GRAMMAR_BYTES = 128 * 1024

# Between two JSON tokens: one blank, or a line break and an indentation.
DEFAULT_WHITESPACE_PATTERN = r" |\n[ \t]{0,32}"
MAX_WHITESPACE = 33
MAX_WHITESPACE_PATTERN_LENGTH = 64

JSON, REGEX, LARK, GBNF = "json", "regex", "lark", "gbnf"

_LARK_START = re.compile(r"(?m)^\s*(%llguidance\b|start\s*:(?!:=))")
_GBNF_ROOT = re.compile(r"(?m)^\s*root\s*::=")
_WHITESPACE_PIECE = re.compile(
    r"[ \t\n\r]|\\[tnr]|\[(?:[ \t\n\r]|\\[tnr])+\]"
    r"|\(\?:|[()|?]|\{\d{1,2}(?:,\d{1,2})?\}"
)
# Two digits elsewhere, and as many as there are to xgrammar.
_GBNF_LONG_HEX = re.compile(r"\\x[0-9a-fA-F]{3}")


@dataclass(frozen=True)
class GrammarSpec:
    """What to compile; equal specs share one compiled grammar.

    Args:
        kind: JSON, REGEX, LARK or GBNF.
        text: schema, pattern or grammar.
        whitespace_pattern: regex between JSON tokens; None: no whitespace at all.
        backends: those that enforce it, the preferred one first.
    """

    kind: str
    text: str
    whitespace_pattern: str | None
    backends: tuple[str, ...]


def resolve_spec(
    params: StructuredOutputsParams,
    config: "StructuredOutputsConfig",
    parameter_prefix: str = "structured_outputs",
) -> GrammarSpec:
    """Check a constraint as far as that goes without a compiler.

    Args:
        config: the engine's defaults, which a request can tighten.
        parameter_prefix: the request field that the constraint came from.

    Raises:
        VLLMValidationError: it is malformed, too large, or not enforceable.
    """
    constraint = params.constraint
    parameter = _PARAMETERS.get(
        (parameter_prefix, constraint), f"{parameter_prefix}.{constraint}"
    )
    try:
        if constraint in ("json", "json_object"):
            return _resolve_json(params, config)
        _refuse_json_options(params, constraint)
        if constraint == "regex":
            assert params.regex is not None
            return _resolve_regex(params.regex, config)
        if constraint == "choice":
            assert params.choice is not None
            return _resolve_choice(params.choice, config)
        assert params.grammar is not None
        return _resolve_grammar(params.grammar, config)
    except (SchemaFault, _ConstraintFault) as fault:
        raise VLLMValidationError(str(fault), parameter=parameter) from fault


class _ConstraintFault(ValueError):
    """A constraint that is not taken; the message is for the client."""


_PARAMETERS = {
    ("response_format", "json"): "response_format.json_schema.schema",
    ("response_format", "json_object"): "response_format.type",
}


def _resolve_json(
    params: StructuredOutputsParams, config: "StructuredOutputsConfig"
) -> GrammarSpec:
    value = {"type": "object"} if params.constraint == "json_object" else params.json
    checked = check_schema(
        value,
        close_objects=params.disable_additional_properties
        or config.disable_additional_properties,
    )
    objections = dict(checked.objections)
    pattern: str | None = DEFAULT_WHITESPACE_PATTERN
    if params.whitespace_pattern is not None:
        if params.disable_any_whitespace:
            raise _ConstraintFault(
                "whitespace_pattern and disable_any_whitespace exclude each other"
            )
        _check_whitespace_pattern(params.whitespace_pattern)
        pattern = params.whitespace_pattern
        objections["xgrammar"] = "whitespace_pattern is not enforced by xgrammar"
    elif params.disable_any_whitespace or config.disable_any_whitespace:
        pattern = None
    return GrammarSpec(
        JSON, checked.text, pattern, _choose_backends(objections, config)
    )


def _resolve_regex(pattern: str, config: "StructuredOutputsConfig") -> GrammarSpec:
    fault = describe_regex_fault(pattern)
    if fault is not None:
        raise _ConstraintFault(f"the regular expression {fault}")
    objections = {}
    if has_inner_anchor(pattern) and not is_fully_anchored(pattern):
        objections["xgrammar"] = "xgrammar takes ^ and $ only around the whole pattern"
    pattern = narrow_classes(pattern)
    if not is_common_regex(pattern):
        objections["xgrammar"] = (
            "xgrammar may read an escape, a class or a group of this regular "
            "expression in another way"
        )
    return GrammarSpec(REGEX, pattern, None, _choose_backends(objections, config))


def _resolve_choice(
    choices: list[str], config: "StructuredOutputsConfig"
) -> GrammarSpec:
    if len(choices) > MAX_CHOICES:
        raise _ConstraintFault(f"at most {MAX_CHOICES} choices, got {len(choices)}")
    if (
        sum(len(choice.encode(errors="replace")) for choice in choices)
        > MAX_CHOICES_BYTES
    ):
        raise _ConstraintFault(f"the choices take more than {MAX_CHOICES_BYTES} bytes")
    pattern = "|".join(escape_regex(choice) for choice in dict.fromkeys(choices))
    return GrammarSpec(REGEX, pattern, None, _choose_backends({}, config))


def _resolve_grammar(grammar: str, config: "StructuredOutputsConfig") -> GrammarSpec:
    if len(grammar.encode(errors="replace")) > MAX_GRAMMAR_BYTES:
        raise _ConstraintFault(f"the grammar takes more than {MAX_GRAMMAR_BYTES} bytes")
    if _GBNF_ROOT.search(grammar):
        objections = {}
        if _GBNF_LONG_HEX.search(grammar):
            objections["xgrammar"] = "xgrammar reads more than two digits behind \\x"
        return GrammarSpec(GBNF, grammar, None, _choose_backends(objections, config))
    if not _LARK_START.search(grammar):
        raise _ConstraintFault(
            "the grammar needs a rule `start:` (Lark) or `root ::=` (GBNF)"
        )
    objections = {"xgrammar": "xgrammar takes grammars in GBNF only"}
    return GrammarSpec(LARK, grammar, None, _choose_backends(objections, config))


def _refuse_json_options(params: StructuredOutputsParams, constraint: str) -> None:
    for name in (
        "disable_any_whitespace",
        "disable_additional_properties",
        "whitespace_pattern",
    ):
        if getattr(params, name):
            raise _ConstraintFault(f"{name} has no meaning beside {constraint}")


def _choose_backends(
    objections: dict[str, str], config: "StructuredOutputsConfig"
) -> tuple[str, ...]:
    wanted = ("guidance", "xgrammar") if config.backend == "auto" else (config.backend,)
    able = tuple(name for name in wanted if name not in objections)
    if not able:
        raise _ConstraintFault("; ".join(objections[name] for name in wanted))
    return able


def _check_whitespace_pattern(pattern: str) -> None:
    """Refuse what could match more than whitespace, or an unbounded run of it."""
    if len(pattern) > MAX_WHITESPACE_PATTERN_LENGTH:
        raise _ConstraintFault(
            f"whitespace_pattern is longer than {MAX_WHITESPACE_PATTERN_LENGTH}"
        )
    is_made_of_whitespace = not _WHITESPACE_PIECE.sub("", pattern)
    if not is_made_of_whitespace or "){" in pattern:
        raise _ConstraintFault(
            "whitespace_pattern must be made of blanks, \\t, \\n, \\r, classes of "
            "them, groups, |, ? and bounded repeats such as {0,8}: runs are bounded"
        )
    fault = describe_regex_fault(pattern)
    if fault is not None:
        raise _ConstraintFault(f"whitespace_pattern {fault}")
