// The integers of a step: which tokens and logit rows its requests have, and what becomes
// of their samples. So small that a thread's help, or a tensor operation, costs more.
#include <algorithm>

#include "api.h"

namespace vllm {
namespace {

bool is_index(int64_t index, int64_t size) { return index >= 0 && index < size; }

// Whether [num_groups + 1] prefix sums cut [0, num_rows) into groups.
bool are_bounds(const int32_t* sums, int64_t num_groups, int64_t num_rows) {
  if (sums[0] != 0 || sums[num_groups] != num_rows) return false;
  return std::is_sorted(sums, sums + num_groups + 1);
}

bool are_rows(const int32_t* idx_mapping, int64_t num_reqs, int64_t max_num_reqs) {
  return std::all_of(idx_mapping, idx_mapping + num_reqs,
                     [&](int32_t row) { return is_index(row, max_num_reqs); });
}

}  // namespace
}  // namespace vllm

VLLM_API int64_t vllm_lay_out_step(
    const int32_t* all_token_ids, int64_t max_num_reqs, int64_t max_model_len,
    const int32_t* total_len, const int64_t* draft_tokens, int64_t max_drafts,
    const int32_t* num_computed_tokens, const int32_t* block_rows, int64_t max_blocks,
    int64_t block_size, const int32_t* idx_mapping, int64_t num_reqs,
    const int32_t* query_start_loc, int64_t num_tokens, const int32_t* cu_num_logits,
    int64_t num_logits, int64_t* logits_indices, int32_t* expanded_idx_mapping,
    int32_t* expanded_local_pos, int64_t num_blocks, int64_t* input_ids, int64_t* positions,
    int64_t* slot_mapping, int64_t* sample_positions, int32_t* seq_lens,
    int32_t* block_table) {
  using namespace vllm;
  if (!are_bounds(query_start_loc, num_reqs, num_tokens)) return 1;
  if (!are_bounds(cu_num_logits, num_reqs, num_logits)) return 1;
  if (!are_rows(idx_mapping, num_reqs, max_num_reqs)) return 1;
  for (int64_t req = 0; req < num_reqs; ++req) {
    const int64_t row = idx_mapping[req];
    const int64_t start = query_start_loc[req], end = query_start_loc[req + 1];
    const int32_t* known = all_token_ids + row * max_model_len;
    for (int64_t token = start; token < end; ++token) {
      const int64_t position = num_computed_tokens[row] + token - start;
      const int64_t draft = position - total_len[row];
      positions[token] = position;
      if (draft >= 0 && max_drafts > 0) {
        input_ids[token] = draft_tokens[row * max_drafts + std::min(draft, max_drafts - 1)];
      } else {
        if (!is_index(position, max_model_len)) return 1;
        input_ids[token] = known[position];
      }
    }
    seq_lens[req] = static_cast<int32_t>(num_computed_tokens[row] + end - start);
    // A request's logit rows are its last tokens.
    const int64_t first_logit = cu_num_logits[req];
    const int64_t shift = end - cu_num_logits[req + 1];
    if (first_logit + shift < start) return 1;
    for (int64_t logit = first_logit; logit + shift < end; ++logit) {
      logits_indices[logit] = logit + shift;
      expanded_idx_mapping[logit] = idx_mapping[req];
      expanded_local_pos[logit] = static_cast<int32_t>(logit - first_logit);
      sample_positions[logit] = positions[logit + shift] + 1;
    }
  }
  if (vllm_gather_rows(block_rows, max_num_reqs, max_blocks, idx_mapping, num_reqs,
                       num_blocks, block_table))
    return 1;
  return vllm_compute_slot_mapping(block_table, num_blocks, num_blocks, query_start_loc,
                                   num_reqs, positions, num_tokens, block_size,
                                   slot_mapping);
}

VLLM_API int64_t vllm_gather_rows(const int32_t* rows, int64_t max_num_reqs, int64_t width,
                                  const int32_t* idx_mapping, int64_t num_reqs,
                                  int64_t num_columns, int32_t* out) {
  using namespace vllm;
  if (num_columns > width || !are_rows(idx_mapping, num_reqs, max_num_reqs)) return 1;
  for (int64_t req = 0; req < num_reqs; ++req)
    std::copy_n(rows + idx_mapping[req] * width, num_columns, out + req * num_columns);
  return 0;
}

VLLM_API int64_t vllm_scatter_rows(const int64_t* values, int64_t width,
                                   const int32_t* idx_mapping, int64_t num_reqs,
                                   int64_t* rows, int64_t max_num_reqs) {
  using namespace vllm;
  if (!are_rows(idx_mapping, num_reqs, max_num_reqs)) return 1;
  for (int64_t req = 0; req < num_reqs; ++req)
    std::copy_n(values + req * width, width, rows + idx_mapping[req] * width);
  return 0;
}

