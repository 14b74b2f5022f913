from dataclasses import fields

import pytest
import torch

from vllm.v1.worker.gpu.spec_decode.draft_model import inputs

both = pytest.mark.parametrize(
    "impl",
    [inputs._gather_committed_inputs_torch, inputs._gather_committed_inputs_triton],
    ids=["torch", "triton"],
)


def int32(values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


def gather(impl, device, total_len, first, query_start_loc, max_len=100):
    tokens = torch.arange(3 * 20, dtype=torch.int32, device=device).view(3, 20)
    blocks = int32([[5, 6, 7, 8, 9], [1, 2, 3, 4, 0]], device)
    return impl(
        tokens,
        int32(total_len, device),
        int32([2, 0], device),
        torch.tensor(first, device=device),
        int32(query_start_loc, device),
        blocks,
        4,
        max_len,
        query_start_loc[-1],
    )


@both
def test_rejected_drafts_leave_places_that_nothing_is_written_to(impl, device):
    # Row 2 knows 8 tokens of its 4 places from 5; row 0 knows all of its own.
    got = gather(impl, device, [3, 0, 8], [5, 1], [0, 4, 6])
    assert got.input_ids.tolist() == [45, 46, 47, 0, 1, 2]
    assert got.positions.tolist() == [5, 6, 7, 0, 1, 2]
    assert got.slot_mapping.tolist() == [25, 26, 27, -1, 5, 6]
    assert got.seq_lens.tolist() == [9, 3]
    assert got.last_token_idx.tolist() == [2, 5]


@both
def test_the_last_token_of_a_chunk_is_the_chunks_own(impl, device):
    got = gather(impl, device, [18, 0, 19], [4, 0], [0, 3, 5])
    assert got.last_token_idx.tolist() == [2, 4]
    assert got.input_ids.tolist() == [44, 45, 46, 0, 1]


@both
def test_tokens_beyond_the_drafters_context_are_not_written(impl, device):
    got = gather(impl, device, [3, 0, 8], [5, 1], [0, 3, 5], max_len=6)
    assert got.slot_mapping.tolist() == [25, -1, -1, 5, 6]
    assert got.last_token_idx.tolist() == [0, 4]


drafts_by_both = pytest.mark.parametrize(
    "impl",
    [inputs._gather_draft_inputs_torch, inputs._gather_draft_inputs_triton],
    ids=["torch", "triton"],
)


@drafts_by_both
def test_a_draft_stands_behind_the_last_one(impl, device):
    got = impl(
        torch.tensor([70, 71], device=device),
        torch.tensor([6, 9], device=device),
        int32([[5, 6, 7], [1, 2, 3]], device),
        4,
        9,
    )
    assert got.input_ids.tolist() == [70, 71]
    assert got.positions.tolist() == [6, 0]
    assert got.slot_mapping.tolist() == [26, -1]
    assert got.seq_lens.tolist() == [7, 1]
    assert got.last_token_idx.tolist() == [0, 1]


@pytest.mark.parametrize("num_reqs", [1, 63, 64, 129])
def test_the_kernel_lays_out_drafts_as_its_twin_does(num_reqs, device):
    generator = torch.Generator().manual_seed(num_reqs)

    def draw(high, *shape):
        return torch.randint(0, high, shape, generator=generator).to(device)

    args = (draw(1000, num_reqs), draw(24, num_reqs))
    args += (draw(500, num_reqs, 5).to(torch.int32), 4, 20)
    expected = inputs._gather_draft_inputs_torch(*args)
    got = inputs._gather_draft_inputs_triton(*args)
    for field in fields(inputs.DraftInputs):
        assert torch.equal(getattr(got, field.name), getattr(expected, field.name))


@pytest.mark.parametrize("query_len", [1, 255, 256, 513])
def test_the_kernel_lays_out_known_tokens_as_its_twin_does(query_len, device):
    generator = torch.Generator().manual_seed(query_len)

    def draw(high, *shape):
        return torch.randint(0, high, shape, generator=generator).to(device)

    args = (
        draw(1000, 4, 600).to(torch.int32),
        int32([0, 2, query_len + 3, 9], device),
        int32([2, 3, 1], device),
        torch.tensor([6, 3, 0], device=device),
        int32([0, query_len, query_len + 4, query_len + 5], device),
        draw(500, 3, 150).to(torch.int32),
        4,
        300,
        query_len + 5,
    )
    expected = inputs._gather_committed_inputs_torch(*args)
    got = inputs._gather_committed_inputs_triton(*args)
    for field in fields(inputs.DraftInputs):
        assert torch.equal(getattr(got, field.name), getattr(expected, field.name))
