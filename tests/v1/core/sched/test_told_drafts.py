"""What requests and /metrics are told of drafts, and that it is the same."""

from dataclasses import replace

import numpy as np
import pytest

from tests.v1.core.fakes import (
    FakeWorker,
    add_request,
    make_scheduler,
    sampled_output,
)
from vllm.v1.core.sched.output import GrammarOutput
from vllm.v1.spec_decode.metrics import SpecDecodingStats


def step_with_drafts(scheduler, drafts, sampled, grammar=None, **fields):
    """Verify `drafts` of request a; return its output and the step's counts."""
    scheduler.update_draft_token_ids(["a"], [drafts])
    output = scheduler.schedule()
    assert output.scheduled_spec_decode_tokens == {"a": drafts}
    result = replace(sampled_output(output, a=sampled), **fields)
    outputs = scheduler.update_from_output(output, result, grammar)
    return outputs.outputs[0], outputs.scheduler_stats.spec_decoding_stats


def make_telling(level="summary", **params):
    """Return a scheduler whose request a has its first token."""
    scheduler = make_scheduler(num_drafts=3, spec_decode_metrics=level)
    request = add_request(scheduler, "a", 3, max_tokens=50, **params)
    output = scheduler.schedule()
    scheduler.update_from_output(output, sampled_output(output, a=[9]))
    return scheduler, request


def test_a_step_with_drafts_tells_how_many_were_accepted():
    scheduler, _ = make_telling()
    output, stats = step_with_drafts(scheduler, [1, 2, 3], [1, 2, 7])
    assert output.spec_decoding_step == (3, 2)
    assert (stats.num_drafts, stats.num_draft_tokens) == (1, 3)
    assert stats.num_accepted_tokens_per_pos == [1, 1, 0]


def test_drafts_behind_a_stop_were_accepted_all_the_same():
    scheduler, _ = make_telling(stop_token_ids=[2])
    output, stats = step_with_drafts(scheduler, [1, 2, 3], [1, 2, 3, 7])
    assert output.new_token_ids == [1, 2]
    assert output.spec_decoding_step == (3, 3)
    assert stats.num_accepted_tokens == 3


def test_a_step_without_drafts_tells_nothing():
    scheduler, _ = make_telling()
    output = scheduler.schedule()
    outputs = scheduler.update_from_output(output, sampled_output(output, a=[1]))
    assert outputs.outputs[0].spec_decoding_step is None
    assert outputs.scheduler_stats.spec_decoding_stats is None


@pytest.mark.parametrize("cap", [0, 2])
def test_the_cap_of_a_request_is_its_number_of_drafts(cap):
    scheduler, _ = make_telling(num_speculative_tokens=cap)
    scheduler.update_draft_token_ids(["a"], [[1, 2, 3]])
    output = scheduler.schedule()
    [told] = scheduler.update_from_output(output, sampled_output(output, a=[1])).outputs
    assert told.spec_decoding_step == (None if cap == 0 else (2, 0))


def test_forbidden_drafts_are_counted_nowhere():
    scheduler, _ = make_telling()
    grammar = GrammarOutput(["a"], np.zeros((4, 1), np.int32), [1])
    output, stats = step_with_drafts(scheduler, [1, 2, 3], [1, 7], grammar)
    assert output.spec_decoding_step == (1, 1)
    assert (stats.num_drafts, stats.num_draft_tokens) == (1, 1)


def test_drafts_that_pass_behind_the_end_of_a_grammar_are_not_accepted():
    scheduler, _ = make_telling()
    grammar = GrammarOutput(["a"], np.zeros((4, 1), np.int32), [2])
    output, stats = step_with_drafts(scheduler, [1, 2, 2], [1, 2, 2, 7], grammar)
    assert output.spec_decoding_step == (2, 2)
    assert stats.num_accepted_tokens_per_pos == [1, 1, 0]


def test_trimmed_drafts_are_taken_back_and_not_rejected():
    scheduler, request = make_telling()
    output, stats = step_with_drafts(
        scheduler, [1, 2, 3], [7], num_verified_drafts={"a": 0}
    )
    assert output.spec_decoding_step == (0, 0)
    assert (stats.num_drafts, stats.num_draft_tokens) == (1, 3)
    assert (stats.num_admitted_tokens, stats.num_accepted_tokens) == (0, 0)
    assert request.num_computed_tokens == request.num_tokens - 1


def test_nobody_is_told_of_drafts_who_did_not_ask():
    scheduler, _ = make_telling("none")
    output, stats = step_with_drafts(scheduler, [1, 2, 3], [1, 2, 7])
    assert output.spec_decoding_step is None
    assert stats.num_accepted_tokens == 2


def test_what_requests_are_told_sums_to_the_counts_also_after_preemption():
    scheduler = make_scheduler(
        num_blocks=7, num_drafts=3, spec_decode_metrics="summary"
    )
    worker = FakeWorker(num_drafts=3)
    requests = [add_request(scheduler, name, 7, max_tokens=11) for name in "ab"]
    told, counted = SpecDecodingStats.make(3), SpecDecodingStats.make(3)
    num_outputs = 0
    while scheduler.has_requests():
        output = scheduler.schedule()
        result = worker.execute(output)
        outputs = scheduler.update_from_output(output, result)
        scheduler.update_draft_token_ids(*worker.propose(result))
        num_outputs += len(outputs.outputs)
        for one in outputs.outputs:
            if one.spec_decoding_step is not None:
                # None is trimmed here.
                told.observe(
                    one.spec_decoding_step.num_verified, one.spec_decoding_step
                )
        if outputs.scheduler_stats.spec_decoding_stats is not None:
            counted.add(outputs.scheduler_stats.spec_decoding_stats)
    assert sum(request.num_preemptions for request in requests) > 0
    assert told == counted
    # Every step gives a token of its own beside the accepted ones.
    num_tokens = sum(request.num_output_tokens for request in requests)
    assert num_tokens == num_outputs + told.num_accepted_tokens
