"""The compiled products of quantised weights.

Each method has the meaning of the function of its name in `_custom_ops`; checked is
what would read or write outside a tensor.
"""

from typing import Any

import torch

from vllm._cpu_ops_checks import check_rows, check_vector
from vllm._cpu_ops_torch import block_row_bytes, check_quantized_size

# As csrc/cpu/quantized.h counts them.
QUANTIZED_FORMATS = {"Q4_0": 0, "Q4_1": 1, "Q8_0": 2, "int8": 3}


class QuantizedOps:
    """The operators that pack, read and multiply by quantised weights."""

    # The C functions by name; ctypes checks their arguments.
    _c: Any

    def __init__(self) -> None:
        # Of (format, columns, values a column), in bytes.
        self._quantized_sizes: dict[tuple[str, int, int], int] = {}

    def pack_blocks(
        self, blocks: torch.Tensor, quant_type: str, size: int
    ) -> torch.Tensor:
        num_columns, column_bytes = blocks.shape
        check_rows(blocks, torch.uint8)
        if column_bytes != block_row_bytes(quant_type, size):
            raise ValueError(
                f"{column_bytes} bytes a column are not {size} values in {quant_type}"
            )
        packed = self._empty_quantized(quant_type, num_columns, size)
        self._c.pack_blocks(
            blocks.data_ptr(),
            blocks.stride()[0],
            QUANTIZED_FORMATS[quant_type],
            num_columns,
            size,
            packed.data_ptr(),
        )
        return packed

    def pack_int8(self, weight: torch.Tensor) -> torch.Tensor:
        num_columns, size = weight.shape
        check_rows(weight)
        packed = self._empty_quantized("int8", num_columns, size)
        self._c.pack_int8(
            weight.data_ptr(), weight.stride()[0], num_columns, size, packed.data_ptr()
        )
        return packed

    def quantized_linear(
        self,
        x: torch.Tensor,
        packed: torch.Tensor,
        quant_type: str,
        num_columns: int,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        num_rows, size = x.shape
        check_rows(x)
        self._check_quantized(packed, quant_type, num_columns, size)
        if bias is not None:
            check_vector(bias, num_columns)
        out = torch.empty((num_rows, num_columns))
        self._c.quantized_linear(
            x.data_ptr(),
            x.stride()[0],
            packed.data_ptr(),
            QUANTIZED_FORMATS[quant_type],
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            num_rows,
            num_columns,
            size,
        )
        return out

    def quantized_rows(
        self,
        packed: torch.Tensor,
        quant_type: str,
        num_columns: int,
        size: int,
        ids: torch.Tensor,
    ) -> torch.Tensor:
        self._check_quantized(packed, quant_type, num_columns, size)
        num_ids = ids.shape[0]
        check_vector(ids, num_ids, torch.int64)
        out = torch.empty((num_ids, size))
        failed = self._c.quantized_rows(
            packed.data_ptr(),
            QUANTIZED_FORMATS[quant_type],
            num_columns,
            size,
            ids.data_ptr(),
            num_ids,
            out.data_ptr(),
        )
        if failed:
            raise IndexError(f"a row is not in [0, {num_columns})")
        return out

    def quantized_select(
        self,
        packed: torch.Tensor,
        quant_type: str,
        num_columns: int,
        size: int,
        ids: torch.Tensor,
    ) -> torch.Tensor:
        self._check_quantized(packed, quant_type, num_columns, size)
        num_ids = ids.shape[0]
        check_vector(ids, num_ids, torch.int64)
        out = self._empty_quantized(quant_type, num_ids, size)
        failed = self._c.quantized_select(
            packed.data_ptr(),
            QUANTIZED_FORMATS[quant_type],
            num_columns,
            size,
            ids.data_ptr(),
            num_ids,
            out.data_ptr(),
        )
        if failed:
            raise IndexError(f"a row is not in [0, {num_columns})")
        return out

    def _empty_quantized(
        self, quant_type: str, num_columns: int, size: int
    ) -> torch.Tensor:
        num_bytes = self._quantized_size(quant_type, num_columns, size)
        return torch.empty(num_bytes, dtype=torch.uint8)

    def _quantized_size(self, quant_type: str, num_columns: int, size: int) -> int:
        shape = quant_type, num_columns, size
        # Asked in every product: a look-up costs a tenth of the call.
        if shape not in self._quantized_sizes:
            check_quantized_size(size)
            self._quantized_sizes[shape] = self._c.quantized_size(
                QUANTIZED_FORMATS[quant_type], num_columns, size
            )
        return self._quantized_sizes[shape]

    def _check_quantized(
        self, packed: torch.Tensor, quant_type: str, num_columns: int, size: int
    ) -> None:
        num_bytes = self._quantized_size(quant_type, num_columns, size)
        if packed.dtype is not torch.uint8 or packed.shape != (num_bytes,):
            raise ValueError(
                f"the packed weight is {packed.dtype} {tuple(packed.shape)}, which is "
                f"not {num_columns} columns of {size} in {quant_type}"
            )
