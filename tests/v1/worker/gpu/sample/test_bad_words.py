import pytest
import torch

from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.sample.bad_words import (
    BadWordsState,
    _apply_bad_words_torch,
    _apply_bad_words_triton,
)

both = pytest.mark.parametrize(
    "impl", [_apply_bad_words_torch, _apply_bad_words_triton], ids=["torch", "triton"]
)
VOCAB_SIZE = 8


def _masked(
    impl, requests, rows, device, local_pos=None, input_ids=None, first=0
) -> list[list[int]]:
    """Return the masked tokens of each row; a request is (words, prompt, output)."""
    state = BadWordsState(len(requests), device)
    all_token_ids = torch.full((len(requests), 16), 7, dtype=torch.int32, device=device)
    for i, (words, prompt, output) in enumerate(requests):
        state.add_request(i, SamplingParams(bad_words_token_ids=words), len(prompt))
        tokens = torch.tensor(prompt + output, dtype=torch.int32)
        all_token_ids[i, : len(tokens)] = tokens.to(device)
    state.apply_staged_writes()
    local_pos = local_pos or [0] * len(rows)
    positions = [
        len(requests[row][1]) + len(requests[row][2]) + local
        for row, local in zip(rows, local_pos, strict=True)
    ]
    logits = torch.zeros(len(rows), VOCAB_SIZE, device=device)
    impl(
        logits,
        torch.tensor(rows, dtype=torch.int32, device=device),
        torch.tensor(local_pos, dtype=torch.int32, device=device),
        torch.tensor(positions, device=device),
        torch.tensor(input_ids or [0] * len(rows), device=device),
        all_token_ids,
        state,
        first,
    )
    return [row.nonzero().flatten().tolist() for row in logits.isneginf()]


@both
def test_a_word_of_one_token_is_always_out(impl, device):
    requests = [([[3], [5]], [1], []), ([], [1], []), ([[2]], [1], [2])]
    assert _masked(impl, requests, [0, 1, 2, 0], device) == [[3, 5], [], [2], [3, 5]]


@both
def test_the_last_token_is_out_where_the_output_ends_with_the_rest(impl, device):
    words = [[1, 2, 3], [2, 4], [6, 2, 5], [1]]
    requests = [(words, [0], [1, 2]), (words, [0], [6, 6, 2]), (words, [0], [2, 0])]
    assert _masked(impl, requests, [0, 1, 2], device) == [[1, 3, 4], [1, 4, 5], [1]]


@both
def test_the_prompt_is_not_matched(impl, device):
    requests = [([[1, 2, 3], [2, 4]], [0, 1, 2], []), ([[1, 2, 3]], [0, 1], [2])]
    assert _masked(impl, requests, [0, 1], device) == [[], []]


@both
def test_a_row_sees_the_drafts_before_it(impl, device):
    # Rows of one step; the token read at local position j > 0 is draft j.
    words = [[1, 2, 3], [2, 3, 4], [5, 6]]
    requests = [(words, [0], [1])]
    masked = _masked(
        impl, requests, [0] * 4, device, local_pos=[0, 1, 2, 3], input_ids=[1, 2, 3, 5]
    )
    assert masked == [[], [3], [4], [6]]


@both
def test_a_chunk_sees_the_drafts_that_stand_before_it(impl, device):
    requests = [([[1, 2, 3], [2, 3, 4], [5, 6]], [0], [1])]
    chunk = {"local_pos": [2, 3], "input_ids": [1, 2, 3, 5], "first": 2}
    assert _masked(impl, requests, [0] * 2, device, **chunk) == [[4], [6]]


@both
def test_requests_with_different_words_do_not_mix(impl, device):
    requests = [([[1, 2]], [0], [1]), ([[1, 3], [0, 1, 4]], [0], [0, 1])]
    assert _masked(impl, requests, [1, 0, 1], device) == [[3, 4], [2], [3, 4]]


def test_a_row_that_is_given_away_forgets_its_words(device):
    state = BadWordsState(1, device)
    params = SamplingParams(bad_words_token_ids=[[1, 2]])
    state.add_request(0, params, 1)
    state.remove_request(0)
    state.add_request(0, SamplingParams(), 1)
    state.apply_staged_writes()
    assert not state.is_used_np[0]
    assert state.words.lengths.np[0] == 0
