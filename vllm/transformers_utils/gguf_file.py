"""The GGUF container: its metadata and where its tensors lie, without their meaning.

The `gguf` package's reader makes an array of every string and takes seconds for a
vocabulary; here a string array stays bytes until somebody asks for it.
"""

import math
import mmap
import os
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm.exceptions import CheckpointError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_NESTING = 4

_STRING = 8
_ARRAY = 9
# Value type -> (struct character, NumPy dtype).
_SCALARS: dict[int, tuple[str, str]] = {
    0: ("B", "<u1"),
    1: ("b", "<i1"),
    2: ("H", "<u2"),
    3: ("h", "<i2"),
    4: ("I", "<u4"),
    5: ("i", "<i4"),
    6: ("f", "<f4"),
    7: ("?", "|b1"),
    10: ("Q", "<u8"),
    11: ("q", "<i8"),
    12: ("d", "<f8"),
}


@dataclass(frozen=True)
class GGUFTensor:
    """One tensor's place in the file.

    Args:
        shape: outermost dimension first, as in torch.
        ggml_type: the number of its encoding.
        offset: from the start of the tensor data, bytes.
    """

    name: str
    shape: tuple[int, ...]
    ggml_type: int
    offset: int


@dataclass(frozen=True)
class _StringArray:
    """Strings that have not been decoded yet.

    Args:
        offset: of the first string's length in the file, bytes.
    """

    offset: int
    length: int


class GGUFFile:
    """A GGUF file, mapped into memory.

    Args:
        path: of the file.

    Raises:
        CheckpointError: the file is missing, truncated, or not GGUF.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.name = os.path.basename(path)
        try:
            with open(path, "rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or "the file is empty"
            raise CheckpointError(f"{path}: cannot be read: {reason}") from None
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GGUFTensor] = {}
        try:
            self._read_header()
        except (struct.error, IndexError, UnicodeDecodeError, OverflowError):
            raise CheckpointError(
                f"{path}: the header is truncated or damaged; download the file again"
            ) from None

    @property
    def architecture(self) -> str:
        """The key prefix of the architecture's numbers, such as "llama"."""
        return str(self.get("general.architecture", ""))

    def get(self, key: str, default: Any = None) -> Any:
        """Return a metadata value, a string array as list of str."""
        value = self.metadata.get(key, default)
        if isinstance(value, _StringArray):
            return self._decode_strings(value)
        return value

    def raw_tensor(self, name: str, num_bytes: int) -> np.ndarray:
        """Return the bytes of a tensor, as a view of the file.

        Raises:
            CheckpointError: the file ends before the tensor does.
        """
        start = self._data_offset + self.tensors[name].offset
        if start + num_bytes > len(self._data):
            raise CheckpointError(
                f"{self.path}: tensor {name} ends at byte {start + num_bytes}, but the "
                f"file has {len(self._data)}: it is truncated; download it again"
            )
        return np.frombuffer(self._data, np.uint8, num_bytes, start)

    def _read_header(self) -> None:
        if self._data[:4] != _MAGIC:
            raise CheckpointError(
                f"{self.path}: not a GGUF file (it begins with {self._data[:4]!r})"
            )
        version, num_tensors, num_values = struct.unpack_from("<IQQ", self._data, 4)
        if version not in _VERSIONS:
            raise CheckpointError(
                f"{self.path}: GGUF version {version} is not supported, only "
                f"{' and '.join(map(str, _VERSIONS))} in little-endian order"
            )
        offset = 24
        for _ in range(num_values):
            key, offset = self._read_string(offset)
            (value_type,) = struct.unpack_from("<I", self._data, offset)
            self.metadata[key], offset = self._read_value(value_type, offset + 4)
        for _ in range(num_tensors):
            tensor, offset = self._read_tensor(offset)
            self.tensors[tensor.name] = tensor
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment <= 0:
            raise CheckpointError(f"{self.path}: general.alignment is {alignment!r}")
        self._data_offset = math.ceil(offset / alignment) * alignment

    def _read_string(self, offset: int) -> tuple[str, int]:
        (length,) = struct.unpack_from("<Q", self._data, offset)
        end = offset + 8 + length
        if end > len(self._data):
            raise IndexError
        return self._data[offset + 8 : end].decode("utf-8"), end

    def _read_value(
        self, value_type: int, offset: int, depth: int = 0
    ) -> tuple[Any, int]:
        if value_type == _STRING:
            return self._read_string(offset)
        if value_type == _ARRAY:
            return self._read_array(offset, depth)
        if value_type not in _SCALARS:
            raise IndexError
        scalar = struct.Struct("<" + _SCALARS[value_type][0])
        return scalar.unpack_from(self._data, offset)[0], offset + scalar.size

    def _read_array(self, offset: int, depth: int) -> tuple[Any, int]:
        item_type, length = struct.unpack_from("<IQ", self._data, offset)
        offset += 12
        if item_type == _STRING:
            return _StringArray(offset, length), self._skip_strings(offset, length)
        if item_type in _SCALARS:
            dtype = np.dtype(_SCALARS[item_type][1])
            end = offset + length * dtype.itemsize
            if end > len(self._data):
                raise IndexError
            return np.frombuffer(self._data, dtype, length, offset).tolist(), end
        if depth == _MAX_NESTING:
            raise IndexError
        values = []
        for _ in range(length):
            value, offset = self._read_value(item_type, offset, depth + 1)
            values.append(value)
        return values, offset

    def _skip_strings(self, offset: int, length: int) -> int:
        unpack_from, data = struct.Struct("<Q").unpack_from, self._data
        for _ in range(length):
            offset += 8 + unpack_from(data, offset)[0]
        return offset

    def _decode_strings(self, array: _StringArray) -> list[str]:
        unpack_from, data, offset = struct.Struct("<Q").unpack_from, self._data, 0
        strings, offset = [], array.offset
        try:
            for _ in range(array.length):
                start = offset + 8
                offset = start + unpack_from(data, offset)[0]
                strings.append(data[start:offset].decode("utf-8"))
        except UnicodeDecodeError:
            raise CheckpointError(
                f"{self.path}: a string of the metadata is not UTF-8"
            ) from None
        return strings

    def _read_tensor(self, offset: int) -> tuple[GGUFTensor, int]:
        name, offset = self._read_string(offset)
        (num_dims,) = struct.unpack_from("<I", self._data, offset)
        if num_dims > 8:
            raise IndexError
        dims = struct.unpack_from(f"<{num_dims}Q", self._data, offset + 4)
        offset += 4 + 8 * num_dims
        ggml_type, data_offset = struct.unpack_from("<IQ", self._data, offset)
        tensor = GGUFTensor(name, tuple(reversed(dims)), ggml_type, data_offset)
        return tensor, offset + 12
