"""Which kind of weight a checkpoint becomes."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from vllm import _custom_ops as ops
from vllm.exceptions import UnsupportedError
from vllm.model_executor.layers.quantization.weights import (
    DenseWeight,
    PackedWeight,
    QuantizedWeight,
    narrow,
    round_to_blocks,
)


@dataclass(frozen=True)
class QuantizationMethod:
    """What is done with the weights of a checkpoint.

    Args:
        keeps_blocks: blocks of a GGUF file are used as they are; else they are
            dequantised.
        pack: makes a weight of numbers [num_rows, size].
        pack_coarse: of weights that bear coarser rounding; None: as the others.
        repack: of rows that a drafter copies from its target; None: as they are.
    """

    keeps_blocks: bool
    pack: Callable[[torch.Tensor], PackedWeight]
    pack_coarse: Callable[[torch.Tensor], PackedWeight] | None = None
    repack: Callable[[PackedWeight], PackedWeight] | None = None

    @property
    def coarse(self) -> "QuantizationMethod":
        """What is done with weights that bear coarser rounding."""
        return replace(self, pack=self.pack_coarse or self.pack)


UNQUANTIZED = QuantizationMethod(False, DenseWeight)
_METHODS = {
    "none": UNQUANTIZED,
    "gguf": QuantizationMethod(True, DenseWeight),
    "int8": QuantizationMethod(False, QuantizedWeight.from_float),
}
# Drafts may be any guess: what rounding costs is acceptance, next to none in Q8_0,
# and in Q4_1, of three fifths of the bytes, next to none for some of the weights.
_ROUNDED_DRAFTER = QuantizationMethod(
    True, round_to_blocks, partial(round_to_blocks, quant_type="Q4_1"), narrow
)


def get_quantization_method(
    quantization: str, is_gguf: bool, device: torch.device, dtype: torch.dtype
) -> QuantizationMethod:
    """Return the method of a checkpoint.

    Args:
        quantization: one of the configuration's QUANTIZATIONS. auto keeps the blocks of
            a GGUF file where the compiled operators multiply them.
        is_gguf: the checkpoint is a GGUF file.
        device: the weights' and activations'.
        dtype: the activations'.

    Raises:
        UnsupportedError: the device, dtype or checkpoint does not go with it.
    """
    is_possible = device.type == "cpu" and dtype is torch.float32
    if quantization == "auto":
        keeps_blocks = is_gguf and is_possible and ops.has_cpu_ops()
        return _METHODS["gguf" if keeps_blocks else "none"]
    if quantization != "none" and not is_possible:
        raise UnsupportedError(
            f"quantization={quantization} needs the CPU and dtype float32, not "
            f"{device.type} and {str(dtype).removeprefix('torch.')}: set quantization "
            "to none"
        )
    if quantization == "gguf" and not is_gguf:
        raise UnsupportedError(
            "quantization=gguf needs a GGUF file: set it to auto, int8 or none"
        )
    return _METHODS[quantization]


def get_drafter_quantization_method(
    quantization: str,
    is_target_gguf: bool,
    is_gguf: bool,
    device: torch.device,
    dtype: torch.dtype,
) -> QuantizationMethod:
    """Return the method of a drafter's checkpoint: quantised where the target is.

    Args:
        quantization: as in `get_quantization_method`, chosen for the target.
        is_target_gguf: the target's checkpoint is a GGUF file.
        is_gguf: the drafter's is.
        device: the weights' and activations'.
        dtype: the activations'.

    Raises:
        UnsupportedError: the device, dtype or target does not go with it.
    """
    of_target = get_quantization_method(quantization, is_target_gguf, device, dtype)
    if of_target is not UNQUANTIZED:
        return _ROUNDED_DRAFTER
    return get_quantization_method(quantization, is_gguf, device, dtype)
