"""SmolLM2 from its GGUF file, against transformers on the same float32 weights."""

import pytest
import torch

from tests.model_executor.harness import Session, load
from tests.model_executor.hf_reference import (
    llama_from_gguf,
    reference_logits,
)
from vllm.transformers_utils.tokenizer import Tokenizer

PROMPTS = [
    "The capital of France is",
    "<|im_start|>user\nName three primes.<|im_end|>\n<|im_start|>assistant\n",
    "def fibonacci(n):\n    " + "# a comment that makes the prompt longer\n    " * 8,
]


@pytest.fixture(scope="module")
def tokenizer(embedded_model):
    return Tokenizer.from_path(embedded_model)


@pytest.fixture(scope="module")
def model(embedded_model):
    return load(embedded_model)


@pytest.fixture(scope="module")
def reference(embedded_model):
    return llama_from_gguf(embedded_model)


@pytest.mark.slow
@pytest.mark.parametrize("prompt", PROMPTS, ids=["short", "chat", "long"])
def test_logits_equal_transformers(prompt, model, reference, tokenizer):
    token_ids = tokenizer.encode(prompt)
    actual = Session(model).logits(token_ids)
    # Thirty layers of float32 sums in another order, at logits of size 30.
    torch.testing.assert_close(
        actual, reference_logits(reference, token_ids), rtol=1e-3, atol=2e-3
    )


@pytest.mark.slow
@pytest.mark.parametrize("prompt", PROMPTS, ids=["short", "chat", "long"])
def test_greedy_text_equals_transformers(prompt, model, reference, tokenizer):
    token_ids = tokenizer.encode(prompt)
    actual = Session(model).greedy(token_ids, 24)
    # Each token is the most likely one after those before it.
    logits = reference_logits(reference, token_ids + actual)
    assert actual == logits[len(token_ids) - 1 : -1].argmax(dim=-1).tolist()
