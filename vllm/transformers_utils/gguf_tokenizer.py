"""A tokenizer from a GGUF file's metadata."""

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from vllm.exceptions import CheckpointError, UnsupportedError
from vllm.transformers_utils.gguf_file import GGUFFile
from vllm.transformers_utils.tokenizer import (
    TokenizerSettings,
    set_special_tokens_around,
)

# Values of tokenizer.ggml.token_type.
_NORMAL = 1
_UNKNOWN = 2
_CONTROL = 3
_USER_DEFINED = 4

# How a text is cut before pairs are merged; the names are those of
# tokenizer.ggml.pre. A cut by several patterns is one by the first, then each piece by
# the next.
_GPT2_CUT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_LLAMA3_CUT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_CUT = _LLAMA3_CUT.replace(r"\p{N}{1,3}", r"\p{N}")
_CUTS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais"), (_GPT2_CUT,)),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell"),
        (r"\p{N}", _GPT2_CUT),
    ),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3"), (_LLAMA3_CUT,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), (_QWEN2_CUT,)),
    "default": (
        r"[\p{P}\$\+<=>\^~\|]+",
        _GPT2_CUT,
        r"\p{N}+",
        r"[0-9][0-9][0-9]",
    ),
}
_NFC_CUTS = {"qwen2", "deepseek-r1-qwen"}
# A piece that is a token as a whole is not built from merges.
_WHOLE_PIECE_CUTS = {"llama3", "llama-v3", "llama-bpe", "falcon3"}
_BOS_CUTS = {"llama3", "llama-v3", "llama-bpe", "falcon3"}


def read_gguf_tokenizer(path: str) -> tuple[tokenizers.Tokenizer, TokenizerSettings]:
    """Build the tokenizer that a GGUF file describes.

    Raises:
        CheckpointError: the file is damaged or holds no tokenizer.
        UnsupportedError: the tokenizer's kind is not supported.
    """
    file = GGUFFile(path)
    kind = file.get("tokenizer.ggml.model")
    tokens = file.get("tokenizer.ggml.tokens")
    if kind is None or not tokens:
        raise CheckpointError(f"{path}: holds no tokenizer; give one with --tokenizer")
    if kind == "gpt2":
        backend = _build_byte_level(file, tokens)
        adds_bos = str(file.get("tokenizer.ggml.pre", "default")) in _BOS_CUTS
    elif kind == "llama":
        backend = _build_sentencepiece(file, tokens)
        adds_bos = True
    else:
        raise UnsupportedError(
            f"{path}: tokenizer model {kind!r:.80} is not supported, only gpt2 "
            "and llama"
        )
    _add_tokens(backend, file, tokens)
    bos = _token(file, tokens, "bos")
    eos = _token(file, tokens, "eos")
    set_special_tokens_around(
        backend,
        bos if file.get("tokenizer.ggml.add_bos_token", adds_bos) else None,
        eos if file.get("tokenizer.ggml.add_eos_token", False) else None,
    )
    return backend, TokenizerSettings(
        bos_token=bos,
        eos_token=eos,
        chat_template=file.get("tokenizer.chat_template"),
    )


def _token(file: GGUFFile, tokens: list[str], name: str) -> str | None:
    token_id = file.get(f"tokenizer.ggml.{name}_token_id")
    if token_id is None:
        return None
    if not 0 <= token_id < len(tokens):
        raise CheckpointError(
            f"{file.path}: tokenizer.ggml.{name}_token_id {token_id} is not in the "
            f"vocabulary of {len(tokens)}"
        )
    return tokens[token_id]


def _build_byte_level(file: GGUFFile, tokens: list[str]) -> tokenizers.Tokenizer:
    cut = str(file.get("tokenizer.ggml.pre", "default"))
    if cut not in _CUTS:
        raise UnsupportedError(
            f"{file.path}: pre-tokenizer {cut!r:.80} is not supported, only "
            f"{', '.join(_CUTS)}; give a tokenizer.json with --tokenizer"
        )
    merges = [
        tuple(merge.split(" ")) for merge in file.get("tokenizer.ggml.merges", ())
    ]
    backend = tokenizers.Tokenizer(
        _build_bpe(file, tokens, merges, ignore_merges=cut in _WHOLE_PIECE_CUTS)
    )
    if cut in _NFC_CUTS:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(part), "isolated") for part in _CUTS[cut]),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def _build_sentencepiece(file: GGUFFile, tokens: list[str]) -> tokenizers.Tokenizer:
    scores = file.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise CheckpointError(
            f"{file.path}: tokenizer.ggml.scores must have one score a token"
        )
    has_prefix = bool(file.get("tokenizer.ggml.add_space_prefix", True))
    unknown = _token(file, tokens, "unknown")
    backend = tokenizers.Tokenizer(
        _build_bpe(
            file,
            tokens,
            _merges_of_scores(tokens, scores),
            byte_fallback=True,
            fuse_unk=True,
            **({"unk_token": unknown} if unknown is not None else {}),
        )
    )
    prefix = [normalizers.Prepend("▁")] if has_prefix else []
    backend.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if has_prefix:
        parts.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(parts)
    return backend


def _build_bpe(
    file: GGUFFile, tokens: list[str], merges: list[tuple[str, str]], **options: object
) -> models.BPE:
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    try:
        return models.BPE(vocab=vocab, merges=merges, **options)
    # The library raises plain Exception for a merge outside the vocabulary.
    except Exception as error:
        raise CheckpointError(
            f"{file.path}: the tokenizer is damaged: {error}"
        ) from None


def _merges_of_scores(tokens: list[str], scores: list[float]) -> list[tuple[str, str]]:
    """Return the merges that make the pieces in the order of their scores.

    SentencePiece merges the neighbours whose union scores best; as ranked merges that
    is every way to cut a piece in two pieces, the best union first.
    """
    vocab = set(tokens)
    ranked = sorted(range(len(tokens)), key=lambda i: -scores[i])
    merges = []
    for token_id in ranked:
        token = tokens[token_id]
        cuts = ((token[:end], token[end:]) for end in range(1, len(token)))
        merges += [cut for cut in cuts if cut[0] in vocab and cut[1] in vocab]
    return merges


def _add_tokens(
    backend: tokenizers.Tokenizer, file: GGUFFile, tokens: list[str]
) -> None:
    """Mark the tokens that are found in a text as a whole, before anything else."""
    types = file.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise CheckpointError(
            f"{file.path}: tokenizer.ggml.token_type must have one type a token"
        )
    backend.add_tokens(
        [
            AddedToken(token, normalized=False, special=kind != _USER_DEFINED)
            for token, kind in zip(tokens, types, strict=True)
            if token and kind in {_UNKNOWN, _CONTROL, _USER_DEFINED}
        ]
    )
