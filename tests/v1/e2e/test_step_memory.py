"""What an engine keeps from one step to the next, looked at afresh in every step."""

from dataclasses import replace

import pytest

from tests.v1.e2e.budget_policies import InTurn, Sometimes
from tests.v1.e2e.tiny_engine import TinyEngine
from tests.v1.worker.gpu.test_step_requests import say
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu import model_runner
from vllm.v1.worker.gpu.batch_layout import BatchLayout
from vllm.v1.worker.gpu.spec_decode.verified_layout import make_verified_layout
from vllm.v1.worker.gpu.step_requests import StepReader

POLICIES = {"all or none": InTurn, "some": Sometimes}


def numbers(layout: BatchLayout) -> list[object]:
    drafts = layout.num_draft_tokens_per_req
    return [
        layout.cu_num_logits_np.tolist(),
        layout.cu_num_logits.tolist(),
        layout.query_start_loc.tolist(),
        layout.num_scheduled_tokens_np.tolist(),
        None if drafts is None else drafts.tolist(),
        layout.draft_budget,
        layout.num_tokens,
        layout.num_logits,
        layout.max_query_len,
        layout.is_exact_on_host,
        layout.has_one_row_per_req,
    ]


@pytest.mark.parametrize("drafts", ["none", *POLICIES])
def test_what_is_kept_is_what_would_be_made(model, monkeypatch, drafts):
    kept = {"requests": 0, "layouts": 0}
    seen: list[object] = [None, None]

    class DoubtedReader(StepReader):
        def read(self, message):
            requests, num_computed = super().read(message)
            fresh = StepReader(self._states, self._num_bonus_tokens, self._device)
            expected, expected_computed = fresh.read(message)
            assert say(requests) == say(expected)
            assert num_computed == expected_computed
            kept["requests"] += requests is seen[0]
            seen[0] = requests
            return requests, num_computed

    def make_layout(step, draft_budget, admitted):
        layout = make_verified_layout(step, draft_budget, admitted)
        fresh = make_verified_layout(replace(step), draft_budget, admitted)
        assert numbers(layout) == numbers(fresh)
        kept["layouts"] += layout is seen[1]
        seen[1] = layout
        return layout

    monkeypatch.setattr(model_runner, "StepReader", DoubtedReader)
    monkeypatch.setattr(model_runner, "make_verified_layout", make_layout)
    engine = TinyEngine(
        model,
        max_num_batched_tokens=24,
        num_gpu_blocks_override=12,
        block_size=16,
        max_num_seqs=4,
        speculative_config=(
            None
            if drafts == "none"
            else {"method": "ngram", "num_speculative_tokens": 3}
        ),
        budget_policy=None if drafts == "none" else POLICIES[drafts](),
    )
    requests = [
        ("aab" * length, SamplingParams(seed=length, max_tokens=40, ignore_eos=True))
        for length in (2, 25, 3, 17, 8, 12)
    ]
    engine.run(requests)
    engine.shutdown()
    assert engine.executor.num_preempted > 0
    assert all(count > 0 for count in kept.values()) or drafts == "some"
