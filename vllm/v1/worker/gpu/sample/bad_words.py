"""bad_words: token sequences that the output must never complete."""

import numpy as np
import torch

from vllm.sampling_params import SamplingParams
from vllm.triton_utils import tl, triton
from vllm.v1.worker.gpu.buffer_utils import UvaBackedTensor
from vllm.v1.worker.gpu.sample.ragged import RaggedRows


class BadWordsState:
    """The bad words of each request: a word is a prefix and its last token.

    Args:
        max_num_reqs: rows.
        device: where the device arrays live.
    """

    def __init__(self, max_num_reqs: int, device: torch.device) -> None:
        self.is_used_np = np.zeros(max_num_reqs, dtype=bool)
        # A word: last token, prefix length, and where the prefix begins in the
        # request's own list of prefix tokens.
        self.words = RaggedRows(max_num_reqs, (torch.int32,) * 3, device)
        self.prefix_token_ids = RaggedRows(max_num_reqs, (torch.int32,), device)
        # [max_num_reqs] int32: only the output is matched, not the prompt.
        self.prompt_len = UvaBackedTensor(max_num_reqs, torch.int32, device)
        # [max_num_reqs] longest prefix of a row's words, host.
        self.max_prefix_len_np = np.zeros(max_num_reqs, dtype=np.int32)
        self._is_stale = False

    def add_request(
        self, req_state_idx: int, sampling_params: SamplingParams, prompt_len: int
    ) -> None:
        """Fill the request's row."""
        self.remove_request(req_state_idx)
        words = [word for word in sampling_params.bad_words_token_ids or [] if word]
        if not words:
            return
        self.is_used_np[req_state_idx] = True
        prefix_lens = np.array([len(word) - 1 for word in words], dtype=np.int32)
        self.words.set_row(
            req_state_idx,
            np.array([word[-1] for word in words], dtype=np.int32),
            prefix_lens,
            (np.cumsum(prefix_lens) - prefix_lens).astype(np.int32),
        )
        self.prefix_token_ids.set_row(
            req_state_idx,
            np.array([t for word in words for t in word[:-1]], dtype=np.int32),
        )
        self.prompt_len.np[req_state_idx] = prompt_len
        self.max_prefix_len_np[req_state_idx] = prefix_lens.max()
        self._is_stale = True

    def remove_request(self, req_state_idx: int) -> None:
        """Empty the request's row."""
        self.is_used_np[req_state_idx] = False
        self.max_prefix_len_np[req_state_idx] = 0
        self.words.clear_row(req_state_idx)
        self.prefix_token_ids.clear_row(req_state_idx)

    def apply_staged_writes(self) -> None:
        """Make the changed rows visible to the device."""
        self.words.apply_staged_writes()
        self.prefix_token_ids.apply_staged_writes()
        if self._is_stale:
            self.prompt_len.copy_to_device()
            self._is_stale = False


def apply_bad_words(
    logits: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    expanded_local_pos: torch.Tensor,
    positions: torch.Tensor,
    input_ids: torch.Tensor,
    all_token_ids: torch.Tensor,
    state: BadWordsState,
    first_logit_idx: int = 0,
) -> None:
    """Set to -inf the last token of each bad word whose prefix the output ends with.

    The output of a row ends with its committed tokens, then the drafts of the same step
    that stand before the row.

    Args:
        logits: [num_logits, vocab_size] float32, changed in place.
        expanded_idx_mapping: [num_logits] int32, logit row -> request state row.
        expanded_local_pos: [num_logits] int32, how many drafts of the request stand
            before the row in this step.
        positions: [num_logits] int64, absolute position of the token to sample.
        input_ids: of all rows of the step, int64, the token that the model read at the
            row; where the local position is above 0, the draft just before the token to
            sample.
        all_token_ids: [max_num_reqs, max_model_len] int32, committed tokens.
        state: the words.
        first_logit_idx: which row of the step row 0 of the other arrays is.
    """
    impl = _apply_bad_words_triton if logits.is_cuda else _apply_bad_words_torch
    impl(
        logits,
        expanded_idx_mapping,
        expanded_local_pos,
        positions,
        input_ids,
        all_token_ids,
        state,
        first_logit_idx,
    )


