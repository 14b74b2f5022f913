"""What the scheduler sees: when grammars end, look ahead, fail and are shared."""

import time
from typing import Any

import numpy as np
import pytest

from tests.v1.structured_output.walks import (
    EOS,
    VOCAB_SIZE,
    accepts,
    allowed_ids,
    backend,
    compile_request,
    encode,
    make_grammar,
    make_manager,
    make_request,
    next_ids,
    tokenizer,
    vocabulary,
)
from vllm.v1.structured_output import StructuredOutputManager, backend_llguidance
from vllm.v1.structured_output.backend_llguidance import (
    MAX_SPENT_LEXERS_AHEAD,
    GuidanceCompiledGrammar,
)
from vllm.v1.structured_output.backend_types import (
    EmptyGrammarError,
    GrammarError,
    StructuredOutputGrammar,
    Vocabulary,
)
from vllm.v1.structured_output.grammar_spec import REGEX, GrammarSpec

both_backends = pytest.mark.parametrize("backend", ["guidance", "xgrammar"])
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def manager():
    manager = make_manager()
    yield manager
    manager.shutdown()


def compiled(manager: StructuredOutputManager, **params: Any) -> Any:
    request = make_request(**params)
    state = compile_request(manager, request)
    assert state.error is None, state.error
    return request


def rows(manager: StructuredOutputManager, request: Any, drafts: list[int]) -> Any:
    """Masks of one request: the allowed ids a row, and its acceptable drafts."""
    output = manager.grammar_bitmask(
        {"r": request}, ["r"], {"r": drafts} if drafts else {}
    )
    assert output is not None
    ids = [allowed_ids(row) for row in output.grammar_bitmask]
    return ids, output.num_acceptable_drafts


# Who compiles.


@pytest.mark.parametrize(
    ("refusal", "asked"),
    [
        (GrammarError("not known"), ["guidance", "xgrammar"]),
        (EmptyGrammarError("no text satisfies the constraint"), ["guidance"]),
    ],
)
def test_a_grammar_without_texts_is_not_passed_on(manager, monkeypatch, refusal, asked):
    seen = []

    class Refusing:
        def compile_grammar(self, spec: GrammarSpec) -> None:
            raise refusal

    def get_backend(name: str) -> Refusing:
        seen.append(name)
        return Refusing()

    monkeypatch.setattr(manager, "_get_backend", get_backend)
    spec = GrammarSpec(REGEX, "[a]", None, ("guidance", "xgrammar"))
    with pytest.raises(GrammarError, match=str(refusal)):
        manager._compile(spec)
    assert seen == asked


# The end of a grammar.


@both_backends
def test_an_extendable_grammar_is_not_cut_at_its_first_valid_prefix(backend):
    grammar = make_grammar(backend, regex="[0-9]+")
    grammar.accept_tokens(encode("1"))
    assert grammar.is_accepting()
    assert not grammar.is_terminated()
    assert set(encode("123") + [EOS]) <= set(next_ids(grammar))


@both_backends
def test_a_closed_grammar_ends_without_a_stop_token(backend):
    grammar = make_grammar(backend, json=PERSON)
    ids = encode('{"name": "Ada", "age": 36}')
    assert grammar.accept_tokens(ids[:-1])
    assert not grammar.is_terminated()
    assert grammar.accept_tokens(ids[-1:])
    assert grammar.is_terminated()


@both_backends
def test_a_choice_that_begins_another_leaves_both_reachable(backend):
    grammar = make_grammar(backend, choice=["a", "ab"])
    grammar.accept_tokens(encode("a"))
    assert sorted(next_ids(grammar)) == sorted(encode("b") + [EOS])
    grammar.accept_tokens(encode("b"))
    assert grammar.is_terminated()


@both_backends
def test_an_integer_at_the_root_goes_on_until_the_model_stops(backend):
    grammar = make_grammar(backend, json={"type": "integer"})
    grammar.accept_tokens(encode("12"))
    assert grammar.is_accepting()
    assert not grammar.is_terminated()
    grammar.accept_tokens([EOS])
    assert grammar.is_terminated()


