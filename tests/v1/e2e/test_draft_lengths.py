"""A proposal has as many drafts as the budget says, and they are the right ones."""

from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.markers import bit_for_bit
from tests.v1.e2e.test_dspark import LIVELY, PROMPT, Recorder, all_ids, draft_alone
from tests.v1.e2e.tiny_drafter import make_speculative_config, save_tiny_drafter
from tests.v1.e2e.tiny_engine import TinyEngine
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.batch_layout import ScheduledStep
from vllm.v1.worker.gpu.spec_decode.confidence_history import ConfidenceHistory
from vllm.v1.worker.gpu.spec_decode.draft_budget import BudgetChoice, BudgetPolicy

LENGTHS = (3, 1, 0, 4, 2)


class Lengths(BudgetPolicy):
    """Verifies every draft, and proposes now so many and now so many."""

    def __init__(self, lengths: tuple[int, ...]) -> None:
        self._lengths = cycle(lengths)

    def choose(
        self, step: ScheduledStep, max_drafts_np: np.ndarray, history: ConfidenceHistory
    ) -> BudgetChoice:
        return BudgetChoice(step.num_drafts, next(self._lengths))


def run(
    model: Path,
    config: dict[str, Any],
    params: SamplingParams,
    lengths: tuple[int, ...] = LENGTHS,
) -> tuple[Any, list[tuple[int, list[int], list[float]]]]:
    """Return the output, and all proposals but one that may be behind the end."""
    engine = TinyEngine(
        model,
        speculative_config=config | {"num_speculative_tokens": 4},
        budget_policy=Lengths(lengths),
    )
    recorder = Recorder(engine)
    [output] = engine.run([(PROMPT, params)])
    engine.shutdown()
    return output, recorder.take()[:-1]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"allows_short_blocks": True},
        {
            "allows_short_blocks": True,
            "sample_from_anchor": False,
            "block_size": 5,
            "markov_head_type": "rnn",
            "draft_ids": range(20, 200, 2),
        },
    ],
    ids=["whole blocks", "short blocks", "not from the anchor"],
)
def test_a_block_drafter_drafts_so_many_as_it_drafts_them_alone(
    model, tmp_path, changes
):
    drafter = save_tiny_drafter(tmp_path, model, **changes)
    config = {"method": "dspark", "model": str(drafter)}
    output, proposals = run(model, config, SamplingParams(max_tokens=11, **LIVELY))
    ids, lengths = all_ids(output), cycle(length for length in LENGTHS if length)
    assert len(proposals) > 6
    for anchor, drafts, confidences in proposals:
        assert len(drafts) == next(lengths)
        num_drafts = len(drafts) if "allows_short_blocks" in changes else 4
        expected = draft_alone(model, drafter, ids, anchor, num_drafts)
        assert drafts == expected[0][: len(drafts)]
        assert confidences == pytest.approx(expected[1][: len(drafts)], abs=1e-5)


@bit_for_bit
def test_a_draft_model_that_is_the_model_drafts_so_many_of_its_tokens(model):
    config = {"method": "draft_model", "model": str(model)}
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    output, proposals = run(model, config, params)
    ids, lengths = all_ids(output), cycle(length for length in LENGTHS if length)
    assert len(proposals) > 5
    for anchor, drafts, _ in proposals:
        assert len(drafts) == next(lengths)
        following = ids[anchor + 1 :][: len(drafts)]
        assert drafts[: len(following)] == following


def test_a_lookup_finds_no_more_than_is_asked_for(model, tmp_path):
    config = make_speculative_config("ngram", model, tmp_path)
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    for length in (4, 1):
        _, proposals = run(model, config, params, (length,))
        assert max(len(drafts) for _, drafts, _ in proposals) == length
