import pytest
import torch

from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.sample.penalties import (
    PenaltiesState,
    _apply_penalties_sparse,
    _apply_penalties_torch,
    _apply_penalties_triton,
    _count_sampled_tokens_torch,
    _count_sampled_tokens_triton,
)

every = pytest.mark.parametrize(
    "impl",
    [
        _apply_penalties_torch,
        _apply_penalties_triton,
        pytest.param(
            _apply_penalties_sparse,
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="a CPU path"),
        ),
    ],
    ids=["torch", "triton", "sparse"],
)
both_counts = pytest.mark.parametrize(
    "count",
    [_count_sampled_tokens_torch, _count_sampled_tokens_triton],
    ids=["torch", "triton"],
)
VOCAB_SIZE = 6


class Rows:
    """Requests with their history, and the penalised logits of a step."""

    def __init__(self, params, prompts, outputs, device, vocab_size=VOCAB_SIZE):
        self.device = device
        self.state = PenaltiesState(len(params), vocab_size, device)
        self.all_token_ids = torch.zeros((len(params), 64), dtype=torch.int32)
        self.num_tokens = []
        requests = zip(params, prompts, outputs, strict=True)
        for row, (param, prompt, output) in enumerate(requests):
            tokens = prompt + output
            self.state.add_request(row, param, prompt, tokens)
            self.all_token_ids[row, : len(tokens)] = torch.tensor(tokens)
            self.num_tokens.append(len(tokens))
        self.all_token_ids = self.all_token_ids.to(device)
        self.state.apply_staged_writes()

    def apply(self, impl, logits, rows, local_pos=None, input_ids=None, first=0):
        local_pos = local_pos or [0] * len(rows)
        positions = [
            self.num_tokens[row] + place
            for row, place in zip(rows, local_pos, strict=True)
        ]
        logits = torch.as_tensor(logits, device=self.device).clone()
        impl(
            logits,
            torch.tensor(rows, dtype=torch.int32, device=self.device),
            torch.tensor(local_pos, dtype=torch.int32, device=self.device),
            torch.tensor(positions, device=self.device),
            torch.tensor(input_ids or [0] * len(rows), device=self.device),
            self.all_token_ids,
            self.state,
            first,
        )
        return logits.tolist()


@every
def test_frequency_counts_the_output_and_not_the_prompt(impl, device):
    params = [SamplingParams(frequency_penalty=0.5)]
    step = Rows(params, [[1, 1, 2]], [[2, 3, 3]], device)
    logits = step.apply(impl, [[1.0] * 6], [0])
    assert logits == [[1, 1, 0.5, 0, 1, 1]]


@every
def test_presence_subtracts_once(impl, device):
    params = [SamplingParams(presence_penalty=-0.25)]
    step = Rows(params, [[1]], [[3, 3, 4]], device)
    logits = step.apply(impl, [[1.0] * 6], [0])
    assert logits == [[1, 1, 1, 1.25, 1.25, 1]]


@every
def test_repetition_divides_positive_and_multiplies_negative_logits(impl, device):
    params = [SamplingParams(repetition_penalty=2.0)]
    step = Rows(params, [[0, 1, 1]], [[4, 4, 5]], device)
    logits = step.apply(impl, [[1.0, -1.0, 3.0, -3.0, 5.0, 0.0]], [0])
    assert logits == [[0.5, -2, 3, -3, 2.5, 0]]


@every
def test_repetition_comes_before_the_other_two(impl, device):
    params = [
        SamplingParams(
            repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=0.25
        )
    ]
    step = Rows(params, [[0]], [[1, 1]], device)
    logits = step.apply(impl, [[4.0] * 6], [0])
    assert logits == [[2, 2 - 1 - 0.25, 4, 4, 4, 4]]


@every
def test_rows_without_penalties_are_unchanged(impl, device):
    params = [SamplingParams(), SamplingParams(frequency_penalty=1.0)]
    step = Rows(params, [[1], [1]], [[2], [2]], device)
    logits = step.apply(impl, [[1.0] * 6] * 3, [0, 1, 0])
    assert logits == [[1] * 6, [1, 1, 0, 1, 1, 1], [1] * 6]