@both_backends
def test_stop_tokens_are_masked_until_the_grammar_may_end(backend):
    grammar = make_grammar(backend, json=PERSON)
    assert EOS not in next_ids(grammar)
    assert not grammar.accept_tokens([EOS])


@both_backends
def test_a_stop_token_that_fits_the_text_is_masked_in_the_middle(backend):
    (comma,) = encode(",")
    grammar = make_grammar(backend, stop_token_ids=(EOS, comma), regex="[0-9,]+x?")
    assert comma not in next_ids(grammar)
    grammar.accept_tokens(encode("1"))
    # Where the text may end, it is the end and no text.
    assert comma in next_ids(grammar)
    grammar.accept_tokens([comma])
    assert grammar.is_terminated()


@both_backends
def test_a_tempting_stop_token_inside_an_object_stays_masked(backend):
    (quote,) = encode('"')
    grammar = make_grammar(backend, stop_token_ids=(quote,), json=PERSON)
    grammar.accept_tokens(encode("{"))
    assert quote not in next_ids(grammar)


@both_backends
def test_a_stop_token_that_the_grammar_cannot_spell_is_allowed_at_the_end(backend):
    stop = encode("Z")[0]
    grammar = make_grammar(backend, stop_token_ids=(EOS, stop), regex="[0-9]+")
    assert stop not in next_ids(grammar)
    grammar.accept_tokens(encode("7"))
    assert {EOS, stop} <= set(next_ids(grammar))


@both_backends
def test_the_tokenizers_end_of_text_ends_a_grammar_without_any_stop_token(backend):
    # As with ignore_eos, or with a configuration that names another token.
    grammar = make_grammar(backend, stop_token_ids=(), regex="[0-9]+")
    grammar.accept_tokens(encode("7"))
    assert EOS in next_ids(grammar)
    grammar.accept_tokens([EOS])
    assert grammar.is_terminated()


@both_backends
def test_tokens_after_the_end_are_never_shown_to_the_matcher(backend):
    grammar = make_grammar(backend, choice=["yes"])
    assert grammar.accept_tokens([*encode("yes"), *encode(" and more"), EOS])
    assert grammar.is_terminated()
    assert next_ids(grammar) == [EOS]


@both_backends
def test_padded_and_special_ids_are_never_allowed(backend):
    grammar = make_grammar(backend, json={})
    grammar.accept_tokens(encode('"'))
    special = set(tokenizer().all_special_ids) | set(range(49_152, VOCAB_SIZE))
    assert not special & set(next_ids(grammar))


@both_backends
@pytest.mark.parametrize("token_id", [-1, VOCAB_SIZE - 1, VOCAB_SIZE, 2**40])
def test_an_impossible_token_id_is_refused_and_poisons_nothing(backend, token_id):
    grammar = make_grammar(backend, choice=["yes"])
    assert not grammar.accept_tokens([token_id])
    assert accepts(grammar, "yes")


@both_backends
def test_a_refused_token_leaves_the_state(backend):
    grammar = make_grammar(backend, choice=["yes"])
    assert not grammar.accept_tokens(encode("no"))
    assert accepts(grammar, "yes")


@both_backends
def test_rollback_undoes_text_and_end(backend):
    grammar = make_grammar(backend, regex="[0-9]+")
    first = next_ids(grammar)
    grammar.accept_tokens([*encode("12"), EOS])
    grammar.rollback(3)
    assert not grammar.is_terminated()
    assert next_ids(grammar) == first


# Look-ahead over drafts.


@both_backends
def test_rows_look_ahead_over_drafts_and_the_state_stays(backend):
    manager = make_manager(backend)
    request = compiled(manager, regex="a[bc][de][fg]")
    before = rows(manager, request, [])[0]
    ids, acceptable = rows(manager, request, encode("a") + encode("c") + encode("d"))
    texts = [{tokenizer().decode([i])[0] for i in row} for row in ids]
    assert texts == [{"a"}, {"b", "c"}, {"d", "e"}, {"f", "g"}]
    assert acceptable == [3]
    assert rows(manager, request, [])[0] == before
    manager.shutdown()


