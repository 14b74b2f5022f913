import pytest
import torch

from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.sample.allowed_token_ids import (
    AllowedTokenIdsState,
    _apply_allowed_token_ids_torch,
    _apply_allowed_token_ids_triton,
    apply_allowed_token_ids,
)

every = pytest.mark.parametrize(
    "impl",
    [
        _apply_allowed_token_ids_torch,
        _apply_allowed_token_ids_triton,
        apply_allowed_token_ids,
    ],
    ids=["torch", "triton", "public"],
)


@every
@pytest.mark.parametrize("vocab_size", [31, 32, 33, 1025])
def test_only_listed_tokens_stay_and_rows_without_a_list_keep_all(
    impl, vocab_size, device
):
    state = AllowedTokenIdsState(3, vocab_size, device)
    allowed = [0, 7, 30, vocab_size - 1]
    state.add_request(0, SamplingParams(allowed_token_ids=allowed))
    state.add_request(1, SamplingParams())
    state.add_request(2, SamplingParams(allowed_token_ids=[5]))
    state.apply_staged_writes()
    logits = torch.ones(3, vocab_size, device=device)
    rows = torch.tensor([2, 1, 0], dtype=torch.int32, device=device)
    impl(logits, rows, state.is_used.gpu, state.bitmask)
    kept = [row.nonzero().flatten().tolist() for row in ~torch.isneginf(logits)]
    assert kept == [[5], list(range(vocab_size)), sorted(set(allowed))]


def test_a_row_that_is_given_away_forgets_its_list(device):
    state = AllowedTokenIdsState(1, 8, device)
    state.add_request(0, SamplingParams(allowed_token_ids=[1]))
    state.remove_request(0)
    state.add_request(0, SamplingParams())
    state.apply_staged_writes()
    logits = torch.zeros(1, 8, device=device)
    rows = torch.zeros(1, dtype=torch.int32, device=device)
    apply_allowed_token_ids(logits, rows, state.is_used.gpu, state.bitmask)
    assert not logits.isneginf().any()
