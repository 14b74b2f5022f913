"""The compiled operators that a draft budget is chosen with.

The twins, in the files of their callers, say what each argument is. All of it is on the
host, and a few numbers a request: see `_cpu_ops_step`.
"""

from typing import Any

import numpy as np
import torch

from vllm._cpu_ops_checks import check_vector


class BudgetOps:
    """Arguments as those of the twins; checked is what would leave an array."""

    # The C functions by name; ctypes checks their arguments.
    _c: Any

    def record_round(
        self,
        confidence_probs: torch.Tensor,
        num_drafts: torch.Tensor,
        idx_mapping: torch.Tensor,
        live: torch.Tensor,
        tenants: torch.Tensor,
        slot: int,
        rounds: torch.Tensor,
        round_tenants: torch.Tensor,
    ) -> None:
        num_slots, max_num_reqs, max_drafts = rounds.shape
        (num_reqs,) = idx_mapping.shape
        if not confidence_probs.shape[1] == live.shape[1] == max_drafts:
            raise ValueError(
                f"confidences of {tuple(confidence_probs.shape)} for rows of "
                f"{tuple(live.shape)} and rounds of {tuple(rounds.shape)}"
            )
        _check_tenants(round_tenants, num_slots, max_num_reqs)
        failed = self._c.record_round(
            _address(confidence_probs, num_reqs, torch.float32),
            _address(num_drafts, num_reqs, torch.int32),
            _address(idx_mapping, num_reqs, torch.int32),
            num_reqs,
            max_num_reqs,
            max_drafts,
            _address(live, max_num_reqs, torch.float32),
            _address(tenants, max_num_reqs, torch.int64),
            slot,
            num_slots,
            _address(rounds, num_slots, torch.float32),
            _address(round_tenants, num_slots, torch.int64),
        )
        if failed:
            raise IndexError("a slot or a request row is outside the rounds")

    def read_rounds(
        self,
        rounds: torch.Tensor,
        round_tenants: torch.Tensor,
        tenants: torch.Tensor,
        typical: torch.Tensor,
        slots: list[int],
        idx_mapping_np: np.ndarray,
    ) -> np.ndarray:
        num_slots, max_num_reqs, max_drafts = rounds.shape
        num_reqs = len(idx_mapping_np)
        past = np.empty((len(slots), num_reqs, max_drafts))
        # Held by a name: an address alone keeps no array alive.
        slots_np = np.array(slots, dtype=np.int64)
        _check_tenants(round_tenants, num_slots, max_num_reqs)
        failed = self._c.read_rounds(
            _address(rounds, num_slots, torch.float32),
            _address(round_tenants, num_slots, torch.int64),
            num_slots,
            _address(tenants, max_num_reqs, torch.int64),
            max_num_reqs,
            _address(typical, max_drafts, torch.float64),
            max_drafts,
            _host_address(slots_np, len(slots), torch.int64),
            len(slots),
            _host_address(idx_mapping_np, num_reqs, torch.int32),
            num_reqs,
            _host_address(past, len(slots), torch.float64),
        )
        if failed:
            raise IndexError("a slot or a request row is outside the rounds")
        return past

    def count_round(
        self,
        rounds: torch.Tensor,
        round_tenants: torch.Tensor,
        tenants: torch.Tensor,
        slot: int,
        idx_mapping_np: np.ndarray,
        max_counted: int,
        typical: torch.Tensor,
        num_counted: torch.Tensor,
    ) -> None:
        num_slots, max_num_reqs, max_drafts = rounds.shape
        num_reqs = len(idx_mapping_np)
        _check_tenants(round_tenants, num_slots, max_num_reqs)
        failed = self._c.count_round(
            _address(rounds, num_slots, torch.float32),
            _address(round_tenants, num_slots, torch.int64),
            slot,
            num_slots,
            _address(tenants, max_num_reqs, torch.int64),
            max_num_reqs,
            max_drafts,
            _host_address(idx_mapping_np, num_reqs, torch.int32),
            num_reqs,
            max_counted,
            _address(typical, max_drafts, torch.float64),
            _address(num_counted, max_drafts, torch.int64),
        )
        if failed:
            raise IndexError("a slot or a request row is outside the rounds")

    def expected_gains(
        self, past_confidences: np.ndarray, num_drafts_np: np.ndarray, num_drafts: int
    ) -> np.ndarray:
        num_rounds, num_reqs, max_drafts = past_confidences.shape
        gains = np.empty(num_drafts + 1)
        failed = self._c.expected_gains(
            _host_address(past_confidences, num_rounds, torch.float64),
            num_rounds,
            num_reqs,
            max_drafts,
            _host_address(num_drafts_np, num_reqs, torch.int32),
            len(gains),
            _host_address(gains, len(gains), torch.float64),
        )
        if failed:
            raise IndexError(f"{num_drafts} drafts are not those of the requests")
        return gains

    def correct_costs(
        self,
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
        (num_knots,) = log_factors.shape
        if covariance.numel() != num_knots**2 or prior.shape != covariance.shape:
            raise ValueError(f"a covariance of {tuple(covariance.shape)}")
        if not 0 <= num_draft_knots <= num_knots:
            raise ValueError(f"{num_draft_knots} of {num_knots} knots")
        return float(
            self._c.correct_costs(
                _address(log_factors, num_knots, torch.float64),
                _address(covariance, num_knots, torch.float64),
                _address(prior, num_knots, torch.float64),
                _host_address(weights_np, num_knots, torch.float64),
                num_draft_knots,
                num_knots,
                draft_ms,
                verify_ms,
                step_ms,
                noise,
                outlier_deviations,
                forgetting,
            )
        )


def _check_tenants(tenants: torch.Tensor, num_slots: int, max_num_reqs: int) -> None:
    if tenants.shape != (num_slots, max_num_reqs):
        raise ValueError(f"{tuple(tenants.shape)} tenants of {num_slots} rounds")


def _address(x: torch.Tensor, size: int, dtype: torch.dtype) -> int:
    """Return where `size` contiguous rows begin."""
    check_vector(x, size, dtype)
    return x.data_ptr()


def _host_address(array: np.ndarray, size: int, dtype: torch.dtype) -> int:
    # A tensor knows its address at half the price of `array.ctypes`.
    return _address(torch.from_numpy(array), size, dtype)