@both_backends
def test_rows_behind_a_refused_draft_repeat_the_last_constrained_row(backend):
    manager = make_manager(backend)
    request = compiled(manager, choice=["abcd"])
    a, z = encode("a")[0], encode("z")[0]
    ids, acceptable = rows(manager, request, [a, z, a])
    assert acceptable == [1]
    assert ids[2] == ids[1]
    assert ids[3] == ids[1]
    assert a not in ids[3]
    manager.shutdown()


def test_rows_behind_an_unknown_draft_repeat_the_last_constrained_row(manager):
    request = compiled(manager, choice=["abcd"])
    ids, acceptable = rows(manager, request, [-1, -1])
    assert acceptable == [0]
    assert ids[0] == ids[1] == ids[2]
    assert len(ids[0]) < 10


@both_backends
def test_a_draft_that_closes_the_grammar_is_the_last_that_is_looked_at(backend):
    manager = make_manager(backend)
    request = compiled(manager, choice=["ab"])
    a, b = encode("a")[0], encode("b")[0]
    ids, acceptable = rows(manager, request, [a, b, a, a])
    assert acceptable == [2]
    assert ids[2] == ids[3] == ids[4] == ids[1]
    manager.shutdown()


def test_a_special_token_as_draft_is_an_ordinary_rejected_draft(manager):
    request = compiled(manager, json=PERSON)
    _, acceptable = rows(manager, request, [0, 1])
    assert acceptable == [0]
    assert manager.accept_tokens(request, encode('{"name'))


def test_a_stop_token_as_draft_is_acceptable_where_the_text_may_end(manager):
    request = compiled(manager, regex="[0-9]+")
    one = encode("1")[0]
    assert rows(manager, request, [one, EOS, one])[1] == [2]
    assert rows(manager, request, [EOS, one])[1] == [0]


def test_validate_tokens_returns_the_leading_tokens_that_fit(manager):
    request = compiled(manager, choice=["abc"])
    a, b, z = (encode(char)[0] for char in "abz")
    assert manager.validate_tokens(request, [a, b, z, a]) == [a, b]
    assert manager.validate_tokens(request, [z]) == []
    assert manager.accept_tokens(request, [a, b])


@both_backends
def test_a_batch_is_filled_as_each_request_alone(backend):
    manager = make_manager(backend)
    a, b, z = (encode(char)[0] for char in "abz")
    drafts = {"0": [a, b], "1": [], "2": [z, -1], "3": [a, EOS], "4": [a, b, a]}
    constraints = ["abab", "ba", "zz", "a+", "ab"]
    requests: dict[str, Any] = {}
    for req_id, pattern in enumerate(constraints):
        requests[str(req_id)] = compiled(manager, regex=pattern)
    finished = compiled(manager, choice=["a"])
    manager.accept_tokens(finished, [a])
    requests["5"] = finished
    together = manager.grammar_bitmask(requests, list(requests), drafts)
    assert together is not None
    alone = [manager.grammar_bitmask(requests, [req_id], drafts) for req_id in requests]
    expected = np.concatenate([one.grammar_bitmask for one in alone if one])
    np.testing.assert_array_equal(together.grammar_bitmask, expected)
    assert together.num_acceptable_drafts == [2, 0, 1, 2, 2, 0]
    manager.shutdown()


