import numpy as np
import pytest
import torch

from vllm.v1.worker.gpu import input_batch as ib
from vllm.v1.worker.gpu.batch_layout import BatchLayout, prefix_sum

gather = pytest.mark.parametrize(
    "impl", [ib._gather_inputs_torch, ib._gather_inputs_triton], ids=["torch", "triton"]
)
expand = pytest.mark.parametrize(
    "impl",
    [ib._expand_logit_rows_torch, ib._expand_logit_rows_triton],
    ids=["torch", "triton"],
)
update = pytest.mark.parametrize(
    "impl", [ib._post_update_torch, ib._post_update_triton], ids=["torch", "triton"]
)


def make_layout(num_tokens, num_rows, device) -> BatchLayout:
    cu = prefix_sum(np.array(num_rows, dtype=np.int32))
    drafts = np.maximum(np.array(num_rows, dtype=np.int32) - 1, 0)
    return BatchLayout(
        cu,
        torch.from_numpy(cu).to(device),
        torch.from_numpy(prefix_sum(np.array(num_tokens))).to(device),
        np.array(num_tokens, dtype=np.int32),
        drafts,
        1,
        int(drafts.sum()),
    )


def int32(values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


def make_states(device):
    """Return the arrays of eight request rows, each two tokens behind."""
    tokens = torch.randint(0, 100, (8, 40), dtype=torch.int32, device=device)
    num_computed = torch.randint(0, 20, (8,), dtype=torch.int32, device=device)
    drafts = torch.randint(0, 100, (8, 3), device=device)
    return tokens, num_computed + 2, drafts, num_computed


@gather
def test_tokens_continue_where_the_computed_ones_end(impl, device):
    tokens = torch.arange(4 * 10, dtype=torch.int32, device=device).view(4, 10)
    no_drafts = torch.empty(4, 0, dtype=torch.int64, device=device)
    input_ids, positions, seq_lens = impl(
        tokens, int32([10] * 4, device), no_drafts, int32([5, 0, 2, 7], device),
        int32([3, 2], device), int32([0, 1, 4], device), 4,
    )  # fmt: skip
    # Row 3 has 7 computed tokens and takes one, row 2 has 2 and takes three.
    assert input_ids.tolist() == [37, 22, 23, 24]
    assert positions.tolist() == [7, 2, 3, 4]
    assert seq_lens.tolist() == [8, 5]


@gather
def test_drafts_stand_behind_the_known_tokens(impl, device):
    tokens = torch.arange(2 * 10, dtype=torch.int32, device=device).view(2, 10)
    drafts = torch.tensor([[91, 92], [93, 94]], device=device)
    input_ids, positions, seq_lens = impl(
        tokens, int32([10, 6], device), drafts, int32([9, 5], device),
        int32([1, 0], device), int32([0, 3, 4], device), 4,
    )  # fmt: skip
    # Row 1 knows 6 tokens: its last one and two drafts. Row 0 has none scheduled.
    assert input_ids.tolist() == [15, 93, 94, 9]
    assert positions.tolist() == [5, 6, 7, 9]
    assert seq_lens.tolist() == [8, 10]


@expand
def test_logit_rows_are_the_last_tokens_of_sampling_requests(impl, device):
    layout = make_layout([3, 4, 1], [3, 0, 1], device)
    positions = torch.tensor([5, 6, 7, 0, 1, 2, 3, 9], device=device)
    indices, owners, local_pos, sample_positions = impl(
        layout, int32([4, 1, 2], device), positions
    )
    assert indices.tolist() == [0, 1, 2, 7]
    assert owners.tolist() == [4, 4, 4, 2]
    assert local_pos.tolist() == [0, 1, 2, 0]
    assert sample_positions.tolist() == [6, 7, 8, 10]


@pytest.mark.parametrize(
    ("num_tokens", "num_rows", "expected"),
    [
        ([3, 4, 1], [3, 0, 1], [0, 1, 2, 7]),
        ([5], [1], [4]),
        ([2, 1], [2, 1], [0, 1, 2]),
    ],
)
def test_a_batch_tells_which_token_rows_have_logits(
    num_tokens, num_rows, expected, device
):
    layout = make_layout(num_tokens, num_rows, device)
    rows_np = np.arange(len(num_tokens), dtype=np.int32)
    rows = torch.from_numpy(rows_np).to(device)
    batch = ib.InputBatch(
        list("abc")[: len(rows)], rows_np, rows, layout, 9, rows_np.tolist(),
        rows, rows,
        *ib.lay_out_rows(*make_states(device), rows, layout),
    )  # fmt: skip
    tokens = torch.arange(layout.num_tokens, device=device)
    assert batch.take_logit_rows(tokens).tolist() == expected


@update
def test_rejected_drafts_are_neither_known_nor_computed(impl, device):
    layout = make_layout([3, 4, 1], [3, 0, 1], device)
    tokens = torch.full((5, 8), -7, dtype=torch.int32, device=device)
    total_len = int32([0, 4, 6, 0, 3], device)
    num_computed = int32([0, 0, 5, 0, 2], device)
    sampled = torch.tensor([[11, 12, 99], [99, 99, 99], [13, 99, 99]], device=device)
    impl(
        sampled, int32([2, 0, 1], device), layout, int32([4, 1, 2], device),
        tokens, total_len, num_computed,
    )  # fmt: skip
    assert tokens[4].tolist() == [-7, -7, -7, 11, 12, -7, -7, -7]
    assert tokens[1].tolist() == [-7] * 8
    assert tokens[2].tolist() == [-7] * 6 + [13, -7]
    assert total_len.tolist() == [0, 4, 7, 0, 5]
    # Request 4: 3 tokens less 1 rejected; request 1: the whole chunk.
    assert num_computed.tolist() == [0, 4, 6, 0, 4]


@update
def test_a_sample_past_the_context_is_not_written(impl, device):
    layout = make_layout([1], [1], device)
    tokens = torch.zeros(2, 4, dtype=torch.int32, device=device)
    total_len, num_computed = int32([4, 0], device), int32([3, 0], device)
    impl(
        torch.tensor([[9]], device=device), int32([1], device), layout,
        int32([0], device), tokens, total_len, num_computed,
    )  # fmt: skip
    assert tokens.sum().item() == 0


@update
def test_a_row_without_a_token_to_choose_leaves_a_token(impl, device):
    """A drafter reads the rows before the request is known to have ended."""
    layout = make_layout([3], [3], device)
    tokens = torch.full((1, 8), 7, dtype=torch.int32, device=device)
    total_len, num_computed = int32([4], device), int32([3], device)
    impl(
        torch.tensor([[9, -1, -1]], device=device), int32([2], device), layout,
        int32([0], device), tokens, total_len, num_computed,
    )  # fmt: skip
    assert tokens[0].tolist() == [7, 7, 7, 7, 9, 0, 7, 7]


@pytest.mark.parametrize("num_reqs", [1, 5])
def test_kernels_match_their_twins(num_reqs, device):
    generator = np.random.default_rng(num_reqs)
    num_rows = generator.integers(0, 4, num_reqs)
    num_tokens = np.maximum(num_rows, 1) + (num_rows < 2) * generator.integers(
        0, 5, num_reqs
    )
    layout = make_layout(num_tokens, num_rows, device)
    rows = int32(generator.permutation(8)[:num_reqs], device)
    states = make_states(device)
    arguments = (*states, rows, layout.query_start_loc, layout.num_tokens)
    twin = ib._gather_inputs_torch(*arguments)
    expected = *twin, *ib._expand_logit_rows_torch(layout, rows, twin[1])
    triton = ib._gather_inputs_triton(*arguments)
    triton = *triton, *ib._expand_logit_rows_triton(layout, rows, triton[1])
    picked = ib.lay_out_rows(*states, rows, layout)
    for actual in triton, picked:
        for values, wanted in zip(actual, expected, strict=True):
            assert values.dtype == wanted.dtype
            assert torch.equal(values, wanted)
