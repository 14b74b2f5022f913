"""Messages between processes: msgpack, with large arrays as frames of their own."""

import sys
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

# Smaller arrays travel inside the message; a frame of its own costs more than the copy.
MIN_FRAME_BYTES = 256

Buffer = bytes | bytearray | memoryview


class MsgpackEncoder:
    """Encode messages that hold NumPy arrays and host tensors.

    The frames of one message belong together: the first is msgpack, the others are the
    memory of its large arrays, not copied. The arrays must stay unchanged until the
    frames are sent.
    """

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._encode_custom)
        self._frames: list[Buffer] = []

    def encode(self, message: Any) -> list[Buffer]:
        """Return the frames of `message`.

        Raises:
            TypeError: the message holds something that has no form on the wire.
        """
        self._frames = [b""]
        frames = self._frames
        frames[0] = self._encoder.encode(message)
        self._frames = []
        return frames

    def _encode_custom(self, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return self._encode_array(value)
        # A process that has no torch has no tensors, and need not load it to see that.
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(value, torch.Tensor):
            # NumPy has no bfloat16, so the bytes travel with torch's name of the dtype.
            raw = value.contiguous().view(-1).view(torch.uint8).numpy()
            dtype = str(value.dtype).removeprefix("torch.")
            return dtype, list(value.shape), self._place(raw)
        if isinstance(value, np.generic):
            return value.item()
        raise TypeError(f"cannot send a {type(value).__name__} to another process")

    def _encode_array(self, array: np.ndarray) -> tuple[str, list[int], Any]:
        if array.dtype.hasobject:
            raise TypeError("cannot send an array of objects to another process")
        array = np.ascontiguousarray(array)
        return array.dtype.str, list(array.shape), self._place(array)

    def _place(self, array: np.ndarray) -> int | bytes:
        if array.nbytes < MIN_FRAME_BYTES:
            return array.tobytes()
        self._frames.append(array.reshape(-1).view(np.uint8).data)
        return len(self._frames) - 1


class MsgpackDecoder:
    """Decode the frames of `MsgpackEncoder` into one type, fixed at construction."""

    def __init__(self, message_type: Any = Any) -> None:
        self._decoder = msgspec.msgpack.Decoder(
            message_type, dec_hook=self._decode_custom
        )
        self._frames: Sequence[Buffer] = ()

    def decode(self, frames: Sequence[Buffer]) -> Any:
        """Return the message; its arrays share memory with `frames`.

        Raises:
            msgspec.ValidationError: the message is not of this decoder's type.
        """
        self._frames = frames
        try:
            return self._decoder.decode(frames[0])
        finally:
            self._frames = ()

    def _decode_custom(self, kind: type, value: Any) -> Any:
        if kind is np.ndarray:
            dtype, shape, data = value
            return np.frombuffer(self._find(data), dtype=dtype).reshape(shape)
        torch = sys.modules.get("torch")
        if torch is not None and kind is torch.Tensor:
            dtype, shape, data = value
            # A tensor needs memory that may be written.
            raw = bytearray(self._find(data))
            if not raw:
                return torch.empty(shape, dtype=getattr(torch, dtype))
            return torch.frombuffer(raw, dtype=getattr(torch, dtype)).view(shape)
        raise NotImplementedError(f"no way to decode a {kind}")

    def _find(self, data: int | bytes) -> Buffer:
        return self._frames[data] if isinstance(data, int) else data