def test_a_step_without_drafts_has_one_row_a_request(manager):
    requests = {name: compiled(manager, choice=["yes", "no"]) for name in "abc"}
    output = manager.grammar_bitmask(requests, ["c", "a"], {})
    assert output is not None
    assert output.structured_output_request_ids == ["c", "a"]
    assert output.grammar_bitmask.shape == (2, -(-VOCAB_SIZE // 32))
    assert output.num_acceptable_drafts is None


def test_a_step_without_constrained_requests_has_no_mask(manager):
    assert manager.grammar_bitmask({}, [], {}) is None


# A library that gives up.

SPENDING = "((e{1,1000}){1,1000}){1,1000}"
ENDLESS = 'start: "cat dog" (" ok fine sir" | " no" inf)\ninf: " no" inf'


def walk(manager: StructuredOutputManager, request: Any, num_tokens: int) -> int:
    """Say the longest token that is allowed, again and again; returns how many."""
    texts = vocabulary().tokens
    for number in range(num_tokens):
        (row,), _ = rows(manager, request, [])
        text_ids = [i for i in row if i != EOS]
        token_id = max(text_ids, key=lambda i: len(texts[i]), default=EOS)
        if not manager.accept_tokens(request, [token_id]):
            return number
    return num_tokens


def test_a_request_that_spends_its_lexer_harms_no_other_with_its_grammar(manager):
    before, live = (compiled(manager, regex=SPENDING) for _ in range(2))
    expected = rows(manager, before, [])[0]
    assert walk(manager, live, 2) == 2
    spending = compiled(manager, regex=SPENDING)
    num_said = walk(manager, spending, 1000)
    assert num_said < 1000
    assert "too many expressions" in (manager.get_failure(spending) or "")
    # Those in flight, at the beginning and in the middle, and those that come later.
    assert rows(manager, before, [])[0] == expected
    assert walk(manager, before, 2) == walk(manager, live, 2) == 2
    after = compiled(manager, regex=SPENDING)
    assert rows(manager, after, [])[0] == expected
    assert walk(manager, after, 4) == 4
    assert manager.get_failure(live) is manager.get_failure(after) is None
    # It gets as far when it is sent again.
    again = compiled(manager, regex=SPENDING)
    assert walk(manager, again, 1000) == num_said


def test_a_lexer_that_is_spent_in_a_batch_spoils_no_other_row():
    manager = make_manager("guidance")
    spending = compiled(manager, regex=SPENDING)
    walk(manager, spending, 4)
    others = {f"o{i}": compiled(manager, regex=SPENDING) for i in range(10)}
    requests = {"s": spending, **others}
    expected = rows(manager, others["o0"], [])[0][0]
    texts = vocabulary().tokens
    for _ in range(1000):
        output = manager.grammar_bitmask(requests, list(requests), {})
        assert output is not None
        for mask in output.grammar_bitmask[1:]:
            assert allowed_ids(mask) == expected
        row = [i for i in allowed_ids(output.grammar_bitmask[0]) if i != EOS]
        if not row:
            break
        token_id = max(row, key=lambda i: len(texts[i]))
        if not manager.accept_tokens(spending, [token_id]):
            break
    assert manager.get_failure(spending) is not None
    assert [manager.get_failure(request) for request in others.values()] == [None] * 10
    manager.shutdown()


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        ('start: "a" start', "a"),
        ('root ::= "a" root', "a"),
        ('start: "a"+ x\nx: "b" x', "ab"),
    ],
)
def test_a_text_that_never_ends_is_the_fault_of_its_constraint(manager, grammar, text):
    request = compiled(manager, grammar=grammar)
    if manager.accept_tokens(request, encode(text)):
        assert walk(manager, request, 20) < 20
    assert "Too many items" in (manager.get_failure(request) or "")


def test_a_draft_that_the_library_gives_up_on_is_a_refused_draft(manager):
    request, plain = (compiled(manager, grammar=ENDLESS) for _ in range(2))
    for other in (request, plain):
        assert manager.accept_tokens(other, encode("cat dog"))
    (no,) = encode(" no")
    (expected,), _ = rows(manager, plain, [])
    ids, acceptable = rows(manager, request, [no] * 4)
    assert ids[0] == expected
    assert acceptable[0] < 4
    assert manager.get_failure(request) is None
    for token_id in encode(" ok fine sir"):
        assert rows(manager, request, [no] * 4)[0][0] == rows(manager, plain, [])[0][0]
        assert manager.accept_tokens(request, [token_id])
        assert manager.accept_tokens(plain, [token_id])
    assert manager.is_terminated(request)


