"""A step read as the last one must be what it would be if it were read afresh."""

from dataclasses import fields

import numpy as np
import pytest
import torch

from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import (
    CachedRequestData,
    NewRequestData,
    SchedulerOutput,
)
from vllm.v1.worker.gpu.batch_layout import ScheduledStep
from vllm.v1.worker.gpu.spec_decode.admitted_drafts import admit_drafts
from vllm.v1.worker.gpu.spec_decode.verified_layout import make_verified_layout
from vllm.v1.worker.gpu.states import RequestState
from vllm.v1.worker.gpu.step_requests import StepReader, StepRequests

NUM_DRAFTS = 3


def message(
    num_tokens: dict[str, int],
    num_computed: dict[str, int],
    num_drafts: dict[str, int] | None = None,
    new: tuple[str, ...] = (),
) -> SchedulerOutput:
    cached = [req_id for req_id in num_tokens if req_id not in new]
    return SchedulerOutput(
        [
            NewRequestData(req_id, [], [], SamplingParams(), (), num_computed[req_id])
            for req_id in new
        ],
        CachedRequestData(
            cached, [None] * len(cached), [num_computed[req_id] for req_id in cached]
        ),
        num_tokens,
        sum(num_tokens.values()),
        {req_id: [7] * count for req_id, count in (num_drafts or {}).items() if count},
    )


def make_states(prefill_lens: dict[str, int], device) -> RequestState:
    states = RequestState(8, 64, NUM_DRAFTS, device)
    for req_id, prefill_len in prefill_lens.items():
        states.add_request(req_id, prefill_len, [1] * prefill_len, 0)
    return states


def say(requests: StepRequests) -> dict[str, object]:
    """Return everything that is known of the requests, as lists and numbers."""
    step = requests.scheduled
    said = {field.name: getattr(requests, field.name) for field in fields(requests)}
    said |= {field.name: getattr(step, field.name) for field in fields(step)}
    said |= {
        name: getattr(step, name)
        for name in ("num_reqs", "num_sampling_reqs", "num_drafts", "num_bonus_rows_np")
    }
    del said["scheduled"]
    return {
        name: value.tolist() if isinstance(value, np.ndarray | torch.Tensor) else value
        for name, value in said.items()
    }


def test_verification_comes_first_then_decodes_then_prefills(device):
    states = make_states({"long": 40, "short": 9, "one": 3, "drafted": 3}, device)
    step = message(
        {"long": 16, "short": 9, "one": 1, "drafted": 4},
        {"long": 16, "short": 0, "one": 5, "drafted": 6},
        {"drafted": 3},
        new=("short",),
    )
    requests, num_computed = StepReader(states, 1, device).read(step)
    assert requests.req_ids == ["drafted", "one", "short", "long"]
    assert num_computed == [6, 5, 0, 16]
    assert requests.num_tokens == [4, 1, 9, 16]
    scheduled = requests.scheduled
    assert requests.idx_mapping.tolist() == scheduled.idx_mapping_np.tolist()
    assert scheduled.idx_mapping_np.tolist() == [3, 2, 1, 0]
    assert scheduled.num_drafts_np.tolist() == [3, 0, 0, 0]
    # The long prompt is not at its end.
    assert scheduled.is_sampling_np.tolist() == [True, True, True, False]


def test_while_messages_say_the_same_the_requests_and_their_layout_are_the_same(device):
    states = make_states({"a": 4, "b": 4}, device)
    reader = StepReader(states, 1, device)
    first, _ = reader.read(message({"a": 1, "b": 1}, {"a": 5, "b": 9}))
    second, num_computed = reader.read(message({"a": 1, "b": 1}, {"a": 6, "b": 10}))
    assert second is first
    assert num_computed == [6, 10]
    layouts = [
        make_verified_layout(requests.scheduled, 0, requests.idx_mapping)
        for requests in (first, second)
    ]
    assert layouts[0] is layouts[1]


def test_a_chunk_like_the_last_one_that_ends_the_prompt_samples(device):
    states = make_states({"a": 32}, device)
    reader = StepReader(states, 1, device)
    is_sampling = [
        reader.read(message({"a": 16}, {"a": num_computed}))[0].scheduled.is_sampling_np
        for num_computed in (0, 16)
    ]
    assert [*map(list, is_sampling)] == [[False], [True]]


