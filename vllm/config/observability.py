"""What the engine tells about itself."""

from dataclasses import dataclass

# How much a request's answer tells of its drafts.
SPEC_DECODE_METRICS_LEVELS = ("none", "summary", "detailed")


@dataclass(frozen=True)
class ObservabilityConfig:
    """Statistics in the log, in /metrics and in answers.

    Args:
        enable_log_requests: log each request when it arrives, cut to a sane length.
        enable_log_outputs: log each finished output, cut to a sane length.
        enable_per_request_metrics: answers tell the times of their request.
        per_request_spec_decode_metrics: one of SPEC_DECODE_METRICS_LEVELS.
        enable_dashboard: keep what the server's dashboard shows, texts included.
    """

    disable_log_stats: bool = False
    enable_log_requests: bool = False
    enable_log_outputs: bool = False
    enable_per_request_metrics: bool = False
    per_request_spec_decode_metrics: str = "none"
    enable_dashboard: bool = False

    @property
    def has_spec_decode_metrics(self) -> bool:
        """Whether requests tell of their drafts."""
        return self.per_request_spec_decode_metrics != "none"
