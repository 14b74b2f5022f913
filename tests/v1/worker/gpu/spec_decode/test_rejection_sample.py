import math

import pytest
import torch

from tests.v1.worker.gpu.spec_decode.spec_rows import make_spec_rows
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.sample import gumbel
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
from vllm.v1.worker.gpu.sample.random import Purpose, noise_keys, philox_uniform
from vllm.v1.worker.gpu.sample.states import SamplingStates
from vllm.v1.worker.gpu.spec_decode import (
    accept_drafts,
    accepted_prefix,
    rejection_sampler,
    residual,
)
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import (
    _flatten_sampled_torch,
    _flatten_sampled_triton,
    compute_conditional_rates,
    get_max_chunk_logits,
    rejection_sample,
)

NEG_INF = float("-inf")
GREEDY = SamplingParams(temperature=0.0)
SEEDED = SamplingParams(seed=11)
UNSEEDED = SamplingParams()


@pytest.fixture(params=["torch", "triton"])
def _impl(request, monkeypatch):
    """Run the whole verification on the kernels too, on any device."""
    twins = [
        (accept_drafts, "_accept_drafts"),
        (residual, "_write_residual_logits"),
        (accepted_prefix, "_take_accepted_prefix"),
    ]
    for module, name in twins:
        impl = getattr(module, f"{name}_{request.param}")
        for other in ("torch", "triton"):
            monkeypatch.setattr(module, f"{name}_{other}", impl)
    if request.param == "triton":
        kernel = gumbel._gumbel_argmax_triton
        monkeypatch.setattr(rejection_sampler, "gumbel_argmax", kernel)


def make_states(params, vocab_size, device) -> SamplingStates:
    states = SamplingStates(len(params), vocab_size, device, seed=3)
    for row, param in enumerate(params):
        states.add_request(row, f"req-{row}", param)
    states.apply_staged_writes()
    return states


def verify(
    logits,
    drafts,
    params,
    *,
    draft_logits=None,
    positions=None,
    idx_mapping=None,
    width=4,
    rates=None,
):
    """Verify drafts against the rows of `logits`, all requests' in their order."""
    device = logits.device
    rows = make_spec_rows(
        device, drafts, positions or [5] * len(drafts), idx_mapping=idx_mapping
    )
    states = make_states(params, logits.shape[1], device)
    if rates is not None:
        rates = torch.tensor([*compute_conditional_rates(rates), 0.0], device=device)
    sampled, num_sampled = rejection_sample(
        lambda start, end: logits[start:end].clone(),
        draft_logits,
        rows,
        states,
        width,
        rates,
    )
    return sampled.tolist(), num_sampled.tolist()


def certain(token_ids: list[int], vocab_size: int, device) -> torch.Tensor:
    """Return rows that have one choice each."""
    logits = torch.full((len(token_ids), vocab_size), NEG_INF, device=device)
    logits[torch.arange(len(token_ids)), token_ids] = 1.5
    return logits


@pytest.mark.usefixtures("_impl")
@pytest.mark.parametrize("params", [GREEDY, SEEDED, UNSEEDED])
@pytest.mark.parametrize("has_draft_logits", [False, True])
@pytest.mark.parametrize(
    ("drafts", "expected"),
    [
        ([4, 2, 7], [4, 2, 7, 1]),
        ([4, 2, 0], [4, 2, 7, -1]),
        ([4, 0, 7], [4, 2, -1, -1]),
        ([0, 2, 7], [4, -1, -1, -1]),
        ([4, -1, 7], [4, 2, -1, -1]),
        ([-1, 2, 7], [4, -1, -1, -1]),
        ([], [4, -1, -1, -1]),
        ([4], [4, 2, -1, -1]),
        ([3], [4, -1, -1, -1]),
    ],
)
def test_a_walk_ends_at_the_first_draft_that_the_target_refuses(
    drafts, expected, has_draft_logits, params, device
):
    logits = certain([4, 2, 7, 1], 8, device)[: len(drafts) + 1]
    draft_logits = None
    if has_draft_logits:
        torch.manual_seed(0)
        draft_logits = torch.randn(1, 3, 8, device=device)
    sampled, num_sampled = verify(logits, [drafts], [params], draft_logits=draft_logits)
    assert sampled == [expected]
    assert num_sampled == [4 - expected.count(-1)]


@pytest.mark.usefixtures("_impl")
def test_requests_of_every_kind_share_a_batch(device):
    drafts = [[4, 2], None, [4, 0], [], [0, 2], [4, 2]]
    params = [GREEDY, UNSEEDED, UNSEEDED, SEEDED, SEEDED, UNSEEDED]
    rows = certain([4, 2, 7], 8, device)
    logits = torch.cat([rows[: len(ids) + 1] for ids in drafts if ids is not None])
    sampled, num_sampled = verify(logits, drafts, params, width=3)
    assert sampled == [
        [4, 2, 7],
        [-1, -1, -1],
        [4, 2, -1],
        [4, -1, -1],
        [4, -1, -1],
        [4, 2, 7],
    ]
    assert num_sampled == [3, 0, 2, 1, 1, 3]


