"""What an operator's arguments must be before their addresses leave Python."""

import torch


def check_rows(x: torch.Tensor, dtype: torch.dtype = torch.float32) -> None:
    """Refuse values that do not stand side by side along the last dimension."""
    # stride() in whole: asking for one dimension costs six times as much.
    if x.dtype is not dtype or (x.stride()[-1] != 1 and x.shape[-1] > 1):
        raise ValueError(
            f"expected contiguous {dtype} rows, got {x.dtype} with strides {x.stride()}"
        )


def check_vector(
    x: torch.Tensor, size: int, dtype: torch.dtype = torch.float32
) -> None:
    """Refuse what is not `size` values, or `size` rows, in one piece."""
    if x.shape[0] != size or x.dtype is not dtype or not x.is_contiguous():
        raise ValueError(
            f"expected {size} contiguous {dtype} values, got {tuple(x.shape)} {x.dtype}"
        )
