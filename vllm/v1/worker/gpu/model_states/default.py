"""What a plain decoder-only model adds to the step."""

from dataclasses import dataclass


@dataclass(frozen=True)
class DefaultModelState:
    """The step of a model that samples one token after the drafts it verified.

    Args:
        num_new_sampled_tokens_per_step: bonus rows of a request that samples.
    """

    num_new_sampled_tokens_per_step: int = 1