@pytest.mark.parametrize(
    ("grammar", "word"), [(ENDLESS, " no"), (ENDLESS.replace(" no", "n"), "n")]
)
def test_a_batch_looks_over_such_a_draft_as_each_request_alone(manager, grammar, word):
    # With the second, only the masks behind the drafts are past the limits.
    (no,) = encode(word)
    requests = {str(i): compiled(manager, grammar=grammar) for i in range(4)}
    for request in requests.values():
        assert manager.accept_tokens(request, encode("cat dog"))
    drafts = {req_id: [no] * (int(req_id) + 1) for req_id in requests}
    together = manager.grammar_bitmask(requests, list(requests), drafts)
    assert together is not None
    for number, (req_id, request) in enumerate(requests.items()):
        ids, acceptable = rows(manager, request, drafts[req_id])
        start = sum(range(1, number + 1)) + number
        stop = start + number + 2
        assert [*map(allowed_ids, together.grammar_bitmask[start:stop])] == ids
        assert together.num_acceptable_drafts[number] == acceptable[0]
        assert manager.get_failure(request) is None


def test_such_a_draft_fails_the_request_if_it_is_taken_after_all(manager):
    request = compiled(manager, grammar=ENDLESS)
    assert manager.accept_tokens(request, encode("cat dog"))
    (no,) = encode(" no")
    rows(manager, request, [no] * 4)
    assert not manager.accept_tokens(request, [no] * 5)
    assert "Too many items" in (manager.get_failure(request) or "")


def test_a_spending_look_ahead_leaves_the_request_and_the_others(manager):
    request, other = (compiled(manager, regex=SPENDING) for _ in range(2))
    assert walk(manager, other, 2) == 2
    _, acceptable = rows(manager, request, encode("e") * 1000)
    assert 0 < acceptable[0] < 1000
    assert walk(manager, request, 3) == walk(manager, other, 3) == 3
    assert manager.get_failure(request) is manager.get_failure(other) is None


@pytest.fixture
def num_compiled(monkeypatch):
    """How often a running step has compiled a grammar again, in a list of one."""
    count = [0]
    compile_again = GuidanceCompiledGrammar.compile_again

    def count_and_compile(self: GuidanceCompiledGrammar) -> Any:
        count[0] += 1
        return compile_again(self)

    monkeypatch.setattr(GuidanceCompiledGrammar, "compile_again", count_and_compile)
    return count


def test_drafts_wear_out_few_lexers_of_a_request_in_all(num_compiled):
    manager = make_manager("guidance")
    request = compiled(manager, regex=SPENDING)
    expected = rows(manager, request, [])[0][0]
    drafts = encode("e") * 1000
    for _ in range(20):
        assert rows(manager, request, drafts)[0][0] == expected
    assert 0 < num_compiled[0] <= MAX_SPENT_LEXERS_AHEAD
    assert not manager.takes_drafts(request)
    # Behind a draft that it no longer looks at stands what is for a refused one.
    ids, acceptable = rows(manager, request, drafts[:3])
    assert ids == [expected] * 4
    assert acceptable == [0]
    # It goes on as it would without drafts.
    plain = compiled(manager, regex=SPENDING)
    for _ in range(3):
        assert manager.get_failure(request) is None
        assert rows(manager, request, drafts)[0][0] == rows(manager, plain, [])[0][0]
        assert walk(manager, request, 1) == walk(manager, plain, 1) == 1
    manager.shutdown()


def test_drafts_of_a_batch_wear_out_few_lexers_and_fail_nobody(num_compiled):
    manager = make_manager("guidance")
    requests = {str(i): compiled(manager, regex=SPENDING) for i in range(4)}
    expected = rows(manager, requests["0"], [])[0][0]
    drafts = {req_id: encode("e") * 40 for req_id in requests if req_id != "0"}
    for _ in range(6):
        output = manager.grammar_bitmask(requests, list(requests), drafts)
        assert output is not None
        for row in (0, 1, 42, 83):
            assert allowed_ids(output.grammar_bitmask[row]) == expected
    # A batch looks over them once together, and then over those of each.
    assert 0 < num_compiled[0] <= len(drafts) * (MAX_SPENT_LEXERS_AHEAD + 2)
    for request in requests.values():
        assert walk(manager, request, 3) == 3
        assert manager.get_failure(request) is None
    manager.shutdown()


