"""What the dashboard's page reads, as JSON. Null is what is not known."""

import msgspec


class ServerData(msgspec.Struct):
    """Who is looked at.

    Args:
        method: who drafts; null without speculation.
        uptime_s: since the engine was ready.
    """

    version: str
    model: str
    method: str | None
    num_speculative_tokens: int
    is_adaptive: bool
    uptime_s: float


class LoadData(msgspec.Struct):
    """The state of the scheduler after the last step.

    Args:
        kv_cache_usage: share of the blocks in use, 0 to 1.
    """

    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    kv_cache_usage: float = 0.0


class DraftData(msgspec.Struct):
    """What became of drafts since the start.

    Args:
        num_drafts: proposals, one a request and step.
        num_draft_tokens: drafts that a grammar did not forbid.
        num_admitted_tokens: those of them that were verified.
        num_accepted_tokens: those of them that were accepted.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_admitted_tokens: int = 0
    num_accepted_tokens: int = 0


class PositionData(msgspec.Struct):
    """One place in a proposal.

    Args:
        num_admitted: verified drafts since the start.
        num_accepted: accepted ones.
        predicted: mean survival that was predicted for verified drafts, of late.
        happened: share of the same drafts that survived.
        error: expected calibration error, of late.
        bins: [mean prediction, share that survived, pairs] of each used bin.
    """

    num_admitted: int
    num_accepted: int
    predicted: float | None
    happened: float | None
    error: float | None
    bins: list[tuple[float, float, float]]


class BatchSizeData(msgspec.Struct):
    """Steps in which the number of requests that got a token is in a range.

    Args:
        min_reqs: the range's first number.
        max_reqs: its last one.
        num_reqs: those requests, over all steps.
        draft_budget: drafts that were to be verified, over all steps.
        num_draft_tokens: as in DraftData, likewise the next two.
    """

    min_reqs: int
    max_reqs: int
    num_steps: int = 0
    num_reqs: int = 0
    draft_budget: int = 0
    num_draft_tokens: int = 0
    num_admitted_tokens: int = 0
    num_accepted_tokens: int = 0


class CostData(msgspec.Struct):
    """How well the time of a step is predicted.

    Args:
        num_steps: with a prediction, since the start.
        predicted_s: their sum.
        measured_s: likewise.
        error: mean of |predicted - measured| / measured over the points.
        points: [tokens, predicted ms, measured ms] of the last steps.
    """

    num_steps: int
    predicted_s: float
    measured_s: float
    error: float | None
    points: list[tuple[int, float, float]]


class SecondData(msgspec.Struct):
    """One second of the last minutes; seconds in which nothing came are absent.

    Args:
        age_s: whole seconds ago.
        num_running_reqs: the most at once.
    """

    age_s: int
    num_prompt_tokens: int
    num_generation_tokens: int
    num_running_reqs: int
    num_draft_tokens: int
    num_admitted_tokens: int
    num_accepted_tokens: int


class LatencyData(msgspec.Struct):
    """Quantiles in seconds over the last values; null without any."""

    num_values: int
    p50: float | None
    p90: float | None
    p99: float | None


class RequestData(msgspec.Struct):
    """One of the last sequences.

    Args:
        key: names it in `/dashboard/data?request=`.
        state: running, or why it ended.
        age_s: since it was queued.
        first_token_s: from then to its first token; null before.
        duration_s: from then to its last output.
        has_gap: not all of its tokens are kept.
    """

    key: str
    state: str
    age_s: float
    first_token_s: float | None
    duration_s: float
    num_steps: int
    num_tokens: int
    num_draft_tokens: int
    num_admitted_tokens: int
    num_accepted_tokens: int
    has_gap: bool


class StepData(msgspec.Struct):
    """What one step gave one sequence.

    Args:
        tokens: the committed ones' texts: the accepted drafts, then the model's own.
        drafts: [text, fate, predicted survival] of each draft; see `DraftFate`.
        num_reqs: requests of the step.
        draft_budget: drafts that were verified in the step, over all requests.
    """

    tokens: list[str]
    drafts: list[tuple[str, str, float | None]]
    num_reqs: int
    draft_budget: int


class RequestDetail(msgspec.Struct):
    """One sequence, step by step."""

    summary: RequestData
    steps: list[StepData]


class DashboardData(msgspec.Struct):
    """Everything, but for the steps of requests other than the one asked for.

    Args:
        positions: one a place in a proposal; empty without speculation.
        pooled_error: expected calibration error over all places.
        latencies: by `time_to_first_token`, `inter_token`, `e2e` and `queue`.
        requests: the latest first.
        request: the one asked for; null if it is gone or none was.
    """

    server: ServerData
    load: LoadData
    drafts: DraftData
    positions: list[PositionData]
    pooled_error: float | None
    batch_sizes: list[BatchSizeData]
    cost: CostData
    seconds: list[SecondData]
    latencies: dict[str, LatencyData]
    requests: list[RequestData]
    request: RequestDetail | None
