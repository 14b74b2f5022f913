import pytest

from tests.v1.core.fakes import (
    FakeGrammar,
    FakeGrammarManager,
    FakeWorker,
    add_request,
    collect,
    expected_output,
    make_request,
    make_scheduler,
    run_all,
    run_step,
    sampled_output,
)
from vllm.exceptions import VLLMValidationError
from vllm.v1.core.sched.stop import NO_TOKEN
from vllm.v1.engine import EngineCoreEventType, FinishReason
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT
from vllm.v1.request import RequestStatus

ABORTED = RequestStatus.FINISHED_ABORTED


def running_ids(scheduler) -> list[str]:
    return [request.request_id for request in scheduler.running]


# What a step holds.


def test_a_prompt_is_computed_and_then_one_token_a_step():
    scheduler, worker = make_scheduler(), FakeWorker()
    request = add_request(scheduler, "a", 5, max_tokens=3)
    assert [run_step(scheduler, worker)[0].num_scheduled_tokens for _ in range(3)] == [
        {"a": 5},
        {"a": 1},
        {"a": 1},
    ]
    assert request.output_token_ids == expected_output(request.prompt_token_ids, 3)


def test_long_prompts_are_spread_over_steps_behind_the_decodes():
    scheduler, worker = make_scheduler(max_num_batched_tokens=8), FakeWorker()
    add_request(scheduler, "a", 3)
    run_step(scheduler, worker)
    add_request(scheduler, "b", 18)
    chunks = [run_step(scheduler, worker)[0].num_scheduled_tokens for _ in range(4)]
    assert chunks == [
        {"a": 1, "b": 7},
        {"a": 1, "b": 7},
        {"a": 1, "b": 4},
        {"a": 1, "b": 1},
    ]


def test_without_chunks_a_prompt_waits_for_a_step_that_takes_it_whole():
    scheduler = make_scheduler(max_num_batched_tokens=8, enable_chunked_prefill=False)
    worker = FakeWorker()
    for request_id, num_tokens in (("a", 5), ("b", 8), ("c", 2)):
        add_request(scheduler, request_id, num_tokens, max_tokens=2)
    steps = [run_step(scheduler, worker)[0].num_scheduled_tokens for _ in range(4)]
    # b is next in line, so c does not pass it.
    assert steps == [{"a": 5}, {"a": 1}, {"b": 8}, {"b": 1, "c": 2}]


def test_no_more_requests_run_than_there_are_rows():
    scheduler = make_scheduler(max_num_seqs=2)
    for request_id in "abc":
        add_request(scheduler, request_id, 3)
    assert list(run_step(scheduler, FakeWorker())[0].num_scheduled_tokens) == ["a", "b"]


def test_no_more_requests_run_than_a_step_has_tokens():
    scheduler, worker = make_scheduler(max_num_batched_tokens=3), FakeWorker()
    for request_id in "abcde":
        add_request(scheduler, request_id, 1)
    run_step(scheduler, worker)
    assert run_step(scheduler, worker)[0].num_scheduled_tokens == dict.fromkeys(
        "abc", 1
    )


def test_the_messages_carry_blocks_and_counts():
    scheduler, worker = make_scheduler(num_groups=2), FakeWorker()
    request = add_request(scheduler, "a", 4)
    (new,) = run_step(scheduler, worker)[0].scheduled_new_reqs
    assert (new.req_id, new.num_computed_tokens) == ("a", 0)
    assert new.prefill_token_ids == new.prompt_token_ids == request.prompt_token_ids
    assert new.block_ids == ([1], [1])
    cached = run_step(scheduler, worker)[0].scheduled_cached_reqs
    assert (cached.req_ids, cached.num_computed_tokens) == (["a"], [4])
    assert cached.new_block_ids == [([2], [2])]
    assert run_step(scheduler, worker)[0].scheduled_cached_reqs.new_block_ids == [None]


def test_a_finished_row_is_told_once():
    scheduler, worker = make_scheduler(), FakeWorker()
    add_request(scheduler, "a", 3, max_tokens=1)
    run_step(scheduler, worker)
    assert scheduler.has_requests()
    assert run_step(scheduler, worker)[0].finished_req_ids == {"a"}
    assert not scheduler.has_requests()
    assert scheduler.schedule().finished_req_ids == set()


