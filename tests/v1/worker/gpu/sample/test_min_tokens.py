import pytest
import torch

from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.sample.min_tokens import (
    MinTokensState,
    _apply_min_tokens_torch,
    _apply_min_tokens_triton,
)

both = pytest.mark.parametrize(
    "impl", [_apply_min_tokens_torch, _apply_min_tokens_triton], ids=["torch", "triton"]
)


def _state(device: torch.device) -> MinTokensState:
    state = MinTokensState(2, device)
    params = SamplingParams(min_tokens=3, all_stop_token_ids=[0, 4])
    state.add_request(0, params, prompt_len=10)
    state.add_request(1, SamplingParams(all_stop_token_ids=[0]), prompt_len=10)
    state.apply_staged_writes()
    return state


@both
def test_stop_tokens_are_out_for_exactly_min_tokens_positions(impl, device):
    # Positions 10, 11 and 12 are the first three of the output: as four decode steps,
    # or as four rows of one verification step.
    state = _state(device)
    logits = torch.zeros(5, 6, device=device)
    rows = torch.tensor([0, 0, 0, 0, 1], dtype=torch.int32, device=device)
    positions = torch.tensor([10, 11, 12, 13, 10], device=device)
    impl(logits, rows, positions, state.stop_token_ids, state.min_stop_position.gpu)
    masked = [row.nonzero().flatten().tolist() for row in logits.isneginf()]
    assert masked == [[0, 4], [0, 4], [0, 4], [], []]


def test_a_request_without_stop_tokens_needs_no_mask(device):
    state = MinTokensState(1, device)
    state.add_request(0, SamplingParams(min_tokens=3), prompt_len=1)
    assert not state.is_used_np[0]
