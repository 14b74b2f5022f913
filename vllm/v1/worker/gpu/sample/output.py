"""From one value a logit row to one value a request."""

import torch

from vllm.v1.outputs import SamplerOutput
from vllm.v1.worker.gpu.batch_layout import BatchLayout


def spread_rows(values: torch.Tensor, layout: BatchLayout, fill: int) -> torch.Tensor:
    """Give each request the value of its row, and `fill` to one without a row.

    Args:
        values: [num_logits], at least one; no request owns more than one row.
        layout: of the step.
        fill: for requests that sample nothing.

    Returns:
        [num_reqs], of the type of values.
    """
    if len(values) == layout.num_reqs:
        return values
    cu_num_logits = layout.cu_num_logits
    first_row = cu_num_logits[:-1].clamp(max=len(values) - 1)
    return values[first_row].masked_fill(torch.diff(cu_num_logits) == 0, fill)


def no_samples(num_reqs: int, device: torch.device) -> SamplerOutput:
    """Return the output of a step in which no request owns a row."""
    return SamplerOutput(
        torch.full((num_reqs, 1), -1, dtype=torch.int64, device=device),
        torch.zeros(num_reqs, dtype=torch.int32, device=device),
    )