def test_a_request_that_never_ran_has_no_row_to_free():
    scheduler = make_scheduler()
    add_request(scheduler, "a", 3)
    scheduler.finish_requests("a", ABORTED)
    assert scheduler.schedule().finished_req_ids == set()


# The prefix cache.


def test_a_second_request_is_given_the_whole_blocks_of_the_first():
    scheduler, worker = make_scheduler(), FakeWorker()
    add_request(scheduler, "a", [7] * 10)
    run_step(scheduler, worker)
    add_request(scheduler, "b", [7] * 10)
    output, outputs = run_step(scheduler, worker)
    assert output.num_scheduled_tokens["b"] == 2
    assert {out.request_id: out.num_cached_tokens for out in outputs} == {
        "a": 0,
        "b": 8,
    }


def test_children_share_the_prompt_within_one_step():
    scheduler, worker = make_scheduler(), FakeWorker()
    for request_id in "abc":
        add_request(scheduler, request_id, [7] * 10, parent="p")
    output = run_step(scheduler, worker)[0]
    assert output.num_scheduled_tokens == {"a": 10, "b": 2, "c": 2}
    # 3 blocks, and one of its own for each other child.
    assert scheduler.kv_cache_manager.usage == pytest.approx(5 / 64)


def test_without_prefix_caching_only_children_share():
    scheduler = make_scheduler(enable_prefix_caching=False)
    for request_id, parent in (("a", None), ("b", None), ("c", "p"), ("d", "p")):
        add_request(scheduler, request_id, [7] * 10, parent=parent)
    output = run_step(scheduler, FakeWorker())[0]
    assert output.num_scheduled_tokens == {"a": 10, "b": 10, "c": 10, "d": 2}


def test_salts_keep_callers_apart():
    scheduler = make_scheduler()
    for request_id, salt in (("a", None), ("b", "x"), ("c", "y"), ("d", "x")):
        add_request(scheduler, request_id, [7] * 10, cache_salt=salt)
    output = run_step(scheduler, FakeWorker())[0]
    assert output.num_scheduled_tokens == {"a": 10, "b": 10, "c": 10, "d": 2}


def test_a_prompt_with_logprobs_is_computed_whole():
    scheduler = make_scheduler()
    add_request(scheduler, "a", [7] * 10)
    add_request(scheduler, "b", [7] * 10, prompt_logprobs=1)
    assert run_step(scheduler, FakeWorker())[0].num_scheduled_tokens["b"] == 10


def test_output_is_found_by_the_next_turn_of_a_conversation():
    scheduler, worker = make_scheduler(), FakeWorker()
    first = add_request(scheduler, "a", 6, max_tokens=7)
    run_all(scheduler, worker)
    # 12 tokens are computed: all but the last one.
    add_request(scheduler, "b", [*first.all_token_ids, 1, 2])
    assert run_step(scheduler, worker)[0].num_scheduled_tokens == {"b": 3}


def test_hits_are_counted_once_a_request():
    scheduler, worker = make_scheduler(num_blocks=7), FakeWorker()
    for request_id in "ab":
        add_request(scheduler, request_id, [7] * 9, max_tokens=12)
    stats = []
    while scheduler.has_requests():
        output = scheduler.schedule()
        result = worker.execute(output)
        stats.append(scheduler.update_from_output(output, result).scheduler_stats)
    assert sum(step.num_preempted for step in stats) > 0
    prefix = [step.prefix_cache_stats for step in stats]
    assert sum(step.requests for step in prefix) == 2
    assert sum(step.queries for step in prefix) == 18
    assert sum(step.hits for step in prefix) == 8


def test_reset_while_running_changes_no_text():
    scheduler, worker = make_scheduler(), FakeWorker()
    requests = [add_request(scheduler, name, [7] * 9, max_tokens=20) for name in "ab"]
    run_step(scheduler, worker)
    assert scheduler.reset_prefix_cache()
    requests.append(add_request(scheduler, "c", [7] * 9, max_tokens=20))
    assert run_step(scheduler, worker)[0].num_scheduled_tokens["c"] == 9
    run_all(scheduler, worker)
    for request in requests:
        assert request.output_token_ids == expected_output([7] * 9, 20)


# Preemption.