def _apply_bad_words_torch(
    logits: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    expanded_local_pos: torch.Tensor,
    positions: torch.Tensor,
    input_ids: torch.Tensor,
    all_token_ids: torch.Tensor,
    state: BadWordsState,
    first_logit_idx: int = 0,
) -> None:
    last_token_ids, prefix_lens, prefix_starts = state.words.values
    (prefix_token_ids,) = state.prefix_token_ids.values
    logit_idx, word_idx = state.words.expand(expanded_idx_mapping)
    prefix_len = prefix_lens[word_idx]
    output_len = positions - state.prompt_len.gpu[expanded_idx_mapping]
    # A word that the output is too short for cannot be completed.
    is_fitting = prefix_len <= output_len[logit_idx]
    logit_idx, word_idx = logit_idx[is_fitting], word_idx[is_fitting]

    last_token_id, prefix_len = last_token_ids[word_idx], prefix_lens[word_idx].long()
    req_state_idx = expanded_idx_mapping[logit_idx]
    prefix_end = state.prefix_token_ids.starts.gpu[req_state_idx].long()
    prefix_end += prefix_starts[word_idx] + prefix_len
    is_match = torch.ones_like(logit_idx, dtype=torch.bool)
    for distance in range(1, int(state.max_prefix_len_np.max()) + 1):
        is_compared = prefix_len >= distance
        is_draft = expanded_local_pos[logit_idx] >= distance
        draft_idx = first_logit_idx + logit_idx - distance + 1
        draft = input_ids[draft_idx.clamp_(min=0)]
        committed = all_token_ids[
            req_state_idx, (positions[logit_idx] - distance).clamp_(min=0)
        ]
        said = torch.where(is_draft, draft, committed)
        expected = prefix_token_ids[(prefix_end - distance) * is_compared]
        is_match &= ~is_compared | (said == expected)
    logits[logit_idx[is_match], last_token_id[is_match]] = float("-inf")


def _apply_bad_words_triton(
    logits: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    expanded_local_pos: torch.Tensor,
    positions: torch.Tensor,
    input_ids: torch.Tensor,
    all_token_ids: torch.Tensor,
    state: BadWordsState,
    first_logit_idx: int = 0,
) -> None:
    last_token_ids, prefix_lens, prefix_starts = state.words.values
    (prefix_token_ids,) = state.prefix_token_ids.values
    _bad_words_kernel[(logits.shape[0], max(state.words.max_length, 1))](
        logits,
        logits.stride(0),
        expanded_idx_mapping,
        expanded_local_pos,
        positions,
        input_ids,
        first_logit_idx,
        all_token_ids,
        all_token_ids.stride(0),
        state.words.starts.gpu,
        state.words.lengths.gpu,
        last_token_ids,
        prefix_lens,
        prefix_starts,
        state.prefix_token_ids.starts.gpu,
        prefix_token_ids,
        state.prompt_len.gpu,
    )


@triton.jit
def _bad_words_kernel(
    logits_ptr,  # [num_logits, vocab_size]
    logits_stride,
    expanded_idx_mapping_ptr,  # [num_logits]
    expanded_local_pos_ptr,  # [num_logits]
    positions_ptr,  # [num_logits]
    input_ids_ptr,  # of the whole step
    first_logit_idx,
    all_token_ids_ptr,  # [max_num_reqs, max_model_len]
    all_token_ids_stride,
    word_starts_ptr,  # [max_num_reqs]
    num_words_ptr,  # [max_num_reqs]
    last_token_ids_ptr,  # [num_words]
    prefix_lens_ptr,  # [num_words]
    prefix_starts_ptr,  # [num_words]
    prefix_list_starts_ptr,  # [max_num_reqs]
    prefix_token_ids_ptr,  # [sum of prefix lengths]
    prompt_len_ptr,  # [max_num_reqs]
):
    # One program per logit row and word.
    logit_idx = tl.program_id(0).to(tl.int64)
    req_state_idx = tl.load(expanded_idx_mapping_ptr + logit_idx).to(tl.int64)
    if tl.program_id(1) >= tl.load(num_words_ptr + req_state_idx):
        return
    word_idx = tl.load(word_starts_ptr + req_state_idx) + tl.program_id(1)
    prefix_len = tl.load(prefix_lens_ptr + word_idx)
    position = tl.load(positions_ptr + logit_idx)
    if prefix_len > position - tl.load(prompt_len_ptr + req_state_idx):
        return
    prefix_ptr = (
        prefix_token_ids_ptr
        + tl.load(prefix_list_starts_ptr + req_state_idx)
        + tl.load(prefix_starts_ptr + word_idx)
    )
    local_pos = tl.load(expanded_local_pos_ptr + logit_idx)
    read_ptr = input_ids_ptr + first_logit_idx + logit_idx
    committed_ptr = all_token_ids_ptr + req_state_idx * all_token_ids_stride + position
    num_equal = 0
    for distance in range(1, prefix_len + 1):
        if distance <= local_pos:
            said = tl.load(read_ptr - distance + 1).to(tl.int32)
        else:
            said = tl.load(committed_ptr - distance).to(tl.int32)
        expected = tl.load(prefix_ptr + prefix_len - distance)
        num_equal += (said == expected).to(tl.int32)
    if num_equal == prefix_len:
        last_token_id = tl.load(last_token_ids_ptr + word_idx)
        tl.store(logits_ptr + logit_idx * logits_stride + last_token_id, float("-inf"))
