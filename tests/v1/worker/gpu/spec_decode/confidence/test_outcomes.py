import pytest
import torch

from vllm.v1.worker.gpu.spec_decode.confidence import outcomes
from vllm.v1.worker.gpu.spec_decode.confidence.scale import PARTS_PER_KNOT

FORMS = [
    outcomes._count_outcomes_torch,
    outcomes._count_outcomes_triton,
    outcomes.count_outcomes,
]
all_forms = pytest.mark.parametrize("impl", FORMS, ids=["torch", "triton", "picked"])
NUM_DRAFTS, NUM_KNOTS = 3, 4


class Steps:
    """Steps of requests whose drafts all stand on the second knot of the first curves.

    Args:
        num_reqs: rows.
    """

    def __init__(self, impl, device, num_reqs=1):
        self.impl, self.device = impl, device
        shape = 2, NUM_DRAFTS, NUM_KNOTS, 3
        self.counts = torch.zeros(shape, dtype=torch.int32, device=device)
        self.marks = torch.empty(
            (num_reqs, NUM_DRAFTS), dtype=torch.int32, device=device
        )
        for row in range(num_reqs):
            self.put(row, [1.0] * NUM_DRAFTS)

    def put(self, row, knots, curve=0):
        """Put the drafts of a row at these distances from the first knot."""
        for step, knot in enumerate(knots):
            first = (curve * NUM_DRAFTS + step) * NUM_KNOTS
            self.marks[row, step] = int((first + knot) * PARTS_PER_KNOT)

    def run(self, rows, num_logits, num_sampled):
        def ints(values):
            return torch.tensor(values, dtype=torch.int32, device=self.device)

        cu_num_logits = torch.nn.functional.pad(ints(num_logits).cumsum(0), (1, 0))
        self.impl(
            self.counts,
            self.marks,
            ints(rows),
            cu_num_logits.int(),
            ints(num_sampled),
            1,
        )

    def count(self, knot=1, curve=0):
        """Return drafted, tried and accepted drafts of each place."""
        return (self.counts[curve, :, knot] / PARTS_PER_KNOT).tolist()


@all_forms
@pytest.mark.parametrize(
    ("num_logits", "num_sampled", "tried", "accepted"),
    [
        (4, 4, [1, 1, 1], [1, 1, 1]),
        (4, 2, [1, 1, 0], [1, 0, 0]),
        (4, 1, [1, 0, 0], [0, 0, 0]),
        # Trimmed to two, one and no drafts.
        (3, 3, [1, 1, 0], [1, 1, 0]),
        (2, 2, [1, 0, 0], [1, 0, 0]),
        (1, 1, [0, 0, 0], [0, 0, 0]),
        # A chunk of a prompt.
        (0, 0, [0, 0, 0], [0, 0, 0]),
    ],
)
def test_a_draft_is_tried_if_it_is_verified_and_those_before_it_passed(
    impl, device, num_logits, num_sampled, tried, accepted
):
    steps = Steps(impl, device)
    steps.run([0], [num_logits], [num_sampled])
    expected = [[1.0, *pair] for pair in zip(tried, accepted, strict=True)]
    assert steps.count() == expected


@all_forms
def test_a_draft_between_two_knots_counts_for_both(impl, device):
    steps = Steps(impl, device)
    steps.put(0, [0.25, 1.75, 2.5])
    steps.run([0], [4], [2])
    assert steps.count(knot=0) == [[0.75] * 3, [0.0] * 3, [0.0] * 3]
    assert steps.count(knot=1) == [[0.25] * 3, [0.25, 0.25, 0.0], [0.0] * 3]
    assert steps.count(knot=2) == [[0.0] * 3, [0.75, 0.75, 0.0], [0.5, 0.0, 0.0]]
    assert steps.count(knot=3) == [[0.0] * 3, [0.0] * 3, [0.5, 0.0, 0.0]]


@all_forms
def test_the_last_knot_of_a_curve_has_no_neighbour(impl, device):
    steps = Steps(impl, device)
    steps.put(0, [3.0] * NUM_DRAFTS, curve=1)
    steps.run([0], [4], [4])
    assert steps.count(knot=3, curve=1) == [[1.0] * 3] * NUM_DRAFTS
    assert int(steps.counts.sum()) == 9 * PARTS_PER_KNOT


@all_forms
def test_a_draft_is_counted_once(impl, device):
    steps = Steps(impl, device, num_reqs=2)
    steps.run([0], [4], [4])
    before = steps.counts.clone()
    steps.run([0], [4], [4])
    assert torch.equal(steps.counts, before)
    assert (steps.marks[0] == -1).all()
    assert (steps.marks[1] >= 0).all()


@all_forms
def test_a_place_without_draft_is_not_counted(impl, device):
    steps = Steps(impl, device)
    steps.marks[0, 1:] = -1
    steps.run([0], [2], [2])
    assert steps.count() == [[1.0, 1.0, 1.0], [0.0] * 3, [0.0] * 3]
    assert int(steps.counts.sum()) == 3 * PARTS_PER_KNOT


@all_forms
def test_requests_add_up_where_their_marks_are(impl, device):
    steps = Steps(impl, device, num_reqs=4)
    steps.put(1, [1.0] * NUM_DRAFTS, curve=1)
    steps.run([3, 1, 0, 2], [4] * 4, [4, 3, 1, 2])
    assert steps.count() == [[3, 3, 2], [3, 2, 1], [3, 1, 1]]
    assert steps.count(curve=1) == [[1, 1, 1], [1, 1, 1], [1, 1, 0]]


@pytest.mark.parametrize("num_drafts", [1, 4, 7])
def test_the_kernel_matches_its_twin(num_drafts, device):
    generator = torch.Generator().manual_seed(num_drafts)
    num_reqs, max_num_reqs, num_knots = 9, 12, 5
    admitted = torch.randint(-1, num_drafts + 1, (num_reqs,), generator=generator)
    accepted = (torch.rand(num_reqs, generator=generator) * (admitted + 1)).long()
    cu_num_logits = torch.nn.functional.pad((admitted + 1).cumsum(0), (1, 0))
    rows = torch.randperm(max_num_reqs, generator=generator)[:num_reqs]
    # On any knot of any curve, or none.
    last = (3 * num_drafts * num_knots - 1) * PARTS_PER_KNOT
    shape = max_num_reqs, num_drafts
    marks = torch.randint(-last // 4, last + 1, shape, generator=generator)
    marks.clamp_(min=-1)
    results = []
    for impl in FORMS:
        counts = torch.ones((3, num_drafts, num_knots, 3), dtype=torch.int32)
        counts, after = counts.to(device), marks.int().clone().to(device)
        impl(
            counts,
            after,
            rows.int().to(device),
            cu_num_logits.int().to(device),
            torch.where(admitted < 0, 0, accepted + 1).int().to(device),
            1,
        )
        results.append((counts, after))
    (expected, expected_after), *others = results
    for counts, after in others:
        assert torch.equal(counts, expected)
        assert torch.equal(after, expected_after)