def test_drafts_never_spend_a_lexer_that_cannot_be_compiled_again(monkeypatch):
    monkeypatch.setattr(backend_llguidance, "MAX_RECOMPILE_S", -1.0)
    manager = make_manager("guidance")
    other, request = (compiled(manager, regex=SPENDING) for _ in range(2))
    assert walk(manager, other, 2) == 2
    expected = rows(manager, request, [])[0][0]
    ids, acceptable = rows(manager, request, encode("e") * 100)
    assert ids == [expected] * 101
    assert acceptable == [0]
    assert not manager.takes_drafts(request)
    for one in (other, request):
        assert walk(manager, one, 3) == 3
        assert manager.get_failure(one) is None
    manager.shutdown()


def test_every_request_moves_to_the_last_lexer_that_was_compiled(num_compiled):
    spec = GrammarSpec(REGEX, "a+", None, ("guidance",))
    first: Any = backend("guidance").compile_grammar(spec)
    first.spend()
    second, is_new = first.get_successor()
    assert is_new
    second.spend()
    third, is_new = second.get_successor()
    assert is_new
    assert first.get_successor() == second.get_successor() == (third, False)
    assert num_compiled == [2]


class _FragileGrammar(StructuredOutputGrammar):
    """Allows every token; the library breaks behind the third, for good."""

    def __init__(self) -> None:
        super().__init__(vocabulary(), (EOS,))
        self.library: list[int] = []
        self.is_broken = False

    def _accept_text(self, token_id: int) -> bool:
        assert not self.is_broken
        self.library.append(token_id)
        return True

    def _rollback_text(self, num_tokens: int) -> None:
        del self.library[-num_tokens:]

    def _restart_text(self) -> None:
        self.library, self.is_broken = list(self._text_ids), False

    def _may_end(self) -> bool:
        return False

    def _is_closed(self) -> bool:
        return False

    def _compute_words(self) -> np.ndarray | None:
        if len(self.library) >= 3:
            self.is_broken = True
            self.fail("broken")
            return None
        words = np.zeros(vocabulary().num_mask_words, dtype=np.int32)
        words[len(self.library)] = -1
        return words


