"""Whether the verified tokens have the target's law, on thousands of requests.

Every wrong variant here is a mistake that looks right in a walk by hand.
"""

import pytest
import torch

from tests.v1.worker.gpu.spec_decode.spec_rows import make_spec_rows
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.sample.gumbel import gumbel_argmax
from vllm.v1.worker.gpu.sample.random import (
    Purpose,
    draft_noise_keys,
    noise_keys,
    philox_uniform,
)
from vllm.v1.worker.gpu.sample.states import SamplingStates
from vllm.v1.worker.gpu.spec_decode import rejection_sampler
from vllm.v1.worker.gpu.spec_decode.admitted_drafts import admit_drafts
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import rejection_sample

NUM_REQS = 3000
FIRST_POSITION = 5
# The laws of three rows; the last has no draft.
TARGET = torch.tensor(
    [[0.3, 0.25, 0.4, 0.05], [0.1, 0.2, 0.3, 0.4], [0.25, 0.25, 0.4, 0.1]]
)
DRAFT = torch.tensor([[0.08, 0.07, 0.8, 0.05], [0.25, 0.25, 0.25, 0.25]])
NUM_DRAFTS = len(DRAFT)


@pytest.fixture(scope="module")
def all_states() -> dict[bool, SamplingStates]:
    """Return the rows of unseeded and of seeded requests."""
    both = {}
    for is_seeded in (False, True):
        states = SamplingStates(NUM_REQS, 4, torch.device("cpu"), seed=1)
        for row in range(NUM_REQS):
            seed = row if is_seeded else None
            states.add_request(row, f"req-{row}", SamplingParams(seed=seed))
        states.apply_staged_writes()
        both[is_seeded] = states
    return both


def _draw_drafts(states: SamplingStates, keys_of) -> torch.Tensor:
    """Draw [NUM_REQS, NUM_DRAFTS] drafts, a place at a time."""
    seeds = states.seeds.gpu
    columns = []
    for place in range(NUM_DRAFTS):
        positions = torch.full((NUM_REQS,), FIRST_POSITION + place)
        anchors = torch.full((NUM_REQS,), FIRST_POSITION - 1)
        keys = keys_of(seeds, positions, anchors, states.is_seeded.gpu)
        logits = DRAFT[place].log().repeat(NUM_REQS, 1)
        flags = torch.zeros(NUM_REQS, dtype=torch.uint8)
        columns.append(gumbel_argmax(logits, keys, flags))
    return torch.stack(columns, dim=1)


def _verify(
    states: SamplingStates,
    drafts: torch.Tensor,
    has_draft_logits: bool,
    admitted: torch.Tensor | None = None,
):
    """Verify all drafts, or the leading ones of each request that are admitted."""
    counts = [NUM_DRAFTS] * NUM_REQS if admitted is None else admitted.tolist()
    verified = [ids[:count] for ids, count in zip(drafts.tolist(), counts, strict=True)]
    rows = make_spec_rows(
        torch.device("cpu"),
        verified,
        [FIRST_POSITION] * NUM_REQS,
        num_scheduled=[NUM_DRAFTS] * NUM_REQS,
    )
    logits = TARGET.log()[rows.expanded_local_pos.long()]
    return rejection_sample(
        lambda start, end: logits[start:end].clone(),
        DRAFT.log().repeat(NUM_REQS, 1, 1) if has_draft_logits else None,
        rows,
        states,
        NUM_DRAFTS + 1,
    )


def _worst_deviation(sampled: torch.Tensor) -> float:
    """Return the chi-square of the worst place, in standard deviations.

    A token at place j is drawn only if the j before it were accepted; its law is the
    target's all the same.
    """
    worst = 0.0
    for law, tokens in zip(TARGET, sampled.T, strict=False):
        tokens = tokens[tokens >= 0]
        assert len(tokens) > 100, "too few to judge"
        counts = torch.bincount(tokens, minlength=4).double()
        expected = law.double() * len(tokens)
        chi_square = ((counts - expected) ** 2 / expected).sum().item()
        # Mean 3, variance 6.
        worst = max(worst, (chi_square - 3) / 6**0.5)
    return worst


def _confidences(drafts: torch.Tensor) -> torch.Tensor:
    """Return [NUM_REQS, NUM_DRAFTS]; the second one has seen the first draft."""
    second = torch.where(drafts[:, 0] == 2, 0.95, 0.05)
    return torch.stack([torch.full_like(second, 0.6), second], dim=1)


