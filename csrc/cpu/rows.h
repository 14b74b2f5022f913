// Rows as a product reads them: as they are, normalised, or gated.
#pragma once

#include "vec.h"

namespace vllm {

inline float inverse_rms(const float* x, int64_t size, float eps) {
  Vec squares = broadcast(0.0f);
  for (int64_t start = 0; start < size; start += kLanes) {
    const Vec v = load_at(x, start, size, 0.0f);
    squares = fma(v, v, squares);
  }
  return 1.0f / std::sqrt(sum(squares) / static_cast<float>(size) + eps);
}

// out may be x.
inline void norm_row(const float* x, const float* weight, float eps, float* out,
                     int64_t size) {
  const Vec factor = broadcast(inverse_rms(x, size, eps));
  for (int64_t start = 0; start < size; start += kLanes) {
    const Vec v = load_at(x, start, size, 0.0f) * factor;
    store_at(out, v * load_at(weight, start, size, 0.0f), start, size);
  }
}

// silu(first half) * second half of x [2 * size].
inline void gate_row(const float* x, float* out, int64_t size) {
  for (int64_t start = 0; start < size; start += kLanes) {
    const Vec gate = load_at(x, start, size, 0.0f);
    const Vec up = load_at(x + size, start, size, 0.0f);
    const Vec denominator = broadcast(1.0f) + exp(broadcast(0.0f) - gate);
    store_at(out, gate / denominator * up, start, size);
  }
}

struct Rows {
  enum class Kind { kPlain, kNormed, kGated };

  const float* x;  // [num_rows][size], or [num_rows][2 * size] where gated
  int64_t stride;
  int64_t num_rows;
  int64_t size;
  Kind kind = Kind::kPlain;
  const float* norm_weight = nullptr;  // [size]
  float eps = 0.0f;

  // The row, which is in `buffer` [size] unless the rows are plain.
  const float* read(int64_t row, float* buffer) const {
    const float* from = x + row * stride;
    if (kind == Kind::kPlain) return from;
    if (kind == Kind::kNormed)
      norm_row(from, norm_weight, eps, buffer, size);
    else
      gate_row(from, buffer, size);
    return buffer;
  }
};

}  // namespace vllm
