from dataclasses import replace

import pytest
import torch

from tests.v1.worker.gpu.test_batch_layout import make_layout
from vllm.v1.outputs import SamplerOutput
from vllm.v1.spec_decode.metrics import StepCost
from vllm.v1.worker.gpu.async_utils import AsyncOutput, VerificationRecord

REQ_IDS = ["two", "three", "chunk", "none"]


def make_record(admitted: list[int]) -> VerificationRecord:
    layout = make_layout(sum(admitted), admitted)
    return VerificationRecord(layout, torch.tensor(admitted, dtype=torch.int32))


def get_output(record: VerificationRecord):
    sampled = SamplerOutput(
        torch.zeros((4, 4), dtype=torch.int64), torch.ones(4, dtype=torch.int32)
    )
    return AsyncOutput(REQ_IDS, sampled, {}, record).get_output()


@pytest.mark.parametrize(
    ("admitted", "expected"),
    [
        ([2, 3, 0, 0], {}),
        ([2, 1, 0, 0], {"three": 1}),
        ([0, 3, 0, 0], {"two": 0}),
        ([0, 0, 0, 0], {"two": 0, "three": 0}),
    ],
    ids=["all", "some of one", "none of one", "none"],
)
def test_requests_with_trimmed_drafts_are_told_with_what_was_verified(
    admitted, expected
):
    output = get_output(make_record(admitted))
    assert output.num_verified_drafts == expected
    assert output.draft_confidences is output.step_cost is None


def test_counts_are_those_of_the_step_also_when_its_buffers_are_rewritten():
    record = make_record([1, 2, 0, 0])
    sampled = SamplerOutput(
        torch.zeros((4, 4), dtype=torch.int64), torch.ones(4, dtype=torch.int32)
    )
    output = AsyncOutput(REQ_IDS, sampled, {}, record)
    record.layout.cu_num_logits.zero_()
    assert output.get_output().num_verified_drafts == {"two": 1, "three": 2}


def test_predictions_go_with_the_results():
    confidences = torch.tensor([[0.5, 0.25, float("nan")]] * 4)
    cost = StepCost(7, 0.1, 0.2)
    record = replace(
        make_record([2, 3, 0, 0]), draft_confidences=confidences, step_cost=cost
    )
    output = get_output(record)
    assert output.draft_confidences[1][:2] == [0.5, 0.25]
    assert output.step_cost == cost