def _certain_drafts() -> torch.Tensor:
    return torch.tensor([[1, 3]]).repeat(NUM_REQS, 1)


def test_drawn_drafts_keep_the_targets_law(all_states):
    states = all_states[False]
    sampled, num_sampled = _verify(states, _draw_drafts(states, draft_noise_keys), True)
    assert _worst_deviation(sampled) < 10
    # The first draft passes with probability 1 - total variation = 0.6.
    passed = (num_sampled > 1).sum().item()
    assert abs(passed - 0.6 * NUM_REQS) < 10 * (0.24 * NUM_REQS) ** 0.5


def test_certain_drafts_keep_the_targets_law(all_states):
    sampled, num_sampled = _verify(all_states[False], _certain_drafts(), False)
    assert _worst_deviation(sampled) < 10
    passed = (num_sampled > 1).sum().item()
    assert abs(passed - 0.25 * NUM_REQS) < 10 * (0.19 * NUM_REQS) ** 0.5


# Fewer than one draft a request, and so many that some requests have two.
@pytest.mark.parametrize("budget", [2000, 4000])
def test_drafts_that_are_admitted_by_their_survivals_keep_the_targets_law(
    budget, all_states
):
    states = all_states[False]
    drafts = _draw_drafts(states, draft_noise_keys)
    mapping = torch.arange(NUM_REQS, dtype=torch.int32)
    counts = torch.full((NUM_REQS,), NUM_DRAFTS, dtype=torch.int32)
    admitted = admit_drafts(_confidences(drafts), mapping, counts, budget)
    assert admitted.sum() == budget
    sampled, _ = _verify(states, drafts, True, admitted)
    assert _worst_deviation(sampled[:, : 2 if budget < NUM_REQS else 3]) < 10


def test_a_number_of_drafts_that_knows_the_first_of_them_is_seen(all_states):
    states = all_states[False]
    drafts = _draw_drafts(states, draft_noise_keys)
    # Two drafts where the second is likely, and none where it is not: as many tokens a
    # second as can be.
    admitted = torch.where(_confidences(drafts)[:, 1] > 0.5, 2, 0)
    sampled, _ = _verify(states, drafts, True, admitted)
    assert _worst_deviation(sampled) > 10


@pytest.mark.parametrize("has_draft_logits", [False, True])
def test_coupled_sampling_keeps_the_targets_law(has_draft_logits, all_states):
    states = all_states[True]
    drafts = _certain_drafts()
    if has_draft_logits:
        drafts = _draw_drafts(states, draft_noise_keys)
    sampled, num_sampled = _verify(states, drafts, has_draft_logits)
    assert _worst_deviation(sampled) < 10
    passed = (num_sampled > 1).sum().item() / NUM_REQS
    # With a total variation of 0.4; a certain draft passes with its probability.
    bound = 0.6 / 1.4 if has_draft_logits else 0.25
    assert passed > bound - 10 * (0.25 / NUM_REQS) ** 0.5


def _acceptance_of_gumbel_coupling(target: torch.Tensor, draft: torch.Tensor) -> float:
    # Both take token i if its exponential clock rings first under both laws: the
    # minimum over j of E_j / max(p_j / p_i, q_j / q_i) is then E_i.
    ratios = torch.maximum(
        target.unsqueeze(0) / target.unsqueeze(1),
        draft.unsqueeze(0) / draft.unsqueeze(1),
    )
    return (1 / ratios.sum(dim=1)).sum().item()


def test_coupled_drafts_pass_as_often_as_the_theory_says(all_states):
    states = all_states[True]
    drafts = _draw_drafts(states, draft_noise_keys)
    _, num_sampled = _verify(states, drafts, True)
    rate = _acceptance_of_gumbel_coupling(TARGET[0].double(), DRAFT[0].double())
    deviation = (rate * (1 - rate) / NUM_REQS) ** 0.5
    passed = (num_sampled > 1).double().mean().item()
    assert abs(passed - rate) < 10 * deviation


