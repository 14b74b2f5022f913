import numpy as np
import pytest
import torch

from tests.v1.worker.gpu.spec_decode.confidence.processes import (
    Truth,
    compute_ece,
    falling,
    level,
    wavy,
)
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.worker.gpu.batch_layout import BatchLayout, prefix_sum
from vllm.v1.worker.gpu.sample.states import SamplingStates
from vllm.v1.worker.gpu.spec_decode.confidence.estimator import (
    FIRST_REFIT,
    ConfidenceEstimator,
)
from vllm.v1.worker.gpu.spec_decode.confidence.scale import CERTAINTIES

NUM_DRAFTS = 4
# Steps in which a lot is learnt.
MANY = 256
GREEDY = SamplingParams(temperature=0.0)
STANDARD = SamplingParams(temperature=1.0)
CONSTRAINED = SamplingParams(
    temperature=1.0, structured_outputs=StructuredOutputsParams(regex="a*")
)


class Serving:
    """Requests that draft in every step, with acceptance by a known law.

    Args:
        params: of the requests.
        keep: drafts of a request that are verified at the most, by the step's
            confidences; None: all.
    """

    def __init__(self, device, params, keep=None):
        self.rng = np.random.default_rng(0)
        self.device = device
        self.num_reqs = len(params)
        self.keep = keep
        states = SamplingStates(self.num_reqs, 10, device, seed=0)
        for row, param in enumerate(params):
            states.add_request(row, str(row), param)
        states.apply_staged_writes()
        self.estimator = ConfidenceEstimator(
            CERTAINTIES, self.num_reqs, NUM_DRAFTS, states, device
        )
        self.rows = torch.arange(self.num_reqs, dtype=torch.int32, device=device)

    def run(self, truth: Truth, num_steps: int) -> tuple[np.ndarray, np.ndarray]:
        """Return what was said, and what is true: [drafts, NUM_DRAFTS] each."""
        said, true = [], []
        for _ in range(num_steps):
            scores = self.rng.gamma(1.5, 2.0, (self.num_reqs, NUM_DRAFTS))
            probs = truth(np.arange(NUM_DRAFTS), scores)
            said.append(self.step(scores, self.rng.random(probs.shape) < probs))
            true.append(probs)
        return np.concatenate(said), np.concatenate(true)

    def step(self, scores: np.ndarray, passes: np.ndarray) -> np.ndarray:
        confidences = self.propose(scores)
        admitted = np.full(self.num_reqs, NUM_DRAFTS)
        if self.keep is not None:
            admitted = self.keep(confidences)
        accepted = np.minimum(np.cumprod(passes, axis=1).sum(axis=1), admitted)
        self.verify(admitted, accepted)
        return confidences

    def propose(self, scores: np.ndarray) -> np.ndarray:
        counts = torch.full_like(self.rows, NUM_DRAFTS)
        tensor = torch.from_numpy(scores).float().to(self.device)
        return self.estimator.estimate(tensor, self.rows, counts).cpu().numpy()

    def verify(self, admitted: np.ndarray, accepted: np.ndarray) -> None:
        num_drafts = np.full(self.num_reqs, NUM_DRAFTS, dtype=np.int32)
        verified = torch.from_numpy(prefix_sum(admitted + 1)).to(self.device)
        layout = BatchLayout(
            cu_num_logits_np=prefix_sum(num_drafts + 1),
            cu_num_logits=verified,
            query_start_loc=verified,
            num_scheduled_tokens_np=num_drafts + 1,
            num_draft_tokens_per_req=num_drafts,
            num_bonus_tokens=1,
            draft_budget=int(admitted.sum()),
        )
        num_sampled = torch.from_numpy(accepted + 1).int().to(self.device)
        self.estimator.observe(layout, self.rows, num_sampled)


def errors(said: np.ndarray, true: np.ndarray) -> list[float]:
    return [compute_ece(said[:, k], true[:, k]) for k in range(NUM_DRAFTS)]


