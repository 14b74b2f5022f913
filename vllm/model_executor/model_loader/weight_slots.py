"""Where each tensor of a checkpoint goes, and what is still missing."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import nn

from vllm.exceptions import CheckpointError
from vllm.model_executor.layers.quantization.weights import Blocks

_MAX_NAMES_IN_ERROR = 3


class WeightSlots:
    """The places of a model's weights, by the checkpoint's names.

    A module that owns weights offers `weight_slots()`, whose names are relative to the
    module that it stands in. A slot is a view of the weight, so that to copy into it is
    to load; safe for threads that fill different slots. A module whose weights may also
    be encoded takes them by `put_blocks`.
    """

    def __init__(self, model: nn.Module) -> None:
        self._free: dict[str, torch.Tensor] = {}
        self._block_takers: dict[str, Callable[[Blocks], bool]] = {}
        for module_name, module in model.named_modules():
            if not hasattr(module, "weight_slots"):
                continue
            parent = module_name.rpartition(".")[0]
            for name, slot in module.weight_slots().items():
                full_name = f"{parent}.{name}" if parent else name
                assert full_name not in self._free, f"two slots named {full_name}"
                self._free[full_name] = slot
                if hasattr(module, "put_blocks"):
                    self._block_takers[full_name] = partial(module.put_blocks, name)
        self._names = frozenset(self._free)

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the slots that are not taken yet, in the model's order."""
        return iter(tuple(self._free.items()))

    def is_table(self, name: str) -> bool:
        """Whether the place holds integers or truth values, not weights."""
        return name in self._free and not self._free[name].is_floating_point()

    def take(
        self, name: str, shape: tuple[int, ...], where: str, shown: str = ""
    ) -> torch.Tensor:
        """Return the place of a tensor; each can be taken once.

        Args:
            name: in a Hugging Face checkpoint.
            shape: that the checkpoint has.
            where: the file, for errors.
            shown: the tensor's name in the file, if it is another.

        Raises:
            CheckpointError: there is no such place, it is taken, or of another shape.
        """
        shown = shown or name
        if name not in self._names:
            raise CheckpointError(f"{where}: tensor {shown} has no place in the model")
        slot = self._free.pop(name, None)
        if slot is None:
            raise CheckpointError(f"{where}: tensor {shown} is there twice")
        if tuple(slot.shape) != tuple(shape):
            raise CheckpointError(
                f"{where}: tensor {shown} has the shape {list(shape)}, but by its "
                f"configuration the model needs {list(slot.shape)}"
            )
        return slot

    def put_blocks(self, name: str, blocks: Blocks) -> bool:
        """Fill a slot that was taken, with a weight in the encoding of its file.

        Returns:
            False where the slot takes numbers only.
        """
        taker = self._block_takers.get(name)
        return taker is not None and taker(blocks)

    def check_all_taken(self, where: str) -> None:
        """Check that nothing is missing.

        Raises:
            CheckpointError: some places are empty.
        """
        if not self._free:
            return
        names = list(self._free)
        more = len(names) - _MAX_NAMES_IN_ERROR
        raise CheckpointError(
            f"{where}: missing tensor {', '.join(names[:_MAX_NAMES_IN_ERROR])}"
            + (f" and {more} more" if more > 0 else "")
        )
