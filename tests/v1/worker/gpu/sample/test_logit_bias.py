import pytest
import torch

from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.sample.logit_bias import (
    LogitBiasState,
    _apply_logit_bias_torch,
    _apply_logit_bias_triton,
)

both = pytest.mark.parametrize(
    "impl", [_apply_logit_bias_torch, _apply_logit_bias_triton], ids=["torch", "triton"]
)


@both
def test_adds_each_requests_biases_to_its_rows(impl, device):
    state = LogitBiasState(3, device)
    state.add_request(0, SamplingParams(logit_bias={1: 2.0, 3: -100.0}))
    state.add_request(1, SamplingParams())
    state.add_request(2, SamplingParams(logit_bias={0: 0.5}))
    state.apply_staged_writes()
    logits = torch.ones(4, 4, device=device)
    rows = torch.tensor([2, 1, 0, 2], dtype=torch.int32, device=device)
    impl(logits, rows, state.biases)
    assert logits.tolist() == [
        [1.5, 1, 1, 1],
        [1, 1, 1, 1],
        [1, 3, 1, -99],
        [1.5, 1, 1, 1],
    ]


@both
def test_a_list_longer_than_a_block_is_added_whole(impl, device):
    state = LogitBiasState(1, device)
    state.add_request(0, SamplingParams(logit_bias={2 * i: 1.0 for i in range(600)}))
    state.apply_staged_writes()
    logits = torch.zeros(1, 1200, device=device)
    impl(logits, torch.zeros(1, dtype=torch.int32, device=device), state.biases)
    assert logits[0, ::2].sum() == 600
    assert logits[0, 1::2].sum() == 0


def test_a_row_that_is_given_away_forgets_its_biases(device):
    state = LogitBiasState(1, device)
    state.add_request(0, SamplingParams(logit_bias={1: 2.0}))
    state.apply_staged_writes()
    state.remove_request(0)
    state.add_request(0, SamplingParams())
    state.apply_staged_writes()
    logits = torch.zeros(1, 4, device=device)
    rows = torch.zeros(1, dtype=torch.int32, device=device)
    _apply_logit_bias_torch(logits, rows, state.biases)
    assert not state.is_used_np[0]
    assert logits.count_nonzero() == 0
