"""How far the measured curves are from the steps that run: learnt step by step."""

import math

import numpy as np
import torch

from vllm import _custom_ops as ops

# Standard deviations of log(true / measured) before any step is seen: of what all sizes
# share, such as a machine that others use as well; of what is added with each doubling
# of the size; and of what is a size's own.
_SHARED_SPREAD = 0.7
_TREND_SPREAD = 0.12
_LOCAL_SPREAD = 0.1
# Of drafting one token beside drafting all: a small difference of measured times.
_SINGLE_SPREAD = 0.5
# Doublings of the size over which neighbours stay alike.
_NEIGHBOURHOOD = 1.5
# Share of what is known that a step makes obsolete: with a noise of 5% the shared part
# follows within some ten steps, a size's own within some fifty of that size.
_FORGETTING = 1e-4
# Deviations by which a size is trusted to be quicker than it seems, beyond those of the
# best known size: whoever believes the worst of what he does not know never learns it.
_OPTIMISM = 0.5
# Relative noise of one step's time, at the start and at its bounds.
_FIRST_NOISE, _LEAST_NOISE, _MOST_NOISE = 0.1, 0.01, 1.0
# The noise moves by this factor a step until half of the errors are within it.
_NOISE_STEP = 1.02
# Median of |x| for a normal x of deviation 1.
_MEDIAN_DEVIATION = 0.6745
# Errors of more deviations than this count for less and less.
_OUTLIER_DEVIATIONS = 2.0