@every
def test_a_row_sees_the_drafts_before_it_and_no_others(impl, device):
    # Two requests with three rows each; the token read at local position j > 0 is
    # draft j. The last committed token (5, 4) is in the counts already.
    params = [SamplingParams(frequency_penalty=1.0)] * 2
    step = Rows(params, [[0], [0]], [[5], [4]], device)
    logits = step.apply(
        impl,
        [[0.0] * 6] * 6,
        [0, 0, 0, 1, 1, 1],
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


@every
def test_a_chunk_sees_the_drafts_that_stand_before_it(impl, device):
    params = [SamplingParams(frequency_penalty=1.0)]
    step = Rows(params, [[0]], [[5]], device)
    logits = step.apply(
        impl,
        [[0.0] * 6] * 2,
        [0, 0],
        local_pos=[2, 3],
        input_ids=[5, 2, 3, 4],
        first=2,
    )
    assert logits == [[0, 0, -1, -1, 0, -1], [0, 0, -1, -1, -1, -1]]


@every
def test_a_draft_in_a_row_is_the_same_as_a_committed_token(impl, device):
    params = [
        SamplingParams(
            repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.25
        )
    ]
    torch.manual_seed(0)
    logits = torch.randn(1, 6).tolist()
    step = Rows(params, [[0]], [[5, 2, 3]], device)
    expected = step.apply(impl, logits, [0])
    step = Rows(params, [[0]], [[5]], device)
    rows = {"local_pos": [0, 1, 2], "input_ids": [5, 2, 3]}
    actual = step.apply(impl, logits * 3, [0] * 3, **rows)
    assert actual[2] == expected[0]


@both_counts
def test_only_committed_tokens_of_requests_with_penalties_count(count, device):
    params = [SamplingParams(frequency_penalty=1.0), SamplingParams()] * 2
    step = Rows(params, [[0]] * 4, [[]] * 4, device)
    sampled = torch.tensor([[1, 1, 5], [2, 2, 2], [3, 4, 4], [-1, 1, 1]], device=device)
    idx_mapping = torch.tensor([2, 1, 0, 2], dtype=torch.int32, device=device)
    num_sampled = torch.tensor([2, 3, 1, 1], dtype=torch.int32, device=device)
    count(idx_mapping, sampled, num_sampled, step.state)
    num_in_output = (step.state.token_counts >> 1).tolist()
    assert num_in_output == [
        [0, 0, 0, 1, 0, 0],
        [0, 0, 0, 0, 0, 0],
        [0, 2, 0, 0, 0, 0],
        [0, 0, 0, 0, 0, 0],
    ]


def test_a_resumed_request_has_the_counts_that_it_had(device):
    params = [SamplingParams(frequency_penalty=1.0)] * 2
    step = Rows(params, [[1, 2]] * 2, [[3, 3, 1], []], device)
    _count_sampled_tokens_torch(
        torch.tensor([1], dtype=torch.int32, device=device),
        torch.tensor([[3, 3, 1]], device=device),
        torch.tensor([3], dtype=torch.int32, device=device),
        step.state,
    )
    counts = step.state.token_counts
    assert torch.equal(counts[0], counts[1])


@pytest.mark.parametrize("vocab_size", [1, 1023, 1024, 2049])
@every
def test_every_path_matches_the_reference(impl, vocab_size, device):
    torch.manual_seed(0)
    params = [
        SamplingParams(repetition_penalty=1.2, presence_penalty=0.3),
        SamplingParams(),
        SamplingParams(frequency_penalty=-0.7),
    ]
    prompts = torch.randint(0, vocab_size, (3, 20)).tolist()
    outputs = torch.randint(0, vocab_size, (3, 20)).tolist()
    step = Rows(params, prompts, outputs, device, vocab_size)
    logits = torch.randn(5, vocab_size, device=device)
    rows = {
        "rows": [2, 0, 0, 0, 1],
        "local_pos": [0, 0, 1, 2, 0],
        "input_ids": torch.randint(0, vocab_size, (5,)).tolist(),
    }
    expected = torch.tensor(step.apply(_apply_penalties_torch, logits, **rows))
    actual = torch.tensor(step.apply(impl, logits, **rows))
    # A fused multiply-add rounds once where the reference rounds twice.
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
