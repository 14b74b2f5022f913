"""Grammars by llguidance: preferred, because it refuses what it cannot enforce."""

import json
import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import llguidance
import numpy as np
from llguidance.gbnf_to_lark import gbnf_to_lark
from llguidance.numpy import (
    fill_next_token_bitmask,
    fill_next_token_bitmask_par_with_draft_tokens,
)

from vllm.v1.structured_output.backend_types import (
    CompiledGrammar,
    EmptyGrammarError,
    FillJob,
    GrammarError,
    StructuredOutputBackend,
    StructuredOutputGrammar,
    Vocabulary,
    allows_only_end,
    is_library_failure,
)
from vllm.v1.structured_output.grammar_spec import GBNF, JSON, REGEX, GrammarSpec

# Fewer rows than this are filled faster than threads are woken.
MIN_PARALLEL_ROWS = 8
MAX_FILL_THREADS = 8
MAX_ERROR_LENGTH = 400
# JSON has few ambiguities, but each optional property that may come next is some items.
# In a grammar by hand, rows get this long by ambiguity, and a mask takes seconds.
MAX_JSON_ITEMS_IN_ROW = 20_000
# Without \u: an escaped letter would spell a declared property's name, or a character
# that a pattern excludes, in a way that the grammar does not see.
JSON_ESCAPES = 'nrtbf\\"'
# Of a matcher's own parser. Any other error may be the lexer's, which copies share.
PARSER_LIMIT = "parser error: Too many items"
NO_TEXT = "no text satisfies the constraint"
UNSATISFIABLE = "Unsatisfiable schema"
# Longer than this no step may wait for a grammar that is compiled again.
MAX_RECOMPILE_S = 0.25
# Lexers that a request may wear out by its text before it fails, and by its drafts
# before it gets no more of them: each costs a step that all requests wait for.
MAX_SPENT_LEXERS = 2
MAX_SPENT_LEXERS_AHEAD = 2
# A matcher's own memory, and what its automaton grows to per byte of source.
BASE_BYTES = 256 * 1024
BYTES_PER_SOURCE_BYTE = 256

T = TypeVar("T")


