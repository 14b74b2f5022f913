"""Which texts are too long to tokenize: a million tokens take seconds."""

from vllm.exceptions import VLLMValidationError
from vllm.transformers_utils.tokenizer import Tokenizer

# A normalizer may join characters: the longest Unicode composition joins four.
_CHARS_PER_NORMALIZED_CHAR = 4
# Characters of a text that need not fit the model's context, for it is cut or counted.
MAX_CHARS_BEYOND_CONTEXT = 1024 * 1024


def check_text_length(
    text: str,
    tokenizer: Tokenizer,
    max_model_len: int,
    *,
    parameter: str,
    need_not_fit: bool = False,
) -> None:
    """Refuse a text that cannot fit the context, however well it is tokenized.

    Args:
        parameter: the request field that holds the text.
        need_not_fit: the prompt is cut to its last tokens, or only counted.

    Raises:
        VLLMValidationError: the text is too long.
    """
    if len(text) <= max_model_len:
        return
    limit = max_model_len * tokenizer.max_token_chars * _CHARS_PER_NORMALIZED_CHAR
    if need_not_fit:
        limit = max(limit, MAX_CHARS_BEYOND_CONTEXT)
    if len(text) > limit:
        raise VLLMValidationError(
            f"the text has {len(text)} characters, more than the {limit} that are "
            f"tokenized for a context of {max_model_len} tokens; shorten it",
            parameter=parameter,
            value=len(text),
        )
