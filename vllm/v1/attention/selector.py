"""Which attention backend a device and dtype get."""

import torch

from vllm._custom_ops import has_cpu_ops
from vllm.exceptions import UnsupportedError
from vllm.triton_utils import HAS_TRITON
from vllm.v1.attention.backend import AttentionBackend


def get_attn_backend(
    device: torch.device, dtype: torch.dtype
) -> type[AttentionBackend]:
    """Return the fastest backend that is right for a device and a model's dtype.

    Raises:
        UnsupportedError: there is none.
    """
    # Imported when chosen: a kernel file needs its compiler, a server only one of them.
    if device.type == "cpu":
        if dtype is torch.float32 and has_cpu_ops():
            from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

            return CPUAttentionBackend
        from vllm.v1.attention.backends.torch_sdpa import TorchSDPABackend

        return TorchSDPABackend
    if device.type == "cuda" and HAS_TRITON:
        from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend

        return TritonAttentionBackend
    raise UnsupportedError(
        f"no attention backend for device {device.type!r}: use --device cpu, or "
        "--device cuda with triton installed"
    )
