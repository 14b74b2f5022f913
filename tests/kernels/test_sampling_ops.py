import math

import pytest
import torch

from tests.kernels.implementations import all_ops, native_ops
from vllm import _cpu_ops_torch
from vllm.v1.worker.gpu.sample.logprob import _likeliest_by_key

INF = math.inf
KEYS = [0, 1, -1, 123456789012345, -987654321098765, 2**62, -(2**63)]


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@native_ops
@pytest.mark.parametrize("num", [1, 15, 16, 17, 1000])
def test_uniform_numbers_equal_the_twin_bit_for_bit(ops, num):
    keys = torch.tensor(KEYS)
    expected = _cpu_ops_torch.philox_uniform(keys, num)
    assert torch.equal(ops.philox_uniform(keys, num), expected)


def test_uniform_twin_equals_triton_bit_for_bit(device):
    from vllm.triton_utils import tl, triton

    @triton.jit
    def _draw_kernel(keys_ptr, out_ptr, BLOCK: tl.constexpr):
        row = tl.program_id(0)
        offsets = tl.arange(0, BLOCK)
        draws = tl.rand(tl.load(keys_ptr + row), offsets)
        tl.store(out_ptr + row * BLOCK + offsets, draws)

    keys = torch.tensor(KEYS, device=device)
    out = torch.empty(len(KEYS), 64, device=device)
    _draw_kernel[(len(KEYS),)](keys, out, BLOCK=64)
    assert torch.equal(out.cpu(), _cpu_ops_torch.philox_uniform(keys.cpu(), 64))


@all_ops
def test_greedy_rows_take_the_first_of_the_largest(ops):
    logits = torch.tensor(
        [[1.0, 3.0, 3.0], [math.nan, 1.0, 0.0], [-INF, math.nan, -INF], [0, INF, INF]]
    )
    greedy = torch.ones(4, dtype=torch.uint8)
    token_ids = ops.gumbel_argmax(logits, torch.zeros(4, dtype=torch.int64), greedy)
    assert token_ids.tolist() == [1, 1, -1, 1]


@native_ops
@pytest.mark.parametrize("vocab_size", [1, 15, 16, 17, 1000])
def test_the_greedy_operator_equals_greedy_rows(ops, vocab_size):
    # Rounded logits have equals.
    logits = (draw(9, vocab_size) * 4).round()
    logits[1], logits[2, 0], logits[3] = -INF, math.nan, math.nan
    keys, greedy = torch.zeros(9, dtype=torch.int64), torch.ones(9, dtype=torch.uint8)
    expected = _cpu_ops_torch.gumbel_argmax(logits, keys, greedy)
    assert torch.equal(ops.greedy_argmax(logits), expected)


@all_ops
def test_only_tokens_above_minus_infinity_are_drawn(ops):
    logits = torch.full((50, 40), -INF)
    logits[:, 17] = -50.0
    logits[:, 18] = math.nan
    token_ids = ops.gumbel_argmax(logits, torch.arange(50), None)
    assert token_ids.tolist() == [17] * 50
    logits[:, 17] = -INF
    assert ops.gumbel_argmax(logits, torch.arange(50), None).tolist() == [-1] * 50


@native_ops
@pytest.mark.parametrize("spread", [0.0, 0.3, 3.0, 1e4])
@pytest.mark.parametrize("offset", [0.0, 1e5])
def test_draws_equal_the_definition(ops, spread, offset):
    # Flat rows make the pruning bound work hardest; far ones test its margin.
    logits = draw(60, 3001) * spread + offset
    logits[::2, 100:900] = -INF
    keys = torch.arange(60) * 7919 - 30
    is_greedy = (torch.arange(60) % 7 == 0).to(torch.uint8)
    expected = _cpu_ops_torch.gumbel_argmax(logits, keys, is_greedy)
    assert torch.equal(ops.gumbel_argmax(logits, keys, is_greedy), expected)


