// Drafts that were drawn, against the target's distribution: which of them pass, and what
// a rejected one leaves.
#include <cmath>

#include "api.h"
#include "parallel.h"
#include "softmax.h"

namespace vllm {
namespace {

// Natural logarithm of positive normal numbers, to about one unit in the last place: the
// series of the inverse hyperbolic tangent, for a mantissa around 1.
Vec log_of_normal(Vec x) {
  float mantissas[kLanes], exponents[kLanes];
  store(mantissas, x);
  for (int lane = 0; lane < kLanes; ++lane) {
    uint32_t bits;
    std::memcpy(&bits, &mantissas[lane], sizeof(bits));
    // Halves of the square root of 2 upwards count for the next power.
    const uint32_t shifted = bits + (0x3F800000u - 0x3F3504F3u);
    exponents[lane] = static_cast<float>(static_cast<int32_t>(shifted >> 23) - 127);
    bits = (shifted & 0x007FFFFFu) + 0x3F3504F3u;
    std::memcpy(&mantissas[lane], &bits, sizeof(bits));
  }
  const Vec one = broadcast(1.0f);
  const Vec m = load(mantissas);
  const Vec s = (m - one) / (m + one);
  const Vec square = s * s;
  Vec series = broadcast(1.0f / 11.0f);
  series = fma(series, square, broadcast(1.0f / 9.0f));
  series = fma(series, square, broadcast(1.0f / 7.0f));
  series = fma(series, square, broadcast(1.0f / 5.0f));
  series = fma(series, square, broadcast(1.0f / 3.0f));
  series = fma(series, square, one);
  return fma(load(exponents), broadcast(0.693147181f), (s + s) * series);
}

// The logits of norm(max(target - draft, 0)), over the target's; they stay where nothing
// is left.
void write_residual(float* target_row, const float* draft_row, int64_t size) {
  const Softmax target(target_row, size), draft(draft_row, size);
  // Smaller ones would be subnormal, and are less likely than any draw can tell.
  const Vec least = broadcast(std::numeric_limits<float>::min());
  const auto residual_at = [&](int64_t start) {
    return target.probabilities(start, size) - draft.probabilities(start, size);
  };
  int64_t first = 0;
  while (first < size && greater_equal(residual_at(first), least) == 0) first += kLanes;
  if (first >= size) return;
  const Vec nothing = broadcast(-kInfinity);
  for (int64_t start = 0; start < size; start += kLanes) {
    const Vec residual = residual_at(start);
    const uint32_t left = greater_equal(residual, least);
    const Vec logits = left == 0 ? nothing : log_of_normal(max(residual, least));
    store_at(target_row, select(left, logits, nothing), start, size);
  }
}

// Where the distributions of drafts are; null where drafts were certain.
struct DraftRows {
  const float* logits;
  int64_t req_stride, stride, max_num_reqs, max_drafts;
  const int32_t* idx_mapping;
  const int32_t* local_pos;

  bool has(int64_t row) const {
    return idx_mapping[row] >= 0 && idx_mapping[row] < max_num_reqs && local_pos[row] >= 0 &&
           local_pos[row] < max_drafts;
  }
  const float* of(int64_t row) const {
    return logits + idx_mapping[row] * req_stride + local_pos[row] * stride;
  }
};

}  // namespace
}  // namespace vllm

VLLM_API int64_t vllm_accept_drafts(const float* target_logits, int64_t target_stride,
                                    const float* draft_logits, int64_t draft_req_stride,
                                    int64_t draft_stride, int64_t max_num_reqs,
                                    int64_t max_drafts, const int64_t* draft_token_ids,
                                    const float* uniform, const int32_t* idx_mapping,
                                    const int32_t* local_pos, int64_t num_rows,
                                    int64_t vocab_size, uint8_t* is_accepted) {
  using namespace vllm;
  const DraftRows drafts{draft_logits, draft_req_stride, draft_stride, max_num_reqs,
                         max_drafts,   idx_mapping,      local_pos};
  for (int64_t row = 0; row < num_rows; ++row) {
    if (draft_token_ids[row] >= vocab_size) return 1;
    if (draft_token_ids[row] >= 0 && draft_logits != nullptr && !drafts.has(row)) return 1;
  }
  parallel_for(num_rows, grain_for(vocab_size, 4096), [&](int64_t row) {
    const int64_t token_id = draft_token_ids[row];
    is_accepted[row] = 0;
    if (token_id < 0) return;
    float threshold = uniform[row];
    if (draft_logits != nullptr)
      threshold *= Softmax(drafts.of(row), vocab_size).probability(token_id);
    const Softmax target(target_logits + row * target_stride, vocab_size);
    is_accepted[row] = threshold < target.probability(token_id);
  });
  return 0;
}

VLLM_API int64_t vllm_write_residual_logits(
    float* target_logits, int64_t target_stride, const float* draft_logits,
    int64_t draft_req_stride, int64_t draft_stride, int64_t max_num_reqs, int64_t max_drafts,
    const uint8_t* is_rejected, const int32_t* idx_mapping, const int32_t* local_pos,
    int64_t num_rows, int64_t vocab_size) {
  using namespace vllm;
  const DraftRows drafts{draft_logits, draft_req_stride, draft_stride, max_num_reqs,
                         max_drafts,   idx_mapping,      local_pos};
  for (int64_t row = 0; row < num_rows; ++row)
    if (is_rejected[row] != 0 && !drafts.has(row)) return 1;
  parallel_for(num_rows, grain_for(vocab_size, 4096), [&](int64_t row) {
    if (is_rejected[row] != 0)
      write_residual(target_logits + row * target_stride, drafts.of(row), vocab_size);
  });
  return 0;
}
