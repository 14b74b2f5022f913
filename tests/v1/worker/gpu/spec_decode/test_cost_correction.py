"""The costs follow the machine, and the best setting is found, whatever the noise."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from vllm.v1.worker.gpu.spec_decode.cost_correction import CostCorrection
from vllm.v1.worker.gpu.spec_decode.cost_model import CostModel

MAX_REQS, MAX_TOKENS, NUM_DRAFTS = 32, 256, 7
Cost = Callable[[np.ndarray], np.ndarray]


@dataclass
class Machine:
    """Costs of steps, and the noise on them.

    Args:
        noise: relative, of every step.
        slow_share: of steps that something else makes three times as slow.
    """

    verify: Cost
    draft: Cost
    noise: float = 0.05
    slow_share: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        self._rng = np.random.default_rng(self.seed)
        self.verify_ms = self.verify(np.arange(MAX_TOKENS + 1))
        self.draft_ms = self.draft(np.arange(MAX_REQS + 1))

    def cost(self, num_reqs: int, num_tokens: int, drafted: bool = True) -> float:
        return self.verify_ms[num_tokens] + drafted * self.draft_ms[num_reqs]

    def run(self, num_reqs: int, num_tokens: int, drafted: bool = True) -> float:
        step_ms = self.cost(num_reqs, num_tokens, drafted)
        step_ms *= np.exp(self._rng.normal(0.0, self.noise))
        return step_ms * (3.0 if self._rng.random() < self.slow_share else 1.0)


def line(fixed: float, each: float) -> Cost:
    return lambda sizes: fixed + each * sizes


def stairs(sizes: np.ndarray) -> np.ndarray:
    return 20.0 + 15.0 * np.ceil(sizes / 16)


def measured(machine: Machine) -> CostModel:
    return CostModel(machine.draft_ms, machine.verify_ms, NUM_DRAFTS)


def serve(
    model: CostModel, machine: Machine, num_reqs: int, num_steps: int
) -> np.ndarray:
    """Choose budgets as the engine does; return each one's share of the best speed."""
    rng = np.random.default_rng(1)
    shares = []
    for _ in range(num_steps):
        confidences = rng.normal(0.7, 0.15, (num_reqs, NUM_DRAFTS)).clip(0.05, 1.0)
        survivals = np.sort(confidences.cumprod(axis=1).ravel())[::-1]
        tokens = num_reqs + np.concatenate([[0.0], survivals.cumsum()])
        costs = model.step_costs(num_reqs, num_reqs, len(survivals), NUM_DRAFTS)
        budget = int(np.argmax(tokens / costs))
        budgets = np.arange(len(tokens))
        true_ms = machine.verify_ms[num_reqs + budgets] + machine.draft_ms[num_reqs]
        speeds = tokens / true_ms
        shares.append(speeds[budget] / speeds.max())
        num_tokens = num_reqs + budget
        step_ms = machine.run(num_reqs, num_tokens)
        model.observe(num_reqs, num_tokens, step_ms, NUM_DRAFTS)
    return np.array(shares)


PROFILED = Machine(line(20, 2), line(2, 0.5))


@pytest.mark.parametrize("num_reqs", [1, 8, 32])
@pytest.mark.parametrize(
    ("verify", "draft"),
    [
        (line(20, 2), line(2, 0.5)),
        (line(20, 1), line(2, 0.5)),
        (line(20, 6), line(2, 0.5)),
        (line(20, 2), line(8, 2)),
        (line(40, 2), line(2, 0.5)),
        (line(60, 6), line(6, 1.5)),
    ],
    ids=["as measured", "flat", "steep", "slow drafter", "host", "slow machine"],
)
@pytest.mark.parametrize("slow_share", [0.0, 0.2])
def test_the_best_budget_is_found_within_a_hundred_steps(
    verify, draft, num_reqs, slow_share
):
    machine = Machine(verify, draft, slow_share=slow_share)
    shares = serve(measured(PROFILED), machine, num_reqs, 200)
    assert shares[100:].mean() > 0.97


