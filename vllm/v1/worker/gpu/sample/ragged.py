"""Lists of different lengths, one a request, packed into flat device arrays."""

import numpy as np
import torch

from vllm.v1.worker.gpu.batch_layout import find_owners
from vllm.v1.worker.gpu.buffer_utils import UvaBackedTensor, to_device


class RaggedRows:
    """What a few requests carry many of (biased tokens, stop tokens, bad words).

    The arrays are packed again when a row changes, that is when such a request comes or
    goes, and cost nothing for requests without a list.

    Args:
        max_num_reqs: rows.
        dtypes: of the parallel arrays that make a list.
        device: where the packed arrays live.
    """

    def __init__(
        self,
        max_num_reqs: int,
        dtypes: tuple[torch.dtype, ...],
        device: torch.device,
    ) -> None:
        # [max_num_reqs] int32: where a row's list begins, and how long it is.
        self.starts = UvaBackedTensor(max_num_reqs, torch.int32, device)
        self.lengths = UvaBackedTensor(max_num_reqs, torch.int32, device)
        # Each [sum of lengths].
        self.values = tuple(torch.zeros(1, dtype=t, device=device) for t in dtypes)
        self.max_length = 0
        self._rows: dict[int, tuple[np.ndarray, ...]] = {}
        self._dtypes = tuple(torch.empty(0, dtype=t).numpy().dtype for t in dtypes)
        self._device = device
        self._is_stale = False

    def set_row(self, req_state_idx: int, *columns: np.ndarray) -> None:
        """Give a row its list, as parallel arrays of one length."""
        assert len(columns) == len(self.values), "one array for each dtype"
        self._rows[req_state_idx] = columns
        self._is_stale = True

    def clear_row(self, req_state_idx: int) -> None:
        """Take a row's list away."""
        if self._rows.pop(req_state_idx, None) is not None:
            self._is_stale = True

    def has_list(self, req_state_idx: int) -> bool:
        """Whether the row has a list, also one that the device does not know yet."""
        return req_state_idx in self._rows

    def apply_staged_writes(self) -> None:
        """Make the changes visible to the device."""
        if not self._is_stale:
            return
        self._is_stale = False
        self.starts.np[:] = 0
        self.lengths.np[:] = 0
        start, self.max_length = 0, 0
        for req_state_idx, columns in self._rows.items():
            length = len(columns[0])
            self.starts.np[req_state_idx] = start
            self.lengths.np[req_state_idx] = length
            self.max_length = max(self.max_length, length)
            start += length
        self.starts.copy_to_device()
        self.lengths.copy_to_device()
        if start == 0:
            return
        self.values = tuple(
            to_device(
                np.concatenate([row[i] for row in self._rows.values()]).astype(dtype),
                self._device,
            )
            for i, dtype in enumerate(self._dtypes)
        )

    def expand(
        self, expanded_idx_mapping: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """List every (logit row, list entry) pair of a step; for the torch twins.

        Args:
            expanded_idx_mapping: [num_logits] int32, logit row -> request state row.

        Returns:
            logit_idx: [num_pairs] int64.
            value_idx: [num_pairs] int64, index into `values`.
        """
        lengths = self.lengths.gpu[expanded_idx_mapping].long()
        ends = lengths.cumsum(0)
        logit_idx = find_owners(ends, int(lengths.sum()))
        # Entry number within the list + where the list begins.
        shift = self.starts.gpu[expanded_idx_mapping].long() - (ends - lengths)
        value_idx = torch.arange(len(logit_idx), device=lengths.device)
        return logit_idx, value_idx + shift[logit_idx]
