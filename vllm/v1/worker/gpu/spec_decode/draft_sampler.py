"""The draw of a draft, and the distributions that it was drawn from."""

from dataclasses import dataclass

import numpy as np
import torch

from vllm._cpu_ops_drafter import BlockDraws
from vllm.config import SpeculativeConfig
from vllm.model_executor.layers.draft_vocab import DraftVocab
from vllm.v1.worker.gpu.buffer_utils import to_device
from vllm.v1.worker.gpu.sample.gumbel import greedy_argmax, gumbel_argmax
from vllm.v1.worker.gpu.sample.random import block_noise_keys
from vllm.v1.worker.gpu.sample.states import SamplingStates
from vllm.v1.worker.gpu.sample.temperature import apply_temperature
from vllm.v1.worker.gpu.spec_decode.confidence.certainty import compute_certainty


@dataclass(frozen=True)
class Draws:
    """What the draws of one proposal share.

    Args:
        idx_mapping: [num_rows] int32, row -> request row.
        keys: [num_speculative_tokens, num_rows] int64, of the noise.
        is_greedy: [num_rows] uint8.
    """

    idx_mapping: torch.Tensor
    keys: torch.Tensor
    is_greedy: torch.Tensor


class DraftSampler:
    """Draws drafts at the request's temperature, or takes the most likely token.

    Filters and penalties are the target's affair: any distribution is lossless, if the
    one that a draft was drawn from is the one that judges it.

    Args:
        config: how drafts are sampled.
        max_num_reqs: rows.
        vocab_size: of the target.
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
        # What the logits' columns stand for; None: for the target's ids.
        self._draft_vocab: DraftVocab | None = None
        # Rows whose other columns have no chance; the rest was never written to, which
        # on a CPU costs no memory.
        self._is_restricted_np = np.zeros(max_num_reqs, dtype=np.bool_)
        self.draft_logits: torch.Tensor | None = None
        if config.has_draft_distributions:
            self.draft_logits = torch.zeros(
                (max_num_reqs, config.num_speculative_tokens, vocab_size), device=device
            )

    def restrict(self, draft_vocab: DraftVocab) -> None:
        """Let only a part of the target's vocabulary be drafted.

        Args:
            draft_vocab: what the columns of all logits stand for.
        """
        self._draft_vocab = draft_vocab

    def prepare(self, idx_mapping_np: np.ndarray) -> bool:
        """Make ready to sample for these request rows.

        Returns:
            Whether the host knows that all of their drafts are the most likely tokens.
        """
        if self.draft_logits is None or self._states.is_all_greedy(idx_mapping_np):
            return True
        new = idx_mapping_np[~self._is_restricted_np[idx_mapping_np]]
        if self._draft_vocab is not None and len(new):
            rows = to_device(new.astype(np.int64), self.draft_logits.device)
            self.draft_logits[rows] = float("-inf")
            self._is_restricted_np[new] = True
        return False

    def score(self, logits: torch.Tensor, idx_mapping: torch.Tensor) -> torch.Tensor:
        """Return how sure the next drafts' distributions are, before the draw.

        Args:
            logits: [num_rows, vocab_size] float32, as `sample` gets them.
            idx_mapping: [num_rows] int32, row -> request row.

        Returns:
            [num_rows] float32, as `compute_certainty` says.
        """
        return compute_certainty(logits, idx_mapping, self._states.temperature.gpu)

    def begin(
        self,
        idx_mapping: torch.Tensor,
        anchor: torch.Tensor,
        is_all_greedy: bool,
        num_drafts: int,
    ) -> Draws | None:
        """Return what `sample` needs for the drafts of these rows.

        Args:
            idx_mapping: [num_rows] int32, row -> request row.
            anchor: [num_rows] int64, position of the last known token.
            is_all_greedy: from `prepare`; such drafts are judged by themselves alone.
            num_drafts: of each row, at most num_speculative_tokens.

        Returns:
            None if nothing is drawn.
        """
        if self.draft_logits is None or is_all_greedy:
            return None
        states = self._states
        keys = block_noise_keys(
            states.seeds.gpu,
            states.is_seeded.gpu,
            idx_mapping,
            anchor,
            num_drafts,
        )
        is_greedy = states.temperature.gpu[idx_mapping] == 0
        return Draws(idx_mapping, keys, is_greedy.to(torch.uint8))

    def for_block(self, draws: Draws | None) -> BlockDraws | None:
        """Return what one operation needs that draws all drafts as `sample` does."""
        if draws is None:
            return None
        assert self.draft_logits is not None, "something is drawn"
        temperature = self._states.temperature.gpu
        return BlockDraws(
            draws.idx_mapping,
            temperature,
            draws.keys,
            draws.is_greedy,
            self.draft_logits,
        )

    def sample(
        self, logits: torch.Tensor, step: int, draws: Draws | None
    ) -> torch.Tensor:
        """Return the next draft of each row, and keep what it was drawn from.

        Args:
            logits: [num_rows, draft_vocab_size] float32, changed in place.
            step: drafts of this proposal before this one.
            draws: from `begin`.

        Returns:
            [num_rows] int64, the target's ids.
        """
        vocab = self._draft_vocab
        if draws is None:
            # A row of NaN has no likeliest token, and must not index.
            best = greedy_argmax(logits).clamp(min=0)
            return best if vocab is None else vocab.map_ids(best)
        assert self.draft_logits is not None, "something is drawn"
        apply_temperature(logits, draws.idx_mapping, self._states.temperature.gpu)
        _replace_broken_rows(logits)
        places = draws.idx_mapping.long()
        if vocab is None:
            self.draft_logits[places, step] = logits
        else:
            self.draft_logits[places.unsqueeze(1), step, vocab.target_ids] = logits
            # A token's noise is that of its place in the target's vocabulary.
            logits = self.draft_logits[places, step]
        return gumbel_argmax(logits, draws.keys[step], draws.is_greedy)


def _replace_broken_rows(logits: torch.Tensor) -> None:
    """Let rows without a token to draw, such as NaN, be certain of the first one.

    A drafter that fails costs acceptance and nothing else: what judges the draft must
    be a distribution.
    """
    # False for NaN as well.
    is_broken = ~(logits > float("-inf")).any(dim=-1)
    logits.masked_fill_(is_broken.unsqueeze(1), float("-inf"))
    logits[:, 0].masked_fill_(is_broken, 0.0)
