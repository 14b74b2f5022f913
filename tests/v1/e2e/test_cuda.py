"""The whole engine on a GPU: the text of the CPU, and no hidden wait for the device."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.v1.e2e.tiny_engine import TinyEngine
from vllm.sampling_params import SamplingParams

pytestmark = pytest.mark.gpu

# No profiling run: the pool is as small as the model.
ON_GPU = {"device": "cuda", "num_gpu_blocks_override": 200, "max_num_seqs": 8}
PROMPTS = ["hello", "the same words stand at the start", "a" * 60]


@pytest.fixture
def engine(model: Path) -> Iterator[TinyEngine]:
    running = TinyEngine(model, **ON_GPU)
    yield running
    running.shutdown()


@pytest.fixture
def no_hidden_waits() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def greedy(prompt: str) -> tuple[str, SamplingParams]:
    return prompt, SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


def texts(engine: TinyEngine, requests: list[tuple[str, SamplingParams]]) -> list[str]:
    return [output.outputs[0].text for output in engine.run(requests)]


def test_greedy_text_equals_the_cpus(model: Path, engine: TinyEngine):
    on_cpu = TinyEngine(model)
    requests = [greedy(prompt) for prompt in PROMPTS]
    assert texts(engine, requests) == texts(on_cpu, requests)
    on_cpu.shutdown()


def test_a_seed_draws_the_tokens_that_it_draws_on_a_cpu(
    model: Path, engine: TinyEngine
):
    params = SamplingParams(temperature=0.8, top_p=0.9, seed=3, max_tokens=24)
    requests = [(prompt, params) for prompt in PROMPTS]
    on_cpu = TinyEngine(model)
    assert texts(engine, requests) == texts(on_cpu, requests)
    on_cpu.shutdown()


@pytest.mark.usefixtures("no_hidden_waits")
def test_a_step_waits_for_the_device_in_one_place(engine: TinyEngine):
    effects = SamplingParams(
        temperature=0.8,
        top_k=20,
        min_p=0.01,
        logprobs=3,
        prompt_logprobs=1,
        presence_penalty=0.5,
        repetition_penalty=1.1,
        logit_bias={5: 1.0},
        bad_words=["he"],
        min_tokens=4,
        max_tokens=12,
    )
    outputs = engine.run([greedy(PROMPTS[0]), (PROMPTS[1], effects)])
    assert all(output.finished for output in outputs)