class GuidanceBackend(StructuredOutputBackend):
    """Compiles in milliseconds; masks of several requests are filled on threads."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        with _as_grammar_error("this tokenizer does not work with guidance"):
            self._tokenizer = llguidance.LLTokenizer(
                llguidance.TokenizerWrapper(_TokenizerView(vocabulary))
            )
        num_threads = min(os.cpu_count() or 1, MAX_FILL_THREADS)
        self._executor = llguidance.LLExecutor(num_threads)
        self._limits = llguidance.LLParserLimits(verbose_errors=False)
        self._json_limits = llguidance.LLParserLimits(
            verbose_errors=False, max_items_in_row=MAX_JSON_ITEMS_IN_ROW
        )

    def compile_grammar(self, spec: GrammarSpec) -> "GuidanceCompiledGrammar":
        started = time.thread_time()
        with _as_grammar_error("guidance could not compile the constraint"):
            grammar = _to_grammar(spec)

        def create_matcher() -> llguidance.LLMatcher:
            return llguidance.LLMatcher(
                self._tokenizer,
                grammar,
                log_level=0,
                limits=self._json_limits if spec.kind == JSON else self._limits,
            )

        with _as_grammar_error("guidance could not compile the constraint"):
            matcher = create_matcher()
        if matcher.is_error():
            raise _to_refusal(matcher)
        # The first mask shows whether any text satisfies the grammar at all.
        words = np.empty((1, self._vocabulary.num_mask_words), dtype=np.int32)
        with _as_grammar_error("guidance could not use the constraint"):
            fill_next_token_bitmask(matcher, words)
        if _is_stuck(matcher):
            raise _to_refusal(matcher)
        if matcher.is_stopped() or allows_only_end(words[0], self._vocabulary):
            raise EmptyGrammarError("the constraint allows no text but the empty one")
        can_repeat = time.thread_time() - started <= MAX_RECOMPILE_S
        return GuidanceCompiledGrammar(
            create_matcher if can_repeat else None,
            matcher,
            self._vocabulary,
            BASE_BYTES + BYTES_PER_SOURCE_BYTE * len(spec.text),
        )

    def fill_bitmasks(self, jobs: Sequence[FillJob], bitmask: np.ndarray) -> list[int]:
        num_rows = sum(len(drafts) + 1 for _, _, drafts in jobs)
        if num_rows < MIN_PARALLEL_ROWS or len(jobs) == 1:
            return super().fill_bitmasks(jobs, bitmask)
        words = np.empty((num_rows, self._vocabulary.num_mask_words), dtype=np.int32)
        plans = []
        work = []
        first_row = 0
        for grammar, _, drafts in jobs:
            assert isinstance(grammar, GuidanceGrammar)
            plan = None
            if grammar.failure is None and not grammar.is_terminated():
                plan = grammar.plan_look_ahead(drafts)
            plans.append((first_row, plan))
            if plan is not None:
                work.append((grammar, first_row, list(drafts[: plan[1]])))
            first_row += len(drafts) + 1
        try:
            fill_next_token_bitmask_par_with_draft_tokens(
                self._executor,
                [(grammar.matcher, row, ahead) for grammar, row, ahead in work],
                words,
            )
        except BaseException as error:
            if not is_library_failure(error):
                raise
            # One matcher failed: filled one by one, only its own request is lost.
            for grammar, _, _ in work:
                grammar.recover()
            return super().fill_bitmasks(jobs, bitmask)
        # One that spends a lexer makes the masks of all that share it doubtful. It is
        # charged to drafts before it is to a text.
        for grammar, _, ahead_ids in sorted(work, key=lambda item: not item[2]):
            grammar.note_masked(is_ahead=bool(ahead_ids))
        num_acceptable = []
        for (grammar, row, drafts), (source, plan) in zip(jobs, plans, strict=True):
            assert isinstance(grammar, GuidanceGrammar)
            rows = bitmask[row : row + len(drafts) + 1]
            if plan is not None and grammar.take_rows(
                rows, words[source:], drafts, plan
            ):
                num_acceptable.append(plan[0])
                continue
            grammar.recover()
            num_acceptable.append(grammar.fill_ahead(rows, drafts))
        return num_acceptable


class GuidanceCompiledGrammar(CompiledGrammar):
    """A matcher that has not moved; each request gets a copy.

    The copies share one lexer, which grows with what they read. Once it is past its
    limits it fails all of them, so each of them moves to the successor of this.

    Args:
        create_matcher: compiles it again; None: that takes too long for a running step.
    """

    def __init__(
        self,
        create_matcher: Callable[[], llguidance.LLMatcher] | None,
        matcher: llguidance.LLMatcher,
        vocabulary: Vocabulary,
        num_bytes: int,
    ) -> None:
        self._create_matcher = create_matcher
        self._matcher = matcher
        self._vocabulary = vocabulary
        self.num_bytes = num_bytes
        self._is_spent = False
        self._successor: GuidanceCompiledGrammar | None = None

    @property
    def is_spent(self) -> bool:
        return self._is_spent

    @property
    def can_compile_again(self) -> bool:
        """Whether those who share the lexer can go on once it is spent."""
        return self._create_matcher is not None

    def create_grammar(self, stop_token_ids: Collection[int]) -> "GuidanceGrammar":
        return GuidanceGrammar(self, self._vocabulary, stop_token_ids)

    def copy_matcher(self) -> llguidance.LLMatcher:
        """Return a matcher at the beginning, over the common lexer."""
        return self._matcher.deep_copy()

    def spend(self) -> None:
        """Give up the common lexer."""
        self._is_spent = True

    def compile_again(self) -> "GuidanceCompiledGrammar | None":
        """Return the same with a lexer of its own, or None if that takes too long."""
        if self._create_matcher is None:
            return None
        return GuidanceCompiledGrammar(
            self._create_matcher,
            self._create_matcher(),
            self._vocabulary,
            self.num_bytes,
        )

    def get_successor(self) -> "tuple[GuidanceCompiledGrammar | None, bool]":
        """Return what its requests move to, and whether nothing has used that yet.

        The last of the successors that were compiled, unless that is spent as well.
        """
        assert self._is_spent
        last = self
        while last._successor is not None:
            last = last._successor
        if last.is_spent:
            self._successor = last._successor = self.compile_again()
            return self._successor, True
        self._successor = last
        return last, False


class _LibraryGaveUpError(Exception):
    """A matcher is past its limits, or broken; the message says why."""


class GuidanceGrammar(StructuredOutputGrammar):
    """One llguidance matcher."""

    def __init__(
        self,
        source: GuidanceCompiledGrammar,
        vocabulary: Vocabulary,
        stop_token_ids: Collection[int],
    ) -> None:
        super().__init__(vocabulary, stop_token_ids)
        self._source = source
        self.matcher = source.copy_matcher()
        self._is_planning = False
        self._num_spent = 0
        self._num_spent_ahead = 0

    @property
    def takes_drafts(self) -> bool:
        return (
            self._source.can_compile_again
            and self._num_spent_ahead < MAX_SPENT_LEXERS_AHEAD
        )

    def plan_look_ahead(self, draft_token_ids: Sequence[int]) -> tuple[int, int] | None:
        self._is_planning = True
        plan = super().plan_look_ahead(draft_token_ids)
        self._is_planning = False
        return plan

    def note_masked(self, *, is_ahead: bool) -> None:
        """Notice a lexer that was spent on masks, computed by the matcher itself."""
        if self.matcher.is_error() and not self._is_own_limit():
            self._spend(is_ahead)

    def take_rows(
        self,
        rows: np.ndarray,
        words: np.ndarray,
        draft_token_ids: Sequence[int],
        plan: tuple[int, int],
    ) -> bool:
        """Write the rows from the matcher's own masks; False if these cannot be used.

        Args:
            rows: [1 + number of drafts, ceil(vocab_size / 32)] int32, written.
            words: [at least as many, num_mask_words] int32, with the end mark.
            plan: of these drafts, see `plan_look_ahead`.
        """
        if self._source.is_spent or _is_stuck(self.matcher):
            return False
        num_valid, num_open = plan
        for ahead in range(num_open + 1):
            self.finish_row(rows[ahead], words[ahead])
        rows[num_open + 1 :] = rows[num_open]
        refused = draft_token_ids[num_valid : num_valid + 1]
        return num_open < num_valid or not _allows_any(rows[-1], refused)

    def recover(self) -> None:
        """Go back to the text, if the matcher gave up somewhere ahead of it."""
        # A spent lexer is left behind by the next operation.
        is_stuck_ahead = self.matcher.is_error() and not self._source.is_spent
        if self.failure is None and is_stuck_ahead:
            self._restart_text()

    def _accept_text(self, token_id: int) -> bool:
        return self._attempt(lambda: self._consume(token_id)) == 1

    def _consume(self, token_id: int) -> int:
        num_taken = self.matcher.try_consume_tokens([token_id])
        if num_taken == 0 and not self._is_planning:
            # With a spent lexer a token is refused without an error, a mask is not. A
            # plan compares its masks with what was refused.
            self._fill_words()
        return num_taken

    def _rollback_text(self, num_tokens: int) -> None:
        try:
            self._check(lambda: self.matcher.rollback(num_tokens))
        except _LibraryGaveUpError:
            self._restart_text()

    def _restart_text(self) -> None:
        is_read = not self._source.is_spent and self._read_again(self._source)
        if not is_read and self._move_on() is None:
            self.fail("its text cannot be read again")

    def _may_end(self) -> bool:
        return self.failure is None and self.matcher.is_accepting()

    def _is_closed(self) -> bool:
        return self._may_end() and self.matcher.is_stopped()

    def _compute_words(self) -> np.ndarray | None:
        words = self._attempt(self._fill_words)
        if self.failure is None and _is_stuck(self.matcher):
            self.fail(_describe_stop(self.matcher))
        return None if self.failure is not None else words

    def _fill_words(self) -> np.ndarray:
        words = np.empty((1, self.vocabulary.num_mask_words), dtype=np.int32)
        fill_next_token_bitmask(self.matcher, words)
        return words[0]

    def _is_own_limit(self) -> bool:
        return _to_sentence(self.matcher.get_error()).startswith(PARSER_LIMIT)

    def _attempt(self, operate: Callable[[], T]) -> T | None:
        """Run an operation, and again with another lexer where the library gives up.

        The lexer may have been worn out by others. Only what fails with a new one, or
        by the parser that each matcher has to itself, is this request's own failure.
        """
        is_new: bool | None = False
        reason = "its lexer is past its limits"
        while True:
            if self._source.is_spent and (
                is_new or self._is_worn_out() or (is_new := self._move_on()) is None
            ):
                self.fail(reason)
                return None
            try:
                return self._check(operate)
            except _LibraryGaveUpError as error:
                reason = str(error)
            if reason.startswith(PARSER_LIMIT):
                self.fail(reason)
                return None
            self._spend(self._is_ahead)

    def _spend(self, is_ahead: bool) -> None:
        """Give up the lexer, for all that share it, on this request's account."""
        if not self._source.is_spent:
            self._num_spent += not is_ahead
            self._num_spent_ahead += is_ahead
        self._source.spend()

    def _is_worn_out(self) -> bool:
        if self._is_ahead:
            # The drafts of the step that came to the limit are still looked over.
            return self._num_spent_ahead > MAX_SPENT_LEXERS_AHEAD
        return self._num_spent >= MAX_SPENT_LEXERS

    def _move_on(self) -> bool | None:
        """Move to a lexer that is not spent; return whether it is a new one.

        None if there is none.
        """
        # The first may have been worn out without anybody having noticed.
        for _ in range(2):
            try:
                source, is_new = self._check_call(self._source.get_successor)
            except _LibraryGaveUpError:
                return None
            if source is None:
                return None
            if self._read_again(source):
                return is_new
        return None

    def _read_again(self, source: GuidanceCompiledGrammar) -> bool:
        """Go to the same place in another grammar; False if its lexer is spent."""
        self._source = source
        try:
            self.matcher = self._check_call(source.copy_matcher)
            if self._text_ids:
                self._check(lambda: self.matcher.consume_tokens(self._text_ids))
        except _LibraryGaveUpError:
            source.spend()
            return False
        return True

    def _check(self, operate: Callable[[], T]) -> T:
        result = self._check_call(operate)
        if self.matcher.is_error():
            raise _LibraryGaveUpError(_describe_stop(self.matcher))
        return result

    def _check_call(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except BaseException as error:
            if not is_library_failure(error):
                raise
            raise _LibraryGaveUpError(_to_sentence(str(error))) from error


class _TokenizerView:
    """What llguidance asks of a tokenizer, with the end mark as its end of text."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.eos_token_id = vocabulary.end_mark
        self.bos_token_id = None
        self.tokens = [*vocabulary.tokens, b"<end mark>"]
        self.special_token_ids = [*vocabulary.special_token_ids, vocabulary.end_mark]
        self._tokenizer = vocabulary.tokenizer

    def __call__(self, text: str | bytes) -> list[int]:
        if isinstance(text, bytes):
            text = text.decode(errors="replace")
        encoding = self._tokenizer.backend.encode(text, add_special_tokens=False)
        return list(encoding.ids)


def _to_grammar(spec: GrammarSpec) -> str:
    if spec.kind == JSON:
        options: llguidance._lib.JsonCompileOptions = {
            "lenient": False,
            "coerce_one_of": False,
            "json_allowed_escapes": JSON_ESCAPES,
            "whitespace_flexible": spec.whitespace_pattern is not None,
        }
        if spec.whitespace_pattern is not None:
            options["whitespace_pattern"] = spec.whitespace_pattern
        return llguidance.LLMatcher.grammar_from_json_schema(
            json.loads(spec.text), overrides=options
        )
    if spec.kind == REGEX:
        return llguidance.LLMatcher.grammar_from_regex(spec.text)
    lark = gbnf_to_lark(spec.text) if spec.kind == GBNF else spec.text
    return llguidance.LLMatcher.grammar_from_lark(lark)


@contextmanager
def _as_grammar_error(prefix: str) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        if not is_library_failure(error):
            raise
        raise GrammarError(f"{prefix}: {_to_sentence(str(error))}") from error


def _allows_any(row: np.ndarray, token_ids: Sequence[int]) -> bool:
    known_ids = [i for i in token_ids if 0 <= i < 32 * len(row)]
    return any(row[i // 32] >> (i % 32) & 1 for i in known_ids)


def _is_stuck(matcher: llguidance.LLMatcher) -> bool:
    """Whether a matcher is past its limits, or has nowhere to go."""
    return matcher.is_error() or (matcher.is_stopped() and not matcher.is_accepting())


def _describe_stop(matcher: llguidance.LLMatcher) -> str:
    message = _to_sentence(matcher.get_error())
    # A stop reason alone is no sentence: the grammar came to where no token fits.
    return message if " " in message else NO_TEXT


def _to_refusal(matcher: llguidance.LLMatcher) -> GrammarError:
    message = _describe_stop(matcher)
    is_empty = message == NO_TEXT or message.startswith(UNSATISFIABLE)
    return EmptyGrammarError(message) if is_empty else GrammarError(message)


def _to_sentence(message: str) -> str:
    """Return the sentence of a message that draws its position over several lines."""
    first, *others = message.split("\n")
    causes = [line for line in others if line.startswith("error: ")]
    return " ".join([first, *causes[:1]])[:MAX_ERROR_LENGTH]