def test_fcfs_takes_the_blocks_of_the_latest():
    scheduler, worker = make_scheduler(num_blocks=5), FakeWorker()
    requests = {name: add_request(scheduler, name, 7, max_tokens=7) for name in "ab"}
    run_step(scheduler, worker)
    run_step(scheduler, worker)
    scheduler.update_draft_token_ids(["b"], [[1, 2]])
    output = run_step(scheduler, worker)[0]
    assert requests["b"].spec_token_ids == []
    assert output.preempted_req_ids == {"b"}
    assert output.num_scheduled_tokens == {"a": 1}
    assert requests["b"].status is RequestStatus.PREEMPTED
    run_all(scheduler, worker)
    for request in requests.values():
        assert request.output_token_ids == expected_output(request.prompt_token_ids, 7)


def test_a_preempted_request_returns_as_a_new_one_with_all_its_tokens():
    scheduler, worker = make_scheduler(num_blocks=5, log_stats=False), FakeWorker()
    add_request(scheduler, "a", 7, max_tokens=4)
    late = add_request(scheduler, "b", 7, max_tokens=7)
    while not late.num_preemptions:
        run_step(scheduler, worker)
    while late.status is not RequestStatus.RUNNING:
        output = run_step(scheduler, worker)[0]
    (new,) = output.scheduled_new_reqs
    assert new.prompt_token_ids == late.prompt_token_ids
    assert new.prefill_token_ids == late.all_token_ids[:9]
    assert late.num_cached_tokens == 0


def test_priority_takes_the_blocks_of_the_least_important():
    scheduler = make_scheduler(num_blocks=7, policy="priority")
    worker = FakeWorker()
    for name, priority in (("low", 5), ("high", 0), ("middle", 2)):
        add_request(scheduler, name, 7, priority=priority, max_tokens=8)
        run_step(scheduler, worker)
    preempted: list[str] = []
    while scheduler.has_requests():
        preempted.extend(sorted(run_step(scheduler, worker)[0].preempted_req_ids))
    assert preempted[0] == "low"
    assert "high" not in preempted


def test_a_victim_that_was_already_scheduled_leaves_the_step():
    scheduler = make_scheduler(num_blocks=5, policy="priority")
    worker = FakeWorker()
    low = add_request(scheduler, "low", 3, priority=9, max_tokens=8)
    run_step(scheduler, worker)
    high = add_request(scheduler, "high", 11, priority=0, max_tokens=3)
    run_step(scheduler, worker)
    # low fills its block here, and high needs a fourth one in the next step.
    output = run_step(scheduler, worker)[0]
    assert output.preempted_req_ids == {"low"}
    assert output.num_scheduled_tokens == {"high": 1}
    assert output.scheduled_cached_reqs.req_ids == ["high"]
    run_all(scheduler, worker)
    assert low.output_token_ids == expected_output(low.prompt_token_ids, 8)
    assert high.output_token_ids == expected_output(high.prompt_token_ids, 3)


def test_the_waiting_come_in_the_order_of_their_priority():
    scheduler = make_scheduler(policy="priority", max_num_seqs=1)
    worker = FakeWorker()
    for name, priority, arrival in (("a", 1, 1.0), ("b", 0, 3.0), ("c", 0, 2.0)):
        add_request(
            scheduler, name, 3, priority=priority, arrival_time=arrival, max_tokens=1
        )
    order = [
        next(iter(run_step(scheduler, worker)[0].num_scheduled_tokens)) for _ in "abc"
    ]
    assert order == ["c", "b", "a"]


def test_a_step_that_preempts_lets_nobody_in():
    scheduler = make_scheduler(num_blocks=6, policy="priority")
    worker = FakeWorker()
    add_request(scheduler, "high", 8, priority=0)
    add_request(scheduler, "low", 11, priority=9)
    run_step(scheduler, worker)
    add_request(scheduler, "tiny", 2, priority=1)
    # low gives its three blocks, high takes one, tiny needs one.
    output = run_step(scheduler, worker)[0]
    assert output.preempted_req_ids == {"low"}
    assert output.scheduled_new_reqs == []
    (new,) = run_step(scheduler, worker)[0].scheduled_new_reqs
    assert new.req_id == "tiny"


