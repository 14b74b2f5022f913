// What is done to rows of logits: temperature, top-k and top-p, log-probability statistics, bitmasks.
#include <algorithm>
#include <limits>
#include <vector>

#include "api.h"
#include "parallel.h"
#include "softmax.h"

namespace vllm {
namespace {

// The logits of at least `least`, in order, without NaN.
void collect(const float* logits, int64_t size, float least, std::vector<float>& found) {
  found.clear();
  for (int64_t start = 0; start < size; start += kLanes) {
    const Vec values = load_at(logits, start, size, -kInfinity);
    uint32_t bits = greater_equal(values, broadcast(least));
    for (; bits != 0; bits &= bits - 1) found.push_back(logits[start + __builtin_ctz(bits)]);
  }
}

// Finds the lowest of some logits that top-k and top-p keep.
//
// Tokens go into bins by their distance to the largest logit. The distance is computed
// by rounding operations that keep order, so bins are ordered as the logits are, and
// only the two bins that hold the borders need a look at single tokens.
class KeptLogits {
 public:
  KeptLogits(const float* logits, int64_t size, float top)
      : logits_(logits), size_(size), top_(top), counts_(kBins), weights_(kBins) {
    thread_local std::vector<uint16_t> bins;
    bins.resize(static_cast<size_t>(size));
    bins_ = bins.data();
    fill_bins();
  }

  // The lowest kept logit; -inf keeps all. Top-p takes its share of the weight of these
  // logits and of those below them.
  float lowest(int64_t k, double p, double weight_below) {
    float by_k = -kInfinity;
    int last_bin = kBins - 1;
    if (k > 0) by_k = kth_largest(k, last_bin);
    if (p >= 1.0) return by_k;
    const std::vector<float> last = logits_of(last_bin, by_k);
    double last_weight = 0.0;
    for (const float logit : last) last_weight += weight(logit);
    double total = weight_below + last_weight;
    for (int bin = 0; bin < last_bin; ++bin) total += weights_[bin];
    double above = 0.0;
    for (int bin = 0; bin < last_bin; ++bin) {
      if (above + weights_[bin] >= p * total)
        return lowest_of(logits_of(bin, -kInfinity), above, p * total);
      above += weights_[bin];
    }
    return lowest_of(last, above, p * total);
  }

 private:
  static constexpr int kBins = 2048;
  static constexpr float kBinsPerUnit = 32.0f;

  void fill_bins() {
    const Vec top = broadcast(top_);
    const Vec last = broadcast(static_cast<float>(kBins - 1));
    for (int64_t start = 0; start < size_; start += kLanes) {
      const Vec values = load_at(logits_, start, size_, -kInfinity);
      const uint32_t finite = greater(values, broadcast(-kInfinity));
      const Vec distance = select(finite, top - values, broadcast(kInfinity));
      float bin[kLanes], e[kLanes];
      store(bin, min(distance * broadcast(kBinsPerUnit), last));
      store(e, exp(broadcast(0.0f) - distance));
      const int64_t count = std::min<int64_t>(kLanes, size_ - start);
      for (int64_t lane = 0; lane < count; ++lane)
        bins_[start + lane] = static_cast<uint16_t>(bin[lane]);
      for (uint32_t bits = finite; bits != 0; bits &= bits - 1) {
        const int lane = __builtin_ctz(bits);
        const int index = static_cast<int>(bin[lane]);
        counts_[index] += 1;
        weights_[index] += static_cast<double>(e[lane]);
      }
    }
  }

  double weight(float logit) const {
    float lanes[kLanes];
    store(lanes, exp(broadcast(0.0f) - broadcast(top_ - logit)));
    return static_cast<double>(lanes[0]);
  }

  // The logits of a bin that are not below `least`, without -inf and NaN.
  std::vector<float> logits_of(int bin, float least) const {
    std::vector<float> found;
    for (int64_t token_id = 0; token_id < size_; ++token_id) {
      if (bins_[token_id] != bin) continue;
      const float logit = logits_[token_id];
      if (logit >= least && logit > -kInfinity) found.push_back(logit);
    }
    return found;
  }

  float kth_largest(int64_t k, int& last_bin) const {
    int64_t above = 0;
    for (int bin = 0; bin < kBins; ++bin) {
      if (above + counts_[bin] < k) {
        above += counts_[bin];
        continue;
      }
      std::vector<float> candidates = logits_of(bin, -kInfinity);
      const auto kth = candidates.begin() + (k - above - 1);
      std::nth_element(candidates.begin(), kth, candidates.end(), std::greater<float>());
      last_bin = bin;
      return *kth;
    }
    return -kInfinity;
  }

  // Walks down one bin: equal logits stay or go together, and one always stays.
  float lowest_of(std::vector<float> candidates, double above, double wanted) const {
    std::sort(candidates.begin(), candidates.end(), std::greater<float>());
    float lowest = top_;
    for (size_t i = 0; i < candidates.size() && (above < wanted || above == 0.0);) {
      lowest = candidates[i];
      for (; i < candidates.size() && candidates[i] == lowest; ++i) above += weight(lowest);
    }
    return lowest;
  }

