"""Start-up runs every path of the step, whatever the configuration has room for."""

import pytest

from tests.v1.e2e.tiny_engine import TinyEngine
from vllm.sampling_params import SamplingParams

NGRAM = {"method": "ngram", "num_speculative_tokens": 5}


@pytest.mark.parametrize("max_model_len", [1, 2, 4, 5, 9, 128])
@pytest.mark.parametrize("speculative_config", [None, NGRAM], ids=["plain", "ngram"])
def test_any_context_can_be_warmed_up(model, max_model_len, speculative_config):
    engine = TinyEngine(
        model, max_model_len=max_model_len, speculative_config=speculative_config
    )
    runner = engine.executor.worker.model_runner
    assert runner.req_states.num_reqs == 0
    engine.shutdown()


def test_one_row_can_be_warmed_up(model):
    engine = TinyEngine(model, max_num_seqs=1, speculative_config=NGRAM)
    [output] = engine.run([("hello", SamplingParams(max_tokens=3, ignore_eos=True))])
    assert len(output.outputs[0].token_ids) == 3
    engine.shutdown()