def test_what_is_behind_a_draft_without_a_mask_is_not_committed():
    grammar = _FragileGrammar()
    bitmask = np.empty((5, -(-VOCAB_SIZE // 32)), dtype=np.int32)
    assert grammar.fill_ahead(bitmask, [5, 6, 7, 8]) == 2
    assert grammar.failure is None
    assert grammar.library == []
    np.testing.assert_array_equal(bitmask[3:], bitmask[[2, 2]])
    # The third draft was under a mask, the one behind it was not.
    assert grammar.accept_tokens([5, 6, 7])
    assert not grammar.accept_tokens([8])
    assert grammar.failure == "broken"


# Requests.


def test_requests_with_one_schema_have_matchers_of_their_own(manager):
    first, second = (compiled(manager, choice=["abc"]) for _ in range(2))
    manager.accept_tokens(first, encode("abc"))
    assert manager.is_terminated(first)
    assert not manager.is_terminated(second)
    assert manager.accept_tokens(second, encode("abc"))


def test_a_plain_request_is_left_alone(manager):
    request = make_request()
    manager.grammar_init(request)
    assert request.structured_output_request is None
    assert manager.accept_tokens(request, [5])
    assert not manager.is_terminated(request)
    assert manager.validate_tokens(request, [5, -1]) == [5, -1]


def test_a_constraint_that_does_not_compile_is_an_error_of_its_request(manager):
    state = compile_request(manager, make_request(grammar="start: missing"))
    assert state.error == (
        'at 1(8): unknown name: "missing"',
        "structured_outputs.grammar",
    )
    assert not state.is_grammar_ready
    assert compiled(manager, choice=["a"])


def test_the_engine_checks_again_what_the_front_should_have_checked(manager):
    state = compile_request(manager, make_request(json={"not": {}}))
    assert state.error == (
        "#/not: the keyword not is not supported",
        "structured_outputs.json",
    )


@pytest.mark.parametrize(
    "pattern",
    [
        r"\h",
        r"\R",
        r"\<ab\>",
        r"\Q.\E",
        r"[[:alpha:]]\h",
        r"[a-z--b]\h",
        r"\o{101}",
        r"[+-\d]",
    ],
)
@pytest.mark.parametrize("form", ["regex", "pattern", "patternProperties"])
def test_a_pattern_is_never_read_in_another_dialect(manager, pattern, form):
    params: dict[str, Any] = {"regex": pattern}
    if form == "pattern":
        params = {"json": {"type": "string", "pattern": f"^{pattern}$"}}
    elif form == "patternProperties":
        names = {f"^{pattern}$": {"type": "integer"}}
        schema = {"type": "object", "patternProperties": names, "minProperties": 1}
        params = {"json": {**schema, "additionalProperties": False}}
    state = compile_request(manager, make_request(**params))
    assert state.error is not None
    assert state.error[1] == f"structured_outputs.{next(iter(params))}"


@pytest.mark.parametrize(
    "params",
    [
        {"regex": r"[^\u{0}-\u{10FFFF}]"},
        {"regex": r"[^\x00-\x{10FFFF}]"},
        {"json": {"type": "string", "pattern": "^[^\\u0000-\\u{10FFFF}]$"}},
        {"json": {"enum": ["a"], "type": "integer"}},
        {
            "json": {
                "type": "object",
                "properties": {"a": {"type": "integer"}},
                "required": ["b"],
                "additionalProperties": False,
            }
        },
    ],
)
def test_a_constraint_without_texts_is_not_given_to_the_other_library(manager, params):
    state = compile_request(manager, make_request(**params))
    assert state.error is not None
    assert "xgrammar" not in manager._backends or state.grammar is None


def test_gbnf_hex_escapes_are_two_digits_to_whoever_reads_them(manager):
    # guidance does not read [\^], and xgrammar would read \x41a as one character.
    request = make_request(grammar="root ::= [\\x41a] | [\\^]")
    assert compile_request(manager, request).error is not None


def test_gbnf_that_guidance_cannot_read_goes_to_xgrammar(manager):
    request = compiled(manager, grammar='root ::= "\\x41" [\\u0042-\\u0044]')
    assert accepts(request.structured_output_request.grammar, "AC")


def test_a_grammar_past_the_time_limit_is_an_error_of_its_request(monkeypatch):
    monkeypatch.setenv("VLLM_GRAMMAR_COMPILE_TIMEOUT", "0.001")
    manager = make_manager()
    choices = [f"choice number {index * 7919}" for index in range(9000)]
    state = compile_request(manager, make_request(choice=choices))
    assert state.error == (
        "the constraint does not compile within 0.001 seconds",
        "structured_outputs.choice",
    )
    assert not state.is_grammar_ready
    manager.shutdown()


def test_a_tokenizer_that_cannot_be_loaded_fails_requests_and_not_the_engine():
    def load() -> Any:
        raise OSError("no such file")

    broken = make_manager(load_tokenizer=load)
    state = compile_request(broken, make_request(choice=["a"]))
    assert state.error == (
        "the constraint could not be compiled",
        "structured_outputs.choice",
    )
    broken.shutdown()


def test_compiled_grammars_are_bounded(monkeypatch):
    monkeypatch.setenv("VLLM_GRAMMAR_CACHE_ENTRIES", "4")
    manager = make_manager()
    for index in range(20):
        compiled(manager, regex=f"a{{{index + 1}}}")
    assert len(manager._cache) == 4
    manager.shutdown()


def test_compiling_does_not_hold_up_the_caller():
    manager = make_manager()
    started = time.monotonic()
    manager.grammar_init(make_request(json=PERSON))
    assert time.monotonic() - started < 0.05
    manager.shutdown()


def test_the_mask_has_the_models_width_and_not_the_tokenizers():
    vocabulary = Vocabulary.from_tokenizer(tokenizer(), 50_000)
    assert len(vocabulary.tokens) == 50_000
    assert set(range(49_152, 50_000)) <= vocabulary.special_token_ids


def test_a_model_with_fewer_ids_than_its_tokenizer_never_gets_the_others():
    manager = make_manager(vocab_size=1000)
    request = compiled(manager, json={})
    output = manager.grammar_bitmask({"r": request}, ["r"], {})
    assert output is not None
    assert max(allowed_ids(output.grammar_bitmask[0])) < 1000
    manager.shutdown()