@pytest.mark.parametrize("truth", [falling, wavy, level])
def test_survivals_become_true(device, truth):
    serving = Serving(device, [STANDARD] * 16)
    serving.run(truth, MANY)
    said, true = serving.run(truth, MANY // 4)
    assert max(errors(said.cumprod(1), true.cumprod(1))) < 0.03


def test_confidences_follow_a_change(device):
    serving = Serving(device, [STANDARD] * 64)
    serving.run(falling, MANY // 8)
    said, true = serving.run(level, 4)
    assert max(errors(said, true)) > 0.1
    serving.run(level, 2 * MANY)
    said, true = serving.run(level, MANY // 4)
    assert max(errors(said.cumprod(1), true.cumprod(1))) < 0.03


def test_trimming_does_not_make_confidences_wrong(device):
    def above_half(confidences: np.ndarray) -> np.ndarray:
        return (confidences.cumprod(1) > 0.5).sum(axis=1)

    serving = Serving(device, [STANDARD] * 32, keep=above_half)
    serving.run(falling, MANY)
    said, true = serving.run(falling, MANY // 8)
    is_kept = said.cumprod(1) > 0.5
    for k in range(2):
        kept = is_kept[:, k]
        assert compute_ece(said[kept, k], true[kept, k]) < 0.03


def test_greedy_and_sampled_requests_are_told_apart(device):
    serving = Serving(device, [GREEDY, STANDARD] * 8)

    def by_verification(places: np.ndarray, scores: np.ndarray) -> np.ndarray:
        probs = np.full(scores.shape, 0.9)
        probs[1::2] = 0.4
        return probs

    serving.run(by_verification, MANY)
    said, true = serving.run(by_verification, MANY // 8)
    assert compute_ece(said[:, 0], true[:, 0]) < 0.03


def test_what_grammars_refuse_does_not_count_against_the_drafter(device):
    serving = Serving(device, [STANDARD, CONSTRAINED] * 8)

    def refused_if_unsure(places: np.ndarray, scores: np.ndarray) -> np.ndarray:
        probs = falling(places, scores)
        probs[1::2] *= scores[1::2] > 3.0
        return probs

    serving.run(refused_if_unsure, MANY)
    said, true = serving.run(refused_if_unsure, MANY // 8)
    for kind in (said[0::2], true[0::2]), (said[1::2], true[1::2]):
        assert compute_ece(kind[0][:, 0], kind[1][:, 0]) < 0.04


def test_requests_of_a_server_for_json_say_nothing_of_others(device):
    serving = Serving(device, [CONSTRAINED] * 7 + [STANDARD])
    scores = np.full((8, NUM_DRAFTS), 3.0)
    first = serving.propose(scores)
    none = np.zeros(8, dtype=int)
    for _ in range(MANY):
        admitted = np.where(np.arange(8) < 7, NUM_DRAFTS, 0)
        serving.propose(scores)
        serving.verify(admitted, none)
    last = serving.propose(scores)
    assert (last[:7, 0] < 0.05).all()
    assert np.array_equal(last[7], first[7])


def test_counts_are_read_two_steps_after_they_were_sent(device):
    serving = Serving(device, [STANDARD] * 4)
    scores = np.full((4, NUM_DRAFTS), 3.0)
    passes = np.ones_like(scores, dtype=bool)
    first = serving.step(scores, passes)
    for _ in range(FIRST_REFIT):
        assert np.array_equal(serving.step(scores, passes), first)
    # The step in which they were read learns after it has proposed.
    assert np.array_equal(serving.step(scores, passes), first)
    assert (serving.step(scores, passes) > first).all()


def test_the_same_steps_give_the_same_bits(device):
    runs = []
    for _ in range(2):
        serving = Serving(device, [STANDARD, GREEDY] * 4)
        runs.append(serving.run(falling, 5 * FIRST_REFIT)[0])
    assert np.array_equal(*runs)


def test_what_was_learnt_can_be_forgotten(device):
    serving = Serving(device, [STANDARD] * 4)
    expected = serving.run(falling, 2 * FIRST_REFIT)[0]
    # In the middle of a round, with counts on their way.
    serving.run(falling, 1)
    serving.propose(np.full((4, NUM_DRAFTS), 2.0))
    serving.estimator.forget()
    serving.rng = np.random.default_rng(0)
    assert np.array_equal(serving.run(falling, 2 * FIRST_REFIT)[0], expected)


def test_a_survival_never_rises(device):
    serving = Serving(device, [STANDARD] * 8)
    always = np.ones((8, NUM_DRAFTS), dtype=bool)
    for _ in range(MANY):
        confidences = serving.step(np.full((8, NUM_DRAFTS), 50.0), always)
    survivals = torch.from_numpy(confidences).cumprod(dim=1)
    assert confidences.max() <= 1.0
    assert (survivals.diff(dim=1) <= 0).all()


def test_a_drafter_that_fails_is_not_trusted(device):
    serving = Serving(device, [STANDARD] * 2)
    scores = np.full((2, NUM_DRAFTS), 3.0)
    scores[1] = np.nan
    confidences = serving.propose(scores)
    assert (confidences[0] > 0.5).all()
    assert (confidences[1] == 0).all()


def test_a_request_learns_nothing_from_the_drafts_of_the_one_before_it(device):
    serving = Serving(device, [STANDARD] * 2)
    scores = np.full((2, NUM_DRAFTS), 3.0)
    believed = serving.propose(scores)
    serving.verify(np.zeros(2, dtype=int), np.zeros(2, dtype=int))
    # Rows of requests that left; the next ones in them have not drafted yet.
    for _ in range(2 * FIRST_REFIT):
        serving.verify(np.full(2, NUM_DRAFTS), np.full(2, NUM_DRAFTS))
    assert np.array_equal(serving.propose(scores), believed)
