"""Costs of steps: how the gaps between measured sizes are filled, and what is added."""

import json
import time

import numpy as np
import pytest

from vllm.config.cost_profile import CostProfile, read_cost_profile
from vllm.v1.worker.gpu.spec_decode.cost_model import (
    CostModel,
    build_cost_tables_from_curves,
)

SAMPLES = [(1, 5.0), (8, 6.0), (16, 9.0)]


def fill(samples, max_size=32, limit=0):
    draft, verify = build_cost_tables_from_curves(
        samples, samples, max_size, max_size, limit
    )
    assert draft.dtype == verify.dtype == np.float64
    np.testing.assert_array_equal(np.maximum(draft, 1e-6), verify)
    return verify


@pytest.mark.parametrize(
    ("limit", "costs"), [(16, [6.0, 9.0, 12.0]), (0, [5 + 1 / 7, 6.375, 12.0])]
)
def test_known_values(limit, costs):
    np.testing.assert_allclose(fill(SAMPLES, limit=limit)[[2, 9, 24]], costs)


def test_the_tables_have_an_entry_for_every_size():
    draft, verify = build_cost_tables_from_curves([(1, 1.0)], SAMPLES, 3, 40)
    assert (len(draft), len(verify)) == (4, 41)


def test_a_curve_is_flat_before_its_first_sample():
    assert fill([(4, 3.0), (8, 5.0)])[:5].tolist() == [3.0] * 5


def test_one_sample_is_flat_on_both_sides():
    assert set(fill([(4, 3.0)]).tolist()) == {3.0}


def test_a_sample_that_is_quicker_than_a_smaller_one_costs_as_much():
    assert fill([(1, 5.0), (2, 4.0), (4, 7.0)])[[1, 2, 3, 4]].tolist() == [5, 5, 6, 7]


def test_nothing_is_blended_across_the_limit():
    # Nine to sixteen tokens run as sixteen: nobody knows better.
    table = fill([*SAMPLES, (32, 30.0)], limit=8)
    assert table[[8, 9, 16]].tolist() == [6.0, 9.0, 9.0]
    assert table[24] == pytest.approx((9.0 + 30.0) / 2)


def test_a_limit_between_two_samples_pads_to_the_next_one():
    assert fill(SAMPLES, limit=12)[[10, 12, 13]].tolist() == [9.0, 9.0, 9.0]


def test_floors_keep_costs_from_being_nothing():
    draft, verify = build_cost_tables_from_curves([], [(1, 0.0)], 4, 4)
    assert draft.tolist() == [0.0] * 5
    assert verify.tolist() == [1e-6] * 5


def test_samples_may_come_in_any_order_or_as_a_mapping():
    np.testing.assert_array_equal(fill(SAMPLES[::-1]), fill(SAMPLES))
    np.testing.assert_array_equal(fill(dict(SAMPLES)), fill(SAMPLES))


def test_more_work_never_costs_less_and_measured_sizes_cost_what_was_measured():
    rng = np.random.default_rng(0)
    for _ in range(200):
        num_samples = rng.integers(1, 9)
        sizes = np.sort(rng.choice(np.arange(1, 60), num_samples, replace=False))
        costs = rng.uniform(0.1, 50.0, num_samples)
        limit = int(rng.integers(0, 70))
        table = fill(list(zip(sizes.tolist(), costs, strict=True)), 64, limit)
        assert (np.diff(table) >= -1e-9).all()
        np.testing.assert_allclose(table[sizes], np.maximum.accumulate(costs))
        # A padded step costs what some measured one does.
        padded = table[: min(limit, sizes[-1]) + 1]
        assert np.isin(padded, np.maximum.accumulate(costs)).all() or limit == 0


def make_model():
    profile = CostProfile(((1, 2.0), (4, 5.0)), ((1, 10.0), (32, 72.0)))
    return CostModel.from_profile(profile, 4, 32, 3)


def test_a_step_costs_its_tokens_and_the_drafting_behind_it():
    model = make_model()
    np.testing.assert_allclose(model.step_costs(2, 3, 2, 3), [17.0, 19.0, 21.0])
    assert model.step_cost_without_drafting(3) == pytest.approx(14.0)


def test_drafting_for_nobody_costs_nothing():
    model = make_model()
    assert model.step_costs(0, 5, 0, 3).tolist() == [
        model.step_cost_without_drafting(5)
    ]


def test_drafting_costs_by_the_draft_between_one_and_all():
    profile = CostProfile(
        ((1, 2.0), (4, 8.0)), ((1, 10.0),), single_draft_curve=((1, 1.0), (4, 9.0))
    )
    model = CostModel.from_profile(profile, 4, 32, 3)
    costs = [model.step_costs(1, 1, 0, length)[0] for length in (0, 1, 2, 3)]
    np.testing.assert_allclose(costs, [10.0, 11.0, 11.5, 12.0])
    # One draft is never dearer than all, whatever a clock says.
    costs = [model.step_costs(4, 4, 0, length)[0] for length in (1, 2, 3)]
    np.testing.assert_allclose(costs, [18.0] * 3)
    [only] = CostModel.from_profile(profile, 4, 32, 1).step_costs(1, 1, 0, 1)
    assert only == 12.0