def test_the_tokens_of_a_victim_go_to_those_behind_it():
    scheduler = make_scheduler(
        num_blocks=4, block_size=16, max_num_batched_tokens=12, policy="priority"
    )
    worker = FakeWorker(block_size=16)
    add_request(scheduler, "low", 2, priority=9, max_tokens=30)
    run_step(scheduler, worker)
    add_request(scheduler, "high", 16, priority=0, max_tokens=30)
    add_request(scheduler, "middle", 2, priority=5, max_tokens=30)
    run_step(scheduler, worker)
    run_step(scheduler, worker)
    scheduler.update_draft_token_ids(["middle"], [[0] * 20])
    output = run_step(scheduler, worker)[0]
    assert output.preempted_req_ids == {"low"}
    assert output.num_scheduled_tokens == {"high": 1, "middle": 11}


def test_a_newcomer_waits_until_its_whole_prompt_fits():
    scheduler = make_scheduler(num_blocks=9, max_num_batched_tokens=8)
    worker = FakeWorker()
    first = add_request(scheduler, "a", 13, max_tokens=7)
    run_step(scheduler, worker)
    # Four blocks are free when the first has its prompt, one too few for this one.
    second = add_request(scheduler, "b", 17, max_tokens=1)
    run_step(scheduler, worker)
    assert running_ids(scheduler) == ["a"]
    run_all(scheduler, worker)
    assert first.num_preemptions == second.num_preemptions == 0


def test_a_pool_for_four_serves_thirty_two():
    scheduler, worker = make_scheduler(num_blocks=25, max_num_seqs=32), FakeWorker()
    requests = [add_request(scheduler, f"{i}", 6, max_tokens=18) for i in range(32)]
    total = run_all(scheduler, worker)
    assert sum(request.num_preemptions for request in requests) > 0
    for request in requests:
        assert total[request.request_id].new_token_ids == expected_output(
            request.prompt_token_ids, 18
        )


# Ends.


def test_a_request_ends_with_its_reason_and_frees_its_blocks():
    scheduler = make_scheduler()
    request = add_request(scheduler, "a", 3, stop_token_ids=[42])
    output = scheduler.schedule()
    result = sampled_output(output, a=[42])
    (out,) = scheduler.update_from_output(output, result).outputs
    assert (out.finish_reason, out.stop_reason) == (FinishReason.STOP, 42)
    assert out.new_token_ids == request.output_token_ids == [42]
    assert scheduler.kv_cache_manager.usage == 0.0
    scheduler.check_integrity()


def test_no_tokens_are_asked_for_and_none_are_given():
    scheduler = make_scheduler(max_num_batched_tokens=4)
    add_request(scheduler, "a", 6, max_tokens=0)
    total = run_all(scheduler)
    assert total["a"].new_token_ids == []
    assert total["a"].finish_reason is FinishReason.LENGTH


def test_the_models_length_ends_a_request():
    scheduler = make_scheduler(max_model_len=12)
    add_request(scheduler, "a", 10, max_tokens=None)
    total = run_all(scheduler)
    assert len(total["a"].new_token_ids) == 2
    assert total["a"].finish_reason is FinishReason.LENGTH


def test_a_chunk_of_a_prompt_gives_no_output():
    scheduler, worker = make_scheduler(max_num_batched_tokens=4), FakeWorker()
    add_request(scheduler, "a", 6)
    assert run_step(scheduler, worker)[1] == []


@pytest.mark.parametrize("bad_id", [-2, 1000])
def test_an_invalid_token_fails_only_its_request(bad_id):
    scheduler, worker = make_scheduler(), FakeWorker()
    worker.overrides["bad"] = lambda _: [bad_id]
    add_request(scheduler, "bad", 3)
    good = add_request(scheduler, "good", 3)
    total = run_all(scheduler, worker)
    assert total["bad"].finish_reason is FinishReason.ERROR
    assert total["bad"].new_token_ids == []
    assert str(bad_id) in total["bad"].error
    assert not total["bad"].is_client_error
    assert good.output_token_ids == expected_output(good.prompt_token_ids, 8)


def test_contradicting_constraints_are_the_clients_error():
    scheduler, worker = make_scheduler(), FakeWorker()
    worker.overrides["bad"] = lambda _: [NO_TOKEN]
    add_request(scheduler, "bad", 3, allowed_token_ids=[5], bad_words=["b"])
    total = run_all(scheduler, worker)
    assert total["bad"].is_client_error
    assert total["bad"].error_parameter == "bad_words"


