"""Messages between the front and the engine core."""

import enum
import time
from typing import Any

import msgspec

from vllm.sampling_params import SamplingParams
from vllm.v1.logprobs_lists import LogprobsLists
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.spec_decode.metrics import SpecDecodingStep
from vllm.v1.spec_decode.trace import DraftTrace


class FinishReason(enum.IntEnum):
    """Why a request ended; the name in lower case is what the API shows."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3

    def __str__(self) -> str:
        return self.name.lower()


class EngineCoreRequest(msgspec.Struct, array_like=True, omit_defaults=True):
    """One sequence to generate: n > 1 has been split into n of these.

    Args:
        arrival_time: seconds of `time.time()`, for metrics and priority ties.
        priority: lower runs earlier, under the priority policy.
        cache_salt: separates prefix caches of callers that must not share.
        parent_request_id: set on the children of an n > 1 request, which share the
            prompt's blocks also when prefix caching is off.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    arrival_time: float
    priority: int = 0
    cache_salt: str | None = None
    parent_request_id: str | None = None


class EngineCoreEventType(enum.IntEnum):
    """Marks in the life of a request."""

    QUEUED = 1
    SCHEDULED = 2
    PREEMPTED = 3


class EngineCoreEvent(msgspec.Struct, array_like=True):
    """A mark with its time, in seconds of the engine process's monotonic clock."""

    type: EngineCoreEventType
    timestamp: float

    @classmethod
    def now(cls, event_type: EngineCoreEventType) -> "EngineCoreEvent":
        """Return an event that happens now."""
        return cls(event_type, time.monotonic())


class EngineCoreOutput(msgspec.Struct, array_like=True, omit_defaults=True):
    """What one step gave one request.

    Args:
        new_logprobs: one row for each of `new_token_ids`.
        new_prompt_logprobs: rows 1..P-1 of the prompt, once, when it is complete.
        num_cached_tokens: prompt tokens that came from the prefix cache.
        error: what went wrong, for the client; set with `FinishReason.ERROR`.
        is_client_error: the error is in the request (400), not in the engine (500).
        is_overload: the engine has no room for the request now (503).
        spec_decoding_step: set in steps with drafts, if requests are to tell of them.
        draft_trace: set in steps with drafts, if there is a dashboard.
    """

    request_id: str
    new_token_ids: list[int]
    new_logprobs: LogprobsLists | None = None
    new_prompt_logprobs: LogprobsLists | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    events: list[EngineCoreEvent] | None = None
    num_cached_tokens: int = 0
    error: str | None = None
    error_parameter: str | None = None
    is_client_error: bool = False
    is_overload: bool = False
    spec_decoding_step: SpecDecodingStep | None = None
    draft_trace: DraftTrace | None = None

    @property
    def finished(self) -> bool:
        """Whether this is the request's last output."""
        return self.finish_reason is not None


class UtilityResult(msgspec.Struct, array_like=True):
    """The answer to a utility call.

    Args:
        error: the failure's message, or None.
    """

    call_id: int
    result: Any = None
    error: str | None = None


class EngineCoreOutputs(msgspec.Struct, array_like=True, omit_defaults=True):
    """Everything that the engine core says at once.

    Args:
        timestamp: seconds of the engine process's monotonic clock.
    """

    outputs: list[EngineCoreOutput] = []
    scheduler_stats: SchedulerStats | None = None
    timestamp: float = 0.0
    utility_result: UtilityResult | None = None


class EngineCoreRequestType(enum.Enum):
    """The first frame of a message to the engine core, one byte each."""

    ADD = b"\x00"
    ABORT = b"\x01"
    UTILITY = b"\x02"
    SHUTDOWN = b"\x03"