def test_what_short_proposals_take_says_little_about_long_ones():
    profile = CostProfile(
        ((1, 4.0),), ((1, 10.0), (4, 10.0)), single_draft_curve=((1, 2.0),)
    )
    model = CostModel.from_profile(profile, 1, 4, 3)
    for _ in range(200):
        model.observe(1, 1, 10.0, 0)
        model.observe(1, 1, 14.0, 1)
    # Two milliseconds were four. What all drafts take is between four and eight, and to
    # be found out.
    assert model.step_costs(1, 1, 0, 1)[0] == pytest.approx(14.0, rel=0.03)
    assert 14.0 < model.step_costs(1, 1, 0, 3)[0] < 15.0
    for _ in range(40):
        model.observe(1, 1, 18.0, 3)
    assert model.step_costs(1, 1, 0, 3)[0] == pytest.approx(18.0, rel=0.05)
    assert model.step_costs(1, 1, 0, 1)[0] == pytest.approx(14.0, rel=0.05)


@pytest.mark.parametrize(("believed", "true"), [(1.0, 6.0), (6.0, 1.0)])
def test_a_curve_of_one_draft_that_is_wrong_is_corrected(believed, true):
    sizes = ((1, 1.0), (8, 8.0))
    profile = CostProfile(
        tuple((size, 6.0 * ms) for size, ms in sizes),
        ((1, 21.0), (64, 84.0)),
        single_draft_curve=tuple((size, believed * ms) for size, ms in sizes),
    )
    model = CostModel.from_profile(profile, 8, 64, 7)
    for _ in range(100):
        model.observe(8, 16, 36.0 + 8 * true, 1)
        model.observe(8, 16, 36.0, 0)
        model.observe(8, 8, 28.0, 0)
    costs = [model.step_costs(8, 8, 0, length)[0] for length in (1, 7)]
    assert costs[0] == pytest.approx(28.0 + 8 * true, rel=0.05)
    assert costs[1] == pytest.approx(28.0 + 48.0, rel=0.1)


def test_a_file_gives_the_model_of_its_profile(tmp_path):
    path = tmp_path / "costs.json"
    document = {"draft_curve": [[1, 2], [4, 5]], "verify_curve": [[1, 10], [32, 72]]}
    path.write_text(json.dumps(document))
    model = CostModel.from_profile(read_cost_profile(str(path)), 4, 32, 3)
    np.testing.assert_array_equal(
        model.step_costs(2, 3, 9, 3), make_model().step_costs(2, 3, 9, 3)
    )


def test_what_a_step_took_decides_about_none_of_the_drafts_that_it_drew():
    model = make_model()
    before = model.step_costs(4, 4, 28, 3)
    # The last of them is known to nobody until the next one is.
    for _ in range(8):
        model.observe(4, 8, 100.0, 3)
    np.testing.assert_array_equal(model.step_costs(4, 4, 28, 3), before)
    model.observe(4, 8, 100.0, 3)
    assert (model.step_costs(4, 4, 28, 3) > before).all()


def test_a_clock_that_stood_still_teaches_nothing():
    model = make_model()
    before = model.step_costs(4, 4, 28, 3)
    for _ in range(20):
        model.observe(4, 8, 0.0, 3)
    np.testing.assert_array_equal(model.step_costs(4, 4, 28, 3), before)


def test_corrected_costs_still_rise_with_the_work():
    rng = np.random.default_rng(0)
    model = make_model()
    for _ in range(300):
        num_reqs, num_tokens = int(rng.integers(0, 5)), int(rng.integers(1, 33))
        # Larger steps that are quicker: nonsense, as clocks tell it.
        model.observe(num_reqs, num_tokens, 200.0 / num_tokens, int(rng.integers(4)))
    for num_reqs in range(4):
        assert (np.diff(model.step_costs(num_reqs, 0, 32, 3)) >= 0).all()
        more = model.step_costs(num_reqs + 1, 0, 32, 3)
        assert (more >= model.step_costs(num_reqs, 0, 32, 3)).all()


def test_costs_of_a_full_batch_are_looked_up_within_the_time_of_a_few_operations():
    verify = np.arange(1.0, 514.0)
    model = CostModel(np.arange(65.0), verify, 7)
    # The best of many: what else the machine does is not meant.
    times_us = []
    for _ in range(50):
        start_s = time.perf_counter()
        model.step_costs(64, 64, 448, 3)
        times_us.append(1e6 * (time.perf_counter() - start_s))
    assert min(times_us) < 20