@pytest.mark.parametrize("fixed_ms", [40, 60])
def test_it_is_found_again_when_the_machine_changes(fixed_ms):
    model = measured(PROFILED)
    serve(model, Machine(line(20, 2), line(2, 0.5)), 8, 150)
    changed = Machine(line(fixed_ms, 2), line(4, 1), seed=2)
    assert serve(model, changed, 8, 200)[100:].mean() > 0.96


def test_stairs_that_were_measured_are_kept():
    machine = Machine(stairs, line(2, 0.5))
    assert serve(measured(machine), machine, 8, 200).mean() > 0.97


def test_predictions_come_near_what_is_measured_beside_slow_steps():
    machine = Machine(line(30, 3), line(8, 1), slow_share=0.2)
    model = measured(PROFILED)
    rng = np.random.default_rng(3)
    for _ in range(600):
        num_reqs = int(rng.choice([1, 4, 16]))
        num_tokens = num_reqs * int(rng.integers(1, 9))
        drafted = bool(rng.random() < 0.7)
        step_ms = machine.run(num_reqs, num_tokens, drafted)
        model.observe(num_reqs, num_tokens, step_ms, NUM_DRAFTS * drafted)
    for num_reqs, num_tokens in [(1, 4), (4, 16), (16, 64), (16, 120)]:
        num_verified = num_tokens - num_reqs
        [*_, predicted] = model.step_costs(num_reqs, num_reqs, num_verified, NUM_DRAFTS)
        true = machine.cost(num_reqs, num_tokens)
        assert predicted == pytest.approx(true, rel=0.12)
        alone = model.step_cost_without_drafting(num_tokens)
        true = machine.cost(num_reqs, num_tokens, drafted=False)
        assert alone == pytest.approx(true, rel=0.12)


def test_drafting_is_told_apart_from_verification():
    machine = Machine(line(20, 2), line(6, 1.5), noise=0.02)
    model = measured(PROFILED)
    for step in range(200):
        drafted = step % 2 == 0
        model.observe(8, 24, machine.run(8, 24, drafted), NUM_DRAFTS * drafted)
    with_drafts = model.step_costs(8, 24, 0, NUM_DRAFTS)[0]
    drafting_ms = with_drafts - model.step_cost_without_drafting(24)
    assert drafting_ms == pytest.approx(18.0, rel=0.1)


def test_sizes_that_never_ran_follow_those_that_did():
    correction = CostCorrection(MAX_REQS, MAX_TOKENS)
    for _ in range(100):
        correction.observe(4, 16, 4.0, 52.0, 2 * 56.0)
    _, draft, verify = correction.factors()
    assert verify[16] == pytest.approx(2.0, rel=0.02)
    assert 1.4 < verify[1] < 2.0
    assert 1.4 < verify[256] < 2.0
    assert 1.7 < draft[32] < 2.3


def test_one_slow_step_changes_next_to_nothing():
    correction = CostCorrection(MAX_REQS, MAX_TOKENS)
    for _ in range(50):
        correction.observe(0, 16, 0.0, 52.0, 52.0)
    correction.observe(0, 16, 0.0, 52.0, 520.0)
    assert correction.factors()[1][16] == pytest.approx(1.0, abs=0.01)


def test_a_size_that_is_not_known_is_believed_to_be_quicker_than_it_seems():
    correction = CostCorrection(MAX_REQS, MAX_TOKENS)
    for _ in range(50):
        correction.observe(0, 16, 0.0, 52.0, 52.0)
    _, _, verify = correction.factors()
    assert verify[256] < 0.95 < verify[16]


@pytest.mark.parametrize("sizes", [(1, 1), (1, 2), (3, 5)])
def test_the_smallest_engines_are_corrected_too(sizes):
    correction = CostCorrection(*sizes)
    for _ in range(50):
        correction.observe(1, 1, 1.0, 9.0, 20.0)
    _, draft, verify = correction.factors()
    assert (len(draft), len(verify)) == (sizes[0] + 1, sizes[1] + 1)
    assert verify[1] == pytest.approx(2.0, rel=0.1)
