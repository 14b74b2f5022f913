"""Grammars by xgrammar: for what guidance refuses, or on request.

xgrammar ignores some keywords of a JSON schema without an error; the tables in
`json_schema` keep those away from it. Importing it takes seconds.
"""

from collections.abc import Collection, Sequence

import numpy as np
import torch
import xgrammar

from vllm.v1.structured_output.backend_types import (
    CompiledGrammar,
    EmptyGrammarError,
    GrammarError,
    StructuredOutputBackend,
    StructuredOutputGrammar,
    Vocabulary,
    allows_only_end,
    is_library_failure,
)
from vllm.v1.structured_output.common_regex import spell_dots
from vllm.v1.structured_output.grammar_spec import (
    JSON,
    MAX_WHITESPACE,
    REGEX,
    GrammarSpec,
)
from vllm.v1.structured_output.json_schema import close_declared_objects

MAX_ERROR_LENGTH = 400


class XgrammarBackend(StructuredOutputBackend):
    """Compiles in tens of milliseconds to seconds."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        # The engine keeps compiled grammars itself, within its own bounds.
        self._compiler = _create_compiler(vocabulary, vocabulary.tokens)
        # xgrammar lets raw control characters into some JSON strings.
        printable = [b"" if _has_control(text) else text for text in vocabulary.tokens]
        self._json_compiler = _create_compiler(vocabulary, printable)

    def compile_grammar(self, spec: GrammarSpec) -> "XgrammarCompiledGrammar":
        try:
            compiled = self._compile(spec)
        except BaseException as error:
            if not is_library_failure(error):
                raise
            reason = _to_sentence(str(error))
            raise GrammarError(
                f"xgrammar could not compile the constraint: {reason}"
            ) from error
        grammar = XgrammarGrammar(compiled, self._vocabulary, ())
        words = grammar.compute_mask_words()
        if not words.any():
            raise EmptyGrammarError("no text satisfies the constraint")
        if grammar.is_terminated():
            raise EmptyGrammarError("the constraint allows no text but the empty one")
        return XgrammarCompiledGrammar(compiled, self._vocabulary)

    def _compile(self, spec: GrammarSpec) -> xgrammar.CompiledGrammar:
        if spec.kind == REGEX:
            return self._compiler.compile_regex(spell_dots(spec.text))
        if spec.kind != JSON:
            return self._compiler.compile_grammar(spec.text)
        schema = close_declared_objects(spec.text)
        if spec.whitespace_pattern is None:
            return self._json_compiler.compile_json_schema(
                schema, any_whitespace=False, separators=(",", ":"), strict_mode=False
            )
        return self._json_compiler.compile_json_schema(
            schema,
            any_whitespace=True,
            max_whitespace_cnt=MAX_WHITESPACE,
            strict_mode=False,
        )


class XgrammarCompiledGrammar(CompiledGrammar):
    """A compiled grammar; each request gets a matcher over it."""

    def __init__(
        self, compiled: xgrammar.CompiledGrammar, vocabulary: Vocabulary
    ) -> None:
        self._compiled = compiled
        self._vocabulary = vocabulary
        self.num_bytes = int(compiled.memory_size_bytes)

    def create_grammar(self, stop_token_ids: Collection[int]) -> "XgrammarGrammar":
        return XgrammarGrammar(self._compiled, self._vocabulary, stop_token_ids)


class XgrammarGrammar(StructuredOutputGrammar):
    """One xgrammar matcher."""

    def __init__(
        self,
        compiled: xgrammar.CompiledGrammar,
        vocabulary: Vocabulary,
        stop_token_ids: Collection[int],
    ) -> None:
        super().__init__(vocabulary, stop_token_ids)
        self._compiled = compiled
        self._matcher = xgrammar.GrammarMatcher(compiled)
        # Whether nothing can follow is read from a mask, once for each state.
        self._closed: bool | None = None

    def compute_mask_words(self) -> np.ndarray:
        """Return [num_mask_words] int32 of the next token, with the end mark."""
        words = np.empty((1, self.vocabulary.num_mask_words), dtype=np.int32)
        self._matcher.fill_next_token_bitmask(torch.from_numpy(words))
        return words[0]

    def _accept_text(self, token_id: int) -> bool:
        self._closed = None
        # xgrammar reports the id of a special token on stderr.
        if token_id in self.vocabulary.special_token_ids:
            return False
        try:
            return bool(self._matcher.accept_token(token_id))
        except RuntimeError as error:
            self.fail(_to_sentence(str(error)))
            return False

    def _rollback_text(self, num_tokens: int) -> None:
        self._closed = None
        try:
            self._matcher.rollback(num_tokens)
        except RuntimeError:
            self._restart_text()

    def _restart_text(self) -> None:
        self._closed = None
        self._matcher = xgrammar.GrammarMatcher(self._compiled)
        try:
            is_replayed = all(map(self._matcher.accept_token, self._text_ids))
        except RuntimeError:
            is_replayed = False
        if not is_replayed:
            self.fail("the text could not be read again")

    def _may_end(self) -> bool:
        return self.failure is None and bool(self._matcher.is_completed())

    def _is_closed(self) -> bool:
        if self._closed is None:
            words = self._compute_words() if self._may_end() else None
            self._closed = words is not None and allows_only_end(words, self.vocabulary)
        return self._closed

    def _compute_words(self) -> np.ndarray | None:
        try:
            return self.compute_mask_words()
        except RuntimeError as error:
            self.fail(_to_sentence(str(error)))
            return None


def _create_compiler(
    vocabulary: Vocabulary, token_texts: Sequence[bytes]
) -> xgrammar.GrammarCompiler:
    tokens = [
        b"" if token_id in vocabulary.special_token_ids else text
        for token_id, text in enumerate(token_texts)
    ]
    tokenizer_info = xgrammar.TokenizerInfo(
        [*tokens, b""],
        xgrammar.VocabType.RAW,
        vocab_size=vocabulary.end_mark + 1,
        stop_token_ids=[vocabulary.end_mark],
    )
    return xgrammar.GrammarCompiler(tokenizer_info, max_threads=1, cache_enabled=False)


def _has_control(text: bytes) -> bool:
    """Whether a token holds what JSON text cannot: line breaks are its whitespace."""
    return any(byte < 0x20 and byte != 0x0A for byte in text)


def _to_sentence(message: str) -> str:
    """Drop the library's own source position, which opens its messages."""
    _, _, sentence = message.rpartition(".cc:")
    _, separator, rest = sentence.partition(": ")
    return (rest if separator else sentence).strip()[:MAX_ERROR_LENGTH]
