import torch

from vllm.speculator_training.report import pool
from vllm.speculator_training.rollout import Rollouts


def make_rollouts(temperature: float, is_greedy: bool, value: float) -> Rollouts:
    accepted = torch.ones(2, 1, dtype=torch.bool)
    return Rollouts(temperature, is_greedy, torch.full((2, 1), value), accepted)


def test_confidences_are_judged_where_drafts_are_made_as_the_text_is_sampled():
    greedy, guessed, drawn = (
        make_rollouts(0.0, True, 1.0),
        make_rollouts(1.0, True, 2.0),
        make_rollouts(1.0, False, 3.0),
    )
    logits, is_accepted = pool([greedy, guessed, drawn])
    assert logits.flatten().tolist() == [1, 1, 3, 3]
    assert len(is_accepted) == 4
    # Where nothing else is known.
    logits, _ = pool([guessed])
    assert logits.flatten().tolist() == [2, 2]
