import pytest
import torch

from vllm import _custom_ops as ops
from vllm.v1.worker.gpu.states import RequestState


def test_a_row_is_reused_only_after_its_request_has_left(device):
    states = RequestState(2, 8, 0, device)
    first = states.add_request("a", 2, [1, 2], 0)
    second = states.add_request("b", 1, [3], 0)
    assert {first, second} == {0, 1}
    assert states.remove_request("a") == first
    assert states.add_request("c", 1, [4], 0) == first


def test_removing_an_unknown_request_does_nothing(device):
    states = RequestState(1, 8, 0, device)
    assert states.remove_request("never") is None
    assert states.add_request("a", 1, [1], 0) == 0


def test_a_resumed_request_fills_its_row_with_all_known_tokens(device):
    states = RequestState(2, 8, 0, device)
    row = states.add_request("a", 2, [1, 2, 30, 40], 1)
    states.apply_staged_writes()
    assert states.all_token_ids.gpu[row, :4].tolist() == [1, 2, 30, 40]
    assert states.total_len.gpu[row].item() == 4
    assert states.num_computed_tokens.gpu[row].item() == 1
    assert (states.prompt_len.np[row], states.prefill_len.np[row]) == (2, 4)


@pytest.mark.parametrize("is_compiled", [True, False])
def test_a_proposal_is_kept_in_the_rows_of_its_requests(
    is_compiled, device, monkeypatch
):
    if not is_compiled:
        monkeypatch.setattr(ops, "maybe_step_ops", lambda: None)
    states = RequestState(4, 8, 2, device)
    drafts = torch.tensor([[5, 6], [7, -1]], device=device)
    states.keep_drafts(torch.tensor([3, 1], dtype=torch.int32, device=device), drafts)
    assert states.draft_tokens.tolist() == [[0, 0], [7, -1], [0, 0], [5, 6]]


def test_more_requests_than_rows_is_a_bug_that_is_told(device):
    states = RequestState(1, 8, 0, device)
    states.add_request("a", 1, [1], 0)
    with pytest.raises(AssertionError, match="more requests than rows"):
        states.add_request("b", 1, [1], 0)
