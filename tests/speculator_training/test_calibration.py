import json

import pytest
import torch

from vllm.exceptions import CheckpointError
from vllm.speculator_training.calibration import (
    GRID,
    compute_brier,
    compute_ece,
    compute_survival,
    fit_temperatures,
    judge_temperatures,
    write_temperatures,
)

STEP = GRID[1] / GRID[0]


@pytest.fixture(scope="module")
def miscalibrated():
    """Return confidences that are off by known factors, and what really happened."""
    generator = torch.Generator().manual_seed(0)
    truth = torch.randn(60_000, 3, generator=generator) * 1.5 + 1.0
    draws = torch.rand(truth.shape, generator=generator)
    is_accepted = (draws < truth.sigmoid()).cumprod(dim=1).bool()
    factors = (GRID[26], GRID[14], GRID[32])
    return truth * torch.tensor(factors), is_accepted, factors


def test_known_temperatures_are_recovered_within_a_step_of_the_grid(miscalibrated):
    logits, is_accepted, factors = miscalibrated
    for fitted, true in zip(
        fit_temperatures(logits, is_accepted), factors, strict=True
    ):
        assert true / STEP * 0.999 <= fitted <= true * STEP * 1.001


def test_calibration_makes_every_position_truer(miscalibrated):
    logits, is_accepted, _ = miscalibrated
    fits = judge_temperatures(
        logits, is_accepted, fit_temperatures(logits, is_accepted)
    )
    for fit in fits:
        assert fit.ece_after < 0.01 < fit.ece_before
        assert fit.brier_after < fit.brier_before


def test_true_confidences_are_left_alone():
    generator = torch.Generator().manual_seed(1)
    truth = torch.randn(60_000, 1, generator=generator)
    happened = torch.rand(truth.shape, generator=generator) < truth.sigmoid()
    (temperature,) = fit_temperatures(truth, happened)
    assert 1 / STEP * 0.999 <= temperature <= STEP * 1.001


def test_the_calibration_error_by_hand():
    # Two bins of 15: 0.1 falls into the second, 0.9 into the fourteenth.
    predicted = torch.tensor([0.1, 0.1, 0.9, 0.9])
    happened = torch.tensor([False, True, True, True])
    # |0.1 - 0.5| of a half, |0.9 - 1| of a half.
    assert compute_ece(predicted, happened) == pytest.approx(0.25)
    # Off by 0.1, 0.9, 0.1 and 0.1.
    assert compute_brier(predicted, happened) == pytest.approx(0.21)


def test_survival_is_a_product_of_tempered_confidences():
    logits = torch.tensor([[0.0, 2.0]])
    # sigmoid(2 / 2) = 0.731059
    survival = compute_survival(logits, (1.0, 2.0))
    assert survival[0].tolist() == pytest.approx([0.5, 0.365529], abs=1e-6)


def test_writing_temperatures_keeps_the_rest_of_the_file(tmp_path):
    (tmp_path / "config.json").write_text('{"block_size": 7, "other": [1]}')
    write_temperatures(str(tmp_path), (1.5, 2.0))
    raw = json.loads((tmp_path / "config.json").read_text())
    assert raw == {
        "block_size": 7,
        "other": [1],
        "confidence_temperatures": [1.5, 2.0],
    }
    with pytest.raises(CheckpointError, match="No such file"):
        write_temperatures(str(tmp_path / "nowhere"), (1.0,))
