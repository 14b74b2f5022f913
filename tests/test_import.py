import statistics
import subprocess
import sys

import pytest

import vllm


def test_importing_the_package_takes_under_half_a_second():
    code = (
        "import sys, time; start = time.perf_counter(); import vllm;"
        "print(time.perf_counter() - start, 'torch' in sys.modules)"
    )
    seconds = []
    for _ in range(3):
        out = subprocess.run(
            [sys.executable, "-c", code], check=True, capture_output=True, text=True
        ).stdout.split()
        assert out[1] == "False"
        seconds.append(float(out[0]))
    assert statistics.median(seconds) < 0.5


@pytest.mark.parametrize("name", vllm.__all__)
def test_every_public_name_resolves(name):
    assert getattr(vllm, name) is not None


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'LMM'"):
        _ = vllm.LMM


def test_the_serving_process_needs_no_torch():
    # Its import would hold up the start of the engine's process by more than a second.
    code = (
        "import sys; from vllm import platforms;"
        "from vllm.engine.arg_utils import AsyncEngineArgs;"
        "import vllm.entrypoints.openai.api_server, vllm.entrypoints.openai.app;"
        "import vllm.entrypoints.openai.http_protocol, vllm.v1.engine.async_llm;"
        "platforms._has_cuda_driver = lambda: False;"
        "AsyncEngineArgs().create_engine_config();"
        "print('torch' in sys.modules)"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    )
    assert out.stdout.split()[-1] == "False"
