"""Marks that tests of several folders share."""

import pytest

from vllm import _custom_ops as ops

# For tests of what only the compiled operators do.
needs_cpu_ops = pytest.mark.skipif(
    not ops.has_cpu_ops(), reason="the compiled operators are not built, or are off"
)
# For tests that compare answers or scores of different batches.
bit_for_bit = pytest.mark.skipif(
    not ops.has_cpu_ops(), reason="torch's own products depend on the number of rows"
)
