"""Grammars by llguidance: preferred, because it refuses what it cannot enforce."""

import json
import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import llguidance
import numpy as np
from llguidance.gbnf_to_lark import gbnf_to_lark
from llguidance.numpy import (
    fill_next_token_bitmask,
    fill_next_token_bitmask_par_with_draft_tokens,
)

from vllm.v1.structured_output.backend_types import (
    CompiledGrammar,
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
# A matcher's own memory, and what its automaton grows to per byte of source.
BASE_BYTES = 256 * 1024
BYTES_PER_SOURCE_BYTE = 256


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
        with _as_grammar_error("guidance could not compile the constraint"):
            matcher = llguidance.LLMatcher(
                self._tokenizer,
                _to_grammar(spec),
                log_level=0,
                limits=self._json_limits if spec.kind == JSON else self._limits,
            )
        _raise_matcher_error(matcher)
        template = GuidanceGrammar(matcher, self._vocabulary, ())
        # The first mask shows whether any text satisfies the grammar at all.
        words = template.compute_first_words()
        if template.failure is not None:
            raise GrammarError(template.failure)
        assert words is not None, "a first mask or a failure"
        if template.is_terminated() or allows_only_end(words, self._vocabulary):
            raise GrammarError("the constraint allows no text but the empty one")
        return GuidanceCompiledGrammar(matcher, self._vocabulary, len(spec.text))

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
            plan = grammar.plan_look_ahead(drafts)
            plans.append((first_row, *plan))
            if grammar.failure is None and not grammar.is_terminated():
                rows_ahead = list(drafts[: plan[1]])
                work.append((grammar.matcher, first_row, rows_ahead))
            first_row += len(drafts) + 1
        try:
            fill_next_token_bitmask_par_with_draft_tokens(self._executor, work, words)
        except BaseException as error:
            if not is_library_failure(error):
                raise
            # One matcher failed: filled one by one, only its own request is lost.
            return super().fill_bitmasks(jobs, bitmask)
        for (grammar, row, drafts), (source, _, num_open) in zip(
            jobs, plans, strict=True
        ):
            assert isinstance(grammar, GuidanceGrammar)
            rows = bitmask[row : row + len(drafts) + 1]
            if not grammar.is_masked_by_library():
                rows[:] = 0
                grammar.close_row(rows[0])
                rows[1:] = rows[0]
                continue
            for ahead in range(num_open + 1):
                grammar.finish_row(rows[ahead], words[source + ahead])
            rows[num_open + 1 :] = rows[num_open]
        return [num_valid for _, num_valid, _ in plans]


class GuidanceCompiledGrammar(CompiledGrammar):
    """A matcher that has not moved; each request gets a copy."""

    def __init__(
        self, matcher: llguidance.LLMatcher, vocabulary: Vocabulary, num_chars: int
    ) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self.num_bytes = BASE_BYTES + BYTES_PER_SOURCE_BYTE * num_chars

    def create_grammar(self, stop_token_ids: Collection[int]) -> "GuidanceGrammar":
        return GuidanceGrammar(
            self._matcher.deep_copy(), self._vocabulary, stop_token_ids
        )


class GuidanceGrammar(StructuredOutputGrammar):
    """One llguidance matcher."""

    def __init__(
        self,
        matcher: llguidance.LLMatcher,
        vocabulary: Vocabulary,
        stop_token_ids: Collection[int],
    ) -> None:
        super().__init__(vocabulary, stop_token_ids)
        self.matcher = matcher

    def compute_first_words(self) -> np.ndarray | None:
        """Return the mask of the first token, with the end mark."""
        return self._compute_words()

    def plan_look_ahead(self, draft_token_ids: Sequence[int]) -> tuple[int, int]:
        """Return how many drafts fit, and behind how many of them text may follow."""
        if not draft_token_ids:
            return 0, 0
        num_valid = len(self.validate_tokens(draft_token_ids))
        if num_valid == 0:
            return 0, 0
        # Only the last draft that fits can have ended the text.
        for token_id in draft_token_ids[:num_valid]:
            self._advance(token_id)
        num_open = num_valid - self.is_terminated()
        self.rollback(num_valid)
        return num_valid, num_open

    def is_masked_by_library(self) -> bool:
        """Whether the mask that was just computed can be used."""
        if self.failure is None and not self.is_terminated():
            self._check_matcher()
            return self.failure is None
        return False

    def _accept_text(self, token_id: int) -> bool:
        with self._failures():
            return self.matcher.try_consume_tokens([token_id]) == 1
        return False

    def _rollback_text(self, num_tokens: int) -> None:
        with self._failures():
            if not self.matcher.rollback(num_tokens):
                self.fail(_to_sentence(self.matcher.get_error()))

    def _may_end(self) -> bool:
        return self.failure is None and self.matcher.is_accepting()

    def _is_closed(self) -> bool:
        return self._may_end() and self.matcher.is_stopped()

    def _compute_words(self) -> np.ndarray | None:
        words = np.empty((1, self.vocabulary.num_mask_words), dtype=np.int32)
        with self._failures():
            fill_next_token_bitmask(self.matcher, words)
            self._check_matcher()
        return None if self.failure is not None else words[0]

    def _check_matcher(self) -> None:
        """Notice a matcher that ran out of its limits, or has nowhere to go."""
        has_stopped = self.matcher.is_stopped() and not self.matcher.is_accepting()
        if has_stopped or self.matcher.is_error():
            self.fail(_describe_stop(self.matcher))

    @contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            if not is_library_failure(error):
                raise
            self.fail(_to_sentence(str(error)))


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


def _raise_matcher_error(matcher: llguidance.LLMatcher) -> None:
    if matcher.is_error():
        raise GrammarError(_describe_stop(matcher))


def _describe_stop(matcher: llguidance.LLMatcher) -> str:
    message = _to_sentence(matcher.get_error())
    # A stop reason alone is no sentence: the grammar came to where no token fits.
    return message if " " in message else "no text satisfies the constraint"


def _to_sentence(message: str) -> str:
    """Return the sentence of a message that draws its position over several lines."""
    first, *others = message.split("\n")
    causes = [line for line in others if line.startswith("error: ")]
    return " ".join([first, *causes[:1]])[:MAX_ERROR_LENGTH]
