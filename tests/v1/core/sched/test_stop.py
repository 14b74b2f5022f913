import pytest

from tests.v1.core.fakes import (
    VOCAB_SIZE,
    FakeGrammar,
    FakeGrammarManager,
    FakeStructuredOutputRequest,
)
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.core.sched.stop import NO_TOKEN, Commit, decide_commit
from vllm.v1.request import Request, RequestStatus

EOS = 9
STOPPED = RequestStatus.FINISHED_STOPPED
LENGTH = RequestStatus.FINISHED_LENGTH_CAPPED
ERROR = RequestStatus.FINISHED_ERROR


def make_request(literal: list[int] | None = None, output=(), **params) -> Request:
    sampling_params = SamplingParams(**{"max_tokens": 10, **params})
    sampling_params.eos_token_id = EOS
    sampling_params.all_stop_token_ids = [EOS, *(sampling_params.stop_token_ids or [])]
    request = Request("a", [1, 2], sampling_params)
    request.append_output_token_ids(output)
    if literal is not None:
        request.structured_output_request = FakeStructuredOutputRequest()
        request.structured_output_request.grammar = FakeGrammar(literal)
    return request


def decide(request: Request, token_ids: list[int], manager=None) -> Commit:
    return decide_commit(
        request, token_ids, VOCAB_SIZE, manager or FakeGrammarManager()
    )


@pytest.mark.parametrize(
    ("params", "token_ids", "expected"),
    [
        ({}, [3], Commit(1)),
        ({}, [3, 4, 5], Commit(3)),
        # The end of sequence is kept, names no reason, and nothing comes after it.
        ({}, [3, EOS, 5], Commit(2, STOPPED)),
        ({"ignore_eos": True}, [3, EOS, 5], Commit(3)),
        ({"stop_token_ids": [4]}, [3, 4, 5], Commit(2, STOPPED, 4)),
        ({"stop_token_ids": [EOS], "ignore_eos": True}, [EOS], Commit(1, STOPPED)),
        ({"stop_token_ids": [4], "ignore_eos": True}, [EOS, 4], Commit(2, STOPPED, 4)),
        # The first reason in the order of the tokens wins.
        (
            {"max_tokens": 5, "stop_token_ids": [6]},
            [3, 4, 6, 7, 8, 8],
            Commit(3, STOPPED, 6),
        ),
        ({"max_tokens": 2, "stop_token_ids": [6]}, [3, 4, 6, 7], Commit(2, LENGTH)),
        # A stop at the last allowed token is a stop.
        ({"max_tokens": 3, "stop_token_ids": [6]}, [3, 4, 6, 7], Commit(3, STOPPED, 6)),
        ({"max_tokens": 3}, [3, 4, EOS], Commit(3, STOPPED)),
        # Below min_tokens nothing stops, also within one step.
        ({"min_tokens": 3}, [EOS, EOS, EOS, 5], Commit(3, STOPPED)),
        ({"min_tokens": 3, "stop_token_ids": [4]}, [4, 4, 5], Commit(3)),
        ({"max_tokens": 0}, [3], Commit(0, LENGTH)),
    ],
)
def test_the_first_reason_ends_the_request(params, token_ids, expected):
    assert decide(make_request(**params), token_ids) == expected


def test_limits_count_the_tokens_of_earlier_steps():
    request = make_request(output=[3, 3], max_tokens=4, min_tokens=3)
    assert decide(request, [EOS]) == Commit(1, STOPPED)
    assert decide(request, [4, 5, 6]) == Commit(2, LENGTH)


@pytest.mark.parametrize("bad_id", [-2, VOCAB_SIZE, 2**40])
def test_an_invalid_id_ends_only_with_the_tokens_before_it(bad_id):
    commit = decide(make_request(), [3, bad_id, 4])
    assert (commit.num_kept, commit.status) == (1, ERROR)
    assert str(bad_id) in commit.error


@pytest.mark.parametrize(
    ("params", "parameter"),
    [
        # One constraint always leaves a token: the engine is to blame.
        ({}, None),
        ({"allowed_token_ids": [3]}, None),
        ({"structured_outputs": StructuredOutputsParams(regex="a")}, None),
        ({"allowed_token_ids": [3], "bad_words": ["b"]}, "bad_words"),
        ({"bad_words": ["b"], "min_tokens": 5}, "min_tokens"),
        (
            {
                "stop_token_ids": [7],
                "structured_outputs": StructuredOutputsParams(regex="a"),
            },
            "stop_token_ids",
        ),
        (
            {
                "allowed_token_ids": [3],
                "structured_outputs": StructuredOutputsParams(regex="a"),
            },
            "allowed_token_ids",
        ),
    ],
)
def test_constraints_that_leave_no_token_are_the_clients_error(params, parameter):
    commit = decide(make_request(**params), [3, NO_TOKEN, 4])
    assert (commit.num_kept, commit.status) == (1, ERROR)
    assert commit.error_parameter == parameter
    assert all(name in commit.error for name in params if parameter)


def test_a_closed_grammar_ends_the_request_at_once():
    manager = FakeGrammarManager()
    request = make_request(literal=[3, 4])
    assert decide(request, [3, 4, 5], manager) == Commit(2, STOPPED)
    # What comes after the end is never shown to it.
    assert manager.accepted == [3, 4]


def test_a_grammar_that_closes_with_the_last_allowed_token_is_a_stop():
    assert decide(make_request(literal=[3, 4], max_tokens=2), [3, 4]) == Commit(
        2, STOPPED
    )


def test_a_grammar_sees_only_tokens_within_the_length():
    manager = FakeGrammarManager()
    request = make_request(literal=[3, 4, 5], max_tokens=2)
    assert decide(request, [3, 4, 5], manager) == Commit(2, LENGTH)
    assert manager.accepted == [3, 4]


def test_a_stop_token_where_the_grammar_may_end_ends_the_request():
    request = make_request(literal=[3, EOS, 4])
    assert decide(request, [3, EOS]) == Commit(2, STOPPED)


def test_a_stop_token_in_the_middle_of_a_grammar_is_no_end():
    commit = decide(make_request(literal=[3, 4]), [3, EOS])
    assert (commit.num_kept, commit.status) == (1, ERROR)
    assert commit.error_parameter is None


def test_a_grammar_that_was_given_up_is_an_error_of_the_constraint():
    constraint = StructuredOutputsParams(regex="ab")
    request = make_request(literal=[3, 4], structured_outputs=constraint)
    request.structured_output_request.grammar.failure = "too many items"
    # Its mask allows stop tokens only, so that nothing unchecked follows.
    commit = decide(request, [EOS])
    assert (commit.num_kept, commit.status) == (0, ERROR)
    assert commit.error_parameter == "structured_outputs.regex"
    assert "too many items" in commit.error


def test_a_token_that_the_grammar_refuses_is_an_error_without_it():
    commit = decide(make_request(literal=[3, 4]), [3, 7])
    assert (commit.num_kept, commit.status) == (1, ERROR)
    assert "grammar" in commit.error
