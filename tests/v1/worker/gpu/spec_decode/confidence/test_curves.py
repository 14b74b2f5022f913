import math

import pytest
import torch

from vllm.v1.worker.gpu.spec_decode.confidence import curves
from vllm.v1.worker.gpu.spec_decode.confidence.scale import (
    CERTAINTIES,
    HEAD_LOGITS,
    MATCH_LENGTHS,
    NUM_KINDS,
    PARTS_PER_KNOT,
    ScoreScale,
)

all_forms = pytest.mark.parametrize(
    "impl",
    [curves._read_curves_torch, curves._read_curves_triton, curves.read_curves],
    ids=["torch", "triton", "picked"],
)
NAN = float("nan")
SCALE = ScoreScale(low=0.0, high=4.0, num_knots=3, slope=1.0, intercept=0.0)
# A greedy request, one that draws, and one that draws by a seed; then the same under a
# grammar.
TEMPERATURE, IS_SEEDED = [0.0, 0.8, 0.8] * 2, [True, False, True] * 2
IS_CONSTRAINED = [False] * 3 + [True] * 3


def read(impl, logits, scores, rows, device, num_drafts=None):
    num_places = len(scores[0])
    if num_drafts is None:
        num_drafts = [num_places] * len(scores)
    marks = torch.full((6, num_places), -7, dtype=torch.int32, device=device)
    idx_mapping = torch.tensor(rows, dtype=torch.int32, device=device)
    probs = impl(
        torch.tensor(logits, device=device),
        torch.tensor(scores, device=device),
        torch.tensor(num_drafts, dtype=torch.int32, device=device),
        idx_mapping,
        torch.tensor(TEMPERATURE, device=device),
        torch.tensor(IS_SEEDED, device=device),
        torch.tensor(IS_CONSTRAINED, device=device),
        SCALE,
        marks,
    )
    others = torch.ones(6, dtype=torch.bool).scatter_(
        0, idx_mapping.long().cpu(), False
    )
    assert marks[others.to(device)].eq(-7).all(), "rows of nobody are left alone"
    knots = marks[idx_mapping.long()].double() / PARTS_PER_KNOT
    return torch.logit(probs.double()).tolist(), knots.tolist()


@all_forms
def test_a_curve_is_a_straight_line_between_its_knots(impl, device):
    logits = [[[-1.0, 1.0, 0.0]]] * 6
    scores = [[0.0], [0.5], [2.0], [3.0], [4.0]]
    values, _ = read(impl, logits, scores, [0] * 5, device)
    assert sum(values, []) == pytest.approx([-1.0, -0.5, 1.0, 0.5, 0.0], abs=1e-5)


@all_forms
def test_a_score_beyond_the_knots_counts_as_the_last_knot(impl, device):
    logits = [[[-1.0, 1.0, 0.5]]] * 6
    scores = [[-3.0], [9.0], [math.inf], [-math.inf]]
    for score, value, knot in zip(
        scores, [-1.0, 0.5, 0.5, -1.0], [0.0, 2.0, 2.0, 0.0], strict=True
    ):
        values, knots = read(impl, logits, [score], [0], device)
        assert values == [[pytest.approx(value, abs=1e-5)]]
        assert knots == [[knot]]


@all_forms
def test_each_place_and_kind_has_a_curve_of_its_own(impl, device):
    # Curve c of place k is level at c + k / 2.
    logits = [[[c + k / 2] * 3 for k in range(2)] for c in range(-3, 3)]
    rows = [2, 0, 1, 5, 3, 4]
    values, _ = read(impl, logits, [[1.0, 1.0]] * 6, rows, device)
    assert values == [pytest.approx([r - 3, r - 2.5], abs=1e-5) for r in rows]


@all_forms
def test_a_mark_says_which_curve_was_read_and_where(impl, device):
    # Six knots for each kind.
    scores = [[0.0, 2.0], [0.5, 3.0], [1.0, 4.0], [1.0, 4.0]]
    _, knots = read(impl, [[[0.0] * 3] * 2] * 6, scores, [0, 1, 2, 5], device)
    assert knots == [[0.0, 4.0], [6.25, 10.5], [12.5, 17.0], [30.5, 35.0]]


@all_forms
def test_what_is_no_draft_is_never_accepted(impl, device):
    values, knots = read(impl, [[[9.0] * 3] * 2] * 6, [[NAN, 1.0]], [0], device)
    assert values[0][0] == -math.inf
    assert knots[0] == [-1.0 / PARTS_PER_KNOT, 3.5]


@all_forms
def test_there_is_no_draft_past_their_number(impl, device):
    curves_ = [[[9.0] * 3] * 2] * 6
    values, knots = read(impl, curves_, [[1.0, 1.0]] * 3, [0, 1, 2], device, [1, 0, 2])
    nothing = -1.0 / PARTS_PER_KNOT
    assert [[value > -math.inf for value in row] for row in values] == [
        [True, False],
        [False, False],
        [True, True],
    ]
    assert knots == [[0.5, nothing], [nothing, nothing], [12.5, 15.5]]


@pytest.mark.parametrize("scale", [HEAD_LOGITS, CERTAINTIES, MATCH_LENGTHS])
@pytest.mark.parametrize("num_drafts", [1, 5, 8])
def test_the_kernel_matches_its_twin(scale, num_drafts, device):
    generator = torch.Generator().manual_seed(num_drafts)
    shape = NUM_KINDS, num_drafts, scale.num_knots
    logits = torch.randn(shape, generator=generator) * 3
    scores = torch.randn(6, num_drafts, generator=generator) * scale.high
    scores[2, 0] = NAN
    arguments = (
        logits.to(device),
        scores.to(device),
        torch.tensor([9, 0, 9, 9, 1, 9], dtype=torch.int32, device=device),
        torch.tensor([3, 0, 2, 1, 5, 4], dtype=torch.int32, device=device),
        torch.tensor([0.0, 1.0, 0.5, 0.0, 1.0, 0.0], device=device),
        torch.tensor([False, True, False, True, True, True], device=device),
        torch.tensor([True, False, False, False, True, False], device=device),
        scale,
    )

    def run(impl):
        marks = torch.zeros(6, num_drafts, dtype=torch.int32, device=device)
        return impl(*arguments, marks), marks

    expected_probs, expected_marks = run(curves._read_curves_torch)
    for impl in (curves._read_curves_triton, curves.read_curves):
        probs, marks = run(impl)
        # The exponential and a fused multiplication round in their own way.
        torch.testing.assert_close(probs, expected_probs, rtol=0, atol=1e-6)
        assert torch.equal(marks, expected_marks)