def test_nan_logits_fail_only_their_request_and_its_blocks_are_not_reused():
    scheduler, worker = make_scheduler(), FakeWorker()
    worker.nan_req_ids.add("bad")
    add_request(scheduler, "bad", [7] * 10)
    add_request(scheduler, "good", 10)
    output = scheduler.schedule()
    outputs = scheduler.update_from_output(output, worker.execute(output))
    reasons = {out.request_id: out.finish_reason for out in outputs.outputs}
    assert reasons == {"bad": FinishReason.ERROR, "good": None}
    assert outputs.scheduler_stats.num_corrupted_reqs == 1
    add_request(scheduler, "again", [7] * 10)
    assert run_step(scheduler, worker)[0].num_scheduled_tokens["again"] == 10


def test_a_request_that_the_worker_forgets_is_an_error_not_a_loop():
    scheduler = make_scheduler()
    add_request(scheduler, "a", 3)
    output = scheduler.schedule()
    (out,) = scheduler.update_from_output(output, EMPTY_MODEL_RUNNER_OUTPUT).outputs
    assert out.finish_reason is FinishReason.ERROR


@pytest.mark.parametrize("moment", ["waiting", "chunk", "running", "in flight"])
def test_an_abort_frees_everything_at_any_moment(moment):
    scheduler, worker = make_scheduler(max_num_batched_tokens=8), FakeWorker()
    add_request(scheduler, "a", 12)
    for _ in range({"waiting": 0, "chunk": 1, "running": 3, "in flight": 3}[moment]):
        run_step(scheduler, worker)
    if moment == "in flight":
        output = scheduler.schedule()
        scheduler.finish_requests("a", ABORTED)
        assert scheduler.get_grammar_bitmask(output) is None
        assert (
            scheduler.update_from_output(output, worker.execute(output)).outputs == []
        )
    else:
        scheduler.finish_requests(["a", "unknown"], ABORTED)
    assert scheduler.has_requests()
    assert scheduler.kv_cache_manager.usage == 0.0
    run_all(scheduler, worker)
    assert worker.rows == {}
    scheduler.check_integrity()


def test_the_gauges_return_to_zero_after_the_last_abort():
    scheduler = make_scheduler()
    add_request(scheduler, "a", 12)
    scheduler.finish_requests("a", ABORTED)
    assert scheduler.has_runnable_requests()
    output = scheduler.schedule()
    outputs = scheduler.update_from_output(output, EMPTY_MODEL_RUNNER_OUTPUT)
    assert outputs.scheduler_stats.num_waiting_reqs == 0
    assert not scheduler.has_requests()


def test_shutdown_ends_every_request():
    scheduler = make_scheduler(max_num_seqs=1)
    for name in "ab":
        add_request(scheduler, name, 3)
    run_step(scheduler, FakeWorker())
    scheduler.shutdown()
    assert scheduler.get_request_counts() == (0, 0)
    assert scheduler.kv_cache_manager.usage == 0.0


# What cannot run.


@pytest.mark.parametrize(
    ("config", "num_tokens", "message"),
    [
        ({}, 65, "65 tokens, more than 64, the model's maximum length"),
        ({"num_blocks": 4}, 13, "more than 12, the KV cache's size"),
        (
            {"max_num_batched_tokens": 8, "enable_chunked_prefill": False},
            9,
            "more than 8, max_num_batched_tokens",
        ),
        ({}, 0, "the prompt is empty"),
    ],
)
def test_a_prompt_that_no_step_can_compute_is_refused(config, num_tokens, message):
    scheduler = make_scheduler(**config)
    with pytest.raises(VLLMValidationError, match=message) as error:
        add_request(scheduler, "a", num_tokens)
    assert error.value.parameter == "prompt"
    assert not scheduler.has_requests()


def test_an_id_in_use_is_refused_and_its_owner_goes_on():
    scheduler = make_scheduler()
    owner = add_request(scheduler, "a", 3)
    with pytest.raises(VLLMValidationError, match="already in use"):
        add_request(scheduler, "a", 3)
    run_all(scheduler)
    assert owner.num_output_tokens == 8


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_request_that_outgrows_the_cache_gets_an_error_not_a_wait(policy):
    scheduler = make_scheduler(num_blocks=4, policy=policy)
    worker = FakeWorker()
    add_request(scheduler, "a", 6, max_tokens=20)
    other = add_request(scheduler, "b", 4, max_tokens=4)
    total = run_all(scheduler, worker)
    assert total["a"].finish_reason is FinishReason.ERROR
    assert "KV cache" in total["a"].error
    assert len(total["a"].new_token_ids) == 7
    assert other.output_token_ids == expected_output(other.prompt_token_ids, 4)


