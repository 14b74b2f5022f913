"""What is called common is read alike by both libraries, and what differs is not."""

import json

import pytest

from tests.v1.structured_output.walks import EOS, accepts, backend
from vllm.v1.structured_output.common_regex import (
    is_common_json_pattern,
    is_common_regex,
    spell_dots,
)
from vllm.v1.structured_output.grammar_spec import GrammarSpec

COMMON = [
    "a|bc?",
    "(a|)b",
    "(?:a|b){2,3}?c*",
    "(?<name>a)+",
    "^a$",
    r"\.\-\#\/\\",
    r"\n\t",
    r"\u0041a",
    "[^-a]",
    "[a-c&~-]",
    r"[\u0041-Cx\n]",
    r"[\-\]\\]",
    "é|[à-ï]",
    ".b",
    "[.]",
]
DIFFERENT = [
    *[rf"\{letter}" for letter in "hHRXNKQEiymacoe0"],
    *[r"\<a\>", r"\x41a", r"[\x41a]", r"\o{101}", r"\x{41}", r"\ud83d"],
    *["[[:alpha:]]", "[a-z--b]", "[a-z&&b]", "[a~~b]", "[[a]b]", "[]a]"],
    *[r"[\^a]", r"[\.-a]", r"[a-\]]", r"[\h]", "a**", "a{2}{2}", "a{,2}", "a{2"],
    *["(?i)a", "(?P<x>a)", r"\d", r"\W", r"\p{L}", r"[^\d]"],
]
CHARACTERS = [chr(code) for code in [9, 10, 13, *range(32, 128), 0xE9, 0x1F31F]]
TEXTS = ["", "ab", "bc", "Aa", "aac", "\n\t", r".-#/" + "\\", *CHARACTERS]


def taken(name: str, kind: str, text: str, texts: list[str]) -> list[str]:
    whitespace = " " if kind == "json" else None
    spec = GrammarSpec(kind, text, whitespace, (name,))
    grammar = backend(name).compile_grammar(spec).create_grammar((EOS,))
    return [text for text in texts if accepts(grammar, text)]


@pytest.mark.parametrize("pattern", COMMON)
def test_a_common_pattern_is_read_alike(pattern):
    assert is_common_regex(pattern)
    both = [taken(name, "regex", pattern, TEXTS) for name in ("guidance", "xgrammar")]
    assert both[0] == both[1]


@pytest.mark.parametrize("pattern", DIFFERENT)
def test_a_pattern_that_is_not_known_to_be_read_alike_is_not_common(pattern):
    assert not is_common_regex(pattern)
    assert pattern in (r"\d", r"[^\d]") or not is_common_json_pattern(pattern)


@pytest.mark.parametrize(
    "pattern", ["^[a-z]+$", r"^[\w.]+$", r"^\d{1,2}$", '^[^"]$', "^[!-~]$"]
)
def test_a_common_json_pattern_is_at_most_read_more_narrowly(pattern):
    assert is_common_json_pattern(pattern)
    schema = json.dumps({"type": "string", "pattern": pattern})
    # The delete character is one that guidance does not write in a JSON string.
    texts = [json.dumps(text, ensure_ascii=False) for text in TEXTS if text != "\x7f"]
    texts += ['"\n"', '"""', '"\\"', '"\\u0061"']
    wide, narrow = (
        taken(name, "json", schema, texts) for name in ("guidance", "xgrammar")
    )
    assert set(narrow) <= set(wide)
    assert narrow


@pytest.mark.parametrize(
    "pattern",
    ['^"$', r"^\"$", r"^\\u0061$", r"^\n$", "^\n$", r"^\u0022$", r"^\u005C$", r"^\s$"],
)
def test_what_a_json_string_cannot_hold_unescaped_is_not_common(pattern):
    assert not is_common_json_pattern(pattern)


def test_dots_are_spelled_outside_of_classes_and_escapes():
    assert spell_dots(r".\.[.\]].") == r"[^\n]\.[.\]][^\n]"


def test_long_patterns_are_judged_in_linear_time():
    assert is_common_regex("(a|[b-z-])*" * 900)
    assert not is_common_regex("[a-z" * 2500)
    assert not is_common_regex("(?:a" * 2500 + r"\h")
