"""The last sequences, token by token."""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from vllm.v1.engine import EngineCoreEventType, EngineCoreOutput
from vllm.v1.engine.token_texts import TokenTable, TokenTexts
from vllm.v1.metrics.dashboard.data import RequestData, RequestDetail, StepData
from vllm.v1.spec_decode.trace import DraftTrace

MAX_REQUESTS = 24
# Tokens and drafts of one sequence; what comes behind them is only counted.
MAX_ENTRIES = 2000
RUNNING = "running"


@dataclass(frozen=True)
class _Step:
    token_ids: list[int]
    drafts: DraftTrace | None
    num_reqs: int
    draft_budget: int

    @property
    def num_entries(self) -> int:
        return len(self.token_ids) + len(self.drafts.token_ids if self.drafts else ())


@dataclass
class _Sequence:
    """One sequence.

    Args:
        queued_s: seconds of the engine core's clock, likewise the other two.
    """

    queued_s: float
    first_token_s: float | None = None
    last_s: float = 0.0
    state: str = RUNNING
    num_steps: int = 0
    num_tokens: int = 0
    num_draft_tokens: int = 0
    num_admitted_tokens: int = 0
    num_accepted_tokens: int = 0
    num_entries: int = 0
    has_gap: bool = False
    steps: list[_Step] = field(default_factory=list)

    def observe(self, step: _Step, timestamp_s: float) -> None:
        self.last_s = timestamp_s
        if step.token_ids:
            if self.first_token_s is None:
                self.first_token_s = timestamp_s
            self.num_steps += 1
            self.num_tokens += len(step.token_ids)
        if step.drafts is not None:
            num_drafts = min(len(step.drafts.token_ids), step.drafts.num_allowed)
            self.num_draft_tokens += num_drafts
            self.num_admitted_tokens += min(num_drafts, step.drafts.num_admitted)
            self.num_accepted_tokens += step.drafts.num_accepted
        if not self.has_gap and self.num_entries + step.num_entries <= MAX_ENTRIES:
            self.num_entries += step.num_entries
            self.steps.append(step)
        else:
            self.has_gap = True


class RequestTraces:
    """Keeps the sequences that began last; older ones make room, finished or not.

    Args:
        token_table: for texts.
    """

    def __init__(self, token_table: TokenTable) -> None:
        self._token_table = token_table
        self._sequences: OrderedDict[str, _Sequence] = OrderedDict()

    def observe(
        self,
        output: EngineCoreOutput,
        timestamp_s: float,
        num_reqs: int,
        draft_budget: int,
    ) -> None:
        """Take what a step gave one sequence, before anybody changes it.

        Args:
            timestamp_s: of the step, in seconds of the engine core's clock.
            num_reqs: of the step.
            draft_budget: of the step.
        """
        for event in output.events or ():
            if event.type is EngineCoreEventType.QUEUED:
                self._begin(output.request_id, event.timestamp)
        sequence = self._sequences.get(output.request_id)
        # It has made room for later ones, or the front has ended it and the core does
        # not know that yet.
        if sequence is None or sequence.state != RUNNING:
            return
        step = _Step(
            list(output.new_token_ids), output.draft_trace, num_reqs, draft_budget
        )
        sequence.observe(step, timestamp_s)
        if output.finish_reason is not None:
            sequence.state = str(output.finish_reason)

    def end(self, request_ids: Iterable[str], state: str) -> None:
        """Note that the front has ended sequences; those that have ended stay so."""
        for request_id in request_ids:
            sequence = self._sequences.get(request_id)
            if sequence is not None and sequence.state == RUNNING:
                sequence.state = state

    def get(self, now_s: float) -> list[RequestData]:
        """Return the sequences, the latest first.

        Args:
            now_s: seconds of the engine core's clock.
        """
        return [
            _summarize(key, sequence, now_s)
            for key, sequence in reversed(self._sequences.items())
        ]

    def get_detail(self, key: str, now_s: float) -> RequestDetail | None:
        """Return one sequence with its steps; None if it is not kept."""
        sequence = self._sequences.get(key)
        if sequence is None:
            return None
        texts = TokenTexts(self._token_table)
        steps = [self._describe(step, texts) for step in sequence.steps]
        return RequestDetail(_summarize(key, sequence, now_s), steps)

    def _begin(self, key: str, queued_s: float) -> None:
        # An id that is used again is another sequence.
        self._sequences.pop(key, None)
        self._sequences[key] = _Sequence(queued_s)
        if len(self._sequences) > MAX_REQUESTS:
            self._sequences.popitem(last=False)

    def _describe(self, step: _Step, texts: TokenTexts) -> StepData:
        drafts: list[tuple[str, str, float | None]] = []
        if step.drafts is not None:
            trace = step.drafts
            drafts = [
                (
                    self._token_table.get_whole_text(token_id) or "\ufffd",
                    fate,
                    trace.survivals[place] if trace.survivals else None,
                )
                for place, (token_id, fate) in enumerate(
                    zip(trace.token_ids, trace.fates(), strict=True)
                )
            ]
        tokens = []
        for token_id in step.token_ids:
            tokens.append(texts.get(token_id))
            texts.advance(token_id)
        return StepData(tokens, drafts, step.num_reqs, step.draft_budget)


def _summarize(key: str, sequence: _Sequence, now_s: float) -> RequestData:
    first_s = sequence.first_token_s
    return RequestData(
        key=key,
        state=sequence.state,
        age_s=max(now_s - sequence.queued_s, 0.0),
        first_token_s=None if first_s is None else first_s - sequence.queued_s,
        duration_s=max(sequence.last_s - sequence.queued_s, 0.0),
        num_steps=sequence.num_steps,
        num_tokens=sequence.num_tokens,
        num_draft_tokens=sequence.num_draft_tokens,
        num_admitted_tokens=sequence.num_admitted_tokens,
        num_accepted_tokens=sequence.num_accepted_tokens,
        has_gap=sequence.has_gap,
    )
