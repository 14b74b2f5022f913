import pytest
import torch

from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.sample.penalties import (
    PenaltiesState,
    _apply_penalties_torch,
    _apply_penalties_triton,
    _count_sampled_tokens_torch,
    _count_sampled_tokens_triton,
)

both = pytest.mark.parametrize(
    "impl", [_apply_penalties_torch, _apply_penalties_triton], ids=["torch", "triton"]
)
both_counts = pytest.mark.parametrize(
    "count",
    [_count_sampled_tokens_torch, _count_sampled_tokens_triton],
    ids=["torch", "triton"],
)
VOCAB_SIZE = 6


def _state(params: list[SamplingParams], prompts, outputs, device) -> PenaltiesState:
    state = PenaltiesState(len(params), VOCAB_SIZE, device)
    for i, (param, prompt, output) in enumerate(
        zip(params, prompts, outputs, strict=True)
    ):
        state.add_request(i, param, prompt, prompt + output)
    state.apply_staged_writes()
    return state


def _apply(impl, state, logits, rows, device, local_pos=None, input_ids=None):
    logits = torch.tensor(logits, device=device)
    local_pos = local_pos or [0] * len(rows)
    impl(
        logits,
        torch.tensor(rows, dtype=torch.int32, device=device),
        torch.tensor(local_pos, dtype=torch.int32, device=device),
        torch.tensor(input_ids or [0] * len(rows), device=device),
        max(local_pos),
        state,
    )
    return logits.tolist()


@both
def test_frequency_counts_the_output_and_not_the_prompt(impl, device):
    params = [SamplingParams(frequency_penalty=0.5)]
    state = _state(params, [[1, 1, 2]], [[2, 3, 3]], device)
    logits = _apply(impl, state, [[1.0] * 6], [0], device)
    assert logits == [[1, 1, 0.5, 0, 1, 1]]


@both
def test_presence_subtracts_once(impl, device):
    params = [SamplingParams(presence_penalty=-0.25)]
    state = _state(params, [[1]], [[3, 3, 4]], device)
    logits = _apply(impl, state, [[1.0] * 6], [0], device)
    assert logits == [[1, 1, 1, 1.25, 1.25, 1]]


@both
def test_repetition_divides_positive_and_multiplies_negative_logits(impl, device):
    params = [SamplingParams(repetition_penalty=2.0)]
    state = _state(params, [[0, 1, 1]], [[4, 4, 5]], device)
    logits = _apply(impl, state, [[1.0, -1.0, 3.0, -3.0, 5.0, 0.0]], [0], device)
    assert logits == [[0.5, -2, 3, -3, 2.5, 0]]


@both
def test_repetition_comes_before_the_other_two(impl, device):
    params = [
        SamplingParams(
            repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=0.25
        )
    ]
    state = _state(params, [[0]], [[1, 1]], device)
    logits = _apply(impl, state, [[4.0] * 6], [0], device)
    assert logits == [[2, 2 - 1 - 0.25, 4, 4, 4, 4]]


@both
def test_rows_without_penalties_are_unchanged(impl, device):
    params = [SamplingParams(), SamplingParams(frequency_penalty=1.0)]
    state = _state(params, [[1], [1]], [[2], [2]], device)
    logits = _apply(impl, state, [[1.0] * 6] * 3, [0, 1, 0], device)
    assert logits == [[1] * 6, [1, 1, 0, 1, 1, 1], [1] * 6]


@both
def test_a_row_sees_the_drafts_before_it_and_no_others(impl, device):
    # Two requests with three rows each; the token read at local position j > 0 is
    # draft j. The last committed token (5, 4) is in the counts already.
    params = [SamplingParams(frequency_penalty=1.0)] * 2
    state = _state(params, [[0], [0]], [[5], [4]], device)
    logits = _apply(
        impl,
        state,
        [[0.0] * 6] * 6,
        [0, 0, 0, 1, 1, 1],
        device,
        local_pos=[0, 1, 2, 0, 1, 2],
        input_ids=[5, 2, 2, 4, 1, 4],
    )
    assert logits == [
        [0, 0, 0, 0, 0, -1],
        [0, 0, -1, 0, 0, -1],
        [0, 0, -2, 0, 0, -1],
        [0, 0, 0, 0, -1, 0],
        [0, -1, 0, 0, -1, 0],
        [0, -1, 0, 0, -2, 0],
    ]


@both
def test_a_draft_in_a_row_is_the_same_as_a_committed_token(impl, device):
    params = [
        SamplingParams(
            repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.25
        )
    ]
    torch.manual_seed(0)
    logits = torch.randn(1, 6).tolist()
    state = _state(params, [[0]], [[5, 2, 3]], device)
    expected = _apply(impl, state, logits, [0], device)
    state = _state(params, [[0]], [[5]], device)
    rows = {"local_pos": [0, 1, 2], "input_ids": [5, 2, 3]}
    actual = _apply(impl, state, logits * 3, [0] * 3, device, **rows)
    assert actual[2] == expected[0]


@both_counts
def test_only_committed_tokens_of_requests_with_penalties_count(count, device):
    params = [SamplingParams(frequency_penalty=1.0), SamplingParams()] * 2
    state = _state(params, [[0]] * 4, [[]] * 4, device)
    sampled = torch.tensor([[1, 1, 5], [2, 2, 2], [3, 4, 4], [-1, 1, 1]], device=device)
    idx_mapping = torch.tensor([2, 1, 0, 2], dtype=torch.int32, device=device)
    num_sampled = torch.tensor([2, 3, 1, 1], dtype=torch.int32, device=device)
    count(idx_mapping, sampled, num_sampled, state)
    num_in_output = (state.token_counts >> 1).tolist()
    assert num_in_output == [
        [0, 0, 0, 1, 0, 0],
        [0, 0, 0, 0, 0, 0],
        [0, 2, 0, 0, 0, 0],
        [0, 0, 0, 0, 0, 0],
    ]


def test_a_resumed_request_has_the_counts_that_it_had(device):
    params = [SamplingParams(frequency_penalty=1.0)] * 2
    state = _state(params, [[1, 2]] * 2, [[3, 3, 1], []], device)
    _count_sampled_tokens_torch(
        torch.tensor([1], dtype=torch.int32, device=device),
        torch.tensor([[3, 3, 1]], device=device),
        torch.tensor([3], dtype=torch.int32, device=device),
        state,
    )
    assert torch.equal(state.token_counts[0], state.token_counts[1])


@pytest.mark.parametrize("vocab_size", [1, 1023, 1024, 2049])
def test_kernel_matches_reference(vocab_size, device):
    torch.manual_seed(0)
    state = PenaltiesState(3, vocab_size, device)
    for row, params in enumerate(
        [
            SamplingParams(repetition_penalty=1.2, presence_penalty=0.3),
            SamplingParams(),
            SamplingParams(frequency_penalty=-0.7),
        ]
    ):
        tokens = torch.randint(0, vocab_size, (40,)).tolist()
        state.add_request(row, params, tokens[:20], tokens)
    state.apply_staged_writes()
    rows = torch.tensor([2, 0, 0, 0, 1], dtype=torch.int32, device=device)
    local_pos = torch.tensor([0, 0, 1, 2, 0], dtype=torch.int32, device=device)
    drafts = torch.randint(0, vocab_size, (5,), device=device)
    expected = torch.randn(5, vocab_size, device=device)
    actual = expected.clone()
    _apply_penalties_torch(expected, rows, local_pos, drafts, 2, state)
    _apply_penalties_triton(actual, rows, local_pos, drafts, 2, state)
    # A fused multiply-add rounds once where the reference rounds twice.
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
