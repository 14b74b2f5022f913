"""Temperatures that make predicted survival true: sequential temperature scaling.

Source: "DSpark", arXiv:2607.05147.
"""

import json
import os
from dataclasses import dataclass

import torch

from vllm.exceptions import CheckpointError

NUM_BINS = 15
# 41 temperatures, even in their logarithm.
GRID = tuple(float(t) for t in torch.logspace(-1, 1, 41, dtype=torch.float64))


@dataclass(frozen=True)
class PositionFit:
    """How true the survival up to one draft is, before and after calibration."""

    temperature: float
    ece_before: float
    ece_after: float
    brier_before: float
    brier_after: float


def compute_survival(
    logits: torch.Tensor, temperatures: tuple[float, ...] = ()
) -> torch.Tensor:
    """Return [n, K] float64: the probability that drafts 1 to k are all accepted.

    Args:
        logits: [n, K], uncalibrated confidences.
        temperatures: one a draft; none for 1.
    """
    divisors = logits.new_tensor(temperatures or [1.0] * logits.shape[1]).double()
    return (logits.double() / divisors).sigmoid().cumprod(dim=-1)


def compute_ece(
    predicted: torch.Tensor, happened: torch.Tensor, num_bins: int = NUM_BINS
) -> float:
    """Return the expected calibration error over bins of equal width.

    Args:
        predicted: [n], in [0, 1].
        happened: [n] bool.
    """
    return sum(
        share * abs(mean - rate)
        for mean, rate, share in reliability(predicted, happened, num_bins)
    )


def reliability(
    predicted: torch.Tensor, happened: torch.Tensor, num_bins: int = NUM_BINS
) -> list[tuple[float, float, float]]:
    """Return the mean prediction, the true rate and the share of each used bin."""
    bins = (predicted * num_bins).long().clamp(0, num_bins - 1)
    counts = torch.bincount(bins, minlength=num_bins).double()
    sums = torch.bincount(bins, predicted.double(), num_bins)
    hits = torch.bincount(bins, happened.double(), num_bins)
    is_used = counts > 0
    counts, sums, hits = counts[is_used], sums[is_used], hits[is_used]
    columns = (sums / counts, hits / counts, counts / len(predicted))
    return list(zip(*(column.tolist() for column in columns), strict=True))


def compute_brier(predicted: torch.Tensor, happened: torch.Tensor) -> float:
    """Return the mean squared error of predictions [n] of what happened [n]."""
    return float((predicted.double() - happened.double()).square().mean())


def fit_temperatures(
    logits: torch.Tensor, is_accepted: torch.Tensor
) -> tuple[float, ...]:
    """Fit one draft after another, with those before it fixed.

    Args:
        logits: [n, K], uncalibrated confidences of whole verified blocks.
        is_accepted: [n, K] bool, a prefix of each block.
    """
    temperatures: list[float] = []
    survival = torch.ones(len(logits), dtype=torch.float64)
    for k in range(logits.shape[1]):
        happened = is_accepted[:, k]
        candidates = [(logits[:, k].double() / t).sigmoid() * survival for t in GRID]
        errors = [compute_ece(candidate, happened) for candidate in candidates]
        best = min(range(len(GRID)), key=errors.__getitem__)
        temperatures.append(GRID[best])
        survival = candidates[best]
    return tuple(temperatures)


def judge_temperatures(
    logits: torch.Tensor, is_accepted: torch.Tensor, temperatures: tuple[float, ...]
) -> list[PositionFit]:
    """Return how true each survival is, with temperatures of 1 and with these."""
    before = compute_survival(logits)
    after = compute_survival(logits, temperatures)
    return [
        PositionFit(
            temperature,
            compute_ece(before[:, k], is_accepted[:, k]),
            compute_ece(after[:, k], is_accepted[:, k]),
            compute_brier(before[:, k], is_accepted[:, k]),
            compute_brier(after[:, k], is_accepted[:, k]),
        )
        for k, temperature in enumerate(temperatures or (1.0,) * is_accepted.shape[1])
    ]


def write_temperatures(folder: str, temperatures: tuple[float, ...]) -> None:
    """Put temperatures into the config.json of a drafter, whatever its format.

    Raises:
        CheckpointError: there is no such file, or it is damaged.
    """
    path = os.path.join(folder, "config.json")
    try:
        with open(path, encoding="utf-8") as file:
            raw = json.load(file)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: {error}") from None
    raw["confidence_temperatures"] = list(temperatures)
    partial = f"{path}.partial"
    with open(partial, "w", encoding="utf-8") as file:
        json.dump(raw, file, indent=2)
        file.write("\n")
    os.replace(partial, path)
