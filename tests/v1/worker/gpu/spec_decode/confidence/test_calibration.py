import numpy as np
import pytest

from tests.v1.worker.gpu.spec_decode.confidence.processes import sigmoid
from vllm.v1.worker.gpu.spec_decode.confidence.calibration import (
    HALF_LIFE_DRAFTS,
    OutcomeMemory,
    fit_curves,
)
from vllm.v1.worker.gpu.spec_decode.confidence.scale import (
    HEAD_LOGITS,
    PARTS_PER_KNOT,
    ScoreScale,
)

SHAPE = 3, 4, 9
SCALE = ScoreScale(low=-4.0, high=4.0, num_knots=9, slope=1.0, intercept=0.0)
KNOTS = np.linspace(-4.0, 4.0, 9)


def nothing():
    return np.zeros(SHAPE), np.zeros(SHAPE)


def test_without_a_draft_the_curve_is_what_is_believed():
    curves = fit_curves(*nothing(), SCALE.prior_logits)
    assert curves.shape == SHAPE
    np.testing.assert_allclose(curves, np.broadcast_to(KNOTS, SHAPE), atol=1e-6)


def test_many_drafts_decide_alone():
    truth = np.random.default_rng(0).uniform(0.02, 0.98, SHAPE)
    tried = np.full(SHAPE, 1e6)
    curves = fit_curves(tried, truth * tried, SCALE.prior_logits)
    np.testing.assert_allclose(sigmoid(curves), truth, atol=1e-4)


def test_a_few_drafts_move_the_whole_curve():
    tried, accepted = nothing()
    # 30 drafts at one knot, of which more pass than was believed.
    tried[0, 0, 4], accepted[0, 0, 4] = 30.0, 27.0
    curves = fit_curves(tried, accepted, SCALE.prior_logits)
    assert (curves[0, 0] > KNOTS + 0.2).all()
    assert curves[0, 0, 4] > 1.5


def test_a_place_without_drafts_learns_from_the_others():
    tried, accepted = nothing()
    tried[1, :2], accepted[1, :2] = 500.0, 450.0
    curves = fit_curves(tried, accepted, SCALE.prior_logits)
    np.testing.assert_allclose(sigmoid(curves[1, 3]), 0.9, atol=0.02)
    # And so does another verification.
    np.testing.assert_allclose(sigmoid(curves[2, 3]), 0.9, atol=0.02)


def test_verifications_and_places_that_differ_are_told_apart():
    tried, accepted = np.full(SHAPE, 300.0), np.full(SHAPE, 30.0)
    accepted[0], accepted[2, 1] = 270.0, 150.0
    probs = sigmoid(fit_curves(tried, accepted, SCALE.prior_logits))
    np.testing.assert_allclose(probs[0], 0.9, atol=0.03)
    np.testing.assert_allclose(probs[1], 0.1, atol=0.03)
    np.testing.assert_allclose(probs[2, 1], 0.5, atol=0.03)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_what_never_or_always_passed_stays_a_probability(share):
    tried = np.full(SHAPE, 1e7)
    curves = fit_curves(tried, share * tried, SCALE.prior_logits)
    assert np.isfinite(curves).all()
    assert (np.abs(sigmoid(curves) - share) < 1e-4).all()


def test_the_likeliest_line_is_found_from_any_beginning():
    # Knots are so rich that the bend at them can be told from the line: there is none.
    for slope, shift in [(0.05, 3.0), (3.0, -6.0), (-1.0, 0.5), (8.0, 0.0)]:
        truth = sigmoid(slope * KNOTS + shift)
        tried = np.full(SHAPE, 40.0)
        curves = fit_curves(tried, truth * tried, SCALE.prior_logits)
        assert np.abs(sigmoid(curves) - truth).max() < 0.03


def make_counts(drafted, tried, accepted):
    counts = np.zeros((*SHAPE, 3), dtype=np.int32)
    counts[..., :] = np.array([drafted, tried, accepted]) * PARTS_PER_KNOT
    return counts


def test_old_outcomes_fade():
    memory = OutcomeMemory(*SHAPE[:2], SCALE)
    memory.add(make_counts(1000, 1000, 900))
    for _ in range(8):
        memory.add(make_counts(HALF_LIFE_DRAFTS, 1000, 200))
    np.testing.assert_allclose(sigmoid(memory.fit_curves()), 0.2, atol=0.01)


def test_what_is_drafted_but_never_tried_gets_another_chance():
    memory = OutcomeMemory(*SHAPE[:2], SCALE)
    counts = make_counts(400, 400, 200)
    # The knots of low scores fail, and are verified no more.
    counts[..., :3, 2] = 0
    memory.add(counts)
    unseen = make_counts(4000, 4000, 2000)
    unseen[..., :3, 1:] = 0
    before = sigmoid(memory.fit_curves())[..., :3]
    for _ in range(10):
        memory.add(unseen)
    after = sigmoid(memory.fit_curves())[..., :3]
    assert before.max() < 0.05
    assert after.min() > 0.2


def test_a_head_is_believed_until_it_is_seen_to_be_wrong():
    memory = OutcomeMemory(1, 2, HEAD_LOGITS)
    knots = np.linspace(-8.0, 8.0, HEAD_LOGITS.num_knots)
    np.testing.assert_allclose(memory.fit_curves()[0, 0], knots, atol=1e-6)
    # Twice as sure as it should be.
    counts = np.full((1, 2, len(knots), 3), 200.0)
    counts[..., 2] *= sigmoid(knots / 2)
    memory.add((counts * PARTS_PER_KNOT).astype(np.int32))
    fitted = sigmoid(memory.fit_curves())
    np.testing.assert_allclose(
        fitted, np.broadcast_to(sigmoid(knots / 2), fitted.shape), atol=0.01
    )
