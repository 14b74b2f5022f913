import pytest

from vllm.v1.structured_output.regex_syntax import (
    describe_regex_fault,
    escape_regex,
    is_fully_anchored,
    narrow_classes,
)


@pytest.mark.parametrize(
    "pattern",
    ["", "abc", r"\(", "[(]", "[]a]", "[^]a]", "(?:a|b){2,3}", "(?P<x>a)", r"\\", "a{"]
    + [r"[-\d-]", r"[a-z-\d]", r"[\w--\d]"],
)
def test_well_formed_patterns_pass(pattern):
    assert describe_regex_fault(pattern) is None


@pytest.mark.parametrize(
    ("pattern", "fault"),
    [
        ("(", "unclosed ("),
        ("a)", "unmatched )"),
        ("[a", "unclosed ["),
        ("a\\", "lone backslash"),
        ("(?=a)b", "lookaround"),
        ("(?<!a)b", "lookaround"),
        (r"(a)\1", "back reference"),
        (r"(?P<x>a)(?P=x)", "back reference"),
        (r"\bfoo", r"assertion \b"),
        (r"[+-\d]", r"class as a bound of the range +-\d"),
        (r"[^a\s-x]", r"class as a bound of the range \s-x"),
        ("(" * 200 + ")" * 200, "deeper than 100"),
        ("(" * 50_000, "longer than 10000"),
        ("a{1000000}", "more than 100000 times"),
        ("a{1,1000000}", "more than 100000 times"),
    ],
)
def test_faults_are_named(pattern, fault):
    assert fault in (describe_regex_fault(pattern) or "")


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("^a$", True),
        ("a", False),
        ("^a", False),
        (r"^a\$", False),
        ("^a|b$", False),
        ("^(a|b)$", True),
        ("^a^b$", False),
        ("^[$|^]$", True),
    ],
)
def test_full_anchoring(pattern, expected):
    assert is_fully_anchored(pattern) is expected


@pytest.mark.parametrize(
    ("pattern", "narrowed"),
    [
        (r"\d+", "[0-9]+"),
        (r"[\w.]", "[0-9A-Za-z_.]"),
        # Narrower members would make a negated class wider.
        (r"[^\d]", r"[^\d]"),
        (r"\D", r"\D"),
        (r"\\d", r"\\d"),
        (r"\[\d", r"\[[0-9]"),
        (r"[-\d-]", "[-0-9-]"),
        (r"[\-\d]", r"[\-0-9]"),
        (r"[a-z-\d]", "[a-z-0-9]"),
    ],
)
def test_classes_are_only_made_narrower(pattern, narrowed):
    assert narrow_classes(pattern) == narrowed


def test_escaping_covers_every_metacharacter():
    assert escape_regex("a.b|c") == r"a\.b\|c"


@pytest.mark.parametrize(
    ("pattern", "is_refused"),
    [
        ("((a{100}){100}){10}", False),
        ("((a{100}){100}){11}", True),
        ("(?:(?P<x>a{1000}){1000})", True),
        ("((a{100}|b){100}){1000}", False),
        ("((a{100}|bb){100}){1000}", True),
        ("((a{1000})?){1000}b*", False),
        ("((a{1000})+?){101}", True),
        ("([a-z]{1,100} ){1,1000}", False),
        (r"([\]x]{1000}){100}", False),
        (r"(\({1000}){101}", True),
        ("((a{1000}){0}b){1000}", False),
        (r"(\x{1000}{1000}){100}", False),
    ],
)
def test_repeats_of_repeats_are_bounded_by_the_shortest_text(pattern, is_refused):
    fault = describe_regex_fault(pattern)
    assert fault == (
        "matches no text of up to 100000 characters" if is_refused else None
    )
