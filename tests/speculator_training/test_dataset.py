import pytest
import torch

from vllm.speculator_training.dataset import (
    Sequence,
    choose_draft_vocab,
    choose_mask_token,
    make_sequences,
    split_sequences,
)
from vllm.speculator_training.generate import Answer
from vllm.speculator_training.settings import TrainingError


def sequence(prompt: list[int], answer: list[int]) -> Sequence:
    return Sequence(torch.tensor([*prompt, *answer]), len(prompt), 0.0)


def test_short_answers_are_dropped_and_too_few_are_an_error():
    def answers(*lengths: int) -> list[Answer]:
        return [Answer([], [1], [2] * length, 0.0) for length in lengths]

    kept = make_sequences(answers(4, 3, 4, 5), min_answer_tokens=4)
    assert [len(one.answer_ids) for one in kept] == [4, 4, 5]
    with pytest.raises(TrainingError, match="too short: 2 of 3 have 4 tokens"):
        make_sequences(answers(4, 3, 4), min_answer_tokens=4)


def test_the_parts_of_a_split_do_not_overlap_and_leave_nothing_out():
    split = split_sequences(40, 0.2, seed=3)
    assert (len(split.calibration), len(split.test)) == (4, 4)
    parts = [*split.train, *split.calibration, *split.test]
    assert sorted(parts) == list(range(40))
    assert split == split_sequences(40, 0.2, seed=3)
    assert split != split_sequences(40, 0.2, seed=4)


@pytest.mark.parametrize("num_sequences", [3, 4])
def test_a_few_sequences_leave_one_for_each_part(num_sequences):
    split = split_sequences(num_sequences, 0.9, seed=0)
    assert min(map(len, (split.train, split.calibration, split.test))) == 1


def test_the_draft_vocabulary_is_what_answers_hold_most():
    # 5 thrice, 4 twice, 6 and 2 once, 7 in a prompt; 9 ends an answer by definition.
    data = [sequence([7, 7], [5, 5, 4]), sequence([6], [5, 4, 6, 2])]
    # 6 also stands in a prompt, and so comes before 2.
    assert choose_draft_vocab(data, 4, 10, [9]).tolist() == [4, 5, 6, 9]
    assert choose_draft_vocab(data, 6, 10, [9]).tolist() == [2, 4, 5, 6, 7, 9]
    # The rest is filled from below.
    assert choose_draft_vocab(data, 7, 10, [9]).tolist() == [0, 2, 4, 5, 6, 7, 9]
    assert choose_draft_vocab(data, 10, 10, [9]) is None


def test_the_mask_token_is_one_that_no_text_holds():
    data = [sequence([0, 3], [1, 4])]
    assert choose_mask_token(data, 8, 5, set()) == 7
    assert choose_mask_token(data, 6, 5, {1, 2}) == 2
    assert choose_mask_token(data, 6, 5, {1}) == 5
    with pytest.raises(TrainingError, match="give --mask-token-id"):
        choose_mask_token([sequence([0], [1])], 2, 1, set())
