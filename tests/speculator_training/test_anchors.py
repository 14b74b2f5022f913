import torch

from vllm.speculator_training.anchors import build_blocks, sample_anchors

MASK = 9


def mask_of(*rows: str) -> torch.Tensor:
    return torch.tensor([[char == "x" for char in row] for row in rows])


def test_anchors_are_answer_tokens_whose_next_token_is_one_too():
    loss_mask = mask_of("..xxx.x.xx")
    anchors, is_real = sample_anchors(loss_mask, 5)
    # 6 is alone, 4 and 9 are the last of their answers.
    assert anchors.tolist() == [[2, 3, 8, 0, 0]]
    assert is_real.tolist() == [[True, True, True, False, False]]


def test_more_anchors_than_tokens_are_dummies():
    anchors, is_real = sample_anchors(mask_of("xx", ".."), 4)
    assert anchors.tolist() == [[0, 0, 0, 0], [0, 0, 0, 0]]
    assert is_real.tolist() == [[True, False, False, False], [False] * 4]


def test_anchors_are_drawn_uniformly_without_replacement():
    generator = torch.Generator().manual_seed(0)
    loss_mask = torch.ones(2000, 6, dtype=torch.bool)
    anchors, is_real = sample_anchors(loss_mask, 2, generator)
    assert is_real.all()
    assert (anchors[:, 0] < anchors[:, 1]).all()
    counts = anchors.flatten().bincount(minlength=6)
    assert counts[5] == 0
    # Each of five is in 2 of 5 samples: 800 expected, standard deviation 22.
    assert ((counts[:5] - 800).abs() < 220).all()


def test_blocks_hold_the_anchor_masks_and_what_follows():
    token_ids = torch.tensor([[10, 11, 12, 13, 14, 15]])
    blocks = build_blocks(
        token_ids,
        mask_of(".xxxxx"),
        torch.tensor([[1, 3]]),
        torch.tensor([[True, True]]),
        block_size=3,
        mask_token_id=MASK,
    )
    assert blocks.input_ids.tolist() == [[[11, MASK, MASK], [13, MASK, MASK]]]
    assert blocks.positions.tolist() == [[[1, 2, 3], [3, 4, 5]]]
    assert blocks.predecessors.tolist() == [[[11, 12, 13], [13, 14, 15]]]
    # The third label of the second block is past the end.
    assert blocks.labels.tolist() == [[[12, 13, 14], [14, 15, 0]]]
    assert blocks.is_valid.tolist() == [[[True] * 3, [True, True, False]]]


def test_labels_after_a_gap_are_not_valid():
    blocks = build_blocks(
        torch.tensor([[10, 11, 12, 13, 14]]),
        mask_of("xx.xx"),
        torch.tensor([[0]]),
        torch.tensor([[True]]),
        block_size=4,
        mask_token_id=MASK,
    )
    assert blocks.is_valid.tolist() == [[[True, False, False, False]]]


def test_dummies_are_blocks_of_masks_without_labels():
    blocks = build_blocks(
        torch.tensor([[10, 11, 12]]),
        mask_of("xxx"),
        torch.tensor([[0, 0]]),
        torch.tensor([[True, False]]),
        block_size=2,
        mask_token_id=MASK,
    )
    assert blocks.input_ids.tolist() == [[[10, MASK], [MASK, MASK]]]
    assert blocks.is_valid.tolist() == [[[True, True], [False, False]]]
    assert blocks.labels.tolist() == [[[11, 12], [0, 0]]]
