"""The draw of a draft, and the distributions that it was drawn from."""

import torch

from vllm.config import SpeculativeConfig
from vllm.v1.worker.gpu.sample.gumbel import gumbel_argmax
from vllm.v1.worker.gpu.sample.random import draft_noise_keys
from vllm.v1.worker.gpu.sample.states import SamplingStates
from vllm.v1.worker.gpu.sample.temperature import apply_temperature


class DraftSampler:
    """Draws drafts at the request's temperature, or takes the most likely token.

    Filters and penalties are the target's affair: any distribution is lossless, if the
    one that a draft was drawn from is the one that judges it.

    Args:
        config: how drafts are sampled.
        max_num_reqs: rows.
        vocab_size: width of the logits.
        sampling_states: the requests' temperatures and seeds.
        device: where the drafter runs.
    """

    def __init__(
        self,
        config: SpeculativeConfig,
        max_num_reqs: int,
        vocab_size: int,
        sampling_states: SamplingStates,
        device: torch.device,
    ) -> None:
        self._states = sampling_states
        self.draft_logits: torch.Tensor | None = None
        if config.has_draft_distributions:
            self.draft_logits = torch.zeros(
                (max_num_reqs, config.num_speculative_tokens, vocab_size), device=device
            )

    def sample(
        self,
        logits: torch.Tensor,
        idx_mapping: torch.Tensor,
        anchor: torch.Tensor,
        step: int,
    ) -> torch.Tensor:
        """Return the next draft of each row, and keep what it was drawn from.

        Args:
            logits: [num_rows, vocab_size] float32, changed in place.
            idx_mapping: [num_rows] int32, row -> request row.
            anchor: [num_rows] int64, position of the last known token.
            step: drafts of this proposal before this one.
        """
        if self.draft_logits is None:
            return logits.argmax(dim=-1)
        states = self._states
        apply_temperature(logits, idx_mapping, states.temperature.gpu)
        keys = draft_noise_keys(
            states.seeds.gpu[idx_mapping],
            anchor + 1 + step,
            anchor,
            states.is_seeded.gpu[idx_mapping],
        )
        is_greedy = states.temperature.gpu[idx_mapping] == 0
        drafts = gumbel_argmax(logits, keys, is_greedy.to(torch.uint8))
        is_broken = drafts < 0
        # On a CPU the look costs less than the rows.
        if logits.is_cuda or bool(is_broken.any()):
            _replace_broken_rows(logits, is_broken)
        self.draft_logits[idx_mapping.long(), step] = logits
        return drafts.clamp(min=0)


def _replace_broken_rows(logits: torch.Tensor, is_broken: torch.Tensor) -> None:
    """Let rows without a token to draw, such as NaN, be certain of token 0.

    A drafter that fails costs acceptance and nothing else: what judges the draft must
    be a distribution.
    """
    logits.masked_fill_(is_broken.unsqueeze(1), float("-inf"))
    logits[:, 0].masked_fill_(is_broken, 0.0)
