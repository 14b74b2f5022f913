"""What an attention layer needs of the step, without passing it through every model."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from vllm.v1.attention.backend import AttentionMetadata


@dataclass(frozen=True)
class ForwardContext:
    """One forward pass.

    Args:
        attn_metadata: of the step; None in a profiling run without attention.
        kv_caches: layer name -> its paged cache.
    """

    attn_metadata: "AttentionMetadata | None"
    kv_caches: dict[str, torch.Tensor]


_forward_context: ContextVar[ForwardContext] = ContextVar("forward_context")


@contextmanager
def set_forward_context(context: ForwardContext) -> Iterator[None]:
    """Make `context` the current one inside the block."""
    token = _forward_context.set(context)
    try:
        yield
    finally:
        _forward_context.reset(token)


def get_forward_context() -> ForwardContext:
    """Return the forward pass that is running.

    Raises:
        LookupError: no forward pass is running.
    """
    return _forward_context.get()