def test_gumbel_coupling_accepts_at_least_the_bound():
    torch.manual_seed(0)
    laws = torch.distributions.Dirichlet(torch.full((6,), 0.5).double())
    for _ in range(200):
        target, draft = laws.sample().clamp(min=1e-9), laws.sample().clamp(min=1e-9)
        target, draft = target / target.sum(), draft / draft.sum()
        variation = 0.5 * (target - draft).abs().sum().item()
        bound = (1 - variation) / (1 + variation)
        rate = _acceptance_of_gumbel_coupling(target, draft)
        assert bound - 1e-9 <= rate <= 1 - variation + 1e-9


def test_a_fresh_draw_instead_of_the_residual_is_seen(monkeypatch, all_states):
    def leave(*_):
        pass

    monkeypatch.setattr(rejection_sampler, "write_residual_logits", leave)
    states = all_states[False]
    drafts = _draw_drafts(states, draft_noise_keys)
    assert _worst_deviation(_verify(states, drafts, True)[0]) > 10
    assert _worst_deviation(_verify(states, _certain_drafts(), False)[0]) > 10


@pytest.mark.parametrize("has_draft_logits", [False, True])
def test_accepting_what_equals_a_sample_is_seen(
    has_draft_logits, monkeypatch, all_states
):
    def accept_if_equal(logits, draft_logits, drafts, uniform, *places):
        keys = (uniform.double() * 2**31).long()
        flags = torch.zeros(len(logits), dtype=torch.uint8)
        return (drafts >= 0) & (gumbel_argmax(logits, keys, flags) == drafts)

    states = all_states[False]
    drafts = _certain_drafts()
    if has_draft_logits:
        drafts = _draw_drafts(states, draft_noise_keys)
    right = _verify(states, drafts, has_draft_logits)[0]
    monkeypatch.setattr(rejection_sampler, "accept_drafts", accept_if_equal)
    wrong = _verify(states, drafts, has_draft_logits)[0]
    if has_draft_logits:
        assert _worst_deviation(wrong) > 10
    else:
        # For a certain draft it is the same rule: p_target(draft) of the time.
        assert _worst_deviation(wrong) < 10
        assert not torch.equal(wrong, right)


@pytest.mark.parametrize("has_draft_logits", [False, True])
def test_a_residual_that_reuses_the_noise_of_the_acceptance_is_seen(
    has_draft_logits, monkeypatch, all_states
):
    def wrong_keys(seeds, positions, purpose):
        if purpose is Purpose.RESIDUAL:
            purpose = Purpose.ACCEPT
        return noise_keys(seeds, positions, purpose)

    states = all_states[False]
    drafts = _certain_drafts()
    if has_draft_logits:
        drafts = _draw_drafts(states, draft_noise_keys)
    monkeypatch.setattr(rejection_sampler, "noise_keys", wrong_keys)
    assert _worst_deviation(_verify(states, drafts, has_draft_logits)[0]) > 10


def test_drafts_that_use_the_noise_of_the_acceptance_are_seen(all_states):
    def wrong_keys(seeds, positions, anchors, use_coupled):
        return noise_keys(seeds, positions, Purpose.ACCEPT)

    states = all_states[False]
    drafts = _draw_drafts(states, wrong_keys)
    assert _worst_deviation(_verify(states, drafts, True)[0]) > 10


def test_uncoupled_drafts_of_a_seeded_request_lose_acceptance_and_no_truth(all_states):
    def uncoupled(seeds, positions, anchors, use_coupled):
        return noise_keys(seeds, positions, Purpose.DRAFT, anchors)

    states = all_states[True]
    sampled, num_sampled = _verify(states, _draw_drafts(states, uncoupled), True)
    assert _worst_deviation(sampled) < 10
    # They meet by chance alone: the sum of p x q.
    rate = (TARGET[0] * DRAFT[0]).sum().item()
    deviation = (rate * (1 - rate) / NUM_REQS) ** 0.5
    passed = (num_sampled > 1).double().mean().item()
    assert abs(passed - rate) < 10 * deviation


def test_the_noise_of_the_purposes_is_uncorrelated(all_states):
    seeds = all_states[False].seeds.gpu
    positions = torch.full((NUM_REQS,), FIRST_POSITION)
    anchors = positions - 1
    keys = [noise_keys(seeds, positions, purpose) for purpose in Purpose]
    keys.append(noise_keys(seeds, positions, Purpose.DRAFT, anchors))
    numbers = torch.stack([philox_uniform(k, 1).squeeze(1) for k in keys])
    correlation = torch.corrcoef(numbers) - torch.eye(len(keys))
    assert correlation.abs().max().item() < 10 / NUM_REQS**0.5
