"""What a grammar is to the engine, whichever library enforces it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from vllm.transformers_utils.tokenizer import Tokenizer
    from vllm.v1.structured_output.grammar_spec import GrammarSpec


class GrammarError(ValueError):
    """A constraint that the library does not take; the message is for the client."""


class EmptyGrammarError(GrammarError):
    """A constraint that was understood, and that no text satisfies."""


@dataclass(frozen=True)
class Vocabulary:
    """The model's tokens, as a grammar library sees them.

    One more token is added behind the last: the *end mark*. The library may choose it
    exactly where the text may end, so that which token ids really end a request is
    decided outside of the library, per request.

    Args:
        tokens: the bytes of each token; empty for ids that the tokenizer does not know.
        special_token_ids: tokens that are no text: control tokens and unknown ids.
        eos_token_id: the tokenizer's end of text; None if it has none.
        tokenizer: for the forced tokens of a grammar.
    """

    tokens: tuple[bytes, ...]
    special_token_ids: frozenset[int]
    eos_token_id: int | None
    tokenizer: "Tokenizer"

    @property
    def end_mark(self) -> int:
        """The id of the end mark, one past the model's vocabulary."""
        return len(self.tokens)

    @property
    def num_mask_words(self) -> int:
        """32-bit words of a mask over the vocabulary and the end mark."""
        return num_mask_words(len(self.tokens) + 1)

    @classmethod
    def from_tokenizer(cls, tokenizer: "Tokenizer", vocab_size: int) -> "Vocabulary":
        """Read the bytes of every token once.

        Args:
            vocab_size: width of the model's logits; may exceed the tokenizer's.
        """
        num_known = min(tokenizer.max_token_id + 1, vocab_size)
        special = {i for i in tokenizer.all_special_ids if 0 <= i < vocab_size}
        tokens = [b""] * vocab_size
        for token_id in range(num_known):
            if tokenizer.id_to_token(token_id) is not None:
                tokens[token_id] = tokenizer.token_bytes(token_id)
        special.update(i for i, text in enumerate(tokens) if not text)
        return cls(tuple(tokens), frozenset(special), tokenizer.eos_token_id, tokenizer)


