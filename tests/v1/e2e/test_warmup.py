"""Start-up runs every path of the step, whatever the configuration has room for."""

import numpy as np
import pytest
import torch

from tests.v1.e2e.tiny_engine import TinyEngine
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu import model_runner
from vllm.v1.worker.gpu.spec_decode.confidence_history import ConfidenceHistory
from vllm.v1.worker.gpu.spec_decode.draft_budget import BudgetChoice, VerifyAll
from vllm.v1.worker.gpu.spec_decode.verified_layout import make_verified_layout

NGRAM = {"method": "ngram", "num_speculative_tokens": 5}
ADAPTIVE = NGRAM | {"enable_adaptive_verification": True}
ROWS = np.arange(3, dtype=np.int32)


@pytest.mark.parametrize("max_model_len", [1, 2, 4, 5, 9, 128])
@pytest.mark.parametrize(
    "speculative_config", [None, NGRAM, ADAPTIVE], ids=["plain", "ngram", "adaptive"]
)
def test_any_context_can_be_warmed_up(model, max_model_len, speculative_config):
    engine = TinyEngine(
        model,
        max_model_len=max_model_len,
        speculative_config=speculative_config,
        budget_policy=VerifyAll(),
    )
    runner = engine.executor.worker.model_runner
    assert runner.req_states.num_reqs == 0
    engine.shutdown()


def test_a_start_runs_a_step_of_which_only_the_device_knows_what_is_verified(
    model, monkeypatch
):
    splits = []

    def watch(step, draft_budget, admitted):
        splits.append((step.num_drafts, draft_budget))
        return make_verified_layout(step, draft_budget, admitted)

    monkeypatch.setattr(model_runner, "make_verified_layout", watch)
    engine = TinyEngine(model, speculative_config=ADAPTIVE, budget_policy=VerifyAll())
    engine.shutdown()
    # The last ones are of proposals of one, two and four drafts.
    assert splits == [(0, 0), (0, 0), (15, 15), (15, 1), (0, 0), (0, 0), (0, 0)]


class Typical(VerifyAll):
    """Keeps what is believed of every row when a step is planned."""

    def __init__(self):
        self.seen = []

    def choose(self, step, max_drafts_np, history) -> BudgetChoice:
        self.seen.append(history.get_past_confidences(ROWS))
        return super().choose(step, max_drafts_np, history)


def test_no_belief_about_drafts_comes_from_the_warm_up(model):
    policy = Typical()
    config = ADAPTIVE | {"method": "draft_model", "model": str(model)}
    engine = TinyEngine(model, speculative_config=config, budget_policy=policy)
    engine.run([("hello", SamplingParams(max_tokens=3, ignore_eos=True))])
    engine.shutdown()
    assert len(policy.seen) > 1
    untouched = ConfidenceHistory(3, 5, torch.device("cpu"))
    first_guess = untouched.get_past_confidences(ROWS)
    assert all((past == first_guess).all() for past in policy.seen)


def test_one_row_can_be_warmed_up(model):
    engine = TinyEngine(model, max_num_seqs=1, speculative_config=NGRAM)
    [output] = engine.run([("hello", SamplingParams(max_tokens=3, ignore_eos=True))])
    assert len(output.outputs[0].token_ids) == 3
    engine.shutdown()