VLLM_API int64_t vllm_compute_slot_mapping(const int32_t* block_table, int64_t stride,
                                           int64_t num_blocks,
                                           const int32_t* query_start_loc,
                                           int64_t num_reqs, const int64_t* positions,
                                           int64_t num_tokens, int64_t block_size,
                                           int64_t* slot_mapping) {
  using namespace vllm;
  if (!are_bounds(query_start_loc, num_reqs, num_tokens)) return 1;
  for (int64_t req = 0; req < num_reqs; ++req) {
    const int32_t* blocks = block_table + req * stride;
    for (int64_t token = query_start_loc[req]; token < query_start_loc[req + 1]; ++token) {
      const int64_t position = positions[token];
      if (!is_index(position, num_blocks * block_size)) return 1;
      const int64_t block = blocks[position / block_size];
      slot_mapping[token] = block * block_size + position % block_size;
    }
  }
  return 0;
}

VLLM_API void vllm_add_and_sum(const int32_t* counts, const int32_t* admitted,
                               int64_t num_reqs, int32_t* row_sums, int32_t* token_sums) {
  row_sums[0] = token_sums[0] = 0;
  for (int64_t req = 0; req < num_reqs; ++req) {
    row_sums[req + 1] = row_sums[req] + counts[req] + admitted[req];
    token_sums[req + 1] = token_sums[req] + counts[num_reqs + req] + admitted[req];
  }
}

VLLM_API void vllm_drafts_behind(const int64_t* input_ids, const int32_t* local_pos,
                                 int64_t num_logits, int64_t* drafts) {
  for (int64_t logit = 0; logit < num_logits; ++logit) {
    const bool has_draft = logit + 1 < num_logits && local_pos[logit + 1] > 0;
    drafts[logit] = has_draft ? input_ids[logit + 1] : -1;
  }
}

VLLM_API int64_t vllm_take_accepted_prefix(const uint8_t* is_accepted,
                                           const int64_t* token_ids, int64_t num_logits,
                                           const int32_t* cu_num_logits, int64_t num_reqs,
                                           int64_t width, int64_t* sampled,
                                           int32_t* num_sampled) {
  using namespace vllm;
  if (!are_bounds(cu_num_logits, num_reqs, num_logits)) return 1;
  for (int64_t req = 0; req < num_reqs; ++req) {
    const int64_t start = cu_num_logits[req];
    const int64_t num_rows = std::min<int64_t>(cu_num_logits[req + 1] - start, width);
    int64_t count = 0;
    while (count < num_rows) {
      sampled[req * width + count] = token_ids[start + count];
      if (!is_accepted[start + count++]) break;
    }
    std::fill(sampled + req * width + count, sampled + (req + 1) * width, -1);
    num_sampled[req] = static_cast<int32_t>(count);
  }
  return 0;
}

VLLM_API int64_t vllm_post_update(const int64_t* sampled_token_ids, int64_t width,
                                  const int32_t* num_sampled, const int32_t* cu_num_logits,
                                  const int32_t* query_start_loc,
                                  const int32_t* idx_mapping, int64_t num_reqs,
                                  int32_t* all_token_ids, int64_t max_num_reqs,
                                  int64_t max_model_len, int32_t* total_len,
                                  int32_t* num_computed_tokens) {
  using namespace vllm;
  if (!are_rows(idx_mapping, num_reqs, max_num_reqs)) return 1;
  for (int64_t req = 0; req < num_reqs; ++req) {
    if (num_sampled[req] < 0 || num_sampled[req] > width) return 1;
    if (total_len[idx_mapping[req]] < 0) return 1;
  }
  for (int64_t req = 0; req < num_reqs; ++req) {
    const int64_t row = idx_mapping[req];
    int32_t* known = all_token_ids + row * max_model_len + total_len[row];
    const int64_t count =
        std::min<int64_t>(num_sampled[req], max_model_len - total_len[row]);
    for (int64_t column = 0; column < count; ++column)
      known[column] = static_cast<int32_t>(
          std::max<int64_t>(sampled_token_ids[req * width + column], 0));
    const int32_t num_rows = cu_num_logits[req + 1] - cu_num_logits[req];
    const int32_t query_len = query_start_loc[req + 1] - query_start_loc[req];
    total_len[row] += num_sampled[req];
    num_computed_tokens[row] += query_len - (num_rows - num_sampled[req]);
  }
  return 0;
}
