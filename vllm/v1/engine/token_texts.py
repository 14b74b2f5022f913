"""The text of single tokens, which may be less than a character."""

from codecs import IncrementalDecoder, getincrementaldecoder
from collections.abc import Callable

from vllm.transformers_utils.tokenizer import Tokenizer

make_utf8_decoder: Callable[[str], IncrementalDecoder] = getincrementaldecoder("utf-8")


class TokenTable:
    """Bytes and texts of the tokens that were seen, for all requests of an engine."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._bytes: dict[int, bytes] = {}
        self._whole_texts: dict[int, str | None] = {}

    def get_bytes(self, token_id: int) -> bytes:
        """Return the bytes that the token stands for."""
        token_bytes = self._bytes.get(token_id)
        if token_bytes is None:
            token_bytes = self._tokenizer.token_bytes(token_id)
            self._bytes[token_id] = token_bytes
        return token_bytes

    def get_whole_text(self, token_id: int) -> str | None:
        """Return the token's text, or None if it is not made of whole characters."""
        if token_id in self._whole_texts:
            return self._whole_texts[token_id]
        text: str | None
        try:
            text = self.get_bytes(token_id).decode()
        except UnicodeDecodeError:
            text = None
        self._whole_texts[token_id] = text
        return text


class TokenTexts:
    """The text of each token of a sequence, read behind the tokens before it.

    A token that ends inside a character has the text before that character, and the
    token that completes it has the whole character, so that the texts of a sequence
    join to its text.
    """

    def __init__(self, table: TokenTable) -> None:
        self._table = table
        # The beginning of a character that the next token may complete.
        self._pending = b""

    def advance(self, token_id: int) -> None:
        """Make `token_id` part of the text before the next position."""
        if self._pending or self._table.get_whole_text(token_id) is None:
            self._pending = self._decode(token_id)[1]

    def get(self, token_id: int) -> str:
        """Return the text of `token_id` at the current position."""
        if not self._pending:
            text = self._table.get_whole_text(token_id)
            if text is not None:
                return text
        return self._decode(token_id)[0]

    def _decode(self, token_id: int) -> tuple[str, bytes]:
        decoder = make_utf8_decoder("replace")
        text = decoder.decode(self._pending + self._table.get_bytes(token_id))
        return text, decoder.getstate()[0]
