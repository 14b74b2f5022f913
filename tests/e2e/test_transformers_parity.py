"""The engine's greedy text is that of transformers on the same float32 weights."""

from collections.abc import Iterator

import pytest

from tests.model_executor.hf_reference import llama_from_gguf, reference_logits
from vllm import LLM, SamplingParams

NUM_TOKENS = 64
SENTENCE = "The old bridge over the river had been closed since the winter flood. "
PROMPTS = [
    "Hello",
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def quicksort(values):\n",
    "1, 1, 2, 3, 5, 8, 13,",
    "<|im_start|>user\nWhat is photosynthesis?<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nGive me a haiku.<|im_end|>\n<|im_start|>assistant\n",
    "La révolution française a commencé en",
    "Ingredients:\n- 2 eggs\n- flour\n",
    '{"name": "Ada", "born":',
    "Dear Sir or Madam,\n\nI am writing to",
    "Question: How many legs does a spider have?\nAnswer:",
    "The mitochondria is",
    "SELECT name FROM users WHERE",
    "A list of five animals:\n1.",
    SENTENCE,
    SENTENCE * 3 + "People said",
    SENTENCE * 6 + "In the end",
    SENTENCE * 12 + "When spring came",
    SENTENCE * 24 + "Nobody knew",
]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    # Chunks smaller than the long prompts, and all prompts in one batch.
    engine = LLM(quantization="none", max_model_len=1024, max_num_batched_tokens=128)
    yield engine
    engine.llm_engine.shutdown()


@pytest.mark.slow
def test_greedy_text_of_twenty_prompts_equals_transformers(
    llm: LLM, embedded_model: str
):
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    reference = llama_from_gguf(embedded_model)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        prompt_ids, token_ids = output.prompt_token_ids, output.outputs[0].token_ids
        assert len(token_ids) == NUM_TOKENS
        # If each token is the most likely one after those before it, greedy decoding
        # gives the same text: one forward pass shows all of them.
        logits = reference_logits(reference, prompt_ids + token_ids)
        expected = logits[len(prompt_ids) - 1 : -1].argmax(dim=-1).tolist()
        assert token_ids == expected, prompt
