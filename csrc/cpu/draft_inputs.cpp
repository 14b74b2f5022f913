// Where a drafter writes its context, and what its blocks are.
#include <algorithm>

#include "api.h"

VLLM_API int64_t vllm_context_slots(const int32_t* block_rows, int64_t num_rows,
                                    int64_t max_blocks, const int32_t* idx_mapping,
                                    const int32_t* query_start_loc,
                                    const int64_t* positions,
                                    const int32_t* num_computed, int64_t num_reqs,
                                    int64_t num_tokens, int64_t block_size,
                                    int64_t max_len, int64_t* out) {
  if (query_start_loc[0] != 0 || query_start_loc[num_reqs] != num_tokens) return 1;
  if (!std::is_sorted(query_start_loc, query_start_loc + num_reqs + 1)) return 1;
  for (int64_t req = 0; req < num_reqs; ++req) {
    const int64_t row = idx_mapping[req];
    if (row < 0 || row >= num_rows) return 1;
    const int64_t end = std::min<int64_t>(num_computed[row], max_len);
    for (int64_t i = query_start_loc[req]; i < query_start_loc[req + 1]; ++i) {
      const int64_t position = positions[i];
      if (position < 0) return 1;
      out[i] = -1;
      if (position >= end) continue;
      const int64_t block = position / block_size;
      if (block >= max_blocks) return 1;
      out[i] = block_rows[row * max_blocks + block] * block_size + position % block_size;
    }
  }
  return 0;
}

VLLM_API int64_t vllm_lay_out_blocks(
    const int32_t* all_token_ids, const int32_t* num_computed_tokens,
    const int32_t* block_rows, const int32_t* idx_mapping, int64_t max_num_reqs,
    int64_t max_model_len, int64_t max_blocks, int64_t num_reqs, int64_t num_slots,
    int64_t num_silent, int64_t max_drafts, int64_t mask_id, int64_t block_size,
    int64_t max_len, int64_t num_columns, int64_t* anchors, int64_t* anchor_ids,
    int64_t* input_ids, int64_t* positions, int64_t* slot_mapping, int32_t* query_start_loc,
    int32_t* seq_lens, int32_t* num_drafts, int32_t* block_table) {
  for (int64_t req = 0; req < num_reqs; ++req) {
    const int64_t row = idx_mapping[req];
    if (row < 0 || row >= max_num_reqs) return 1;
    const int64_t anchor = num_computed_tokens[row];
    if (anchor < 0) return 1;
    const int64_t kept = std::min(anchor, max_model_len - 1);
    const int32_t* block_ids = block_rows + row * max_blocks;
    anchors[req] = anchor;
    anchor_ids[req] = all_token_ids[row * max_model_len + kept];
    query_start_loc[req] = static_cast<int32_t>(req * num_slots);
    seq_lens[req] = static_cast<int32_t>(std::min(anchor + num_slots, max_len));
    const int64_t room = max_len - num_silent - anchor;
    num_drafts[req] =
        static_cast<int32_t>(std::clamp<int64_t>(room, 0, max_drafts));
    std::copy(block_ids, block_ids + num_columns, block_table + req * num_columns);
    for (int64_t slot = 0; slot < num_slots; ++slot) {
      const int64_t i = req * num_slots + slot;
      const int64_t position = anchor + slot;
      input_ids[i] = slot == 0 ? anchor_ids[req] : mask_id;
      positions[i] = 0;
      slot_mapping[i] = -1;
      if (position >= max_len) continue;
      const int64_t block = position / block_size;
      if (block >= num_columns) return 1;
      positions[i] = position;
      slot_mapping[i] = block_ids[block] * block_size + position % block_size;
    }
  }
  query_start_loc[num_reqs] = static_cast<int32_t>(num_reqs * num_slots);
  return 0;
}