def test_output_beyond_a_step_comes_back_in_chunks_without_chunked_prefill():
    scheduler = make_scheduler(
        num_blocks=9, max_num_batched_tokens=8, enable_chunked_prefill=False
    )
    requests = [add_request(scheduler, name, 5, max_tokens=20) for name in "ab"]
    run_all(scheduler)
    assert requests[1].num_preemptions > 0
    for request in requests:
        assert request.output_token_ids == expected_output(request.prompt_token_ids, 20)


# Grammars.


def test_others_pass_a_request_whose_grammar_compiles():
    scheduler, worker = make_scheduler(), FakeWorker()
    slow = add_request(scheduler, "slow", 3, grammar=True)
    assert scheduler.has_requests()
    assert not scheduler.has_runnable_requests()
    add_request(scheduler, "fast", 3)
    assert list(run_step(scheduler, worker)[0].num_scheduled_tokens) == ["fast"]
    literal = expected_output(slow.prompt_token_ids, 4)
    slow.structured_output_request.grammar = FakeGrammar(literal)
    assert scheduler.has_runnable_requests()
    output, _ = run_step(scheduler, worker)
    assert output.structured_output_request_ids == ["slow"]
    total = run_all(scheduler, worker)
    assert total["slow"].finish_reason is FinishReason.STOP
    assert slow.output_token_ids == literal


def test_a_failed_compilation_is_the_clients_error():
    scheduler = make_scheduler()
    request = add_request(scheduler, "a", 3, grammar=True)
    request.structured_output_request.error = ("no such keyword", "response_format")
    assert scheduler.has_runnable_requests()
    output = scheduler.schedule()
    assert output.total_num_scheduled_tokens == 0
    (out,) = scheduler.update_from_output(output, EMPTY_MODEL_RUNNER_OUTPUT).outputs
    assert out.finish_reason is FinishReason.ERROR
    assert out.is_client_error
    assert (out.error, out.error_parameter) == ("no such keyword", "response_format")
    assert not scheduler.has_requests()


def test_an_error_without_a_parameter_is_not_the_clients():
    scheduler = make_scheduler()
    request = add_request(scheduler, "a", 3, grammar=True)
    request.structured_output_request.error = ("every thread is busy", None)
    output = scheduler.schedule()
    (out,) = scheduler.update_from_output(output, EMPTY_MODEL_RUNNER_OUTPUT).outputs
    assert (out.is_client_error, out.is_overload) == (False, True)


def test_a_request_can_be_aborted_while_its_grammar_compiles():
    scheduler = make_scheduler()
    request = add_request(scheduler, "a", 3, grammar=True)
    scheduler.finish_requests("a", ABORTED)
    request.structured_output_request.grammar = FakeGrammar([1])
    assert run_all(scheduler) == {}


def test_a_compiled_request_takes_its_old_place():
    scheduler, worker = make_scheduler(max_num_seqs=1), FakeWorker()
    add_request(scheduler, "a", 3, max_tokens=2)
    slow = add_request(scheduler, "slow", 3, grammar=True)
    add_request(scheduler, "b", 3)
    run_step(scheduler, worker)
    slow.structured_output_request.grammar = FakeGrammar([1, 2])
    run_step(scheduler, worker)
    assert list(run_step(scheduler, worker)[0].num_scheduled_tokens) == ["slow"]


def test_only_sampling_requests_are_masked():
    scheduler, worker = make_scheduler(max_num_batched_tokens=4), FakeWorker()
    request = add_request(scheduler, "a", 6, grammar=True)
    request.structured_output_request.grammar = FakeGrammar(
        expected_output(request.prompt_token_ids, 2)
    )
    masked = [
        run_step(scheduler, worker)[0].structured_output_request_ids for _ in "12"
    ]
    assert masked == [[], ["a"]]


def test_a_token_that_the_grammar_refuses_fails_only_its_request():
    scheduler, worker = make_scheduler(), FakeWorker()
    bad = add_request(scheduler, "bad", 3, grammar=True)
    bad.structured_output_request.grammar = FakeGrammar([1, 2])
    worker.overrides["bad"] = lambda _: [5]
    good = add_request(scheduler, "good", 3)
    total = run_all(scheduler, worker)
    assert total["bad"].finish_reason is FinishReason.ERROR
    assert "grammar" in total["bad"].error
    assert good.num_output_tokens == 8


