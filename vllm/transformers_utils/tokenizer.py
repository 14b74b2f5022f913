"""Text to token ids and back, on the `tokenizers` library alone.

Importing transformers costs seconds, so the files that it writes are read here.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import tokenizers
from tokenizers.processors import TemplateProcessing

from vllm.exceptions import CheckpointError, VLLMValidationError
from vllm.transformers_utils.byte_alphabet import CHAR_TO_BYTE

# Classes that add these tokens by their configuration, whatever tokenizer.json says.
_LLAMA_CLASSES = {"LlamaTokenizer", "LlamaTokenizerFast"}
_SPACE_MARK = "▁"


@dataclass(frozen=True)
class TokenizerSettings:
    """What a model says about its tokenizer beside the vocabulary.

    Args:
        chat_template: Jinja source; None if the model has none.
        special_tokens: texts that are special whatever the vocabulary says of them.
    """

    bos_token: str | None = None
    eos_token: str | None = None
    chat_template: str | None = None
    special_tokens: tuple[str, ...] = ()


class Tokenizer:
    """A model's tokenizer.

    Args:
        backend: does the work; shared, never changed after this.
        settings: what the vocabulary does not say.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, settings: TokenizerSettings
    ) -> None:
        self.backend = backend
        self.bos_token = settings.bos_token
        self.eos_token = settings.eos_token
        self.bos_token_id = self._known_id(settings.bos_token)
        self.eos_token_id = self._known_id(settings.eos_token)
        self.chat_template = settings.chat_template
        self._added_tokens = backend.get_added_tokens_decoder()
        named = {self._known_id(token) for token in settings.special_tokens}
        named |= {self.bos_token_id, self.eos_token_id}
        marked = {i for i, token in self._added_tokens.items() if token.special}
        self.all_special_ids = frozenset(marked | {i for i in named if i is not None})
        self._is_byte_level = "ByteLevel" in _component_types(backend.decoder)

    @classmethod
    def from_path(cls, path: str) -> "Tokenizer":
        """Read a model's tokenizer.

        Args:
            path: a directory with a tokenizer.json, that file, or a .gguf file.

        Raises:
            CheckpointError: there is no tokenizer, or it is damaged.
            UnsupportedError: its kind is not supported.
        """
        if os.path.isdir(path):
            return _from_directory(path)
        if path.endswith(".json"):
            return _from_directory(os.path.dirname(path) or ".", os.path.basename(path))
        from vllm.transformers_utils.gguf_tokenizer import read_gguf_tokenizer

        return cls(*read_gguf_tokenizer(path))

    @cached_property
    def vocab_size(self) -> int:
        """How many tokens there are, added ones included."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @cached_property
    def max_token_id(self) -> int:
        """The largest id that stands for a token; ids may have holes below it."""
        vocab = self.backend.get_vocab(with_added_tokens=True)
        return max(vocab.values(), default=-1)

    @cached_property
    def max_token_chars(self) -> int:
        """The length of the longest token in the vocabulary's own spelling."""
        vocab = self.backend.get_vocab(with_added_tokens=True)
        return max(map(len, vocab), default=0)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`.

        Args:
            add_special_tokens: put what the model expects around a text, such as BOS.

        Raises:
            VLLMValidationError: the text holds half of a surrogate pair.
        """
        try:
            return self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        except (TypeError, UnicodeEncodeError):
            raise VLLMValidationError(
                "the text holds an unpaired surrogate, which no token stands for",
                parameter="prompt",
            ) from None

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids; incomplete UTF-8 becomes U+FFFD."""
        return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def id_to_token(self, token_id: int) -> str | None:
        """Return the token in the vocabulary's own spelling; None if there is none."""
        return self.backend.id_to_token(token_id)

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a token in the vocabulary's own spelling."""
        return self.backend.token_to_id(token)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token stands for in a text; b"" for no token.

        They may be a part of a character. A special token stands for its own spelling.
        """
        if token_id in self._added_tokens:
            return self._added_tokens[token_id].content.encode()
        token = self.backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._is_byte_level:
            return _byte_level_bytes(token)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes.fromhex(token[3:5])
        return token.replace(_SPACE_MARK, " ").encode()

    def to_json(self) -> str:
        """Return the whole tokenizer as the text of a tokenizer.json."""
        return self.backend.to_str()

    def _known_id(self, token: str | None) -> int | None:
        return None if token is None else self.backend.token_to_id(token)


def _byte_level_bytes(token: str) -> bytes:
    try:
        return bytes(CHAR_TO_BYTE[char] for char in token)
    except KeyError:
        return token.encode()


def _component_types(component: Any) -> set[str]:
    """Return the type names inside a decoder, whose Python object hides them."""
    if component is None:
        return set()
    state = json.loads(component.__getstate__())
    return {part["type"] for part in [state, *state.get("decoders", ())]}


def _from_directory(folder: str, name: str = "tokenizer.json") -> Tokenizer:
    path = os.path.join(folder, name)
    if not os.path.isfile(path):
        raise CheckpointError(
            f"{folder}: there is no {name}; convert the tokenizer to that form, or "
            "give one with --tokenizer"
        )
    try:
        backend = tokenizers.Tokenizer.from_file(path)
    # The library raises plain Exception, whatever is wrong with the file.
    except Exception as error:
        raise CheckpointError(f"{path}: is not a tokenizer: {error}") from None
    # Left by training; a prompt is cut and padded by the engine alone.
    backend.no_truncation()
    backend.no_padding()
    config = _read_optional_json(folder, "tokenizer_config.json")
    special = _read_optional_json(folder, "special_tokens_map.json")
    settings = _read_settings(folder, config, special)
    if config.get("tokenizer_class") in _LLAMA_CLASSES:
        _add_special_by_config(backend, config, settings)
    return Tokenizer(backend, settings)


def _read_settings(
    folder: str, config: dict[str, Any], special: dict[str, Any]
) -> TokenizerSettings:
    merged = special | {name: value for name, value in config.items() if value}
    names = [name for name in merged if name.endswith("_token")]
    tokens = {name: _token_text(merged[name]) for name in names}
    return TokenizerSettings(
        bos_token=tokens.get("bos_token"),
        eos_token=tokens.get("eos_token"),
        chat_template=_read_chat_template(folder, config.get("chat_template")),
        special_tokens=tuple(token for token in tokens.values() if token),
    )


def _read_chat_template(folder: str, of_config: Any) -> str | None:
    path = os.path.join(folder, "chat_template.jinja")
    if os.path.isfile(path):
        try:
            with open(path, encoding="utf-8") as file:
                return file.read()
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{path}: cannot be read: {error}") from None
    if isinstance(of_config, str):
        return of_config
    if isinstance(of_config, list):
        # Several templates with names.
        named = {
            entry.get("name"): entry.get("template")
            for entry in of_config
            if isinstance(entry, dict)
        }
        return named.get("default")
    return None


def _token_text(value: Any) -> str | None:
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _add_special_by_config(
    backend: tokenizers.Tokenizer, config: dict[str, Any], settings: TokenizerSettings
) -> None:
    """Put BOS and EOS around a text where the configuration speaks of it."""
    if "add_bos_token" not in config and "add_eos_token" not in config:
        return
    bos = settings.bos_token if config.get("add_bos_token") else None
    eos = settings.eos_token if config.get("add_eos_token") else None
    set_special_tokens_around(backend, bos, eos)


def set_special_tokens_around(
    backend: tokenizers.Tokenizer, bos: str | None, eos: str | None
) -> None:
    """Make `backend` put these tokens around every text that it encodes."""
    pieces = [token for token in dict.fromkeys((bos, eos)) if token]
    backend.post_processor = TemplateProcessing(
        single=[*([bos] if bos else []), "$A", *([eos] if eos else [])],
        special_tokens=[(token, backend.token_to_id(token)) for token in pieces],
    )


def _read_optional_json(folder: str, name: str) -> dict[str, Any]:
    path = os.path.join(folder, name)
    if not os.path.isfile(path):
        return {}
    try:
        with open(path, encoding="utf-8") as file:
            value = json.load(file)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: must hold a JSON object")
    return value
