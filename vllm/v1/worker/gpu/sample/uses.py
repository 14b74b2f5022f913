"""Which parts of sampling a request needs, as bits that are joined over a step."""


class Uses:
    """One bit a part; plain integers, because a step asks for each of them."""

    LOGIT_BIAS = 1 << 0
    ALLOWED_TOKEN_IDS = 1 << 1
    MIN_TOKENS = 1 << 2
    PENALTIES = 1 << 3
    BAD_WORDS = 1 << 4
    # Logits are divided by it: it is neither 0 nor 1.
    TEMPERATURE = 1 << 5
    MIN_P = 1 << 6
    TOP_K_TOP_P = 1 << 7
    # The token is drawn, not the likeliest.
    NOISE = 1 << 8
    LOGPROBS = 1 << 9
    # Of more tokens than the output layer lists, or of tokens that the request named.
    LOGPROBS_OF_WHOLE_ROWS = 1 << 10
