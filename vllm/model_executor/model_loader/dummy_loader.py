"""Random weights, for tests and for measuring without a checkpoint."""

import torch

from vllm.model_executor.model_loader.weight_slots import WeightSlots

_STANDARD_DEVIATION = 0.02


def load_dummy(slots: WeightSlots, seed: int) -> None:
    """Fill the slots with numbers that depend on `seed` and the model's shape alone."""
    generator = torch.Generator().manual_seed(seed)
    for name, slot in slots:
        slots.take(name, tuple(slot.shape), "dummy weights")
        if "norm" in name:
            slot.fill_(1.0)
            continue
        # Drawn on the CPU in float32, so that every device and dtype has the same.
        values = torch.empty(slot.shape).normal_(
            0.0, _STANDARD_DEVIATION, generator=generator
        )
        slot.copy_(values)
