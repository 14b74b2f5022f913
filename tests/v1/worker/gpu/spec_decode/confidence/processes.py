"""Drafters whose acceptance is known, and how true what is said about it comes out."""

from collections.abc import Callable

import numpy as np

# The probability that a draft is accepted, by its place and score.
Truth = Callable[[np.ndarray, np.ndarray], np.ndarray]


def sigmoid(logits: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-logits))


def falling(places: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """Later drafts of the same score are worse, and none is certain."""
    return 0.95 * sigmoid(0.9 * scores - 1.0 - 0.2 * places)


def wavy(places: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """No straight line, nor any that only rises."""
    return 0.5 + 0.45 * np.sin(0.7 * scores)


def level(places: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """The score says nothing."""
    return np.full_like(scores, 0.6)


def compute_ece(predicted: np.ndarray, true: np.ndarray, num_bins: int = 15) -> float:
    """Return the expected calibration error, of probabilities that are known."""
    bins = np.minimum((predicted * num_bins).astype(int), num_bins - 1)
    errors = np.bincount(bins.ravel(), (predicted - true).ravel(), num_bins)
    return float(np.abs(errors).sum() / predicted.size)
