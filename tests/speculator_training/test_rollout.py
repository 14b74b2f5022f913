import pytest
import torch

from vllm.speculator_training.rollout import Rollouts, _draw

DRAFTER = torch.tensor([0.5, 0.3, 0.2])
TARGET = torch.tensor([0.2, 0.7, 0.1])
NUM_DRAWS = 200_000


def test_replayed_drafts_have_the_law_of_speculative_sampling():
    generator = torch.Generator().manual_seed(0)
    labels = torch.multinomial(TARGET, NUM_DRAWS, True, generator=generator)
    drafts, passes = _draw(
        DRAFTER.expand(NUM_DRAWS, 3),
        TARGET.expand(NUM_DRAWS, 3),
        labels,
        torch.ones(NUM_DRAWS, dtype=torch.bool),
        generator,
    )
    # min(q, p) = 0.2, 0.3, 0.1: a draft passes in 0.6 of all cases.
    accepted = torch.bincount(drafts[passes], minlength=3) / NUM_DRAWS
    # Ten times the deviation of a share of so many draws.
    assert accepted.tolist() == pytest.approx([0.2, 0.3, 0.1], abs=0.012)
    # Accepted or not, what is drafted follows the drafter.
    law = torch.bincount(drafts, minlength=3) / NUM_DRAWS
    assert law.tolist() == pytest.approx([0.5, 0.3, 0.2], abs=0.012)
    assert (drafts[passes] == labels[passes]).all()


def test_a_token_outside_the_draft_vocabulary_is_never_accepted():
    labels = torch.full((100,), -1)
    _, passes = _draw(
        DRAFTER.expand(100, 3),
        torch.zeros(100, 3),
        labels,
        torch.ones(100, dtype=torch.bool),
        torch.Generator().manual_seed(0),
    )
    assert not passes.any()


def test_nothing_is_accepted_after_a_rejection():
    generator = torch.Generator().manual_seed(0)
    labels = torch.ones(100, dtype=torch.int64)
    is_alive = torch.arange(100) < 50
    _, passes = _draw(
        DRAFTER.expand(100, 3), DRAFTER.expand(100, 3), labels, is_alive, generator
    )
    # Where both are one distribution, whoever is alive passes.
    assert passes.tolist() == is_alive.tolist()


def test_acceptance_and_length_by_hand():
    is_accepted = torch.tensor([[1, 1], [1, 0], [1, 0], [0, 0]]).bool()
    rollouts = Rollouts(0.0, True, None, is_accepted)
    assert rollouts.survival == [0.75, 0.25]
    assert rollouts.acceptance == pytest.approx([0.75, 1 / 3])
    assert rollouts.accepted_length == 2.0
