// Rotation of heads by their token's position.
#pragma once

#include "vec.h"

namespace vllm {

// Turns the halves of the first 2 * half dimensions of every head against each other.
inline void rotate_heads(float* heads, int64_t num_heads, int64_t head_dim,
                         const float* cos, const float* sin, int64_t half) {
  for (int64_t head = 0; head < num_heads; ++head) {
    float* first = heads + head * head_dim;
    float* second = first + half;
    for (int64_t start = 0; start < half; start += kLanes) {
      const Vec c = load_at(cos, start, half, 0.0f);
      const Vec s = load_at(sin, start, half, 0.0f);
      const Vec a = load_at(first, start, half, 0.0f);
      const Vec b = load_at(second, start, half, 0.0f);
      store_at(first, a * c - b * s, start, half);
      store_at(second, b * c + a * s, start, half);
    }
  }
}

}  // namespace vllm