def test_a_request_that_comes_back_under_its_name_is_looked_at_again(device):
    states = make_states({"a": 4, "b": 4}, device)
    reader = StepReader(states, 1, device)
    step = message({"b": 1}, {"b": 5})
    assert reader.read(step)[0].idx_mapping.tolist() == [1]
    states.remove_request("b")
    states.remove_request("a")
    states.add_request("b", 4, [1] * 9, 0, max_num_drafts=1)
    requests, _ = reader.read(step)
    assert requests.idx_mapping.tolist() == [0]
    assert requests.max_drafts_np.tolist() == [1]
    assert requests.scheduled.is_sampling_np.tolist() == [False]


@pytest.mark.parametrize(
    ("num_drafts", "admitted"),
    [
        ([3, 2], [[0, 0], [3, 2], [1, 1], [2, 0]]),
        ([0, 3], [[0, 0], [0, 1], [0, 2], [0, 3]]),
    ],
)
def test_a_layout_is_kept_for_each_budget_that_says_what_is_admitted(
    num_drafts, admitted
):
    drafts_np = np.array(num_drafts, np.int32)
    step = ScheduledStep(
        np.arange(2, dtype=np.int32), drafts_np + 1, drafts_np, np.ones(2, bool), 1
    )
    for counts in admitted:
        verified, budget = torch.tensor(counts, dtype=torch.int32), sum(counts)
        layout = make_verified_layout(step, budget, verified)
        for sums in layout.cu_num_logits, layout.query_start_loc:
            assert sums.diff().tolist() == [kept + 1 for kept in counts]
        assert layout.draft_budget == budget
        again = make_verified_layout(step, budget, verified)
        assert (again is layout) == (step.settle(budget) is not None)


@pytest.mark.parametrize("num_drafts", [[3, 2], [0, 3, 0], [3], [0, 0]])
def test_what_a_budget_admits_by_itself_is_what_any_ranking_admits(num_drafts):
    drafts_np = np.array(num_drafts, np.int32)
    rows_np = np.arange(len(drafts_np), dtype=np.int32)
    step = ScheduledStep(rows_np, drafts_np + 1, drafts_np, rows_np >= 0, 1)
    for confidences in (
        torch.rand(8, NUM_DRAFTS),
        torch.zeros(8, NUM_DRAFTS),
        torch.full((8, NUM_DRAFTS), float("nan")),
    ):
        for budget in range(step.num_drafts + 1):
            settled = step.settle(budget)
            ranked = admit_drafts(
                confidences,
                torch.from_numpy(rows_np),
                torch.from_numpy(drafts_np),
                budget,
            )
            assert settled is None or settled.dtype == np.int32
            assert settled is None or settled.tolist() == ranked.tolist()
    # With two requests that have drafts the confidences say which are admitted.
    assert (step.settle(1) is None) == (num_drafts == [3, 2])


@pytest.mark.parametrize("seed", range(20))
def test_no_message_is_ever_answered_with_what_was_true_before(seed, device):
    """Requests come, are chunked, decode, draft, are preempted, and end at random."""
    generator = np.random.default_rng(seed)
    states = make_states({}, device)
    reader = StepReader(states, 1, device)
    # Computed tokens by request, in the scheduler's order.
    running: dict[str, int] = {}
    num_same, last = 0, None
    for _ in range(200):
        if running and generator.random() < 0.08:
            gone = generator.choice(list(running))
            del running[gone]
            states.remove_request(gone)
        new = ()
        # Few names, so that a request comes back as one before it was called.
        name = f"req{generator.integers(6)}"
        if name not in running and generator.random() < 0.15:
            prefill_len = int(generator.integers(1, 24))
            limit = generator.choice([None, 1, NUM_DRAFTS])
            states.add_request(name, prefill_len, [1] * prefill_len, 0, limit)
            running[name] = int(generator.integers(0, prefill_len))
            new = (name,)
        if not running:
            continue
        drafts_next = generator.random() < 0.3
        num_tokens, num_drafts = {}, {}
        for req_id, num_computed in running.items():
            row = states.req_id_to_index[req_id]
            num_left = int(states.prefill_len.np[row]) - num_computed
            if num_left <= 0 and drafts_next:
                num_drafts[req_id] = int(generator.integers(0, NUM_DRAFTS + 1))
            num_tokens[req_id] = 1 + num_drafts.get(req_id, 0)
            if num_left > 0:
                num_tokens[req_id] = min(num_left, 8)
        step = message(num_tokens, running, num_drafts, new)
        requests, computed = reader.read(step)
        fresh, fresh_computed = StepReader(states, 1, device).read(step)
        assert say(requests) == say(fresh)
        assert computed == fresh_computed
        num_same += requests is last
        last = requests
        for req_id, count in num_tokens.items():
            rejected = int(generator.integers(0, num_drafts.get(req_id, 0) + 1))
            running[req_id] += count - rejected
    # Whether anything was answered from memory.
    assert num_same > 20