  const float* logits_;
  int64_t size_;
  float top_;
  uint16_t* bins_;
  std::vector<int64_t> counts_;
  std::vector<double> weights_;
};

// The lowest logit that top-k (if k > 0) and top-p keep, looked for among the likeliest:
// most rows have few that are worth a closer look.
float lowest_kept(const float* logits, int64_t size, float top, int64_t k, double p) {
  thread_local std::vector<float> found;
  const double total = k > 0 ? 0.0 : sum_of_exp<true>(logits, size, top);
  // More than the roundings of the two sums.
  const double wanted = p * (1.0 + 1e-6) * total;
  for (float reach = 8.0f;; reach *= 2.0f) {
    const bool takes_all = reach > 128.0f;
    const float least = takes_all ? std::numeric_limits<float>::lowest() : top - reach;
    collect(logits, size, least, found);
    const int64_t count = static_cast<int64_t>(found.size());
    const double weight = k > 0 ? 0.0 : sum_of_exp<true>(found.data(), count, top);
    if (!takes_all && (count < k || weight < wanted)) continue;
    return KeptLogits(found.data(), count, top).lowest(k, p, std::max(total - weight, 0.0));
  }
}

void filter_row(float* logits, int64_t size, int64_t k, float p) {
  const bool has_k = k > 0 && k < size;
  if (!has_k && p >= 1.0f) return;
  const float top = row_max(logits, size);
  if (top == -kInfinity || top == kInfinity) {
    // An infinite logit has all the probability.
    for (int64_t token_id = 0; token_id < size; ++token_id)
      if (!(logits[token_id] == top)) logits[token_id] = -kInfinity;
    return;
  }
  const float lowest =
      lowest_kept(logits, size, top, has_k ? k : 0, static_cast<double>(p));
  const Vec out = broadcast(-kInfinity);
  for (int64_t start = 0; start < size; start += kLanes) {
    const Vec values = load_at(logits, start, size, -kInfinity);
    const uint32_t kept = greater_equal(values, broadcast(lowest));
    store_at(logits, select(kept, values, out), start, size);
  }
}

int32_t rank_of(const float* logits, int64_t size, float value) {
  int32_t rank = 1;
  for (int64_t start = 0; start < size; start += kLanes)
    rank += __builtin_popcount(
        greater(load_at(logits, start, size, -kInfinity), broadcast(value)));
  return rank;
}

void mask_row(float* logits, int64_t size, const int32_t* bitmask) {
  const Vec out = broadcast(-kInfinity);
  for (int64_t start = 0; start < size; start += kLanes) {
    const uint32_t word = static_cast<uint32_t>(bitmask[start / 32]);
    const uint32_t bits = (word >> (start % 32)) & 0xFFFFu;
    if (bits == 0xFFFFu) continue;
    store_at(logits, select(bits, load_at(logits, start, size, 0.0f), out), start, size);
  }
}

}  // namespace
}  // namespace vllm

VLLM_API int64_t vllm_apply_temperature(float* logits, int64_t stride,
                                        const int32_t* idx_mapping,
                                        const float* temperature, int64_t max_num_reqs,
                                        int64_t num_rows, int64_t vocab_size) {
  using namespace vllm;
  for (int64_t row = 0; row < num_rows; ++row)
    if (idx_mapping[row] < 0 || idx_mapping[row] >= max_num_reqs) return 1;
  parallel_for(num_rows, grain_for(vocab_size, 32768), [&](int64_t row) {
    const float divisor = temperature[idx_mapping[row]];
    if (divisor == 0.0f || divisor == 1.0f) return;
    float* values = logits + row * stride;
    for (int64_t start = 0; start < vocab_size; start += kLanes) {
      const Vec quotient = load_at(values, start, vocab_size, 0.0f) / broadcast(divisor);
      store_at(values, quotient, start, vocab_size);
    }
  });
  return 0;
}

VLLM_API void vllm_top_k_top_p(float* logits, int64_t stride, const int32_t* k,
                               const float* p, int64_t num_rows, int64_t vocab_size) {
  using namespace vllm;
  parallel_for(num_rows, grain_for(vocab_size, 4096), [&](int64_t row) {
    filter_row(logits + row * stride, vocab_size, k[row], p[row]);
  });
}

VLLM_API int64_t vllm_logprob_stats(const float* logits, int64_t stride,
                                    const int64_t* token_ids, int64_t num_rows,
                                    int64_t vocab_size, float* logsumexp, int32_t* rank) {
  using namespace vllm;
  for (int64_t row = 0; row < num_rows; ++row)
    if (token_ids[row] < 0 || token_ids[row] >= vocab_size) return 1;
  parallel_for(num_rows, grain_for(vocab_size, 4096), [&](int64_t row) {
    const float* values = logits + row * stride;
    thread_local std::vector<SegmentSum> segments;
    segments.clear();
    for (int64_t start = 0; start < vocab_size; start += kSegment)
      segments.emplace_back(values + start, std::min(kSegment, vocab_size - start));
    logsumexp[row] = log_sum_exp(segments.data(), num_segments(vocab_size));
    rank[row] = rank_of(values, vocab_size, values[token_ids[row]]);
  });
  return 0;
}

VLLM_API int64_t vllm_apply_bitmask(float* logits, int64_t stride, const int32_t* bitmask,
                                    int64_t bitmask_stride, const int32_t* rows,
                                    int64_t num_masks, int64_t num_rows,
                                    int64_t vocab_size) {
  using namespace vllm;
  for (int64_t mask = 0; mask < num_masks; ++mask)
    if (rows[mask] >= num_rows) return 1;
  parallel_for(num_masks, grain_for(vocab_size, 32768), [&](int64_t mask) {
    if (rows[mask] >= 0)
      mask_row(logits + rows[mask] * stride, vocab_size, bitmask + mask * bitmask_stride);
  });
  return 0;
}
