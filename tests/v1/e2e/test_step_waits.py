"""What a step waits for, and what it copies, on a stream that only keeps a record."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from tests.markers import needs_cpu_ops
from tests.v1.e2e.budget_policies import Watched
from tests.v1.e2e.tiny_engine import TinyEngine
from tests.v1.spec_decode.linear_costs import LinearCosts
from vllm._cpu_ops_budget import BudgetOps
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu import model_runner
from vllm.v1.worker.gpu.spec_decode.adaptive_budget import AdaptiveBudget
from vllm.v1.worker.gpu.spec_decode.confidence_history import _record_round_torch
from vllm.v1.worker.gpu.spec_decode.draft_budget import (
    BudgetPolicy,
    FixedBudget,
    VerifyAll,
)

NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 3,
}
# Reads of a tensor's values, which wait for a device that is still computing them.
READS = {
    torch.Tensor.item,
    torch.Tensor.tolist,
    torch.Tensor.numpy,
    torch.Tensor.cpu,
    torch.Tensor.nonzero,
    torch.Tensor.__bool__,
    torch.Tensor.__int__,
    torch.Tensor.__float__,
    torch.Tensor.__index__,
    torch.nonzero,
}


@dataclass
class Record:
    """What a device would have been asked for in one step.

    Attributes:
        num_waits: for the copies of results to be complete.
        num_copies: to the host, not waited for.
        num_early_reads: of values before any wait of the step.
    """

    num_waits: int = 0
    num_copies: int = 0
    num_early_reads: int = 0


@dataclass
class Recorder:
    steps: list[Record] = field(default_factory=list)

    @property
    def step(self) -> Record:
        return self.steps[-1]


class FakeStream:
    def wait_stream(self, other: "FakeStream") -> None:
        """Let work behind work wait, which the host does not notice."""


def make_fake_event(recorder: Recorder) -> type:
    class FakeEvent:
        def __init__(self, *, blocking: bool) -> None:
            self.is_recorded = False

        def record(self, stream: FakeStream) -> None:
            self.is_recorded = True

        def synchronize(self) -> None:
            assert self.is_recorded
            recorder.step.num_waits += 1

    return FakeEvent


class CountingMode(TorchFunctionMode):
    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def __torch_function__(
        self, func: Callable, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        step = self._recorder.step
        is_copy = func is torch.Tensor.copy_ or (
            func is torch.Tensor.to and "cpu" in args
        )
        if is_copy and kwargs.get("non_blocking"):
            step.num_copies += 1
        elif func in READS and step.num_waits == 0:
            step.num_early_reads += 1
        return func(*args, **kwargs)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder, stream = Recorder([Record()]), FakeStream()

    @contextmanager
    def on_stream(stream: FakeStream) -> Iterator[None]:
        yield

    def copy_scores(self: LogprobsTensors) -> LogprobsTensors:
        # The host's boundaries are no tensor.
        recorder.step.num_copies += sum(isinstance(x, torch.Tensor) for x in self)
        return self

    monkeypatch.setattr(torch.cuda, "Event", make_fake_event(recorder))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", on_stream)
    monkeypatch.setattr(model_runner, "make_copy_stream", lambda device: stream)
    monkeypatch.setattr(LogprobsTensors, "to_cpu_nonblocking", copy_scores)
    # The compiled operator copies unseen.
    monkeypatch.setattr(
        BudgetOps, "record_round", lambda ops, *args: _record_round_torch(*args)
    )
    return recorder


def run(
    model: Path, recorder: Recorder, policy: BudgetPolicy, **params: Any
) -> set[tuple[int, int, int]]:
    """Return (waits, copies, early reads) of the steps that had drafts to verify."""
    watched = Watched(policy)
    engine = TinyEngine(model, speculative_config=NGRAM, budget_policy=watched)
    for _ in range(3):
        engine.add("a" * 9, SamplingParams(temperature=0.0, max_tokens=16, **params))
    kept = set()
    with CountingMode(recorder):
        while engine.engine.has_unfinished_requests():
            recorder.steps.append(Record())
            engine.engine.step()
            step, (num_scheduled, _, next_length) = recorder.step, watched.choices[-1]
            if num_scheduled > 2 and next_length:
                kept.add((step.num_waits, step.num_copies, step.num_early_reads))
    engine.shutdown()
    assert watched.regimes == {"some"} or not isinstance(policy, FixedBudget)
    return kept


# What is forced on the model repeats itself at once.
FORCED = {"allowed_token_ids": [97]}
MASKED = {"structured_outputs": StructuredOutputsParams(regex="a{20,40}")}
SCORED = FORCED | {"logprobs": 2}


@needs_cpu_ops
@pytest.mark.parametrize("params", [FORCED, MASKED], ids=["plain", "grammar"])
@pytest.mark.parametrize(
    "make_policy",
    [lambda: FixedBudget(2), lambda: AdaptiveBudget(LinearCosts(1.0, 0.5, 0.0))],
    ids=["fixed", "adaptive"],
)
def test_fewer_verified_drafts_cost_copies_and_no_wait(
    model: Path, recorder: Recorder, make_policy: Any, params: dict[str, Any]
):
    [(num_waits, num_copies, num_early_reads)] = run(
        model, recorder, VerifyAll(), **params
    )
    # For the tokens, and for the drafts.
    assert num_waits == 2
    # The CPU path of allowed ids looks for the rows that have some; nothing else looks.
    assert num_early_reads == ("allowed_token_ids" in params)
    adaptive = run(model, recorder, make_policy(), **params)
    # How sure the drafter is of the next drafts and was of these; and, if not all of
    # them are verified, which are.
    assert adaptive <= {
        (num_waits, num_copies + extra, num_early_reads) for extra in (2, 3)
    }


@needs_cpu_ops
def test_log_probabilities_cost_their_copies_and_no_wait(
    model: Path, recorder: Recorder
):
    [plain] = run(model, recorder, VerifyAll(), **FORCED)
    [scored] = run(model, recorder, VerifyAll(), **SCORED)
    # Ids, scores and ranks. What CPU operators look at is no wait.
    assert scored[:2] == (plain[0], plain[1] + 3)
    trimmed = run(model, recorder, FixedBudget(2), **SCORED)
    # The same, and whose the scores are.
    assert trimmed == {(scored[0], scored[1] + 4, scored[2])}
