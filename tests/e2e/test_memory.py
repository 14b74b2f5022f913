"""What a busy server takes of the machine's memory."""

import random
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path

import pytest

import vllm
from tests.e2e.conftest import MODEL, start_server, stop_server
from tests.markers import needs_cpu_ops

BENCHMARKS = Path(vllm.__file__).parent.parent / "benchmarks"
NUM_REQS, PROMPT_LEN, OUTPUT_LEN = 32, 224, 32
MOST_BYTES = 2**30


# Else the weights are in float32, four times as large.
@needs_cpu_ops
def test_32_requests_to_the_embedded_pair_fit_in_a_gigabyte(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    peak_memory_mib = import_module("peer_engines").peak_memory_mib
    draw = random.Random(1)
    prompts = [draw.choices(range(1000, 20000), k=PROMPT_LEN) for _ in range(NUM_REQS)]
    server = start_server()
    client = server.client

    def count_tokens(prompt: list[int]) -> int:
        answer = client.completions.create(
            model=MODEL,
            prompt=prompt,
            max_tokens=OUTPUT_LEN,
            extra_body={"ignore_eos": True},
        )
        return answer.usage.completion_tokens if answer.usage else 0

    with ThreadPoolExecutor(NUM_REQS) as pool:
        lengths = list(pool.map(count_tokens, prompts))
    num_bytes = peak_memory_mib(server.process.pid) * 2**20
    stop_server(server)
    assert lengths == [OUTPUT_LEN] * NUM_REQS
    assert num_bytes < MOST_BYTES
