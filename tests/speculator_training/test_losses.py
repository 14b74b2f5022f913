import math

import pytest
import torch

from vllm.speculator_training.losses import (
    LossWeights,
    compute_draft_losses,
    compute_expected_length,
    compute_position_weights,
    compute_target_probs,
    compute_total_variation,
)

# Two drafts over three tokens: draft and target distributions.
DRAFT = torch.tensor([[[0.5, 0.25, 0.25], [0.8, 0.1, 0.1]]])
TARGET = torch.tensor([[[0.7, 0.2, 0.1], [0.1, 0.1, 0.8]]])
LABELS = torch.tensor([[0, 2]])
ALL_VALID = torch.tensor([[True, True]])


def losses(
    draft=DRAFT,
    target=TARGET,
    labels=LABELS,
    is_valid=ALL_VALID,
    confidence=None,
    **weights: float,
):
    return compute_draft_losses(
        draft.log(), target, labels, is_valid, confidence, LossWeights(**weights)
    )


def test_weights_fall_by_e_over_the_decay():
    weights = compute_position_weights(5, decay=4.0)
    assert weights.tolist() == pytest.approx([math.exp(-k / 4) for k in range(5)])


def test_total_variation_is_the_whole_sum_of_differences():
    distance = compute_total_variation(DRAFT, TARGET)
    # 0.2 + 0.05 + 0.15, and 0.7 + 0 + 0.7: not halved.
    assert distance.tolist() == [pytest.approx([0.4, 1.4])]


def test_total_variation_counts_what_cannot_be_drafted():
    # The target has 0.4 outside of the draft vocabulary.
    distance = compute_total_variation(
        torch.tensor([0.5, 0.5]), torch.tensor([0.2, 0.4])
    )
    assert float(distance) == pytest.approx(0.3 + 0.1 + 0.4)


def test_acceptance_is_what_the_distributions_share():
    assert losses().acceptance.tolist() == [pytest.approx([0.8, 0.3])]


def test_a_drafter_that_equals_its_target_is_always_accepted():
    out = losses(draft=TARGET)
    assert out.acceptance.tolist() == [pytest.approx([1.0, 1.0])]
    assert float(out.total_variation) == pytest.approx(0.0, abs=1e-6)
    assert float(compute_expected_length(out.acceptance)) == pytest.approx(3.0)


def test_losses_are_weighted_means_over_positions():
    w = math.exp(-1 / 2)
    out = losses(confidence=torch.tensor([[0.0, 2.0]]), decay=2.0)
    cross_entropy = (-math.log(0.5) - w * math.log(0.1)) / (1 + w)
    total_variation = (0.4 + w * 1.4) / (1 + w)
    sigmoid = 1 / (1 + math.exp(-2))
    second = -0.3 * math.log(sigmoid) - 0.7 * math.log(1 - sigmoid)
    confidence = (math.log(2) + w * second) / (1 + w)
    assert float(out.cross_entropy) == pytest.approx(cross_entropy, rel=1e-5)
    assert float(out.total_variation) == pytest.approx(total_variation, rel=1e-5)
    assert float(out.confidence) == pytest.approx(confidence, rel=1e-5)
    expected = 0.1 * cross_entropy + 0.9 * total_variation + confidence
    assert float(out.total) == pytest.approx(expected, rel=1e-5)


def test_positions_without_a_label_count_nowhere():
    out = losses(
        is_valid=torch.tensor([[True, False]]), confidence=torch.tensor([[0.0, 9.0]])
    )
    assert float(out.cross_entropy) == pytest.approx(math.log(2), rel=1e-5)
    assert float(out.total_variation) == pytest.approx(0.4, rel=1e-5)
    assert float(out.confidence) == pytest.approx(math.log(2), rel=1e-5)
    assert out.acceptance.tolist() == [pytest.approx([0.8, 0.0])]


def test_labels_that_cannot_be_drafted_are_left_out_of_the_cross_entropy_only():
    out = losses(labels=torch.tensor([[0, -1]]))
    assert float(out.cross_entropy) == pytest.approx(math.log(2), rel=1e-5)
    w = math.exp(-1 / 4)
    expected = (0.4 + w * 1.4) / (1 + w)
    assert float(out.total_variation) == pytest.approx(expected, rel=1e-5)


def test_a_batch_without_labels_has_no_loss():
    out = losses(is_valid=torch.tensor([[False, False]]))
    assert float(out.total) == 0.0


def test_confidence_teaches_the_head_but_its_label_does_not_teach_the_draft():
    logits = DRAFT.log().requires_grad_()
    confidence = torch.tensor([[0.0, math.log(4)]], requires_grad=True)
    only = LossWeights(cross_entropy=0.0, total_variation=0.0)
    out = compute_draft_losses(logits, TARGET, LABELS, ALL_VALID, confidence, only)
    out.total.backward()
    assert logits.grad.abs().max() == 0
    # Each is the sigmoid, 0.5 and 0.8, less the label, by weight.
    w = math.exp(-1 / 4)
    expected = [(0.5 - 0.8) / (1 + w), w * (0.8 - 0.3) / (1 + w)]
    assert confidence.grad.tolist() == [pytest.approx(expected, rel=1e-4)]


def test_target_probabilities_are_of_the_whole_vocabulary():
    logits = torch.tensor([0.7, 0.2, 0.1]).log()
    picked = compute_target_probs(logits, torch.tensor([0, 2]))
    assert picked.tolist() == pytest.approx([0.7, 0.1])
    assert compute_target_probs(logits, None).tolist() == pytest.approx([0.7, 0.2, 0.1])


def test_expected_length_is_one_and_the_products():
    acceptance = torch.tensor([[0.5, 0.5], [1.0, 0.0]])
    # The two blocks give 1.75 and 2 tokens.
    assert float(compute_expected_length(acceptance)) == pytest.approx(1.875)