def test_preemption_keeps_the_state_of_the_grammar():
    manager = FakeGrammarManager()
    scheduler = make_scheduler(num_blocks=5, manager=manager)
    add_request(scheduler, "a", 7, max_tokens=7)
    request = add_request(scheduler, "b", 7, max_tokens=9, grammar=True)
    literal = expected_output(request.prompt_token_ids, 7)
    request.structured_output_request.grammar = FakeGrammar(literal)
    run_all(scheduler)
    assert request.num_preemptions > 0
    assert manager.accepted == request.output_token_ids == literal


# Drafts.


def make_drafting(num_drafts: int = 3, **config):
    scheduler = make_scheduler(num_drafts=num_drafts, **config)
    return scheduler, FakeWorker(num_drafts=num_drafts)


def test_drafts_are_scheduled_behind_the_known_token_and_rejected_ones_taken_back():
    scheduler, worker = make_drafting()
    request = add_request(scheduler, "a", 5, max_tokens=20)
    run_step(scheduler, worker)
    output, (out,) = run_step(scheduler, worker)
    assert output.num_scheduled_tokens == {"a": 4}
    assert len(output.scheduled_spec_decode_tokens["a"]) == 3
    # Two of the three drafts are right: three tokens, and one draft taken back.
    assert out.new_token_ids == expected_output(request.prompt_token_ids, 4)[1:]
    assert request.num_computed_tokens == 8
    assert request.num_tokens == 9


def test_text_with_drafts_is_the_text_without():
    scheduler, worker = make_drafting()
    requests = [add_request(scheduler, name, 5, max_tokens=17) for name in "abc"]
    total = run_all(scheduler, worker)
    for request in requests:
        assert total[request.request_id].new_token_ids == expected_output(
            request.prompt_token_ids, 17
        )


def test_drafts_leave_a_token_for_every_running_request():
    scheduler, worker = make_drafting(max_num_batched_tokens=9, max_num_seqs=3)
    for name in "abc":
        add_request(scheduler, name, 2, max_tokens=20)
    while len(scheduler.running) < 3:
        run_step(scheduler, worker)
    output = run_step(scheduler, worker)[0]
    assert output.num_scheduled_tokens == {"a": 4, "b": 4, "c": 1}


def test_drafts_beyond_the_end_are_not_scheduled():
    scheduler, worker = make_drafting()
    add_request(scheduler, "a", 5, max_tokens=3)
    run_step(scheduler, worker)
    # One token is there and two may follow: one draft and the token behind it.
    assert run_step(scheduler, worker)[0].num_scheduled_tokens == {"a": 2}


@pytest.mark.parametrize("num_left", [1, 2])
def test_drafts_for_an_incomplete_prompt_are_dropped(num_left):
    scheduler, worker = make_scheduler(max_num_batched_tokens=4), FakeWorker()
    request = add_request(scheduler, "a", 4 + num_left)
    run_step(scheduler, worker)
    scheduler.update_draft_token_ids(["a", "gone"], [[1, 2], [3]])
    assert request.spec_token_ids == []


def test_drafts_for_a_grammar_that_cannot_look_ahead_are_dropped():
    scheduler, worker = make_drafting()
    literal, other = ([*range(20, 30)] for _ in range(2))
    grammars = {"a": FakeGrammar(literal), "b": FakeGrammar(other)}
    grammars["a"].takes_drafts = False
    for name, grammar in grammars.items():
        request = add_request(scheduler, name, 5, grammar=True)
        request.structured_output_request.grammar = grammar
        worker.overrides[name] = lambda _: [20]
    run_step(scheduler, worker)
    scheduler.update_draft_token_ids(["a", "b"], [[21, 22], [21, 22]])
    assert scheduler.requests["a"].spec_token_ids == []
    assert scheduler.requests["b"].spec_token_ids == [21, 22]


def test_a_draft_is_verified_in_the_next_step_or_never():
    scheduler, worker = make_scheduler(), FakeWorker()
    request = add_request(scheduler, "a", 6)
    run_step(scheduler, worker)
    scheduler.update_draft_token_ids(["a"], [[1, 2]])
    run_step(scheduler, worker)
    assert request.spec_token_ids == []
    assert run_step(scheduler, worker)[0].num_scheduled_tokens == {"a": 1}