class StructuredOutputGrammar(ABC):
    """Where one request is in its grammar.

    This class knows the end of a request: a stop token is refused while the text may
    not end, and is the end where it may, also when its text would fit the grammar. The
    library behind it only knows text and the end mark.

    Args:
        vocabulary: of the model.
        stop_token_ids: every id that ends the request. The tokenizer's end of text
            always ends the grammar as well.
    """

    def __init__(self, vocabulary: Vocabulary, stop_token_ids: Collection[int]) -> None:
        self.vocabulary = vocabulary
        self.failure: str | None = None
        vocab_size = vocabulary.end_mark
        stop_ids = {i for i in stop_token_ids if 0 <= i < vocab_size}
        if vocabulary.eos_token_id is not None and vocabulary.eos_token_id < vocab_size:
            stop_ids.add(vocabulary.eos_token_id)
        self._stop_token_ids = frozenset(stop_ids)
        self._has_ended = False
        self._num_accepted = 0
        # Accepted tokens that are text; all but a stop token at the end.
        self._text_ids: list[int] = []
        # Behind how many tokens the last rows were not vouched for, and why.
        self._blind: tuple[int, str] | None = None
        self._is_ahead = False
        stop_row = np.zeros(num_mask_words(vocab_size), dtype=np.uint32)
        for token_id in stop_ids:
            stop_row[token_id // 32] |= np.uint32(1 << (token_id % 32))
        # The words of a mask row that hold stop tokens, and their bits in them.
        self._stop_words = np.nonzero(stop_row)[0]
        self._stop_bits = stop_row[self._stop_words].view(np.int32)

    @property
    def takes_drafts(self) -> bool:
        """Whether looking ahead is affordable; once it is not, it never is again."""
        return True

    def accept_tokens(self, token_ids: Sequence[int]) -> bool:
        """Advance over tokens that were committed; what follows the end is left out.

        Returns:
            False if a token does not fit; the request can then only be failed.
        """
        for token_id in token_ids:
            if self.is_terminated():
                break
            if self._blind is not None and self._num_accepted >= self._blind[0]:
                # A draft was taken behind which the library gave up.
                self.fail(self._blind[1])
            if not self._advance(token_id):
                return False
        return True

    def validate_tokens(self, token_ids: Sequence[int]) -> list[int]:
        """Return the leading tokens that fit, without advancing."""
        num_valid, _, _ = self._look_ahead(token_ids, lambda _: None)
        return list(token_ids[:num_valid])

    def rollback(self, num_tokens: int) -> None:
        """Take back the last `num_tokens` accepted tokens."""
        assert num_tokens <= self._num_accepted, "more tokens than were accepted"
        self._num_accepted -= num_tokens
        if num_tokens and self._has_ended:
            self._has_ended = False
            num_tokens -= 1
        if num_tokens:
            del self._text_ids[-num_tokens:]
            self._rollback_text(num_tokens)

    def reset(self) -> None:
        """Go back to the first token."""
        self.rollback(self._num_accepted)

    def is_accepting(self) -> bool:
        """Whether the text so far satisfies the grammar."""
        return self._has_ended or self._may_end()

    def is_terminated(self) -> bool:
        """Whether nothing can follow: a stop token came, or the grammar is closed."""
        return self._has_ended or self._is_closed()

    def fill_bitmask(self, bitmask: np.ndarray, index: int) -> None:
        """Write which tokens may come next.

        Args:
            bitmask: [rows, ceil(vocab_size / 32)] int32, row `index` is written.
        """
        self.fill_ahead(bitmask[index : index + 1], ())

    def fill_ahead(self, rows: np.ndarray, draft_token_ids: Sequence[int]) -> int:
        """Write the masks of the next token and of those behind each draft.

        The state is the same afterwards. A row behind a draft that does not fit, that
        is not known (negative), or behind the end, repeats the last constrained row.

        Args:
            rows: [1 + number of drafts, ceil(vocab_size / 32)] int32, written.

        Returns:
            The number of leading drafts that fit.
        """
        self._blind = None
        self._fill_row(rows[0])
        num_valid, last_row, reason = self._look_ahead(
            draft_token_ids, lambda row: self._fill_row(rows[row])
        )
        rows[last_row + 1 :] = rows[last_row]
        if reason is not None:
            self._blind = (self._num_accepted + last_row + 1, reason)
        return num_valid

    def plan_look_ahead(self, draft_token_ids: Sequence[int]) -> tuple[int, int] | None:
        """Return how many drafts fit, and behind how many of them text may follow.

        None if the library gives up on the way: `fill_ahead` finds out how far it goes.
        """
        self._blind = None
        num_valid, num_open, reason = self._look_ahead(draft_token_ids, lambda _: None)
        return (num_valid, num_open) if reason is None else None

    def finish_row(self, row: np.ndarray, words: np.ndarray) -> None:
        """Turn the library's mask into the request's: the end mark into stop tokens.

        Args:
            row: [ceil(vocab_size / 32)] int32, written.
            words: [num_mask_words] int32, with the end mark.
        """
        end_mark = self.vocabulary.end_mark
        row[:] = words[: row.shape[0]]
        if end_mark % 32:
            row[-1] &= (1 << (end_mark % 32)) - 1
        if words[end_mark // 32] >> (end_mark % 32) & 1:
            row[self._stop_words] |= self._stop_bits
        else:
            row[self._stop_words] &= ~self._stop_bits

    def close_row(self, row: np.ndarray) -> None:
        """Allow nothing but stop tokens: nothing else can be vouched for."""
        row[:] = 0
        if len(self._stop_words):
            row[self._stop_words] = self._stop_bits
        else:
            # A row without any token has no distribution to sample from.
            row[0] = 1

    def fail(self, reason: str) -> None:
        """Give up on this request: its rows are closed and no token is accepted."""
        self.failure = self.failure or reason

    def _fill_row(self, row: np.ndarray) -> None:
        words = None
        if self.failure is None and not self.is_terminated():
            words = self._compute_words()
        if words is None:
            self.close_row(row)
        else:
            self.finish_row(row, words)

    def _look_ahead(
        self, draft_token_ids: Sequence[int], visit: Callable[[int], None]
    ) -> tuple[int, int, str | None]:
        """Advance over the leading drafts that fit, and back.

        A library that gives up behind a draft does so for the draft, not for the
        request: the draft counts as one that does not fit.

        Args:
            visit: called behind each draft that text may follow, with its number.

        Returns:
            How many drafts fit, behind how many of them text may follow, and why the
            library gave up, or None.
        """
        if self.failure is not None:
            return 0, 0, None
        num_advanced = num_open = 0
        self._is_ahead = True
        for token_id in draft_token_ids:
            if self.is_terminated() or not self._advance(token_id):
                break
            num_advanced += 1
            if self.is_terminated():
                break
            visit(num_advanced)
            if self.failure is not None:
                break
            num_open = num_advanced
        self._is_ahead = False
        reason, self.failure = self.failure, None
        if reason is None:
            self.rollback(num_advanced)
            return num_advanced, num_open, None
        self._num_accepted -= num_advanced
        if num_advanced:
            del self._text_ids[-num_advanced:]
        self._restart_text()
        return num_open, num_open, reason

    def _advance(self, token_id: int) -> bool:
        if self.failure is not None or not 0 <= token_id < self.vocabulary.end_mark:
            return False
        if token_id in self._stop_token_ids:
            if not self._may_end():
                return False
            self._has_ended = True
        elif self._accept_text(token_id):
            self._text_ids.append(token_id)
        else:
            return False
        self._num_accepted += 1
        return True

    @abstractmethod
    def _accept_text(self, token_id: int) -> bool:
        """Advance over one token that is no stop token; False leaves the state."""

    @abstractmethod
    def _rollback_text(self, num_tokens: int) -> None:
        """Take back tokens accepted by `_accept_text`."""

    @abstractmethod
    def _restart_text(self) -> None:
        """Read `_text_ids` again, from the start, after the library gave up."""

    @abstractmethod
    def _may_end(self) -> bool:
        """Whether the text so far satisfies the grammar."""

    @abstractmethod
    def _is_closed(self) -> bool:
        """Whether the text satisfies the grammar and nothing can follow."""

    @abstractmethod
    def _compute_words(self) -> np.ndarray | None:
        """Return [num_mask_words] int32 with the end mark; None after `fail`."""


class CompiledGrammar(ABC):
    """A constraint, compiled once and shared by every request that states it.

    Args:
        num_bytes: memory that it holds, estimated.
    """

    num_bytes: int

    @property
    def is_spent(self) -> bool:
        """Whether a request has worn out what all share: compile it again."""
        return False

    @abstractmethod
    def create_grammar(
        self, stop_token_ids: Collection[int]
    ) -> StructuredOutputGrammar:
        """Return a matcher of its own for one request."""


# A grammar, the first of its rows in the bitmask, and the drafts to look ahead over.
FillJob = tuple[StructuredOutputGrammar, int, Sequence[int]]


class StructuredOutputBackend(ABC):
    """A library that compiles grammars over one vocabulary."""

    @abstractmethod
    def compile_grammar(self, spec: "GrammarSpec") -> CompiledGrammar:
        """Compile; called on a thread of its own.

        Raises:
            GrammarError: the library does not take the constraint.
        """

    def fill_bitmasks(self, jobs: Sequence[FillJob], bitmask: np.ndarray) -> list[int]:
        """Run `fill_ahead` for several requests; returns what it returns for each."""
        return [
            grammar.fill_ahead(bitmask[row : row + 1 + len(drafts)], drafts)
            for grammar, row, drafts in jobs
        ]


def num_mask_words(num_tokens: int) -> int:
    """32-bit words of a mask over `num_tokens` tokens."""
    return -(-num_tokens // 32)


def is_library_failure(error: BaseException) -> bool:
    """Whether a library failed, as opposed to the interpreter being stopped.

    A Rust panic arrives as a BaseException whose class cannot be imported.
    """
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def allows_only_end(words: np.ndarray, vocabulary: Vocabulary) -> bool:
    """Whether a mask [num_mask_words] int32 allows the end mark and nothing else."""
    word, bit = divmod(vocabulary.end_mark, 32)
    is_allowed = bool(words[word] >> bit & 1)
    return is_allowed and int(np.bitwise_count(words.view(np.uint32)).sum()) == 1
