"""What the engine tells about itself."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ObservabilityConfig:
    """Statistics in the log and in /metrics.

    Args:
        enable_log_requests: log each request when it arrives, cut to a sane length.
        enable_log_outputs: log each finished output, cut to a sane length.
    """

    disable_log_stats: bool = False
    enable_log_requests: bool = False
    enable_log_outputs: bool = False