@native_ops
def test_draws_follow_the_softmax(ops):
    probabilities = torch.tensor([0.5, 0.25, 0.2, 0.05])
    logits = probabilities.log().repeat(40000, 1)
    counts = ops.gumbel_argmax(logits, torch.arange(40000), None).bincount(minlength=4)
    expected = probabilities * 40000
    # Chi-square with 3 degrees of freedom: mean 3, deviation 2.4; ten deviations.
    assert ((counts - expected) ** 2 / expected).sum() < 27


def kept(ops, row: list[float], k: int, p: float) -> list[int]:
    logits = torch.tensor([row])
    ops.top_k_top_p(logits, torch.tensor([k]).int(), torch.tensor([p]))
    return (logits[0] > -INF).nonzero().flatten().tolist()


@all_ops
def test_top_k_keeps_ties_at_its_border(ops):
    assert kept(ops, [1.0, 4.0, 2.0, 3.0], 2, 1.0) == [1, 3]
    assert kept(ops, [2.0, 4.0, 2.0, 3.0, 2.0], 3, 1.0) == [0, 1, 2, 3, 4]
    assert kept(ops, [2.0, 4.0, -INF, 3.0], 4, 1.0) == [0, 1, 3]
    assert kept(ops, [2.0, 4.0, 1.0, 3.0], 0, 1.0) == [0, 1, 2, 3]
    assert kept(ops, [2.0, 4.0, 1.0, 3.0], 9, 1.0) == [0, 1, 2, 3]


@all_ops
def test_top_p_keeps_a_token_while_less_than_p_is_above_it(ops):
    row = [math.log(x) for x in (0.1, 0.4, 0.2, 0.3)]
    assert kept(ops, row, 0, 0.39) == [1]
    assert kept(ops, row, 0, 0.41) == [1, 3]
    assert kept(ops, row, 0, 0.69) == [1, 3]
    assert kept(ops, row, 0, 0.71) == [1, 2, 3]
    assert kept(ops, row, 0, 0.91) == [0, 1, 2, 3]
    assert kept(ops, row, 0, 1e-9) == [1]


@all_ops
def test_top_p_keeps_equal_tokens_together(ops):
    assert kept(ops, [0.0, 0.0, -1.0, 0.0], 0, 0.1) == [0, 1, 3]


@all_ops
def test_top_p_counts_only_what_top_k_left(ops):
    # 0.5 and 0.3 of 0.8: the first has 0.625 of what is left.
    row = [math.log(x) for x in (0.5, 0.3, 0.2)]
    assert kept(ops, row, 2, 0.6) == [0]
    assert kept(ops, row, 0, 0.6) == [0, 1]


@all_ops
def test_filtered_rows_lose_their_nan(ops):
    assert kept(ops, [1.0, math.nan, 2.0, 3.0], 2, 1.0) == [2, 3]
    assert kept(ops, [1.0, math.nan, 2.0, 3.0], 0, 0.9) == [2, 3]


@all_ops
@pytest.mark.parametrize("gap", [5.0, 12.0, 40.0, 300.0])
def test_the_border_may_lie_far_below_the_likeliest_token(ops, gap):
    row = [0.0, *(-gap - index / 1000 for index in range(1500))]
    assert kept(ops, row, 700, 1.0) == list(range(700))
    # Half of what the unlikely ones have together, where float32 can tell it from 1.
    rest = sum(map(math.exp, row[1:]))
    p = (1 + rest / 2) / (1 + rest)
    half = 1 + math.log(2 / (1 + math.exp(-1.5))) * 1000
    expected = half if gap < 20 else len(row)
    assert len(kept(ops, row, 0, p)) == pytest.approx(expected, abs=2)


