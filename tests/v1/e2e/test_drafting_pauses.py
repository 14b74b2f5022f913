"""Steps after which nothing is drafted leave no hole in what the drafter remembers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.markers import bit_for_bit
from tests.v1.e2e.budget_policies import Watched
from tests.v1.e2e.test_dspark import LIVELY, PROMPT, Recorder, all_ids, draft_alone
from tests.v1.e2e.tiny_drafter import save_tiny_drafter
from tests.v1.e2e.tiny_engine import TinyEngine
from vllm._cpu_ops_drafter import ContextPiece
from vllm.model_executor.models.qwen3_dspark import DSparkModel
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.batch_layout import ScheduledStep
from vllm.v1.worker.gpu.spec_decode.confidence_history import ConfidenceHistory
from vllm.v1.worker.gpu.spec_decode.draft_budget import BudgetChoice, BudgetPolicy


class Pausing(BudgetPolicy):
    """Verifies every draft, and has some after two steps of five."""

    def __init__(self) -> None:
        self._num_steps = 0

    def choose(
        self, step: ScheduledStep, max_drafts_np: np.ndarray, history: ConfidenceHistory
    ) -> BudgetChoice:
        self._num_steps += 1
        return BudgetChoice(step.num_drafts, None if self._num_steps % 5 < 2 else 0)


def run(
    model: Path, config: dict[str, Any], params: SamplingParams, **kwargs: Any
) -> tuple[Any, Watched, Recorder]:
    policy = Watched(Pausing())
    # Several chunks of prompt.
    engine = TinyEngine(
        model,
        speculative_config=config,
        budget_policy=policy,
        max_num_batched_tokens=25,
        **kwargs,
    )
    recorder = Recorder(engine) if config["method"] == "dspark" else None
    [output] = engine.run([(PROMPT, params)])
    engine.shutdown()
    return output, policy, recorder


def test_a_block_drafter_drafts_behind_a_pause_what_it_drafts_alone(model, tmp_path):
    drafter = save_tiny_drafter(tmp_path, model)
    config = {"method": "dspark", "model": str(drafter)}
    output, policy, recorder = run(
        model, config, SamplingParams(max_tokens=20, **LIVELY)
    )
    proposals, ids = recorder.take(), all_ids(output)
    assert [follows for _, _, follows in policy.choices].count(False) > 6
    assert len(proposals) > 4
    # The last proposal may be behind the end.
    for anchor, drafts, confidences in proposals[:-1]:
        tokens, expected = draft_alone(model, drafter, ids, anchor)
        assert drafts == tokens[: len(drafts)]
        assert confidences == pytest.approx(expected[: len(drafts)], abs=1e-5)


def test_each_token_is_context_once_and_a_rejected_draft_never(
    model, tmp_path, monkeypatch
):
    write, positions = DSparkModel.write_context, []

    def record(self: DSparkModel, pieces: list[ContextPiece]) -> None:
        for piece in pieces:
            positions.extend(piece.positions[piece.slot_mapping >= 0].tolist())
        write(self, pieces)

    monkeypatch.setattr(DSparkModel, "write_context", record)
    config = {"method": "dspark", "model": str(save_tiny_drafter(tmp_path, model))}
    engine = TinyEngine(
        model,
        speculative_config=config,
        budget_policy=Pausing(),
        max_num_batched_tokens=25,
    )
    # Of the warm-up.
    positions.clear()
    params = SamplingParams(max_tokens=20, **LIVELY)
    [output] = engine.run([(PROMPT, params)])
    engine.executor.worker.model_runner.speculator.catch_up()
    engine.shutdown()
    # The last token is not computed, but drafts behind a stop may have been.
    assert len(positions) >= len(all_ids(output)) - 1
    assert positions == list(range(len(positions)))


@bit_for_bit
def test_a_draft_model_that_is_the_model_is_right_behind_a_pause_too(model):
    config = {"method": "draft_model", "model": str(model), "num_speculative_tokens": 3}
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    output, policy, _ = run(model, config, params)
    budgets = [budget for _, budget, _ in policy.choices]
    assert sum(budgets) > 6
    # A token comes with each step but those of the prompt's first chunks, and one with
    # each draft.
    num_chunks = -(-len(output.prompt_token_ids) // 25)
    assert len(budgets) - (num_chunks - 1) + sum(budgets) == 30
