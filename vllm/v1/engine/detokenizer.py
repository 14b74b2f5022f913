"""Tokens to text, as they come: no half characters, and nothing after a stop string."""

from abc import ABC, abstractmethod

from tokenizers import decoders

from vllm.sampling_params import SamplingParams
from vllm.transformers_utils.tokenizer import Tokenizer
from vllm.v1.engine.token_texts import TokenTable, make_utf8_decoder

REPLACEMENT = "\ufffd"
# Prompt tokens that a tokenizer with context needs to place the first blank.
NUM_PRIMING_TOKENS = 5
# Bytes that never become a character are given up after so many tokens.
MAX_WINDOW_TOKENS = 64


class TokenDecoder(ABC):
    """Turns a growing list of tokens into text; a piece, once given, never changes."""

    @abstractmethod
    def decode(self, token_id: int) -> str:
        """Return the text that is certain after one more token."""

    @abstractmethod
    def flush(self) -> str:
        """Return what is left at the end, incomplete characters replaced."""


class ByteLevelDecoder(TokenDecoder):
    """For tokenizers whose tokens are plain bytes: the text is their UTF-8 reading."""

    def __init__(self, token_table: TokenTable, skipped_ids: frozenset[int]) -> None:
        self._token_table = token_table
        self._skipped_ids = skipped_ids
        self._utf8 = make_utf8_decoder("replace")

    def decode(self, token_id: int) -> str:
        if token_id in self._skipped_ids:
            return ""
        return self._utf8.decode(self._token_table.get_bytes(token_id))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class WindowDecoder(TokenDecoder):
    """For any tokenizer: decode the last few tokens with and without the new one.

    Args:
        skipped_ids: tokens that have no text.
        raw_ids: special tokens to join as they are written, without the blanks that
            some tokenizers put between them.
        prompt_token_ids: its end gives the first token its context.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        skipped_ids: frozenset[int],
        raw_ids: frozenset[int],
        prompt_token_ids: list[int],
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped_ids = skipped_ids
        self._raw_ids = raw_ids
        self._token_ids = [
            token_id
            for token_id in prompt_token_ids[-NUM_PRIMING_TOKENS:]
            if token_id not in self._skipped_ids
        ]
        self._read_text = self._text()

    def decode(self, token_id: int) -> str:
        if token_id in self._skipped_ids:
            return ""
        if token_id in self._raw_ids:
            return self._decode_raw(token_id)
        self._token_ids.append(token_id)
        text = self._text()
        is_incomplete = (
            text.endswith(REPLACEMENT) and len(self._token_ids) < MAX_WINDOW_TOKENS
        )
        if is_incomplete or len(text) <= len(self._read_text):
            return ""
        piece = text[len(self._read_text) :]
        # The last tokens stay as context: they decide about the next one's blank.
        self._token_ids = self._token_ids[-NUM_PRIMING_TOKENS:]
        self._read_text = self._text()
        return piece

    def flush(self) -> str:
        text = self._text()
        piece = text[len(self._read_text) :]
        self._read_text = text
        return piece

    def _decode_raw(self, token_id: int) -> str:
        piece = self.flush() + (self._tokenizer.id_to_token(token_id) or "")
        self._token_ids.append(token_id)
        self._read_text = self._text()
        return piece

    def _text(self) -> str:
        return self._tokenizer.decode(self._token_ids, skip_special_tokens=False)


class StopStringChecker:
    """Finds the first stop string in a text that grows."""

    def __init__(self, stop: list[str], include_in_output: bool) -> None:
        self._stop = stop
        self._include_in_output = include_in_output

    def find(self, text: str, num_old_chars: int) -> tuple[str, int] | None:
        """Look for a stop string that ends behind the first `num_old_chars`.

        Returns:
            The stop string that begins earliest, and the length of the text to keep.
        """
        found: tuple[int, str] | None = None
        for stop in self._stop:
            start = text.find(stop, max(0, num_old_chars - len(stop) + 1))
            if start >= 0 and (found is None or start < found[0]):
                found = start, stop
        if found is None:
            return None
        start, stop = found
        return stop, start + (len(stop) if self._include_in_output else 0)

    def num_held_chars(self, text: str) -> int:
        """Return how long an end of `text` may yet become a stop string."""
        if self._include_in_output:
            return 0
        held = 0
        for stop in self._stop:
            for length in range(min(len(stop) - 1, len(text)), held, -1):
                if text.endswith(stop[:length]):
                    held = length
                    break
        return held


class IncrementalDetokenizer:
    """The text of one sequence, and where a stop string ends it.

    A stop token's text is left out unless `include_stop_str_in_output` is set; its id
    is kept in any case.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        token_table: TokenTable,
        params: SamplingParams,
        prompt_token_ids: list[int],
    ) -> None:
        assert isinstance(params.stop, list)
        self.token_ids: list[int] = []
        self.text = ""
        self._decoder = (
            make_token_decoder(tokenizer, token_table, params, prompt_token_ids)
            if params.detokenize
            else None
        )
        self._min_tokens = params.min_tokens
        self._stop = params.stop
        self._include_stop = params.include_stop_str_in_output
        self._checker = StopStringChecker(self._stop, self._include_stop)
        self._num_emitted_chars = 0
        self._is_finished = False

    def update(self, new_token_ids: list[int], is_stop_token_last: bool) -> str | None:
        """Append tokens, up to the one that completes a stop string.

        Args:
            is_stop_token_last: the last of the tokens is a stop token.

        Returns:
            The stop string that ended the sequence, or None. `token_ids` tells how many
            of the tokens were kept.
        """
        if self._decoder is None:
            self.token_ids += new_token_ids
            return None
        num_tokens = len(new_token_ids)
        for place, token_id in enumerate(new_token_ids, 1):
            self.token_ids.append(token_id)
            if is_stop_token_last and place == num_tokens and not self._include_stop:
                continue
            piece = self._decoder.decode(token_id)
            stop = self._append(piece) if piece else None
            if stop is not None:
                self._is_finished = True
                return stop
        return None

    def finish(self) -> str | None:
        """Complete the text; return the stop string if the last piece completes one."""
        if self._decoder is None or self._is_finished:
            return None
        self._is_finished = True
        piece = self._decoder.flush()
        return self._append(piece) if piece else None

    def take_text(self, is_finished: bool, is_delta: bool) -> str:
        """Return the text that may be shown: all of it, or what was not shown yet."""
        end = len(self.text)
        if self._stop and not is_finished:
            end -= self._checker.num_held_chars(self.text)
        if not is_delta:
            return self.text if end == len(self.text) else self.text[:end]
        start = self._num_emitted_chars
        if end <= start:
            return ""
        self._num_emitted_chars = end
        return self.text[start:end]

    def _append(self, piece: str) -> str | None:
        num_old_chars = len(self.text)
        self.text += piece
        if not self._stop or len(self.token_ids) <= self._min_tokens:
            return None
        found = self._checker.find(self.text, num_old_chars)
        if found is None:
            return None
        stop, num_kept_chars = found
        self.text = self.text[:num_kept_chars]
        return stop


def make_token_decoder(
    tokenizer: Tokenizer,
    token_table: TokenTable,
    params: SamplingParams,
    prompt_token_ids: list[int],
) -> TokenDecoder:
    """Return the simplest decoder that is right for the tokenizer."""
    special_ids = tokenizer.all_special_ids
    skipped_ids = special_ids if params.skip_special_tokens else frozenset()
    if isinstance(tokenizer.backend.decoder, decoders.ByteLevel):
        return ByteLevelDecoder(token_table, skipped_ids)
    raw_ids = frozenset() if params.spaces_between_special_tokens else special_ids
    return WindowDecoder(tokenizer, skipped_ids, raw_ids, prompt_token_ids)
