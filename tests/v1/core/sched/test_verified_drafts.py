import numpy as np
import pytest

from vllm.v1.core.sched.output import (
    CachedRequestData,
    GrammarOutput,
    SchedulerOutput,
)
from vllm.v1.core.sched.verified_drafts import count_verified_drafts
from vllm.v1.outputs import ModelRunnerOutput

DRAFTS = {"a": [1, 2, 3], "b": [4, 5]}


def count(num_verified=None, grammar=None):
    step = SchedulerOutput([], CachedRequestData(), {"a": 4, "b": 3, "c": 1}, 8, DRAFTS)
    result = ModelRunnerOutput(
        list("abc"), {}, [[], [], []], num_verified_drafts=num_verified or {}
    )
    if grammar is not None:
        req_ids, num_acceptable = grammar
        grammar = GrammarOutput(req_ids, np.zeros((0, 1), np.int32), num_acceptable)
    return count_verified_drafts(step, result, grammar)


@pytest.mark.parametrize(
    ("num_verified", "grammar", "expected"),
    [
        ({}, None, {"a": 3, "b": 2}),
        # Nobody had drafts when the mask was made.
        ({}, (["a"], None), {"a": 3, "b": 2}),
        ({}, (["b", "c"], [1, 0]), {"a": 3, "b": 1}),
        ({"a": 0}, None, {"a": 0, "b": 2}),
        # The tighter of the two limits holds.
        ({"a": 2}, (["a", "b"], [1, 2]), {"a": 1, "b": 2}),
        ({"a": 1}, (["a", "b"], [2, 0]), {"a": 1, "b": 0}),
    ],
)
def test_trimmed_and_forbidden_drafts_are_not_verified(num_verified, grammar, expected):
    assert count(num_verified, grammar) == expected