class CostCorrection:
    """Factors on three cost curves, piecewise linear in log2 of the size.

    A Kalman filter over the factors' logarithms at the powers of two. Sizes that do
    not run inherit from those that do, all the more from their neighbours. One slow
    step among quick ones, as when another process takes the machine, changes little.

    Args:
        max_num_reqs: last index of the draft curve.
        max_batch_tokens: last index of the verify curve.
    """

    def __init__(self, max_num_reqs: int, max_batch_tokens: int) -> None:
        self._draft_basis = _make_basis(max_num_reqs)
        self._verify_basis = _make_basis(max_batch_tokens)
        self._num_draft_knots = 2 * self._draft_basis.shape[1]
        prior = _make_prior(self._draft_basis.shape[1], self._verify_basis.shape[1])
        # Knots of one draft, of all drafts, then of verification; of what is changed,
        # two views of one memory.
        self._covariance_np = prior.copy()
        self._log_factors_np = np.zeros(len(prior))
        self._prior, self._covariance, self._log_factors = map(
            torch.from_numpy, (prior, self._covariance_np, self._log_factors_np)
        )
        self._noise = _FIRST_NOISE

    def observe(
        self,
        num_draft_reqs: int,
        num_tokens: int,
        draft_ms: float,
        verify_ms: float,
        step_ms: float,
        length_share: float = 1.0,
    ) -> None:
        """Learn from one step.

        Args:
            num_draft_reqs: requests that were drafted for.
            num_tokens: of the step.
            draft_ms: what the curve says of drafting; 0 if the step did not.
            verify_ms: what the curve says of the rest, > 0.
            step_ms: measured, > 0.
            length_share: where what was drafted stands between one draft of a request,
                0, and all of them, 1.
        """
        draft_weights = self._draft_basis[num_draft_reqs]
        native = ops.maybe_budget_ops()
        correct = _correct_costs_numpy if native is None else native.correct_costs
        error = correct(
            self._log_factors,
            self._covariance,
            self._prior,
            np.concatenate(
                [
                    (1.0 - length_share) * draft_weights,
                    length_share * draft_weights,
                    self._verify_basis[num_tokens],
                ]
            ),
            self._num_draft_knots,
            draft_ms,
            verify_ms,
            step_ms,
            self._noise,
            _OUTLIER_DEVIATIONS,
            _FORGETTING,
        )
        is_within = abs(error) < _MEDIAN_DEVIATION * self._noise
        noise = self._noise / _NOISE_STEP if is_within else self._noise * _NOISE_STEP
        self._noise = min(max(noise, _LEAST_NOISE), _MOST_NOISE)

    def factors(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return what to multiply each entry of the curves with.

        Returns:
            Of one draft and of all drafts, [max_num_reqs + 1] each; of verification,
            [max_batch_tokens + 1].
        """
        split = self._num_draft_knots
        covariance = self._covariance_np[split:, split:]
        log_factors = self._log_factors_np
        variances = ((self._verify_basis @ covariance) * self._verify_basis).sum(axis=1)
        deviations = np.sqrt(variances)
        verify = self._verify_basis @ log_factors[split:]
        verify -= _OPTIMISM * (deviations - deviations.min())
        single, full = (
            self._draft_basis @ part for part in np.split(log_factors[:split], 2)
        )
        return np.exp(single), np.exp(full), np.exp(verify)


def _correct_costs_numpy(
    log_factors: torch.Tensor,
    covariance: torch.Tensor,
    prior: torch.Tensor,
    weights_np: np.ndarray,
    num_draft_knots: int,
    draft_ms: float,
    verify_ms: float,
    step_ms: float,
    noise: float,
    outlier_deviations: float,
    forgetting: float,
) -> float:
    """Move the factors and their covariance by one step's time.

    Args:
        log_factors: [num_knots] float64, changed in place.
        covariance: [num_knots, num_knots] float64, of the factors, changed in place.
        prior: as the covariance, before any step is seen.
        weights_np: [num_knots] float64, of the step's sizes on the knots.
        num_draft_knots: how many of the knots, the first ones, are of drafting.
        draft_ms: what the curve says of drafting.
        verify_ms: what the curve says of the rest.
        step_ms: measured.
        noise: relative deviation of one step's time.
        outlier_deviations: from where an error counts for less.
        forgetting: share of what is known that the step makes obsolete.

    Returns:
        log(measured / predicted).
    """
    factors, spread = log_factors.numpy(), covariance.numpy()
    weighted = weights_np * factors
    draft_ms *= math.exp(weighted[:num_draft_knots].sum())
    verify_ms *= math.exp(weighted[num_draft_knots:].sum())
    predicted_ms = draft_ms + verify_ms
    gradient = weights_np / predicted_ms
    gradient[:num_draft_knots] *= draft_ms
    gradient[num_draft_knots:] *= verify_ms
    error = math.log(step_ms / predicted_ms)
    shared = spread @ gradient
    explained = float(gradient @ shared)
    variance = noise**2
    variance *= 1 + error**2 / (outlier_deviations**2 * (explained + variance))
    gain = shared / (explained + variance)
    factors += gain * error
    factors *= 1 - forgetting / 2
    spread -= np.outer(gain, shared)
    spread += forgetting * (prior.numpy() - spread)
    return error


def _make_basis(max_size: int) -> np.ndarray:
    """Return [max_size + 1, num_knots]: each size's weights on the knots 1, 2, 4..."""
    places = np.log2(np.maximum(np.arange(max_size + 1), 1))
    knots = np.arange(math.ceil(places[-1]) + 1)
    return np.maximum(1 - np.abs(places[:, None] - knots), 0)


def _make_prior(num_draft_knots: int, num_verify_knots: int) -> np.ndarray:
    """Return the covariance of the knots before any step is seen."""
    ends = np.cumsum([num_draft_knots, num_draft_knots, num_verify_knots]).tolist()
    num_knots = ends[-1]
    prior = np.full((num_knots, num_knots), _SHARED_SPREAD**2)
    prior[:num_draft_knots, :num_draft_knots] += _SINGLE_SPREAD**2
    for knots in map(slice, [0, *ends], ends):
        places = np.arange(num_knots)[knots].astype(np.float64)
        distance = np.abs(places[:, None] - places)
        prior[knots, knots] += _LOCAL_SPREAD**2 * np.exp(-distance / _NEIGHBOURHOOD)
        from_middle = places - places.mean()
        prior[knots, knots] += _TREND_SPREAD**2 * np.outer(from_middle, from_middle)
    return prior
