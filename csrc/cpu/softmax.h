// What a softmax needs to know of a row of logits.
#pragma once

#include <algorithm>
#include <cmath>
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

// Columns whose sum of e^logit is one number. How the sum of a row is grouped depends on
// its length alone, whoever computes which part of it: its bits do too.
constexpr int64_t kSegment = 512;

inline int64_t num_segments(int64_t size) { return (size + kSegment - 1) / kSegment; }

// Of the logits of a segment.
struct SegmentSum {
  float top;    // -inf where none is above it
  float total;  // of e^(logit - top); NaN where a logit is

  SegmentSum() = default;
  SegmentSum(const float* logits, int64_t size) : top(row_max(logits, size)) {
    const Vec base = broadcast(std::isfinite(top) ? top : 0.0f);
    Vec partial = broadcast(0.0f);
    for (int64_t start = 0; start < size; start += kLanes)
      partial = partial + exp(load_at(logits, start, size, -kInfinity) - base);
    total = sum(partial);
  }
};

// The logarithm of the sum of e^logit of a row in segments.
inline float log_sum_exp(const SegmentSum* segments, int64_t count) {
  float top = -kInfinity;
  for (int64_t i = 0; i < count; ++i) top = std::max(top, segments[i].top);
  if (!std::isfinite(top)) return top;
  double total = 0.0;
  for (int64_t i = 0; i < count; ++i) {
    const double distance = static_cast<double>(segments[i].top) - static_cast<double>(top);
    total += static_cast<double>(segments[i].total) * std::exp(distance);
  }
  return static_cast<float>(static_cast<double>(top) + std::log(total));
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
