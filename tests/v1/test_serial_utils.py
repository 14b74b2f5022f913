import msgspec
import numpy as np
import pytest
import torch

from vllm.sampling_params import (
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)
from vllm.v1.engine import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    UtilityResult,
)
from vllm.v1.metrics.stats import PrefixCacheStats, SchedulerStats
from vllm.v1.outputs import LogprobsLists
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder


class TensorMessage(msgspec.Struct):
    tensor: torch.Tensor


def roundtrip(message, message_type=None):
    # Joined and split again, as the socket would: no memory is shared by accident.
    frames = [bytes(frame) for frame in MsgpackEncoder().encode(message)]
    return MsgpackDecoder(message_type or type(message)).decode(frames)


def logprobs(num_rows, num_columns):
    ids = np.arange(num_rows * num_columns, dtype=np.int64).reshape(num_rows, -1)
    return LogprobsLists(
        ids, -ids.astype(np.float32), np.ones(num_rows, dtype=np.int32), [0, num_rows]
    )


@pytest.mark.parametrize("num_rows", [1, 200], ids=["inline", "own frames"])
def test_outputs_with_logprobs_survive_the_wire(num_rows):
    sent = EngineCoreOutputs(
        outputs=[
            EngineCoreOutput(
                "a",
                [1, 2],
                new_logprobs=logprobs(num_rows, 3),
                finish_reason=FinishReason.STOP,
                stop_reason="x",
                events=[EngineCoreEvent(EngineCoreEventType.QUEUED, 1.5)],
            )
        ],
        scheduler_stats=SchedulerStats(
            num_running_reqs=3, prefix_cache_stats=PrefixCacheStats(1, 2, 3)
        ),
        timestamp=2.0,
        utility_result=UtilityResult(4, {"blocks": 7}),
    )
    received = roundtrip(sent)
    output = received.outputs[0]
    np.testing.assert_array_equal(
        output.new_logprobs.logprob_token_ids, logprobs(num_rows, 3).logprob_token_ids
    )
    assert output.new_logprobs.logprobs.dtype == np.float32
    assert output.new_logprobs.cu_num_generated_tokens == [0, num_rows]
    assert output.finish_reason is FinishReason.STOP
    assert output.stop_reason == "x"
    assert output.events[0].type is EngineCoreEventType.QUEUED
    assert received.scheduler_stats.prefix_cache_stats.hits == 3
    assert received.utility_result.result == {"blocks": 7}


def test_request_survives_the_wire_with_every_kind_of_field():
    sent = EngineCoreRequest(
        "r",
        [5, 6],
        SamplingParams(
            n=2,
            temperature=0.5,
            seed=2**63 - 1,
            stop=["a"],
            logit_bias={3: 1.5},
            allowed_token_ids=[1],
            structured_outputs=StructuredOutputsParams(json={"type": "object"}),
            output_kind=RequestOutputKind.DELTA,
            extra_args={"k": [1]},
            max_tokens=None,
        ),
        arrival_time=1.0,
        cache_salt="s",
    )
    assert roundtrip(sent) == sent


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64])
@pytest.mark.parametrize("shape", [(0, 3), (2, 3), (40, 50)])
def test_tensors_survive_the_wire(dtype, shape):
    tensor = torch.arange(shape[0] * shape[1]).view(shape).to(dtype)
    received = roundtrip(TensorMessage(tensor)).tensor
    assert received.dtype == dtype
    assert torch.equal(received, tensor)


def test_large_arrays_are_not_copied_when_encoding():
    rows = logprobs(200, 3)
    frames = MsgpackEncoder().encode(EngineCoreOutput("a", [], new_logprobs=rows))
    assert np.shares_memory(
        np.frombuffer(frames[1], dtype=np.int64), rows.logprob_token_ids
    )


def test_arrays_that_are_not_contiguous_keep_their_values():
    ids = np.arange(600, dtype=np.int64).reshape(3, 200).T
    rows = LogprobsLists(ids, ids.astype(np.float32), np.ones(200, dtype=np.int32))
    received = roundtrip(EngineCoreOutput("a", [], new_logprobs=rows))
    np.testing.assert_array_equal(received.new_logprobs.logprob_token_ids, ids)


def test_unknown_objects_are_refused():
    with pytest.raises(TypeError, match="object"):
        MsgpackEncoder().encode([object()])
