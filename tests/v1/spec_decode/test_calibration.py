import numpy as np
import pytest

from vllm.v1.spec_decode.calibration import MAX_PAIRS, NUM_BINS, Calibration


def observe(calibration: Calibration, *proposals: tuple[list[float], int, int]) -> None:
    survivals, num_verified, num_accepted = zip(*proposals, strict=True)
    calibration.observe(
        np.array(survivals, np.float32), np.array(num_verified), np.array(num_accepted)
    )


def test_the_error_is_the_mean_distance_of_prediction_and_truth_over_bins():
    calibration = Calibration(2)
    # Position 0: bin 12 holds 0.85 twice, one survived: |1.7 - 1| = 0.7; bin 3 holds
    # 0.25, which did not: 0.25. Position 1: 0.5 and 0.52 are in bin 7, one survived;
    # 0.1 was not verified.
    observe(calibration, ([0.85, 0.5], 2, 2), ([0.85, 0.52], 2, 0), ([0.25, 0.1], 1, 0))
    first, second = calibration.errors()
    assert first == pytest.approx((0.7 + 0.25) / 3)
    assert second == pytest.approx(0.02 / 2)
    assert calibration.pooled_error() == pytest.approx((0.7 + 0.25 + 0.02) / 5)
    assert calibration.num_pairs.sum(axis=1).tolist() == [3, 2]


def test_a_draft_behind_a_rejected_one_has_not_survived():
    calibration = Calibration(3)
    observe(calibration, ([1.0, 1.0, 1.0], 3, 1))
    assert calibration.errors() == [0.0, 1.0, 1.0]


def test_predictions_at_the_bounds_are_in_the_outer_bins():
    calibration = Calibration(1)
    observe(calibration, ([0.0], 1, 0), ([1.0], 1, 1))
    assert np.flatnonzero(calibration.num_pairs[0]).tolist() == [0, NUM_BINS - 1]
    assert calibration.errors() == [0.0]


def test_what_nobody_predicted_is_no_pair():
    calibration = Calibration(2)
    observe(calibration, ([float("nan"), 0.5], 2, 1))
    assert calibration.num_pairs.sum(axis=1).tolist() == [0, 1]
    assert calibration.errors()[0] is None


def test_pairs_are_handed_on_once():
    source, target = Calibration(2), Calibration(2)
    assert source.take_stats() is None
    observe(source, ([0.9, 0.4], 2, 1))
    stats = source.take_stats()
    assert source.take_stats() is None
    target.add(stats)
    target.add(stats)
    assert target.errors() == pytest.approx([0.1, 0.4])
    assert target.num_pairs.sum() == 4


def test_old_pairs_weigh_less_than_late_ones():
    source, target = Calibration(1), Calibration(1)
    count = MAX_PAIRS + 1
    for predicted in (1.0, 0.0):
        # Each of them wrong first, then right.
        num_accepted = np.zeros(count, np.int64)
        source.observe(np.full((count, 1), predicted), num_accepted + 1, num_accepted)
        target.add(source.take_stats())
    # The wrong ones were halved twice, the right ones once.
    assert target.errors() == pytest.approx([1 / 3])