def test_preemption_drops_the_drafts():
    scheduler, worker = make_drafting(num_blocks=7)
    requests = [add_request(scheduler, name, 7, max_tokens=11) for name in "ab"]
    dropped = False
    while scheduler.has_requests():
        output = run_step(scheduler, worker)[0]
        for new in output.scheduled_new_reqs:
            dropped |= len(new.prefill_token_ids) > 7
            assert new.req_id not in output.scheduled_spec_decode_tokens
    assert dropped
    for request in requests:
        assert request.output_token_ids == expected_output(request.prompt_token_ids, 11)


def test_logprobs_are_cut_at_the_end_of_the_request():
    scheduler, worker = make_drafting()
    other = add_request(scheduler, "other", 3, max_tokens=20)
    request = make_request(scheduler, "a", 5, max_tokens=20, logprobs=0)
    stop = expected_output(request.prompt_token_ids, 3)[2]
    request.sampling_params.all_stop_token_ids = [stop]
    scheduler.add_request(request)
    run_step(scheduler, worker)
    outputs = {out.request_id: out for out in run_step(scheduler, worker)[1]}
    assert outputs["a"].stop_reason == stop
    assert outputs["a"].new_logprobs.logprob_token_ids[:, 0].tolist() == (
        outputs["a"].new_token_ids
    )
    assert outputs["other"].new_logprobs is None
    assert other.num_output_tokens == 4


# What is told.


def test_events_mark_the_life_of_a_request():
    scheduler, worker = make_scheduler(num_blocks=5), FakeWorker()
    add_request(scheduler, "a", 7, max_tokens=7)
    add_request(scheduler, "b", 7, max_tokens=7)
    events: list[EngineCoreEventType] = []
    while scheduler.has_requests():
        for out in run_step(scheduler, worker)[1]:
            if out.request_id == "b":
                events.extend(event.type for event in out.events or [])
    kinds = EngineCoreEventType
    assert events[:4] == [
        kinds.QUEUED,
        kinds.SCHEDULED,
        kinds.PREEMPTED,
        kinds.SCHEDULED,
    ]


def test_prompt_logprobs_are_told_once():
    scheduler = make_scheduler()
    add_request(scheduler, "a", 3, prompt_logprobs=0)
    told = []
    for _ in range(2):
        output = scheduler.schedule()
        result = sampled_output(output, a=[5])
        result.prompt_logprobs_dict["a"] = "rows"
        told += scheduler.update_from_output(output, result).outputs
    assert [out.new_prompt_logprobs for out in told] == ["rows", None]


def test_stats_count_each_step():
    scheduler, worker = (
        make_scheduler(max_num_batched_tokens=4, max_num_seqs=1),
        FakeWorker(),
    )
    add_request(scheduler, "a", 6)
    add_request(scheduler, "b", 3)
    add_request(scheduler, "c", 3, grammar=True)
    counts = []
    for _ in range(3):
        output = scheduler.schedule()
        stats = scheduler.update_from_output(
            output, worker.execute(output)
        ).scheduler_stats
        counts.append((stats.step_prompt_tokens, stats.step_generation_tokens))
    assert counts == [(4, 0), (2, 1), (0, 1)]
    assert (stats.num_running_reqs, stats.num_waiting_reqs) == (1, 1)
    assert stats.num_waiting_for_grammar_reqs == 1
    assert stats.kv_cache_usage == pytest.approx(2 / 64)
    assert scheduler.get_request_counts() == (1, 2)


def test_stats_are_left_out_when_nobody_wants_them():
    scheduler = make_scheduler(log_stats=False)
    output = scheduler.schedule()
    outputs = scheduler.update_from_output(output, EMPTY_MODEL_RUNNER_OUTPUT)
    assert outputs.scheduler_stats is None


def test_outputs_are_collected_in_the_order_of_the_tokens():
    scheduler, worker = make_scheduler(), FakeWorker()
    request = add_request(scheduler, "a", 3, max_tokens=4)
    total = {}
    while scheduler.has_requests():
        for out in run_step(scheduler, worker)[1]:
            collect(total, out)
    assert total["a"].new_token_ids == request.output_token_ids
    assert total["a"].finish_reason is FinishReason.LENGTH
