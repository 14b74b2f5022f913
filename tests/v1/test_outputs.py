"""Log-probabilities on their way to the host: whose rows are whose."""

import numpy as np
import pytest
import torch

from vllm.v1.outputs import LogprobsTensors


def make_tensors(**boundaries) -> LogprobsTensors:
    """Return five rows of three ids, all different."""
    return LogprobsTensors(
        torch.arange(15, dtype=torch.int32).view(5, 3),
        -torch.arange(15, dtype=torch.float32).view(5, 3),
        torch.arange(5, dtype=torch.int32),
        **boundaries,
    )


def test_logprobs_tensors_tolists_with_tensor_boundaries():
    boundaries = torch.tensor([0, 2, 3, 5], dtype=torch.int32)
    tensors = make_tensors(cu_num_generated_tokens_tensor=boundaries)
    lists = tensors.to_cpu_nonblocking().tolists()
    assert lists.cu_num_generated_tokens == [0, 2, 3, 5]
    # The last request owns two rows, and keeps one.
    mine = lists.slice_request(2, 1)
    assert mine.logprob_token_ids.tolist() == [[9, 10, 11]]
    assert mine.logprobs.tolist() == [[-9.0, -10.0, -11.0]]
    assert mine.sampled_token_ranks.tolist() == [3]
    # What the caller knows wins.
    assert tensors.tolists([0, 5]).cu_num_generated_tokens == [0, 5]


def test_host_boundaries_are_taken_as_they_are():
    lists = make_tensors(cu_num_generated_tokens=[0, 4, 5]).tolists()
    assert lists.cu_num_generated_tokens == [0, 4, 5]
    assert make_tensors().tolists().cu_num_generated_tokens is None
    assert make_tensors().tolists([0, 2, 5]).cu_num_generated_tokens == [0, 2, 5]


def test_the_five_fields_stand_in_their_order():
    assert LogprobsTensors._fields == (
        "logprob_token_ids",
        "logprobs",
        "selected_token_ranks",
        "cu_num_generated_tokens",
        "cu_num_generated_tokens_tensor",
    )
    token_ids, logprobs, ranks, *_ = make_tensors()
    assert token_ids.shape == logprobs.shape == (5, 3)
    assert ranks.shape == (5,)


@pytest.mark.parametrize(
    "boundaries",
    [
        {"cu_num_generated_tokens": [0, 5]},
        {"cu_num_generated_tokens_tensor": torch.tensor([0, 5])},
    ],
    ids=["host", "device"],
)
def test_rows_with_boundaries_are_not_filtered(boundaries):
    with pytest.raises(AssertionError, match="boundaries"):
        make_tensors(**boundaries).filter(torch.ones(5, dtype=torch.bool))


def test_filtered_rows_keep_their_scores():
    kept = make_tensors().filter(torch.tensor([True, False, False, False, True]))
    assert kept.selected_token_ranks.tolist() == [0, 4]
    assert kept.logprob_token_ids.tolist() == [[0, 1, 2], [12, 13, 14]]


def test_joined_rows_have_the_boundaries_that_are_given():
    joined = LogprobsTensors.cat([make_tensors(), make_tensors()], [0, 3, 10])
    assert joined.logprobs.shape == (10, 3)
    assert joined.tolists().cu_num_generated_tokens == [0, 3, 10]


def test_one_block_keeps_its_boundaries_unless_new_ones_come():
    device = torch.tensor([0, 5], dtype=torch.int32)
    block = make_tensors(cu_num_generated_tokens_tensor=device)
    assert LogprobsTensors.cat([block]).cu_num_generated_tokens_tensor is device
    joined = LogprobsTensors.cat([block], [0, 5])
    assert joined.cu_num_generated_tokens_tensor is None
    assert joined.cu_num_generated_tokens == [0, 5]


@pytest.mark.parametrize(
    ("boundaries", "new"),
    [
        ({"cu_num_generated_tokens_tensor": torch.tensor([0, 5])}, None),
        ({"cu_num_generated_tokens_tensor": torch.tensor([0, 5])}, [0, 10]),
        ({"cu_num_generated_tokens": [0, 5]}, None),
    ],
)
def test_boundaries_of_several_blocks_are_not_joined(boundaries, new):
    with pytest.raises(AssertionError, match="boundaries"):
        LogprobsTensors.cat([make_tensors(**boundaries), make_tensors()], new)


def test_rows_of_a_request_without_boundaries_are_one_each():
    mine = make_tensors().tolists().slice_request(3, 1)
    np.testing.assert_array_equal(mine.logprob_token_ids, [[9, 10, 11]])