@pytest.mark.usefixtures("_impl")
def test_greedy_takes_the_argmax_whatever_the_draft_distribution_says(device):
    logits = torch.tensor([[0.0, 1.0, 0.9], [2.0, 0.0, 1.9]], device=device)
    draft_logits = torch.tensor([[[0.0, 0.0, 9.0]]], device=device)
    arguments = {"draft_logits": draft_logits, "width": 2}
    sampled, _ = verify(logits, [[2]], [GREEDY], **arguments)
    assert sampled == [[1, -1]]
    sampled, _ = verify(logits, [[1]], [GREEDY], **arguments)
    assert sampled == [[1, 0]]


def _gumbel_by_hand(probabilities: list[float], key: int, device) -> int:
    keys = torch.tensor([key], device=device)
    uniform = philox_uniform(keys, len(probabilities))[0].tolist()
    scores = [
        math.log(p) - math.log(-math.log1p(-u)) if p > 0 else NEG_INF
        for p, u in zip(probabilities, uniform, strict=True)
    ]
    return scores.index(max(scores))


@pytest.mark.usefixtures("_impl")
@pytest.mark.parametrize("is_certain", [False, True])
def test_chance_and_residual_are_drawn_by_hand(is_certain, device):
    target, draft = [0.5, 0.3, 0.15, 0.05], [0.2, 0.2, 0.5, 0.1]
    num_reqs, token = 30, 2
    states = make_states([UNSEEDED] * num_reqs, 4, device)
    seeds = states.seeds.gpu
    positions = torch.full((num_reqs,), 5, device=device)
    accept = noise_keys(seeds, positions, Purpose.ACCEPT)
    residual_keys = noise_keys(seeds, positions, Purpose.RESIDUAL).tolist()
    bonus_keys = noise_keys(seeds, positions + 1, Purpose.TARGET).tolist()
    # 0.15 / 0.5, or 0.15 where the draft was certain.
    bound = 0.15 if is_certain else 0.3
    left = [0.5, 0.3, 0.0, 0.05] if is_certain else [0.3, 0.1, 0.0, 0.0]
    expected = []
    for row, u in enumerate(philox_uniform(accept, 1)[:, 0].tolist()):
        if u < bound:
            bonus = _gumbel_by_hand(target, bonus_keys[row], device)
            expected.append([token, bonus])
        else:
            expected.append([_gumbel_by_hand(left, residual_keys[row], device), -1])
    assert len(set(map(tuple, expected))) > 3
    logits = torch.tensor([target], device=device).log().repeat(2 * num_reqs, 1)
    drawn_from = torch.tensor([[draft]], device=device).log().repeat(num_reqs, 1, 1)
    sampled, _ = verify(
        logits,
        [[token]] * num_reqs,
        [UNSEEDED] * num_reqs,
        draft_logits=None if is_certain else drawn_from,
        width=2,
    )
    assert sampled == expected


def _gumbel_sample_rows(logits, states, positions):
    rows = torch.arange(len(logits), dtype=torch.int32, device=logits.device)
    tables = states.temperature.gpu, states.seeds.gpu
    return gumbel_sample(logits, rows, *tables, positions)


@pytest.mark.parametrize("rates", [None, (0.9, 0.5)])
def test_without_drafts_a_request_draws_what_plain_decoding_draws(rates, device):
    torch.manual_seed(0)
    params = [GREEDY, SEEDED, UNSEEDED, UNSEEDED, UNSEEDED]
    states = make_states(params, 300, device)
    logits = torch.randn(7, 300, device=device)
    positions = torch.tensor([5, 6, 8, 9], device=device)
    alone = logits[[0, 1, 5, 6]]
    expected = _gumbel_sample_rows(alone, states, positions).tolist()
    # Between the others a request with drafts.
    sampled, num_sampled = verify(
        logits,
        [[], [], [1, 2], [], []],
        params,
        positions=[5, 6, 7, 8, 9],
        idx_mapping=[0, 1, 4, 2, 3],
        rates=rates,
        width=3,
    )
    del sampled[2], num_sampled[2]
    assert sampled == [[token, -1, -1] for token in expected]
    assert num_sampled == [1, 1, 1, 1]


