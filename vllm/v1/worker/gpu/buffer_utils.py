"""Arrays that the host writes and the device reads, without a wait on either side."""

from collections.abc import Sequence

import numpy as np
import torch


class UvaBackedTensor:
    """A host array and its device copy; on a CPU both are the same memory.

    Args:
        shape: of both.
        dtype: of both.
        device: where the device copy lives.
    """

    def __init__(
        self, shape: int | tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> None:
        on_cpu = device.type == "cpu"
        host = torch.zeros(shape, dtype=dtype, pin_memory=not on_cpu)
        self.host = host
        self.np: np.ndarray = host.numpy()
        self.gpu = host if on_cpu else torch.zeros(shape, dtype=dtype, device=device)

    def copy_to_device(self, num_rows: int | None = None) -> torch.Tensor:
        """Make the first `num_rows` rows visible to the device and return them.

        NOTE: the host array must not be written again before the copy has run; the
        runner does so by ending each step with the wait for its results.
        """
        target = self.gpu if num_rows is None else self.gpu[:num_rows]
        if self.gpu is not self.host:
            source = self.host if num_rows is None else self.host[:num_rows]
            target.copy_(source, non_blocking=True)
        return target


class StagedWriteTensor:
    """A device array that the host changes in small pieces, all sent at once.

    On a CPU a piece is written at once: no step is running meanwhile.

    Args:
        shape: of the array; the first dimension is the row.
        dtype: of the array.
        device: where it lives.
    """

    def __init__(
        self, shape: int | tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.gpu = torch.zeros(shape, dtype=dtype, device=device)
        self._row_size = self.gpu[0].numel()
        self._on_cpu = device.type == "cpu"
        self._np = self.gpu.view(-1).numpy() if self._on_cpu else None
        self._indices: list[np.ndarray] = []
        self._values: list[np.ndarray] = []

    def stage_write(
        self, row: int, start: int, values: Sequence[int] | np.ndarray | int
    ) -> None:
        """Write `values` into row `row` from column `start` at the next apply."""
        data = np.atleast_1d(np.asarray(values))
        assert start + len(data) <= self._row_size, "a staged write leaves its row"
        first = row * self._row_size + start
        if self._np is not None:
            self._np[first : first + len(data)] = data
            return
        if len(data) == 0:
            return
        self._indices.append(np.arange(first, first + len(data), dtype=np.int64))
        self._values.append(data)

    def apply_write(self) -> None:
        """Send what was staged; at one place the last piece wins."""
        if not self._indices:
            return
        indices = np.concatenate(self._indices)[::-1]
        values = np.concatenate(self._values)[::-1]
        # A scatter with repeated indices has no order on a device: keep the last one.
        indices, kept = np.unique(indices, return_index=True)
        index = torch.from_numpy(indices).pin_memory()
        value = torch.from_numpy(values[kept].copy()).to(self.gpu.dtype).pin_memory()
        device = self.gpu.device
        self.gpu.view(-1).index_put_(
            (index.to(device, non_blocking=True),),
            value.to(device, non_blocking=True),
        )
        self._indices.clear()
        self._values.clear()


class HostSnapshot:
    """A copy of a device array for the host, which never waits for it.

    NOTE: it may be read after the wait that ends the step after `take`, and not before:
    that wait is for a later point of the same stream.

    Args:
        shape: of the array.
        dtype: of the array.
        device: where the array lives.
    """

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> None:
        pin_memory = device.type != "cpu"
        self._host = torch.zeros(shape, dtype=dtype, pin_memory=pin_memory)
        self.np: np.ndarray = self._host.numpy()

    def take(self, source: torch.Tensor) -> None:
        """Send the array as it is at this point of the stream."""
        self._host.copy_(source, non_blocking=True)


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Return `array` on the device; on a CPU a view, elsewhere an unwaited copy."""
    host = torch.from_numpy(array)
    if device.type == "cpu":
        return host
    return host.pin_memory().to(device, non_blocking=True)
