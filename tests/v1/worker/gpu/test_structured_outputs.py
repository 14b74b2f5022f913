import numpy as np
import pytest
import torch

from vllm.v1.core.sched.output import GrammarOutput
from vllm.v1.worker.gpu.batch_layout import BatchLayout, prefix_sum
from vllm.v1.worker.gpu.structured_outputs import (
    StructuredOutputsWorker,
    _apply_grammar_bitmask_torch,
    _apply_grammar_bitmask_triton,
    _build_grammar_mapping,
)

both = pytest.mark.parametrize(
    "impl",
    [_apply_grammar_bitmask_torch, _apply_grammar_bitmask_triton],
    ids=["torch", "triton"],
)


def make_layout(
    drafts: list[int], admitted: list[int], device: torch.device
) -> BatchLayout:
    """Every request samples; `admitted` of its drafts are verified."""
    verified = torch.from_numpy(prefix_sum(np.array(admitted) + 1)).to(device)
    return BatchLayout(
        cu_num_logits_np=prefix_sum(np.array(drafts) + 1),
        cu_num_logits=verified,
        query_start_loc=verified,
        num_scheduled_tokens_np=np.array(drafts, dtype=np.int32) + 1,
        num_draft_tokens_per_req=np.array(drafts, dtype=np.int32),
        num_bonus_tokens=1,
        draft_budget=sum(admitted),
    )


def bits(*token_ids: int, num_words: int = 1) -> list[int]:
    words = np.zeros(num_words, dtype=np.uint32)
    for token_id in token_ids:
        words[token_id // 32] |= np.uint32(1 << (token_id % 32))
    return words.view(np.int32).tolist()


def allowed(logits: torch.Tensor) -> list[list[int]]:
    return [torch.nonzero(torch.isfinite(row)).flatten().tolist() for row in logits]


def test_without_drafts_a_request_owns_its_host_rows():
    mapping = _build_grammar_mapping(
        ["a", "chunk", "b"],
        ["b", "a", "chunk"],
        np.array([0, 1, 1, 2], dtype=np.int32),
        None,
        num_bonus_tokens=1,
        mask_stride=1,
    )
    assert mapping == [2, 0]


def test_mapping_follows_the_order_of_the_masks():
    mapping = _build_grammar_mapping(
        ["a", "b"],
        ["b", "a"],
        np.array([0, 2, 5], dtype=np.int32),
        np.array([1, 2], dtype=np.int32),
        num_bonus_tokens=1,
        mask_stride=4,
    )
    assert mapping == [4, 5, 6, 0, 1]


@both
def test_a_mask_reaches_only_its_row(impl, device):
    logits = torch.zeros(3, 5, device=device)
    bitmask = torch.tensor([bits(0, 4)], dtype=torch.int32, device=device)
    mapping = torch.tensor([1], dtype=torch.int32, device=device)
    cu_num_logits = torch.tensor([0, 1, 2, 3], dtype=torch.int32, device=device)
    impl(logits, bitmask, mapping, cu_num_logits, 1)
    assert allowed(logits) == [[0, 1, 2, 3, 4], [0, 4], [0, 1, 2, 3, 4]]


@both
def test_a_position_past_the_verified_rows_touches_nothing(impl, device):
    # Request 0 has 2 scheduled drafts, none of them verified; row 1 is request 1's.
    logits = torch.zeros(2, 4, device=device)
    bitmask = torch.tensor(
        [bits(1), bits(2), bits(3)], dtype=torch.int32, device=device
    )
    mapping = torch.tensor([0, 1, 2], dtype=torch.int32, device=device)
    cu_num_logits = torch.tensor([0, 1, 2], dtype=torch.int32, device=device)
    impl(logits, bitmask, mapping, cu_num_logits, 3)
    assert allowed(logits) == [[1], [0, 1, 2, 3]]


@both
def test_a_chunk_is_reached_by_the_masks_of_its_own_rows(impl, device):
    logits = torch.zeros(2, 5, device=device)
    bitmask = torch.tensor(
        [bits(0), bits(1), bits(2), bits(3)], dtype=torch.int32, device=device
    )
    mapping = torch.arange(4, dtype=torch.int32, device=device)
    cu_num_logits = torch.tensor([0, 2, 4], dtype=torch.int32, device=device)
    impl(logits, bitmask, mapping, cu_num_logits, 2, 1)
    assert allowed(logits) == [[1], [2]]


@both
def test_the_last_token_of_a_word_has_a_bit_of_its_own(impl, device):
    logits = torch.zeros(1, 64, device=device)
    bitmask = torch.tensor(
        [bits(31, 63, num_words=2)], dtype=torch.int32, device=device
    )
    mapping = torch.zeros(1, dtype=torch.int32, device=device)
    cu_num_logits = torch.tensor([0, 1], dtype=torch.int32, device=device)
    impl(logits, bitmask, mapping, cu_num_logits, 1)
    assert allowed(logits) == [[31, 63]]


@pytest.mark.parametrize("vocab_size", [1, 31, 33, 8193])
@pytest.mark.parametrize("admitted", [[0, 0, 0], [2, 0, 1], [2, 2, 2]])
def test_kernel_matches_reference(vocab_size, admitted, device):
    torch.manual_seed(0)
    num_words = -(-vocab_size // 32)
    bitmask = torch.randint(
        -(2**31), 2**31 - 1, (9, num_words), dtype=torch.int32, device=device
    )
    mapping = torch.arange(9, dtype=torch.int32, device=device)
    cu_num_logits = make_layout([2, 2, 2], admitted, device).cu_num_logits
    logits = torch.randn(sum(admitted) + 3, vocab_size, device=device)
    expected, actual = logits.clone(), logits.clone()
    _apply_grammar_bitmask_torch(expected, bitmask, mapping, cu_num_logits, 3)
    _apply_grammar_bitmask_triton(actual, bitmask, mapping, cu_num_logits, 3)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("admitted", "expected"),
    [
        ([0, 0, 0], [[0, 1, 2, 3, 4, 5, 6, 7], [0], [3]]),
        ([1, 0, 1], [[0, 1, 2, 3, 4, 5, 6, 7]] * 2 + [[0], [3], [4]]),
        ([2, 2, 1], [[0, 1, 2, 3, 4, 5, 6, 7]] * 3 + [[0], [1], [2], [3], [4]]),
    ],
    ids=["none", "some", "all"],
)
def test_masks_land_on_their_rows_in_every_budget_regime(admitted, expected, device):
    worker = StructuredOutputsWorker(16, 8, device, mask_stride=4, num_bonus_tokens=1)
    layout = make_layout([2, 2, 1], admitted, device)
    masks = np.array([bits(i) for i in range(5)], dtype=np.int32)
    logits = torch.zeros(sum(admitted) + 3, 8, device=device)
    worker.apply_grammar_bitmask(
        logits, layout, ["plain", "b", "c"], GrammarOutput(["b", "c"], masks)
    )
    assert allowed(logits) == expected


def test_a_missing_mask_is_an_error_and_not_a_free_row(device):
    worker = StructuredOutputsWorker(16, 8, device, mask_stride=4, num_bonus_tokens=1)
    layout = make_layout([2], [0], device)
    masks = np.zeros((1, 1), dtype=np.int32)
    with pytest.raises(AssertionError, match="1 grammar masks for 3 scheduled rows"):
        worker.apply_grammar_bitmask(
            torch.zeros(1, 8, device=device), layout, ["a"], GrammarOutput(["a"], masks)
        )
