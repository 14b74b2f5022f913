"""From answers to what a drafter learns: sequences, their parts, its vocabulary."""

from collections import Counter
from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch

from vllm.speculator_training.generate import Answer
from vllm.speculator_training.settings import TrainingError


@dataclass(frozen=True)
class Sequence:
    """A prompt and its answer.

    Args:
        token_ids: [S] int64.
        num_prompt_tokens: the rest is the answer.
        temperature: that the answer was drawn at.
    """

    token_ids: torch.Tensor
    num_prompt_tokens: int
    temperature: float

    @property
    def answer_ids(self) -> torch.Tensor:
        """The answer's tokens."""
        return self.token_ids[self.num_prompt_tokens :]


@dataclass(frozen=True)
class Split:
    """Indices of sequences, by what they are for."""

    train: list[int]
    calibration: list[int]
    test: list[int]


def make_sequences(answers: Items[Answer], min_answer_tokens: int) -> list[Sequence]:
    """Return the answers that are long enough.

    Raises:
        TrainingError: fewer than three are.
    """
    sequences = [
        Sequence(
            torch.tensor([*answer.prompt_ids, *answer.answer_ids]),
            len(answer.prompt_ids),
            answer.temperature,
        )
        for answer in answers
        if len(answer.answer_ids) >= min_answer_tokens
    ]
    if len(sequences) < 3:
        raise TrainingError(
            f"the answers are too short: {len(sequences)} of {len(answers)} have "
            f"{min_answer_tokens} tokens or more, at least 3 must"
        )
    return sequences


def split_sequences(num_sequences: int, held_out_ratio: float, seed: int) -> Split:
    """Draw the sequences that are never trained on; one of each part at least."""
    order = torch.randperm(
        num_sequences, generator=torch.Generator().manual_seed(seed)
    ).tolist()
    num_test = max(1, round(num_sequences * held_out_ratio / 2))
    num_test = min(num_test, (num_sequences - 1) // 2)
    return Split(
        sorted(order[2 * num_test :]),
        sorted(order[:num_test]),
        sorted(order[num_test : 2 * num_test]),
    )


def choose_draft_vocab(
    sequences: Items[Sequence],
    draft_vocab_size: int,
    vocab_size: int,
    eos_token_ids: Items[int],
) -> torch.Tensor | None:
    """Return the tokens that answers hold most often, rising; None for all.

    Where the answers hold fewer, those of the prompts and then the lowest ids fill up.

    Args:
        eos_token_ids: always among them.
    """
    if draft_vocab_size >= vocab_size:
        return None
    answers: Counter[int] = Counter()
    everything: Counter[int] = Counter()
    for sequence in sequences:
        answers.update(sequence.answer_ids.tolist())
        everything.update(sequence.token_ids.tolist())
    ends = set(eos_token_ids)
    order = sorted(
        range(vocab_size),
        key=lambda i: (i not in ends, -answers[i], -everything[i], i),
    )
    return torch.tensor(sorted(order[:draft_vocab_size]))


def choose_mask_token(
    sequences: Items[Sequence], vocab_size: int, max_token_id: int, special: set[int]
) -> int:
    """Return a token for the masked places of a block: one that no text holds.

    A row beyond the tokenizer's ids is best, then a special token, then any unused.

    Raises:
        TrainingError: every token is used.
    """
    if vocab_size - 1 > max_token_id:
        return vocab_size - 1
    used = torch.cat([sequence.token_ids for sequence in sequences]).unique().tolist()
    unused = set(range(vocab_size)) - set(used)
    if not unused:
        raise TrainingError("every token is used in the answers: give --mask-token-id")
    return max(unused & special or unused)
