import numpy as np
import pytest
import torch

from vllm.v1.worker.gpu.spec_decode.confidence_history import ConfidenceHistory
from vllm.v1.worker.gpu.spec_decode.speculator import Drafts

NAN = float("nan")


class Rows:
    """A history whose steps propose drafts for some rows."""

    def __init__(self, device: torch.device, max_num_reqs: int = 4) -> None:
        self.device = device
        self.history = ConfidenceHistory(max_num_reqs, 2, device)

    def start(self, *rows: int) -> None:
        for row in rows:
            self.history.add_request(row)
        self.history.apply_staged_writes()

    def step(self, confidences=None, num_drafts=None, rows=None) -> None:
        """Run a step that ends with a proposal, or with none."""
        self.history.begin_step()
        if confidences is None:
            return
        probs = torch.tensor(confidences, device=self.device)
        rows_np = np.arange(len(probs)) if rows is None else np.array(rows)
        rows_np = rows_np.astype(np.int32)
        counts = [2] * len(probs) if num_drafts is None else num_drafts
        drafts = Drafts(
            torch.zeros_like(probs, dtype=torch.int64),
            torch.tensor(counts, dtype=torch.int32, device=self.device),
            probs,
        )
        mapping = torch.from_numpy(rows_np).to(self.device)
        self.history.record(rows_np, mapping, drafts)

    def look(self, *rows: int) -> list:
        """Return what is known when the next step begins, the oldest round first."""
        self.history.begin_step()
        past = self.history.get_past_confidences(np.array(rows, dtype=np.int32))
        assert past.dtype == np.float64
        return past.tolist()


@pytest.fixture
def rows(device) -> Rows:
    started = Rows(device)
    started.start(0, 1, 2, 3)
    return started


def test_a_step_does_not_see_how_sure_the_drafter_is_of_what_it_verifies(rows):
    rows.step([[0.5, 0.25]])
    # What is guessed of drafts that nothing is known of.
    assert rows.look(0) == [[[0.6, 0.6]]]
    assert rows.history.live[0].tolist() == [0.5, 0.25]


def test_the_round_before_is_known(rows):
    rows.step([[0.5, 0.25]])
    rows.step([[0.125, 0.125]])
    assert rows.look(0) == [[[0.5, 0.25]]]
    assert rows.history.live[0].tolist() == [0.125, 0.125]


def test_a_round_is_read_late_when_steps_without_drafts_follow_it(rows):
    rows.step([[0.5, 0.25]])
    rows.step()
    assert rows.look(0) == [[[0.5, 0.25]]]


def test_few_requests_are_looked_at_over_rounds_and_many_over_one(device):
    rows = Rows(device, max_num_reqs=64)
    rows.start(*range(64))
    for confidence in (0.125, 0.25, 0.5, 0.75):
        rows.step([[confidence] * 2] * 64)
    assert rows.look(0) == [[[0.125] * 2], [[0.25] * 2], [[0.5] * 2]]
    for confidence in range(8):
        rows.step([[confidence / 8] * 2] * 64)
    past = np.array(rows.look(0))[:, 0, 0]
    # A ring of nine, the youngest of which is not to be read.
    assert past.tolist() == [0.75, *(confidence / 8 for confidence in range(7))]
    past = np.array(rows.look(*range(64)))
    assert past.shape == (1, 64, 2)
    assert (past == 7 / 8).all()


def test_what_was_before_a_long_pause_counts_no_more_than_until_the_next_round(rows):
    rows.step([[0.5, 0.5]])
    for _ in range(30):
        rows.step()
    assert rows.look(0) == [[[0.5, 0.5]]]
    rows.step([[0.25, 0.25]])
    rows.step()
    assert rows.look(0) == [[[0.25, 0.25]]]


def test_what_was_not_drafted_is_unknown(rows):
    rows.step([[0.0, 0.5], [0.5, 0.5]], num_drafts=[2, 1])
    live = rows.history.live[:2]
    assert live[0].tolist() == [0.0, 0.5]
    assert live[1, 0] == 0.5
    assert live[1, 1].isnan()


def test_a_reused_row_forgets_its_last_request(rows):
    for _ in range(3):
        rows.step([[0.5, 0.5], [0.25, 0.25]])
    rows.start(0)
    assert rows.history.live[0].isnan().all()
    assert rows.history.live[1].tolist() == [0.25, 0.25]
    past = np.array(rows.look(0, 1))
    assert past[:, 1].tolist() == [[0.25, 0.25]] * 2
    # Neither 0.5 nor 0.25, in any round.
    assert len(np.unique(past[:, 0])) == 1
    assert past[0, 0, 0] not in (0.25, 0.5)


def test_a_copy_that_lands_after_its_request_has_gone_is_not_read(rows):
    rows.step([[0.5, 0.5]])
    # The round is on its way when the row changes hands.
    rows.start(0)
    rows.step([[0.125, 0.125]])
    rows.step([[0.75, 0.75]])
    past = np.array(rows.look(0))[:, 0, 0]
    assert 0.125 in past
    assert 0.5 not in past


def test_what_is_unknown_is_taken_for_typical(rows):
    # The first guess counts for four proposals.
    rows.step([[0.5, 0.0]] * 4)
    rows.step([[0.5, 0.0]] * 4)
    rows.start(3)
    [[unknown]] = rows.look(3)
    # Three rows of one round are known by now, and belong to the same requests still.
    np.testing.assert_allclose(unknown, [(4 * 0.6 + 3 * 0.5) / 7, 4 * 0.6 / 7])


def test_typical_follows_what_has_changed(device):
    rows = Rows(device, max_num_reqs=64)
    rows.start(*range(64))
    for confidence in (1.0, 0.25):
        for _ in range(40):
            rows.step([[confidence] * 2] * 64)
    rows.start(0)
    assert np.array(rows.look(0))[0, 0, 0] == pytest.approx(0.25, abs=0.01)


def test_what_is_forgotten_is_neither_known_nor_typical(rows):
    for _ in range(3):
        rows.step([[0.5, 0.25]])
    assert rows.look(0) != [[[0.6, 0.6]]]
    rows.history.forget()
    assert rows.look(0) == [[[0.6, 0.6]]]
