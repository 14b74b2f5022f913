// Norms, rotary embedding and the gated activation.
#include "api.h"
#include "parallel.h"
#include "vec.h"

namespace vllm {
namespace {

// Elements below which a second thread costs more than it brings.
constexpr int64_t kMinElements = 16384;

float inverse_rms(const float* x, int64_t size, float eps) {
  Vec squares = broadcast(0.0f);
  for (int64_t start = 0; start < size; start += kLanes) {
    const Vec v = load_at(x, start, size, 0.0f);
    squares = fma(v, v, squares);
  }
  return 1.0f / std::sqrt(sum(squares) / static_cast<float>(size) + eps);
}

void scale_row(const float* x, const float* weight, float scale, float* out, int64_t size) {
  const Vec factor = broadcast(scale);
  for (int64_t start = 0; start < size; start += kLanes) {
    const Vec v = load_at(x, start, size, 0.0f) * factor;
    store_at(out, v * load_at(weight, start, size, 0.0f), start, size);
  }
}

void add_row(const float* x, float* residual, int64_t size) {
  for (int64_t start = 0; start < size; start += kLanes) {
    const Vec v = load_at(residual, start, size, 0.0f) + load_at(x, start, size, 0.0f);
    store_at(residual, v, start, size);
  }
}

void rotate_heads(float* heads, int64_t num_heads, int64_t head_dim, const float* cos,
                  const float* sin, int64_t half) {
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

}  // namespace
}  // namespace vllm

VLLM_API void vllm_rms_norm(const float* x, int64_t outer_stride, int64_t inner_stride,
                            const float* weight, float eps, float* out,
                            int64_t out_outer_stride, int64_t out_inner_stride,
                            int64_t num_outer, int64_t num_inner, int64_t size) {
  using namespace vllm;
  parallel_for(num_outer, grain_for(num_inner * size, kMinElements), [&](int64_t outer) {
    for (int64_t inner = 0; inner < num_inner; ++inner) {
      const float* row = x + outer * outer_stride + inner * inner_stride;
      float* target = out + outer * out_outer_stride + inner * out_inner_stride;
      scale_row(row, weight, inverse_rms(row, size, eps), target, size);
    }
  });
}

VLLM_API void vllm_fused_add_rms_norm(float* x, int64_t x_stride, float* residual,
                                      int64_t residual_stride, const float* weight,
                                      float eps, int64_t num_rows, int64_t size) {
  using namespace vllm;
  parallel_for(num_rows, grain_for(size, kMinElements), [&](int64_t row) {
    float* sums = residual + row * residual_stride;
    add_row(x + row * x_stride, sums, size);
    scale_row(sums, weight, inverse_rms(sums, size, eps), x + row * x_stride, size);
  });
}

VLLM_API void vllm_silu_and_mul(const float* x, int64_t x_stride, float* out,
                                int64_t num_rows, int64_t size) {
  using namespace vllm;
  parallel_for(num_rows, grain_for(size, kMinElements), [&](int64_t row) {
    const float* gate = x + row * x_stride;
    for (int64_t start = 0; start < size; start += kLanes) {
      const Vec g = load_at(gate, start, size, 0.0f);
      const Vec up = load_at(gate + size, start, size, 0.0f);
      const Vec denominator = broadcast(1.0f) + exp(broadcast(0.0f) - g);
      store_at(out + row * size, g / denominator * up, start, size);
    }
  });
}

VLLM_API int64_t vllm_rotary_embedding(const int64_t* positions, float* q, int64_t q_stride,
                                       int64_t num_q_heads, float* k, int64_t k_stride,
                                       int64_t num_k_heads, const float* cos_sin_cache,
                                       int64_t num_positions, int64_t rotary_dim,
                                       int64_t head_dim, int64_t num_tokens) {
  using namespace vllm;
  for (int64_t token = 0; token < num_tokens; ++token)
    if (positions[token] < 0 || positions[token] >= num_positions) return 1;
  const int64_t half = rotary_dim / 2;
  const int64_t work = (num_q_heads + num_k_heads) * head_dim;
  parallel_for(num_tokens, grain_for(work, kMinElements), [&](int64_t token) {
    const float* cos = cos_sin_cache + positions[token] * rotary_dim;
    rotate_heads(q + token * q_stride, num_q_heads, head_dim, cos, cos + half, half);
    rotate_heads(k + token * k_stride, num_k_heads, head_dim, cos, cos + half, half);
  });
  return 0;
}
