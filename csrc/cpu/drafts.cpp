// What is known of drafts: which of them a budget admits, how likely they are accepted, and
// what became of them. A few numbers a request, as in step.cpp.
#include <algorithm>
#include <cmath>
#include <vector>

#include "api.h"

namespace vllm {
namespace {

struct Draft {
  float survival;
  int32_t position;
  int32_t req;

  bool operator<(const Draft& other) const {
    if (survival != other.survival) return survival > other.survival;
    if (position != other.position) return position < other.position;
    return req < other.req;
  }
};

}  // namespace
}  // namespace vllm

VLLM_API int64_t vllm_admit_drafts(const float* confidence_probs, int64_t max_num_reqs,
                                   int64_t max_drafts, const int32_t* idx_mapping,
                                   const int32_t* num_drafts, int64_t num_reqs,
                                   int64_t draft_budget, int32_t* admitted) {
  using namespace vllm;
  std::vector<Draft> drafts;
  for (int64_t req = 0; req < num_reqs; ++req) {
    const int64_t row = idx_mapping[req];
    if (row < 0 || row >= max_num_reqs || num_drafts[req] > max_drafts) return 1;
    double survival = 1.0;
    for (int32_t position = 0; position < num_drafts[req]; ++position) {
      const float confidence = confidence_probs[row * max_drafts + position];
      // False for NaN. A factor of at most 1 cannot raise a product, nor can the rounding.
      survival *= confidence > 0.0f ? static_cast<double>(std::min(confidence, 1.0f)) : 0.0;
      drafts.push_back({static_cast<float>(survival), position, static_cast<int32_t>(req)});
    }
  }
  if (draft_budget < 0 || draft_budget > static_cast<int64_t>(drafts.size())) return 1;
  std::nth_element(drafts.begin(), drafts.begin() + draft_budget, drafts.end());
  std::fill(admitted, admitted + num_reqs, 0);
  for (int64_t place = 0; place < draft_budget; ++place) ++admitted[drafts[place].req];
  return 0;
}

VLLM_API int64_t vllm_read_curves(const float* curves, const float* scores,
                                  int64_t req_stride, int64_t stride,
                                  const int32_t* num_drafts,
                                  const int32_t* idx_mapping, int64_t num_reqs,
                                  int64_t max_drafts, const float* temperature,
                                  const uint8_t* is_seeded, const uint8_t* is_constrained,
                                  int64_t max_num_reqs, int64_t num_verifications,
                                  float low, float knots_per_unit, int64_t num_knots,
                                  int64_t parts, float* probs, int32_t* marks) {
  for (int64_t req = 0; req < num_reqs; ++req) {
    const int64_t row = idx_mapping[req];
    if (row < 0 || row >= max_num_reqs) return 1;
    const bool is_drawn = temperature[row] != 0.0f;
    const int64_t first_kind = is_constrained[row] != 0 ? num_verifications : 0;
    const int64_t kind = first_kind + (is_drawn ? 1 + (is_seeded[row] != 0) : 0);
    for (int64_t step = 0; step < max_drafts; ++step) {
      float& prob = probs[req * max_drafts + step];
      int32_t& mark = marks[row * max_drafts + step];
      const float score = scores[req * req_stride + step * stride];
      prob = 0.0f;
      mark = -1;
      if (step >= num_drafts[req] || std::isnan(score)) continue;
      const float last = static_cast<float>(num_knots - 1);
      const float distance = std::clamp((score - low) * knots_per_unit, 0.0f, last);
      const int64_t knot = std::min(static_cast<int64_t>(distance), num_knots - 2);
      const int64_t first = (kind * max_drafts + step) * num_knots;
      const float below = curves[first + knot], above = curves[first + knot + 1];
      const float logit = below + (distance - static_cast<float>(knot)) * (above - below);
      const float place = distance * static_cast<float>(parts) + 0.5f;
      prob = 1.0f / (1.0f + std::exp(-logit));
      mark = static_cast<int32_t>(static_cast<int64_t>(place) + first * parts);
    }
  }
  return 0;
}

VLLM_API int64_t vllm_count_outcomes(int32_t* counts, int64_t num_cells, int32_t* marks,
                                     int64_t max_num_reqs, int64_t num_drafts,
                                     const int32_t* idx_mapping,
                                     const int32_t* cu_num_logits,
                                     const int32_t* num_sampled, int64_t num_reqs,
                                     int64_t num_bonus_tokens, int64_t parts) {
  for (int64_t req = 0; req < num_reqs; ++req) {
    const int64_t row = idx_mapping[req];
    if (row < 0 || row >= max_num_reqs) return 1;
    const int64_t num_accepted = num_sampled[req] - num_bonus_tokens;
    const int64_t num_admitted =
        cu_num_logits[req + 1] - cu_num_logits[req] - num_bonus_tokens;
    const int64_t num_tried = std::min(num_accepted + 1, num_admitted);
    for (int64_t step = 0; step < num_drafts; ++step) {
      int32_t& mark = marks[row * num_drafts + step];
      if (mark < 0) continue;
      const int64_t cell = mark / parts;
      const int32_t above = static_cast<int32_t>(mark % parts);
      // What stands on the last knot has none above it.
      if (cell >= num_cells || (above > 0 && cell + 1 >= num_cells)) return 1;
      const bool happened[] = {true, step < num_tried, step < num_accepted};
      for (int outcome = 0; outcome < 3; ++outcome) {
        if (!happened[outcome]) continue;
        counts[cell * 3 + outcome] += static_cast<int32_t>(parts) - above;
        if (above > 0) counts[(cell + 1) * 3 + outcome] += above;
      }
      mark = -1;
    }
  }
  return 0;
}
