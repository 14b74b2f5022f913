"""The two row layouts meet where a step verifies fewer drafts than were scheduled."""

import numpy as np
import pytest

from vllm.v1.worker.gpu.structured_outputs import _build_grammar_mapping


# The scheduled prefix sums, and those of bonus rows alone: scheduled drafts are counted
# from the drafts, so that no prefix sum of verified rows can drop a mask.
@pytest.mark.parametrize("cu_num_logits", [[0, 3, 6, 7], [0, 1, 2, 3]])
def test_zero_budget_keeps_one_grammar_row_per_scheduled_draft(cu_num_logits):
    # Two decoding requests with 2 drafts each, and a prefill that samples its bonus.
    mapping = _build_grammar_mapping(
        req_ids=["a", "b", "prefill"],
        grammar_req_ids=["a", "b", "prefill"],
        cu_num_logits_np=np.array(cu_num_logits, dtype=np.int32),
        num_draft_tokens_per_req=np.array([2, 2, 0], dtype=np.int32),
        num_bonus_tokens=1,
        mask_stride=3,
    )
    assert mapping == [0, 1, 2, 3, 4, 5, 6]
