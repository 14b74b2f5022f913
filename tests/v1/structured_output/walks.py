"""Engines of grammars over the embedded model's vocabulary, and walks under masks."""

import random
import threading
from collections.abc import Callable, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np

from vllm.config import StructuredOutputsConfig
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.transformers_utils.model_files import resolve_model_path
from vllm.transformers_utils.tokenizer import Tokenizer
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_types import (
    StructuredOutputBackend,
    StructuredOutputGrammar,
    Vocabulary,
)
from vllm.v1.structured_output.grammar_spec import resolve_spec

# Of the embedded model; 16 more than its tokenizer has, as if padded.
VOCAB_SIZE = 49_168
EOS = 2


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_path(resolve_model_path(None))


@cache
def vocabulary() -> Vocabulary:
    return Vocabulary.from_tokenizer(tokenizer(), VOCAB_SIZE)


@cache
def backend(name: str) -> StructuredOutputBackend:
    if name == "xgrammar":
        from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend

        return XgrammarBackend(vocabulary())
    from vllm.v1.structured_output.backend_llguidance import GuidanceBackend

    return GuidanceBackend(vocabulary())


def make_grammar(
    backend_name: str = "guidance",
    stop_token_ids: Sequence[int] = (EOS,),
    **params: Any,
) -> StructuredOutputGrammar:
    """Compile one constraint on one backend, with every check on the way."""
    spec = resolve_spec(
        StructuredOutputsParams(**params), StructuredOutputsConfig(backend=backend_name)
    )
    compiled = backend(backend_name).compile_grammar(spec)
    return compiled.create_grammar(stop_token_ids)


def make_manager(
    backend_name: str = "auto",
    vocab_size: int = VOCAB_SIZE,
    load_tokenizer: Callable[[], Tokenizer] = tokenizer,
) -> StructuredOutputManager:
    vllm_config: Any = SimpleNamespace(
        structured_outputs_config=StructuredOutputsConfig(backend_name),
        model_config=SimpleNamespace(vocab_size=vocab_size),
    )
    return StructuredOutputManager(vllm_config, load_tokenizer)


def make_request(
    stop_token_ids: Sequence[int] = (EOS,), req_id: str = "r", **params: Any
) -> Any:
    sampling_params = SamplingParams(
        structured_outputs=StructuredOutputsParams(**params) if params else None
    )
    sampling_params.all_stop_token_ids = list(stop_token_ids)
    return SimpleNamespace(
        request_id=req_id,
        sampling_params=sampling_params,
        structured_output_request=None,
    )


def compile_request(manager: StructuredOutputManager, request: Any) -> Any:
    """Wait for the manager to compile; returns the request's grammar state."""
    done = threading.Event()
    manager.grammar_init(request, done.set)
    assert done.wait(60), "the grammar was never answered"
    return request.structured_output_request


def allowed_ids(row: np.ndarray) -> list[int]:
    """Token ids of the set bits of one mask row."""
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")
    return np.nonzero(bits)[0].tolist()


def next_ids(grammar: StructuredOutputGrammar) -> list[int]:
    bitmask = np.empty((1, -(-VOCAB_SIZE // 32)), dtype=np.int32)
    grammar.fill_bitmask(bitmask, 0)
    return allowed_ids(bitmask[0])


def encode(text: str) -> list[int]:
    return tokenizer().encode(text, add_special_tokens=False)


def accepts(grammar: StructuredOutputGrammar, text: str) -> bool:
    """Whether a text fits from the start and may end there."""
    grammar.reset()
    ids = encode(text)
    fits = len(grammar.validate_tokens(ids)) == len(ids)
    fits = fits and grammar.accept_tokens(ids) and grammar.is_accepting()
    grammar.reset()
    return fits


def random_walk(
    grammar: StructuredOutputGrammar, rng: random.Random, max_tokens: int = 250
) -> tuple[str, bool]:
    """Draw tokens that the mask allows, leaning to the end.

    Returns:
        The text, and whether it is complete.
    """
    grammar.reset()
    tokens: list[bytes] = []
    texts = vocabulary().tokens
    for _ in range(max_tokens):
        if grammar.is_terminated():
            break
        choices = next_ids(grammar)
        assert choices, "a mask without any token"
        closing = [i for i in choices if i == EOS or texts[i] in (b'"', b"}", b"]")]
        short = [i for i in choices if len(texts[i]) == 1]
        pools = [pool for pool in (closing, short, choices) if pool]
        token_id = rng.choice(rng.choice(pools))
        assert grammar.accept_tokens([token_id]), f"refused {texts[token_id]!r}"
        if token_id != EOS:
            tokens.append(texts[token_id])
    complete = grammar.is_terminated()
    grammar.reset()
    return b"".join(tokens).decode(errors="replace"), complete
