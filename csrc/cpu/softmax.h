// What a softmax needs to know of a row of logits.
#pragma once

#include <algorithm>
#include <limits>

#include "vec.h"

namespace vllm {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// The largest logit; NaN is left out.
inline float row_max(const float* logits, int64_t size) {
  Vec top = broadcast(-kInfinity);
  for (int64_t start = 0; start < size; start += kLanes)
    top = max(load_at(logits, start, size, -kInfinity), top);
  return largest(top);
}

// The sum of e^(logit - top). NaN stays NaN unless it is to count nothing.
template <bool kSkipsNan>
double sum_of_exp(const float* logits, int64_t size, float top) {
  double total = 0.0;
  // Short float runs under a double keep the error near one float rounding.
  constexpr int64_t kRun = 64 * kLanes;
  for (int64_t run = 0; run < size; run += kRun) {
    const int64_t end = std::min(run + kRun, size);
    Vec partial = broadcast(0.0f);
    for (int64_t start = run; start < end; start += kLanes) {
      Vec values = load_at(logits, start, size, -kInfinity);
      if constexpr (kSkipsNan) values = max(values, broadcast(-kInfinity));
      partial = partial + exp(values - broadcast(top));
    }
    total += static_cast<double>(sum(partial));
  }
  return total;
}

// The softmax of a row; NaN where a logit is NaN or none is finite and largest.
struct Softmax {
  Softmax(const float* row, int64_t size)
      : logits(row), top(row_max(row, size)), total(sum_of_exp<false>(row, size, top)) {}

  float probability(int64_t token_id) const {
    return static_cast<float>(
        std::exp(static_cast<double>(logits[token_id]) - static_cast<double>(top)) / total);
  }
  // Of sixteen tokens; 0 past the end of the row.
  Vec probabilities(int64_t start, int64_t size) const {
    const Vec values = load_at(logits, start, size, -kInfinity);
    return exp(values - broadcast(top)) * broadcast(static_cast<float>(1.0 / total));
  }

  const float* logits;
  float top;
  double total;
};

}  // namespace vllm
