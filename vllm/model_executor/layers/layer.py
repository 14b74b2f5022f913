"""What every layer here is: a torch module without hooks."""

from typing import Any

import torch
from torch import nn


class Layer(nn.Module):
    """A module whose call is its `forward`, and nothing else.

    Hooks would be looked for on every call, which at one token a step is a quarter of
    the time outside the matrix products.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run `forward`."""
        return self.forward(*args, **kwargs)


def empty_weight(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    """Return a weight without gradient, to be filled by a loader."""
    return nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)
