import pytest

from vllm.exceptions import VLLMValidationError
from vllm.v1.engine.text_length import MAX_CHARS_BEYOND_CONTEXT, check_text_length

CONTEXT = 64


def is_refused(text: str, tokenizer, **options) -> bool:
    try:
        check_text_length(text, tokenizer, CONTEXT, parameter="prompt", **options)
    except VLLMValidationError:
        return True
    return False


def test_a_text_that_may_fit_is_let_through(tokenizer):
    longest = CONTEXT * tokenizer.max_token_chars
    assert not is_refused("a" * longest, tokenizer)


def test_a_text_that_cannot_fit_is_refused(tokenizer):
    longest = CONTEXT * tokenizer.max_token_chars
    assert is_refused("a" * (4 * longest + 1), tokenizer)


@pytest.mark.parametrize("num_more", [0, 1])
def test_a_text_that_need_not_fit_has_a_limit_too(tokenizer, num_more):
    text = "a" * (MAX_CHARS_BEYOND_CONTEXT + num_more)
    assert is_refused(text, tokenizer, need_not_fit=True) == bool(num_more)


def test_the_longest_token_is_that_of_the_vocabulary(tokenizer):
    vocab = tokenizer.backend.get_vocab()
    assert tokenizer.max_token_chars == max(len(token) for token in vocab)
