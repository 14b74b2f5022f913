"""Triton, or stand-ins that let its kernels be defined where it is not installed."""

from typing import Any

try:
    import triton
    import triton.language as tl

    HAS_TRITON = True
except ImportError:  # pragma: no cover - depends on the machine
    HAS_TRITON = False

    class _TritonStub:
        """Accepts the decorations of a kernel; the kernel can never be launched."""

        def jit(self, function: Any = None, **_: Any) -> Any:
            return function if function is not None else self.jit

        def heuristics(self, *_: Any, **__: Any) -> Any:
            return self.jit

        def cdiv(self, a: int, b: int) -> int:
            return -(-a // b)

        def next_power_of_2(self, n: int) -> int:
            return 1 << max(n - 1, 0).bit_length()

    class _LanguageStub:
        constexpr = int

    triton = _TritonStub()
    tl = _LanguageStub()

__all__ = ["HAS_TRITON", "tl", "triton"]