@native_ops
@pytest.mark.parametrize("scale", [0.0, 1e-3, 2.0, 1e6])
def test_filters_equal_the_twin(ops, scale):
    # Rounded logits have many ties; the scales send them to one bin, or to the last.
    logits = (draw(60, 2003) * 8).round() / 8 * scale
    logits[::3, 500:1500] = -INF
    generator = torch.Generator().manual_seed(1)
    k = torch.randint(0, 200, (60,), generator=generator, dtype=torch.int32)
    p = torch.rand(60, generator=generator)
    k[::2], p[::5] = 0, 1.0
    expected = logits.clone()
    _cpu_ops_torch.top_k_top_p(expected, k, p)
    ops.top_k_top_p(logits, k, p)
    assert torch.equal(logits, expected)


@native_ops
# A list of candidates, and more than a list is good for.
@pytest.mark.parametrize("count", [0, 1, 7, 64, 65, 1000, 2002])
@pytest.mark.parametrize("step", [1e-4, 0.5])
def test_the_likeliest_tokens_equal_the_twin(ops, count, step):
    # In steps of a half most tokens have equals.
    logits = (draw(9, 2003) / step).round() * step
    logits[3, 5:] = -INF
    logits[4] = logits[4].sort().values
    expected = _likeliest_by_key(logits, count)
    assert torch.equal(ops.likeliest_tokens(logits, count), expected)


@native_ops
def test_what_is_no_number_is_the_least_likely(ops):
    logits = torch.tensor([[math.nan, -INF, 2.0, math.nan, INF, -INF]])
    assert ops.likeliest_tokens(logits, 6).tolist() == [[4, 2, 1, 5, 0, 3]]
    with pytest.raises(IndexError, match="7 of 6 tokens"):
        ops.likeliest_tokens(logits, 7)


@all_ops
def test_statistics_of_a_known_row(ops):
    row = [math.log(x) for x in (0.5, 0.125, 0.125, 0.25)]
    logsumexp, rank = ops.logprob_stats(
        torch.tensor([row] * 4) + 3.0, torch.tensor([0, 1, 2, 3])
    )
    torch.testing.assert_close(logsumexp, torch.full((4,), 3.0))
    assert rank.tolist() == [1, 3, 3, 2]


@native_ops
def test_statistics_equal_the_twin(ops):
    logits, token_ids = draw(20, 5003) * 4, torch.arange(20) * 250
    logits[3, 100:] = -INF
    logsumexp, rank = ops.logprob_stats(logits, token_ids)
    expected, expected_rank = _cpu_ops_torch.logprob_stats(logits, token_ids)
    torch.testing.assert_close(logsumexp, expected, rtol=2e-6, atol=2e-6)
    assert torch.equal(rank, expected_rank)


@all_ops
def test_bitmask_blocks_tokens_whose_bit_is_zero(ops):
    logits = torch.zeros(3, 35)
    bitmask = torch.tensor([[-1, 0b101], [0b10, 0], [0, 0]], dtype=torch.int32)
    ops.apply_bitmask(logits, bitmask, torch.tensor([2, 0, -1], dtype=torch.int32))
    allowed = [row.nonzero().flatten().tolist() for row in logits == 0]
    assert allowed == [[1], list(range(35)), [*range(33), 34]]


@native_ops
def test_bitmask_equals_the_twin(ops):
    generator = torch.Generator().manual_seed(1)
    logits = draw(9, 1000)
    bitmask = torch.randint(-(2**31), 2**31, (5, 32), generator=generator).int()
    rows = torch.tensor([8, 0, -1, 3, 4], dtype=torch.int32)
    expected = logits.clone()
    _cpu_ops_torch.apply_bitmask(expected, bitmask, rows)
    ops.apply_bitmask(logits, bitmask, rows)
    assert torch.equal(logits, expected)


@native_ops
def test_indices_outside_the_rows_are_errors(ops):
    with pytest.raises(IndexError, match="token id"):
        ops.logprob_stats(draw(1, 10), torch.tensor([10]))
    with pytest.raises(IndexError, match="row"):
        ops.apply_bitmask(draw(1, 10), torch.zeros(1, 1).int(), torch.tensor([1]).int())
    with pytest.raises(ValueError, match="words"):
        ops.apply_bitmask(draw(1, 33), torch.zeros(1, 1).int(), torch.tensor([0]).int())
