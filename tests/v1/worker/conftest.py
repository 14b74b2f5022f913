"""New memory holds garbage, so that whoever leaves an element unwritten is seen."""

from collections.abc import Callable
from typing import Any

import pytest
import torch


def _with_garbage(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def make_garbage(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = make(*args, **kwargs)
        if tensor.is_floating_point():
            return tensor.fill_(float("nan"))
        if tensor.dtype is torch.bool:
            return tensor.fill_(True)
        return tensor.fill_(torch.iinfo(tensor.dtype).max - 6)

    return make_garbage


def fill_new_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace what makes tensors of no particular values."""
    # The first device context of a process remembers, by their names at that moment,
    # which functions take its device: it must not remember the ones below.
    with torch.device("cpu"):
        torch.empty(0)
    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, _with_garbage(getattr(torch, name)))


@pytest.fixture(autouse=True)
def _garbage_in_new_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    fill_new_memory(monkeypatch)
