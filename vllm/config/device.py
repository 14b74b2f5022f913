"""The device that the model runs on."""

from dataclasses import dataclass


@dataclass(frozen=True)
class DeviceConfig:
    """One device.

    Args:
        device: "cpu" or "cuda".
    """

    device: str = "cpu"