def test_a_seeded_request_emits_plain_decodings_tokens_whatever_is_drafted(device):
    torch.manual_seed(0)
    logits = torch.randn(3, 50, device=device)
    params = [SamplingParams(seed=seed) for seed in range(20)]
    states = make_states(params, 50, device)
    plain = [
        [
            _gumbel_sample_rows(
                logits[j].repeat(20, 1),
                states,
                torch.full((20,), 5 + j, device=device),
            )[row].item()
            for j in range(3)
        ]
        for row in range(20)
    ]
    drafts = [[ids[0], ids[1] if row % 2 else 49] for row, ids in enumerate(plain)]
    sampled, num_sampled = verify(logits.repeat(20, 1), drafts, params, width=3)
    assert set(num_sampled) == {2, 3}
    for row, count in enumerate(num_sampled):
        assert sampled[row][:count] == plain[row][:count]


@pytest.mark.parametrize("rates", [(1.0, 1.0, 0.0), (1.0, 0.0, 0.0), (1.0, 1.0, 1.0)])
@pytest.mark.parametrize("params", [GREEDY, SEEDED, UNSEEDED])
def test_certain_rates_accept_what_the_target_refuses(rates, params, device):
    logits = certain([4, 2, 7, 1], 8, device)
    sampled, num_sampled = verify(logits, [[0, 0, 0]], [params], rates=rates)
    accepted = int(sum(rates))
    assert num_sampled == [accepted + 1]
    assert sampled[0][: accepted + 1] == [0] * accepted + [[4, 2, 7, 1][accepted]]


def test_an_unknown_draft_is_not_accepted_by_rate(device):
    logits = certain([4, 2], 8, device)
    sampled, _ = verify(logits, [[-1]], [UNSEEDED], rates=(1.0,), width=2)
    assert sampled == [[4, -1]]


def test_drafts_are_accepted_at_the_given_rates(device):
    num_reqs, rates = 2000, (0.8, 0.4, 0.1)
    logits = torch.zeros(4 * num_reqs, 2, device=device)
    _, num_sampled = verify(
        logits, [[0, 1, 0]] * num_reqs, [UNSEEDED] * num_reqs, rates=rates
    )
    counts = torch.tensor(num_sampled)
    for place, rate in enumerate(rates):
        accepted = (counts > place + 1).sum().item()
        deviation = (num_reqs * rate * (1 - rate)) ** 0.5
        assert abs(accepted - num_reqs * rate) < 10 * deviation


def test_conditional_rates_are_the_quotients_of_neighbours():
    rates = compute_conditional_rates((0.8, 0.4, 0.0, 0.0))
    assert rates == [0.8, 0.5, 0.0, 0.0]


@pytest.mark.parametrize(
    ("vocab_size", "expected"), [(2**16, 1024), (151936, 432), (2**26, 1), (2**24, 4)]
)
def test_a_chunk_is_bounded_in_bytes(vocab_size, expected):
    assert get_max_chunk_logits(vocab_size) == expected


def test_chunks_cut_requests_and_change_nothing(monkeypatch, device):
    torch.manual_seed(0)
    params = [UNSEEDED, SEEDED, GREEDY, UNSEEDED]
    drafts = [[1, 2, 3], [4, 5], [6], [7, 0, 1]]
    logits = torch.randn(13, 8, device=device)
    draft_logits = torch.randn(4, 3, 8, device=device)
    whole = verify(logits, drafts, params, draft_logits=draft_logits)
    for num_rows in (1, 2, 5):
        monkeypatch.setattr(rejection_sampler, "MAX_CHUNK_BYTES", num_rows * 8 * 4)
        assert verify(logits, drafts, params, draft_logits=draft_logits) == whole


def test_no_more_rows_than_a_chunk_are_asked_for_at_a_time(monkeypatch, device):
    monkeypatch.setattr(rejection_sampler, "MAX_CHUNK_BYTES", 3 * 8 * 4)
    asked = []

    def source(start, end):
        asked.append((start, end))
        return torch.zeros(end - start, 8, device=device)

    rows = make_spec_rows(device, [[1, 2, 3], [4, 5, 6]], [5, 5])
    rejection_sample(source, None, rows, make_states([UNSEEDED] * 2, 8, device), 4)
    assert asked == [(0, 3), (3, 6), (6, 8)]


@pytest.mark.parametrize("impl", [_flatten_sampled_torch, _flatten_sampled_triton])
def test_tokens_lie_on_the_rows_that_emitted_them(impl, device):
    sampled = torch.tensor(
        [[5, 6, 7], [8, -1, -1], [-1, -1, -1], [9, -1, -1]], device=device
    )
    cu_num_logits = torch.tensor([0, 3, 5, 5, 6], dtype=torch.int32, device=device)
    assert impl(sampled, cu_num_logits, 6).tolist() == [5, 6, 7, 8, 0, 9]
