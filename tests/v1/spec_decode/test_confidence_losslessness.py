"""Confidences that are estimated keep the target's law, exactly.

They are read from the distribution that a draft is drawn from, by curves that follow
from what became of earlier drafts.
"""

import numpy as np
import pytest
import torch

from tests.v1.spec_decode.test_losslessness import (
    EXACT,
    Confidences,
    Model,
    Text,
    above_threshold,
    by_score,
    distance,
    drafts_of,
    joint_law,
    law_of_policy,
    law_of_round,
    survival,
    verify,
)
from vllm.v1.worker.gpu.spec_decode.confidence.calibration import OutcomeMemory
from vllm.v1.worker.gpu.spec_decode.confidence.certainty import compute_certainty
from vllm.v1.worker.gpu.spec_decode.confidence.curves import read_curves
from vllm.v1.worker.gpu.spec_decode.confidence.outcomes import count_outcomes
from vllm.v1.worker.gpu.spec_decode.confidence.scale import (
    CERTAINTIES,
    PARTS_PER_KNOT,
    Verification,
)

ONE_REQUEST = torch.zeros(1, dtype=torch.int32)
TEMPERATURE, NEITHER = torch.ones(1), torch.zeros(1, dtype=torch.bool)


def scores_of(model: Model, text: Text, drafts: Text) -> torch.Tensor:
    """Return [1, K] scores; the k-th has seen the drafts before the k-th."""
    laws = [model.draft(text + drafts[:k]) for k in range(len(drafts))]
    logits = torch.from_numpy(np.log(laws)).float()
    rows = torch.zeros(len(drafts), dtype=torch.int32)
    return compute_certainty(logits, rows, TEMPERATURE).unsqueeze(0)


def read(curves: np.ndarray, scores: torch.Tensor) -> tuple[np.ndarray, torch.Tensor]:
    """Return [K] confidences, and the marks of the drafts."""
    tensor = torch.from_numpy(curves).float()
    marks = torch.empty(scores.shape, dtype=torch.int32)
    num_drafts = torch.full_like(ONE_REQUEST, scores.shape[1])
    probs = read_curves(
        tensor,
        scores,
        num_drafts,
        ONE_REQUEST,
        TEMPERATURE,
        NEITHER,
        NEITHER,
        CERTAINTIES,
        marks,
    )
    return probs[0].double().numpy(), marks


def steep_curves(num_places: int) -> np.ndarray:
    """Return curves under which scores matter, differently at each place."""
    knots = np.linspace(CERTAINTIES.low, CERTAINTIES.high, CERTAINTIES.num_knots)
    places = np.arange(num_places)[:, None]
    curves = (2.0 + places) * knots - 1.0 - 0.5 * places
    return np.broadcast_to(curves, (len(Verification), *curves.shape)).copy()


def estimated(model: Model, text: Text, drafts: Text) -> np.ndarray:
    return read(steep_curves(len(drafts)), scores_of(model, text, drafts))[0]


def with_the_drawn_token(model: Model, text: Text, drafts: Text) -> np.ndarray:
    """Score a draft by its own probability."""
    probs = [model.draft(text + drafts[:k])[token] for k, token in enumerate(drafts)]
    scores = torch.tensor(probs).float().logit().unsqueeze(0)
    return read(steep_curves(len(drafts)), scores)[0]


@pytest.mark.parametrize("threshold", [0.4, 0.6, 0.8])
@pytest.mark.parametrize("shape", [(2, 3), (3, 3)])
def test_a_threshold_on_estimated_confidences_is_lossless(threshold, shape):
    lengths = set()

    def policy(model: Model, text: Text, drafts: Text) -> int:
        lengths.add(above_threshold(threshold, estimated)(model, text, drafts))
        return above_threshold(threshold, estimated)(model, text, drafts)

    for seed in range(4):
        model = Model(*shape, seed)
        assert distance(law_of_policy(model, policy), model.truth) < EXACT
    assert len(lengths) > 1


@pytest.mark.parametrize("budget", [1, 2, 3, 5])
def test_a_budget_and_a_ranking_of_estimated_survivals_are_lossless(budget):
    models = Model(2, 3, seed=5), Model(2, 3, seed=6)
    law, truth = joint_law(models, by_score(budget, survival), estimated)
    assert distance(law, truth) < EXACT


def furthest(say: Confidences) -> float:
    return max(
        distance(*joint_law(models, by_score(2, survival), say))
        for models in ((Model(2, 2, s), Model(2, 2, s + 20)) for s in range(5))
    )


def test_a_score_of_the_drawn_token_is_seen():
    assert furthest(estimated) < EXACT
    assert furthest(with_the_drawn_token) > 0.01


def refitted(scores: torch.Tensor, num_verified: int, num_accepted: int) -> np.ndarray:
    """Return the curves after many rounds like this one."""
    num_places = scores.shape[1]
    shape = len(Verification), num_places, CERTAINTIES.num_knots
    counts = torch.zeros((*shape, 3), dtype=torch.int32)
    count_outcomes(
        counts,
        read(steep_curves(num_places), scores)[1],
        ONE_REQUEST,
        torch.tensor([0, num_verified + 1], dtype=torch.int32),
        torch.tensor([num_accepted + 1], dtype=torch.int32),
        1,
    )
    assert int(counts[..., 1].sum()) == PARTS_PER_KNOT * num_verified
    memory = OutcomeMemory(*shape[:2], CERTAINTIES)
    memory.add(counts.numpy() * 50)
    return memory.fit_curves()


def law_of_a_refit(model: Model) -> tuple[np.ndarray, set[int]]:
    """Verify one draft, learn from it, and verify by what was learnt.

    Returns:
        The law, and how many drafts the second rounds verify.
    """
    law, lengths = np.zeros_like(model.truth), set()
    for drafts, weight in drafts_of(model, ()):
        scores = scores_of(model, (), drafts)
        for text, reached in verify(model, (), drafts, 1):
            curves = refitted(scores, 1, len(text) - 1)

            def say(
                model: Model, text: Text, drafts: Text, curves: np.ndarray = curves
            ) -> np.ndarray:
                return read(curves, scores_of(model, text, drafts))[0]

            for again, weight_again in drafts_of(model, text):
                length = above_threshold(0.6, say)(model, text, again)
                lengths.add(length)
                part = law_of_round(model, text, again, length)
                law += weight * reached * weight_again * part
    return law, lengths


def test_learning_from_rejections_is_lossless():
    lengths = set()
    for seed in range(3):
        model = Model(2, 2, seed, horizon=4)
        law, seen = law_of_a_refit(model)
        assert distance(law, model.truth) < EXACT
        lengths |= seen
    assert len(lengths) > 1
